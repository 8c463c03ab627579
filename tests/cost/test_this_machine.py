"""The machine at hand: measured once, stored, read again; and the expected times that it gives."""

import json
import math

import pytest
import torch

from regard import Causal, Window, explain, native
from regard.bench import this_machine
from regard.bench.rounds import Effort
from regard.cli.cost import this_machine as found_machine
from regard.cost import call_cost, find_machine
from regard.cost.expected import BACKWARD, START, expected_seconds
from regard.cost.machine import Efficiency, Machine
from regard.cost.this_machine import fast_memory, read_this_machine, stored_at
from regard.errors import ProblemError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(this_machine, "EFFORT", Effort(seconds=0.0, least=1))


@pytest.mark.skipif(not native.available(), reason="the compiled library measures the limits")
def test_the_machine_is_measured_once_and_then_read(monkeypatch):
    with pytest.raises(ProblemError, match="this machine was not measured yet: `regard cost --machine this`"):
        find_machine("this")
    measured = found_machine()
    assert measured.bandwidth > 1e8
    assert measured.peak("bfloat16") > 1e8
    assert measured.fast_memory == fast_memory() >= 2**14
    monkeypatch.setattr(this_machine, "measure_this_machine", lambda: pytest.fail("measured again"))
    assert found_machine() == measured == read_this_machine() == find_machine("this")


@pytest.mark.skipif(not native.available(), reason="the compiled library measures the limits")
def test_another_processor_or_version_is_measured_again(monkeypatch):
    this_machine.measure_this_machine()
    content = json.loads(stored_at().read_text())
    for change in ({"identity": "another"}, {"efficiency": {"float32": {"pace": 1}}}, {"flops": {"float32": -1}}):
        stored_at().write_text(json.dumps(content | change))
        assert read_this_machine() is None
    stored_at().write_text("[]")
    assert read_this_machine() is None


def test_without_the_library_it_says_so(monkeypatch):
    monkeypatch.setattr(this_machine, "available", lambda: False)
    monkeypatch.setattr(this_machine, "absence", lambda: "it is not installed.")
    with pytest.raises(ProblemError, match="cannot be measured: it is not installed"):
        this_machine.measure_this_machine()


def machine(**efficiency: Efficiency) -> Machine:
    return Machine("m", "m", "here", {"float32": 1e11, "bfloat16": 2e11}, 1e10, 2**34, 2**20, 1, efficiency or None)


def plan_of(queries: int, keys: int, mask=None, dtype=torch.float32):
    q, k = (torch.empty(1, 8, n, 64, dtype=dtype) for n in (queries, keys))
    return explain(q, k, k, mask=mask, backend="native" if native.available() else None)


def test_full_tiles_take_their_flops_at_a_share_of_the_peak():
    e = Efficiency(0.5, 1.0, 0.1)
    assert expected_seconds(plan_of(512, 512), machine(float32=e)) == pytest.approx(
        START + 8 * 512**2 * 4 * 64 / 0.5e11
    )


@pytest.mark.skipif(not native.available(), reason="tiles of 64")
def test_partial_tiles_take_their_own_time():
    """A causal square of 512: 28 full tiles and 8 partial ones for each head."""
    for cost in (0.5, 1.0, 2.0):
        expected = expected_seconds(plan_of(512, 512, Causal()), machine(float32=Efficiency(0.5, cost, 0.1)))
        assert expected == pytest.approx(START + 8 * (28 + cost * 8) * 64**2 * 4 * 64 / 0.5e11)


def test_few_queries_add_their_products_to_the_read():
    plan, here = plan_of(1, 4096, Causal(), torch.bfloat16), machine(bfloat16=Efficiency(1.0, 1.0, 0.25))
    expected = expected_seconds(plan, here)
    assert expected == call_cost(plan, machine=here).expected_seconds
    assert call_cost(plan, machine="h100").expected_seconds is None
    assert expected == pytest.approx(START + 8 * 4096 * 4 * 64 / 0.5e11 + plan.bytes / 1e10)


def test_a_backward_pass_takes_more_and_no_time_is_below_the_roofline():
    for mask in (None, Causal(), Causal() & Window(100)):
        plan, here = plan_of(300, 300, mask), machine()
        one, both = expected_seconds(plan, here), expected_seconds(plan, here, backward=True)
        assert one > here.seconds(plan.flops, plan.bytes, "float32")
        assert math.isclose((both - START) / (one - START), 1 + BACKWARD)
