"""A case measured: what a result says of it."""

import math
from dataclasses import replace

import pytest
import torch

from regard import Causal, Window, native, native_calls
from regard.bench import limits
from regard.bench.case import COLD, Case
from regard.bench.measure import measure
from regard.bench.rounds import Effort
from regard.dispatch.plan_cache import forget
from regard.machine import cache_sizes
from regard.plan import tiling

ONCE = Effort(seconds=0.0, least=1, most=1)
CASE = Case("small", 37, 37, heads=4, kv_heads=2, dim=8, mask=Causal)

needs_library = pytest.mark.skipif(not native.available(), reason=str(native.absence()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_says_what_was_measured(dtype):
    result = measure(CASE, dtype, 1, ONCE)
    assert (result.name, result.dtype, result.threads, result.rounds) == ("small", str(dtype)[6:], 1, 1)
    assert result.pairs == 4 * 37 * 38 // 2
    assert result.flops == 2 * result.pairs * 16
    assert result.rate == result.flops / result.seconds
    assert math.isclose(result.ratio, result.torch_seconds / result.seconds)
    assert result.torch_call == "is_causal"
    assert result.cost is None


@needs_library
def test_the_share_is_of_the_limit_measured_beside():
    result = measure(CASE, torch.float32, 1, ONCE)
    assert result.share is not None
    assert result.limit is not None
    work = result.flops if result.bound == "products" else result.share * result.limit * result.seconds
    assert math.isclose(result.share, work / result.limit / result.seconds)
    assert result.ratio is not None
    assert math.isclose(result.torch_share or 0, result.share / result.ratio)


def test_without_the_library_there_is_no_limit(monkeypatch):
    monkeypatch.setattr(limits.native, "available", lambda: False)
    result = measure(CASE, torch.float32, 1, ONCE)
    assert (result.bound, result.limit, result.share, result.torch_share) == (None, None, None, None)
    assert result.ratio is not None


def test_the_cost_is_for_each_pair_by_the_case_beside():
    result = measure(CASE, torch.float32, 1, Effort(seconds=0.1), beside=CASE)
    assert result.cost is not None
    assert 0.3 < result.cost < 3


def test_a_new_plan_is_made_for_each_call_where_a_case_asks_for_that(monkeypatch):
    made = []
    schedule = tiling.schedule
    monkeypatch.setattr(tiling, "schedule", lambda *mask, **sizes: made.append(mask) or schedule(*mask, **sizes))
    for anew in (False, True):
        forget()
        made.clear()
        measure(replace(CASE, new_plan=anew), torch.float32, 1, ONCE)
        assert (len(made) > 2) == anew


def test_gradients_are_taken_where_a_case_asks_for_them():
    forward, both = (measure(Case("", 64, 64, backward=b), torch.float32, 1, ONCE) for b in (False, True))
    assert both.flops == 3.5 * forward.flops


def test_the_flops_of_gradients_are_those_of_five_products_for_values_of_another_dimension():
    """Three of the five products take 16 multiply-adds for a pair, and two take 8."""
    result = measure(Case("", 64, 64, dim=16, v_dim=8, backward=True), torch.float32, 1, ONCE)
    assert result.flops == 2 * result.pairs * (16 + 8 + 3 * 16 + 2 * 8)


def test_a_case_says_its_own_threads_and_engine():
    result = measure(Case("", 7, 7, threads=1, backend="reference"), torch.float32, 2, ONCE)
    assert (result.threads, result.backend) == (1, "reference")


def test_what_torch_cannot_say_is_measured_without_it():
    result = measure(Case("", 7, 7, softcap=2.0), torch.float32, 1, ONCE)
    assert (result.torch_seconds, result.ratio) == (None, None)
    assert "softcap" in result.torch_call


def test_cold_keys_and_values_are_read_again_only_after_others():
    case = Case("", 1, 4096, heads=8, kv_heads=8, dim=64, cold=True)
    copies = case.copies(torch.float32)
    assert sum(k.nbytes + v.nbytes for _, k, v in copies[1:]) >= COLD
    assert len({k.data_ptr() for _, k, _ in copies}) == len(copies)
    assert all(torch.equal(k, copies[0][1]) for _, k, _ in copies)


def test_a_case_knows_its_bytes():
    case = Case("", 7, 11, heads=4, kv_heads=2, dim=5, v_dim=3, batch=2)
    q, k, v = case.tensors(torch.bfloat16)
    forward = q.nbytes + k.nbytes + v.nbytes + 2 * 4 * 7 * 3 * 2
    assert case.nbytes(torch.bfloat16) == forward
    assert replace(case, backward=True).nbytes(torch.bfloat16) == 2 * forward  # a gradient of each


def test_words_that_say_nothing_are_left_out():
    assert Case("", 7, 7).options(torch.float32) == {}
    case = Case("", 7, 7, mask=lambda: Causal() & Window(3), backend="reference")
    assert case.options(torch.float32) == {"mask": Causal() & Window(3), "backend": "reference"}


@needs_library
@pytest.mark.parametrize("dtype", native_calls.DTYPES)
def test_the_machine_computes_more_on_wider_vectors_and_never_less_than_a_scalar(dtype):
    assert limits.products(dtype, 1, 0.005) > 1e9


@needs_library
def test_memory_is_read_at_some_speed(monkeypatch):
    monkeypatch.setattr(limits, "_touched", lambda: torch.ones(1 << 20))
    assert limits.stream(1) > 1e8


def test_what_is_read_from_memory_does_not_fit_the_last_level_cache():
    last = max(cache_sizes().values(), default=0)
    assert limits.STREAMED >= 256 << 20
    assert min(2 * last, limits.MEMORY // 16) <= limits.STREAMED


@needs_library
def test_every_instruction_set_measures_the_machine(monkeypatch):
    found = {}
    for isa in native.isas():
        monkeypatch.setenv("REGARD_ISA", isa)
        found[isa] = max(limits.products(torch.float32, 1, 0.005) or 0 for _ in range(5))  # others may be at work
    assert all(speed > 1e9 for speed in found.values())


@needs_library
@pytest.mark.parametrize(("threads", "seconds"), [(0, 0.01), (-1, 0.01), (1, -1.0), (1, 1e9), (1, float("nan"))])
def test_a_question_without_sense_is_refused(threads, seconds):
    with pytest.raises(ValueError, match="status -1"):
        native_calls.products(torch.float32, threads, seconds)


@needs_library
@pytest.mark.parametrize(("address", "size", "threads", "status"), [(0, 64, 1, -2), (64, -1, 1, -1), (64, 64, 0, -1)])
def test_a_read_without_sense_is_refused(address, size, threads, status):
    with pytest.raises(ValueError, match=f"status {status}"):
        native_calls.stream(address, size, threads)
