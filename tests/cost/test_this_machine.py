"""The machine at hand: measured once, stored, read again; and the expected times that it gives."""

import json
import math

import pytest
import torch

from regard import Causal, Window, explain, native
from regard.bench import this_gpu, this_machine
from regard.bench.linear_rates import Sizes, linear_rates
from regard.bench.rounds import Effort
from regard.cli import cost_view
from regard.cli.cost import this_machine as found_machine
from regard.cost import call_cost, cost, find_machine
from regard.cost import this_machine as stored
from regard.cost.expected import BACKWARD, START, expected_pass, expected_seconds, forward_work
from regard.cost.machine import Efficiency, Machine
from regard.cost.this_machine import fast_memory, identity, read_this_machine, stored_at
from regard.cost.work import Parts, Work
from regard.errors import ProblemError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(this_machine, "EFFORT", Effort(seconds=0.0, least=1))
    monkeypatch.setattr(this_machine, "LINEAR", Sizes(rows=8, dim=64, weights=2, wide=64))


@pytest.mark.skipif(not native.available(), reason="the compiled library measures the limits")
def test_the_machine_is_measured_once_and_then_read(monkeypatch):
    with pytest.raises(ProblemError, match="this machine was not measured yet: `regard cost --machine this`"):
        find_machine("this")
    measured = found_machine()
    assert measured.bandwidth > 1e8
    assert measured.peak("bfloat16") > 1e8
    assert measured.fast_memory == fast_memory() >= 2**14
    for e in (measured.efficiency or {}).values():
        assert 0 < (e.wide_share or 0) <= 1
        assert 0 < (e.gradient_share or 0) <= 1
    monkeypatch.setattr(this_machine, "measure_this_machine", lambda: pytest.fail("measured again"))
    assert found_machine() == measured == read_this_machine() == find_machine("this")


@pytest.mark.skipif(not native.available(), reason="the compiled library measures the limits")
def test_another_processor_or_version_is_measured_again(monkeypatch):
    this_machine.measure_this_machine()
    content = json.loads(stored_at().read_text())
    older = {dtype: {k: v for k, v in e.items() if k != "wide_share"} for dtype, e in content["efficiency"].items()}
    for change in ({"identity": "another"}, {"efficiency": older}, {"flops": {"float32": -1}}):
        stored_at().write_text(json.dumps(content | change))
        assert read_this_machine() is None
    stored_at().write_text("[]")
    assert read_this_machine() is None


def test_machines_of_one_name_are_distinguished_by_their_models(monkeypatch):
    one = identity()
    monkeypatch.setattr(stored, "model", lambda: "6/9999/1")
    assert identity() != one


def test_the_fast_memory_is_the_second_cache(monkeypatch):
    monkeypatch.setattr(stored, "cache_sizes", lambda: {1: 48 << 10, 2: 2 << 20, 3: 480 << 20})
    assert fast_memory() == 2 << 20
    monkeypatch.setattr(stored, "cache_sizes", dict)
    assert fast_memory() == stored.FALLBACK_FAST_MEMORY


def test_without_the_library_it_says_so(monkeypatch):
    monkeypatch.setattr(this_machine, "available", lambda: False)
    monkeypatch.setattr(this_machine, "absence", lambda: "it is not installed.")
    with pytest.raises(ProblemError, match="cannot be measured: it is not installed"):
        this_machine.measure_this_machine()


# ---- a GPU ----------------------------------------------------------------------------------------------------------


class FakeGpu:
    """A processor in a GPU's place; each call takes a millisecond."""

    device, title, memory, fast_memory = "cpu", "NVIDIA Fake", 2**36, 2**18

    def seconds(self, call):
        call()
        return 1e-3


@pytest.fixture
def _small_gpu(monkeypatch):
    for name, value in (("SQUARE", 64), ("COPIED", 4096), ("TOKENS", 64), ("HEADS", 2), ("DIM", 16), ("TRIES", 1)):
        monkeypatch.setattr(this_gpu, name, value)
    monkeypatch.setattr(this_gpu, "LINEAR", Sizes(rows=8, dim=64, weights=2, wide=64))


@pytest.mark.usefixtures("_small_gpu")
def test_the_limits_of_a_gpu_are_its_products_and_copies():
    found = this_gpu.measure_gpu(FakeGpu())
    assert found.title == "this GPU: NVIDIA Fake"
    assert found.flops == dict.fromkeys(("bfloat16", "float16", "float32"), 2 * 64**3 / 1e-3)
    assert found.bandwidth == 2 * 4096 / 1e-3
    assert (found.memory, found.fast_memory) == (2**36, 2**18)
    e = found.efficiency["bfloat16"]
    assert e.share == pytest.approx(4 * 16 * 2 * 64**2 / (2 * 64**3))
    assert e.linear_share == pytest.approx(2 * 8 * 64**2 / (2 * 64**3))


@pytest.mark.usefixtures("_small_gpu")
def test_a_type_that_a_gpu_does_not_multiply_is_left_out(monkeypatch):
    def peak(gpu, dtype):
        if dtype is not torch.float32:
            raise RuntimeError("not implemented for this device")
        return 1e12

    monkeypatch.setattr(this_gpu, "product_rate", peak)
    assert set(this_gpu.measure_gpu(FakeGpu()).flops) == {"float32"}
    monkeypatch.setattr(this_gpu, "TYPES", (torch.float16,))
    with pytest.raises(ProblemError, match=r"NVIDIA Fake multiplies none of torch\.float16"):
        this_gpu.measure_gpu(FakeGpu())


@pytest.mark.usefixtures("_small_gpu")
def test_this_machine_is_its_gpu_where_torch_has_one_and_this_cpu_its_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(this_machine, "Cuda", FakeGpu)
    assert found_machine().title == "this GPU: NVIDIA Fake"
    assert find_machine("this").title == "this GPU: NVIDIA Fake"
    with pytest.raises(ProblemError, match="`regard cost --machine this-cpu` measures it once"):
        find_machine("this-cpu")
    if native.available():
        assert found_machine("this-cpu").title.startswith("this processor: ")
        assert find_machine("this-cpu").name == "this-cpu"
        assert find_machine("this").title == "this GPU: NVIDIA Fake"


def test_the_gpus_of_a_machine_are_read_from_its_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "GPUS", tmp_path)
    alone = identity()
    (tmp_path / "0000:00").mkdir()
    (tmp_path / "0000:00" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert identity() == f"{alone}; NVIDIA H100 80GB HBM3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert identity() == f"{alone}; NVIDIA H100 80GB HBM3; visible: "


def test_a_gpu_without_memory_says_so(monkeypatch):
    def peak(gpu, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(this_gpu, "COPIED", 4096)
    monkeypatch.setattr(this_gpu, "product_rate", peak)
    with pytest.raises(ProblemError, match="no memory left to be measured"):
        this_gpu.measure_gpu(FakeGpu())


# ---- expected times -------------------------------------------------------------------------------------------------


def test_rates_of_products_are_those_of_the_fastest_call():
    times = iter([2e-3] * 30 + [1e-3] * 10000)
    flops, moved = linear_rates(torch.float32, "cpu", lambda call: next(times), Sizes(8, 64, 2, 32))
    assert (flops, moved) == (2 * 8 * 64**2 / 1e-3, 32 * 32 * 4 / 1e-3)


def test_the_parts_of_a_model_take_their_limits_at_the_shares_of_their_kind():
    e = Efficiency(share=0.5, partial_cost=1.0, few_share=0.1, linear_share=0.8, stream_share=0.25)
    here = machine(float32=e)  # 1e11 FLOP/s, 1e10 bytes/s
    parts = Parts(projections=Work(8e10, 0), attention=Work(5e10, 0), mlp=Work(0, 1e10), recurrent=Work(1e11, 0))
    assert expected_pass(parts, here, "float32", is_step=False) == pytest.approx(1 + 1 + 4 + 1)
    assert expected_pass(parts, here, "float32", is_step=True) == pytest.approx(1 + 5 + 4 + 1)
    assert expected_pass(parts, here, "bfloat16", is_step=False) is None
    assert expected_pass(parts, machine(float32=Efficiency(0.5, 1.0, 0.1)), "float32", is_step=True) is None


def test_a_table_says_what_its_times_are():
    e = Efficiency(share=0.5, partial_cost=1.0, few_share=0.1, linear_share=0.8, stream_share=0.25)
    here, there = (cost("gpt2", machine=m, dtype="float32") for m in (machine(float32=e), "h100"))
    assert (here.expected_seconds(here.prompt) or 0) > (here.seconds(here.prompt) or 1)
    assert "Expected, with the shares of the limits that were measured here (weights 80 %" in cost_view.view(here, [])
    assert "Times are rooflines of the machine's figures" in cost_view.view(there, [])
    assert there.to_dict()["prompt"]["expected_seconds"] is None
    assert here.to_dict()["step"]["expected_seconds"] == here.expected_seconds(here.step, is_step=True)


def machine(**efficiency: Efficiency) -> Machine:
    return Machine("m", "m", "here", {"float32": 1e11, "bfloat16": 2e11}, 1e10, 2**34, 2**20, 1, efficiency or None)


def plan_of(queries: int, keys: int, mask=None, dtype=torch.float32, dim: int = 64):
    q, k = (torch.empty(1, 8, n, dim, dtype=dtype) for n in (queries, keys))
    return explain(q, k, k, mask=mask, backend="native" if native.available() else None)


def test_full_tiles_take_their_flops_at_a_share_of_the_peak():
    e = Efficiency(0.5, 1.0, 0.1)
    assert expected_seconds(plan_of(512, 512), machine(float32=e)) == pytest.approx(
        START + 8 * 512**2 * 4 * 64 / 0.5e11
    )


@pytest.mark.parametrize(("dim", "share"), [(64, 0.25), (128, 0.4), (256, 1024 / 1792)])
def test_the_share_grows_with_the_dims_as_a_pair_takes_time_of_its_own(dim, share):
    e = Efficiency(0.25, 1.0, 0.1, wide_share=0.4)
    assert expected_seconds(plan_of(512, 512, dim=dim), machine(float32=e)) == pytest.approx(
        START + 8 * 512**2 * 4 * dim / (share * 1e11)
    )


@pytest.mark.parametrize("wide", [None, 0.1])
def test_a_share_that_does_not_grow_is_that_of_64_dims(wide):
    e = Efficiency(0.25, 1.0, 0.1, wide_share=wide)
    assert [forward_work(e, 4 * d) for d in (32, 64, 128)] == [512, 1024, 2048]


def test_a_backward_pass_takes_its_flops_at_a_share_of_its_own():
    pairs = 8 * 512**2
    for gradient_share, share in ((0.1, 0.1), (None, 0.5)):
        e = Efficiency(0.5, 1.0, 0.1, gradient_share=gradient_share)
        expected = expected_seconds(plan_of(512, 512), machine(float32=e), backward=True)
        assert expected == pytest.approx(START + pairs * 4 * 64 * (1 / 0.5e11 + 2.5 / (share * 1e11)))


def test_the_products_of_a_backward_pass_are_three_over_keys_and_two_over_values():
    q, k, v = (torch.empty(1, 8, 512, dim, device="meta") for dim in (96, 96, 32))
    for gradient_share, share in ((0.1, 0.1), (None, 0.5)):
        here = machine(float32=Efficiency(0.5, 1.0, 0.1, gradient_share=gradient_share))
        one, both = (expected_seconds(explain(q, k, v), here, backward=backward) for backward in (False, True))
        assert both - one == pytest.approx(8 * 512**2 * 2 * (3 * 96 + 2 * 32) / (share * 1e11))


def test_a_backward_pass_of_few_queries_adds_its_products_and_reads():
    plan, here = plan_of(1, 4096, Causal()), machine(float32=Efficiency(1.0, 1.0, 0.25))
    expected = START + 3.5 * (8 * 4096 * 4 * 64 / 0.25e11 + plan.bytes / 1e10)
    assert expected_seconds(plan, here, backward=True) == pytest.approx(expected)


def test_attention_of_a_model_takes_the_share_of_128_dims():
    e = Efficiency(0.2, 1.0, 0.1, linear_share=0.8, stream_share=0.25, wide_share=0.5)
    parts = Parts(projections=Work(0, 0), attention=Work(5e10, 0), mlp=Work(0, 0), recurrent=Work(0, 0))
    assert expected_pass(parts, machine(float32=e), "float32", is_step=False) == pytest.approx(1)


@pytest.mark.skipif(not native.available(), reason="tiles of 64")
def test_partial_tiles_take_their_own_time():
    """A causal square of 512: 28 full tiles and 8 partial ones for each head."""
    for partial in (0.5, 1.0, 2.0):
        expected = expected_seconds(plan_of(512, 512, Causal()), machine(float32=Efficiency(0.5, partial, 0.1)))
        assert expected == pytest.approx(START + 8 * (28 + partial * 8) * 64**2 * 4 * 64 / 0.5e11)


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
