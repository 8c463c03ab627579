"""Every kernel of every instruction set gathers what the plain loops do, whatever the call."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Alibi, Causal, KeyLengths, Prefix, TensorBias, TensorMask, Window, attend
from regard.bench.rounds import on_threads
from regard.calls import observe_calls
from regard.inspect import Weights
from regard.inspect.sweep import Sweep, by_native, by_torch
from tests.native.engines import ALL, LEAST_AND_BEST, PLAIN
from tests.native.interrupted import seconds_to_end
from tests.native.test_kernels import cases
from tests.oracle import Case
from tests.selection import examples

ISAS = {name: number for number, name in enumerate(ALL)}
PLAIN_LOOPS = -1
NUMBERS = ("entropy", "squares", "mass", "top", "bins", "columns", "along", "mean", "largest")
ROUNDING = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 4e-6, torch.float16: 4e-6}
"""Of a number of about 1. Sums and products are float32 for 16 bits too."""


def weights_of(q: Tensor, k: Tensor, **words: object) -> Weights:
    """Of a call of the plain loops."""
    seen: list[Weights] = []
    with observe_calls(lambda call: seen.append(Weights.of(call))):
        attend(q, k, k, backend=PLAIN, **words)  # pyright: ignore[reportArgumentType]
    return seen[0]


def drawn(queries: int, keys: int, heads: int = 6, kv_heads: int = 2, batch: int = 1, **words: object) -> Weights:
    return weights_of(torch.randn(batch, heads, queries, 17), torch.randn(batch, kv_heads, keys, 17), **words)


def same(found: Sweep, expected: Sweep, rounding: float) -> None:
    for name in NUMBERS:
        ours, exact = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (exact is None)
        if exact is None or not exact.numel():
            continue
        size = max(1.0, float(exact.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        torch.testing.assert_close(ours, exact, rtol=0, atol=rounding * size, equal_nan=True)


def first_of_the_largest(found: Sweep, weights: Weights, rounding: float) -> None:
    """The top key has the top weight, and no key before it has more."""
    a = weights.dense()
    there = a.gather(-1, found.top_key[..., None])[..., 0]
    torch.testing.assert_close(there, found.top, rtol=0, atol=rounding)
    torch.testing.assert_close(a.amax(-1), found.top, rtol=0, atol=rounding)


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@given(case=cases(), picture=st.sampled_from([None, 1, 7, 61, 2000]), vectors=st.sampled_from([0, 1, 2, 5]))
@examples(20, everything=50)
def test_a_kernel_gathers_what_the_plain_loops_gather(engine: str, case: Case, picture: int | None, vectors: int):
    words = {name: word for name, word in case.words.items() if name != "dropout"}
    weights = weights_of(case.q, case.k, **words)
    g = torch.Generator().manual_seed(vectors)
    along = torch.randn(case.q.shape[0], vectors, case.k.shape[2], generator=g) if vectors else None
    found, plain = (by_native.swept(weights, picture, along, isa=isa) for isa in (ISAS[engine], PLAIN_LOOPS))
    same(found, plain, ROUNDING[case.q.dtype])
    first_of_the_largest(found, weights, 1e-5)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_kernel_gathers_what_torch_gathers(engine: str, dtype: torch.dtype):
    q, k = torch.randn(2, 6, 131, 17).to(dtype), torch.randn(2, 3, 331, 17).to(dtype)
    weights = weights_of(
        q, k, mask=Causal() & (Window(97) | Prefix(3)), softcap=3.0, bias=Alibi(6), sink=torch.randn(6)
    )
    along = torch.randn(1, 2, 331)
    found = by_native.swept(weights, 50, along, isa=ISAS[engine])
    same(found, by_torch.swept(weights, 50, along), ROUNDING[dtype])


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
def test_bins_end_where_distances_double(engine: str):
    """Every row sees every key alike, before it and after: bins then count keys, on both sides of any tile."""
    keys = 1500
    weights = weights_of(torch.zeros(1, 1, 150, 1), torch.zeros(1, 1, keys, 1), offset=700)
    found = by_native.swept(weights, None, None, isa=ISAS[engine])
    same(found, by_torch.swept(weights, None, None), 1e-6)
    assert (found.bins[0, 0, 0] * keys).round()[:12].tolist() == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 477, 0]


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_an_infinite_sink_takes_all_or_nothing(engine: str):
    q, k, sink = torch.randn(1, 3, 40, 8), torch.randn(1, 3, 40, 8), torch.tensor([torch.inf, -torch.inf, 0.5])
    weights = weights_of(q, k, mask=Causal(), sink=sink)
    found = by_native.swept(weights, None, None, isa=(ISAS | {PLAIN: PLAIN_LOOPS})[engine])
    same(found, by_torch.swept(weights, None, None), 1e-6)
    assert torch.equal(found.squares[:, 0], torch.ones(1, 40))
    assert torch.equal(weights.sink_share[:, :2], torch.tensor([1.0, 0.0])[None, :, None].expand(1, 2, 40))


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("sink", [None, 499.0])
def test_large_scores_cost_no_digits(engine: str, sink: float | None):
    """A log-sum of 500.97 is 5,343.68 in units of the products, with more digits than float32 has."""
    k, lse = 5340 + 4 * torch.rand(1, 1, 131, 1), torch.tensor([[[500.97]]])
    logit = None if sink is None else torch.tensor([sink])
    weights = Weights(torch.ones(1, 1, 1, 1), k, lse, scale=0.09375, offset=130, sink=logit)
    total = torch.logaddexp(lse.double(), torch.tensor(sink or -torch.inf).double())
    exact = (k[..., 0].double() * 0.09375 - total).exp().sum(-1)
    found = by_native.swept(weights, None, None, isa=ISAS[engine]).mass[..., 0]
    torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=0)


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_change_nothing(engine: str, dtype: torch.dtype):
    q, k = torch.randn(1, 3, 1153, 16, dtype=dtype), torch.randn(1, 1, 1153, 16, dtype=dtype)
    weights, along = weights_of(q, k, mask=Causal()), torch.randn(1, 2, 1153)

    def swept(number: int) -> Sweep:
        with on_threads(number):
            return by_native.swept(weights, 100, along, isa=ISAS[engine])

    one = swept(1)
    for number in (2, 3, 7):
        found = swept(number)
        assert all(torch.equal(getattr(found, name), getattr(one, name)) for name in (*NUMBERS, "top_key"))


def test_a_sweep_that_returns_in_the_middle_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch):
    weights, along = drawn(700, 700, mask=Causal()), torch.randn(1, 2, 700)
    whole, ticks = by_native.swept(weights, 30, along), []
    monkeypatch.setattr(by_native, "SECONDS", 1e-5)
    found = by_native.swept(weights, 30, along, lambda: ticks.append(1))
    assert len(ticks) > 3
    assert all(torch.equal(getattr(found, name), getattr(whole, name)) for name in (*NUMBERS, "top_key"))


def test_the_tick_is_heard_of_a_short_sweep_too():
    ticks = []
    by_native.swept(drawn(5, 5), None, None, lambda: ticks.append(1))
    assert ticks == [1]


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
def test_strides_change_nothing(engine: str):
    weights = drawn(131, 131, batch=2, mask=Causal())
    moved = replace(
        weights, **{name: getattr(weights, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qk"}
    )
    across = replace(weights, **{name: getattr(weights, name).mT.contiguous().mT for name in "qk"})
    along = torch.randn(2, 2, 131)
    expected = by_native.swept(weights, 9, along, isa=ISAS[engine])
    for other in (moved, across):
        found = by_native.swept(other, 9, along.mT.contiguous().mT, isa=ISAS[engine])
        assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in (*NUMBERS, "top_key"))


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("one", [0, 1])
def test_one_sequence_of_a_batch_keeps_its_own_words(engine: str, one: int):
    words = {"mask": Causal() & KeyLengths(torch.tensor([131, 71])), "bias": TensorBias(torch.randn(2, 1, 131, 131))}
    weights = drawn(131, 131, batch=2, **words)
    found, whole = by_native.swept(weights.only(one), 9, None, isa=ISAS[engine]), by_native.swept(weights, 9, None)
    same(found, Sweep(**{name: _row(t, one) for name, t in vars(whole).items()}), 4e-6)


def _row(t: object, one: int) -> object:
    return t[one : one + 1] if isinstance(t, Tensor) else t


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
def test_heads_may_have_masks_of_their_own(engine: str):
    weights = drawn(131, 131, mask=TensorMask(torch.rand(1, 6, 131, 131) < 0.3))
    for some in (weights, weights.heads([4, 1])):
        same(by_native.swept(some, 9, None, isa=ISAS[engine]), by_torch.swept(some, 9, None), 4e-6)


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
def test_what_is_hidden_cannot_spoil_a_sweep(engine: str):
    """Keys that nobody sees hold NaN; a key that all see is infinitely far off, and 0 times it is no number."""
    q, k = torch.rand(1, 1, 71, 3) + 1, torch.randn(1, 1, 200, 3)
    seen = torch.arange(200) < 150
    k[:, :, 150:], k[:, :, 3] = torch.nan, -torch.inf
    weights = weights_of(q, k, mask=TensorMask(seen[None, None, None].expand(1, 1, 71, 200)))
    along = torch.randn(1, 1, 200)
    found, plain = (by_native.swept(weights, 10, along, isa=isa) for isa in (ISAS[engine], PLAIN_LOOPS))
    assert all(bool(getattr(found, name).isfinite().all()) for name in NUMBERS)
    same(found, plain, 4e-6)
    torch.testing.assert_close(found.mass, torch.ones(1, 1, 71), rtol=0, atol=2e-6)


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
def test_a_row_of_nan_is_a_row_of_nan(engine: str):
    q, k = torch.randn(1, 1, 71, 3), torch.randn(1, 1, 71, 3)
    q[:, :, 5] = torch.nan
    found = by_native.swept(weights_of(q, k, mask=Causal()), None, None, isa=ISAS[engine])
    assert found.mass.isnan().nonzero()[:, 2].tolist() == [5]
    assert found.entropy.isnan().nonzero()[:, 2].tolist() == [5]


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_a_call_without_rows_or_keys_has_nothing(engine: str, queries: int, keys: int):
    weights = drawn(queries, keys, sink=torch.randn(6))
    found = by_native.swept(weights, 4, torch.randn(1, 2, keys), isa=ISAS[engine])
    same(found, by_torch.swept(weights, 4, torch.randn(1, 2, keys)), 1e-6)
    assert found.squares.shape == (1, 6, queries)


@pytest.mark.exhaustive
def test_ctrl_c_ends_a_long_sweep_within_a_second():
    before = """
import torch
from regard import Causal
from regard.inspect import Weights
from regard.inspect.sweep import by_native
q = torch.randn(1, 12, 16384, 64)
weights = Weights(q, q, torch.full((1, 12, 16384), 20.0), Causal(), scale=0.1)
"""
    assert seconds_to_end(before, "by_native.swept(weights, 100, None)") < 1


@pytest.mark.exhaustive
def test_a_long_sweep_needs_little_memory():
    """32,768 tokens: the weights of a head would take 4 GiB. Measured in a process of its own."""
    text = """
import resource, torch
from regard import Causal, Window
from regard.inspect import Weights
from regard.inspect.sweep import by_native
def swept(n):
    q = torch.randn(1, 1, n, 8)
    weights = Weights(q, q, torch.full((1, 1, n), 7.0), Causal() & Window(512))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = by_native.swept(weights, 192, torch.randn(1, 2, n))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
swept(256)
print(swept(32768))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 64 << 20
