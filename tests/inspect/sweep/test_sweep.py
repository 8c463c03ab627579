"""What a sweep gathers is what the dense weights say, on every engine, whatever the call."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard import Alibi, Bias, Causal, T5Bias, TensorBias, Window
from regard.calls import Call
from regard.describe.mask import Positions
from regard.describe.spec import spec
from regard.errors import ProblemError
from regard.inspect.sweep import BINS, Sweep, by_native, by_torch, sweep
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import CASES, HEADS, KEYS, called, definition, drawn

MORE: dict[str, Callable[[], Call]] = {
    **CASES,
    "a bias by distance": lambda: drawn(mask=Causal(), bias=T5Bias(torch.randn(8, HEADS), max_distance=16)),
    "rows that see nothing": lambda: drawn(mask=Window(4, 3) & ~Window(2, 4)),
    "nobody sees anything": lambda: drawn(mask=Causal() & ~Causal(), sink=torch.randn(HEADS)),
    "one row": lambda: drawn(queries=1, mask=Causal()),
}


@spec
class Tilted(Bias):
    """Grows with the position of the key."""

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return 0.01 * (k + 0 * (b + h + q)).float()  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]


BACKENDS = {"torch": by_torch.swept, "the library": by_native.swept}


@pytest.fixture(params=MORE)
def call(request):
    return MORE[request.param]()


def gathered(call: Call, along: Tensor, cell: int) -> Sweep:
    """The same from the dense weights in float64, each number by its formula."""
    exact = definition(call)
    a, positions = exact.weights, call.offset + torch.arange(call.q.shape[2])
    keys = torch.arange(a.shape[3])
    distance = (positions[:, None] - keys).abs()
    edges = [0, *(2**b for b in range(BINS - 1)), 2**60]
    bins = [torch.where((low <= distance) & (distance < high), a, 0).sum(-1) for low, high in pairwise(edges)]
    with_sink = torch.cat([a, exact.sink_share[..., None]], dim=-1)
    blocks = [block.split(cell, dim=3) for block in a.split(cell, dim=2)]
    top, top_key = a.max(-1)
    return Sweep(
        torch.special.entr(with_sink).sum(-1),
        with_sink.square().sum(-1),
        a.sum(-1),
        top,
        torch.where(top > 0, top_key, 0),
        torch.stack(bins, dim=-1),
        a.sum(-2),
        torch.einsum("bhij,bmj->bhim", a, along.double().expand(len(a), -1, -1)),
        torch.stack([torch.stack([x.mean((2, 3)) for x in row], -1) for row in blocks], -2),
        torch.stack([torch.stack([x.amax((2, 3)) for x in row], -1) for row in blocks], -2),
        cell,
    )


def same(found: Sweep, expected: Sweep, call: Call) -> None:
    """Equal to 1e-6 where numbers are masses, to 1e-5 where they are entropies, and of the type of the weights."""
    # a square errs by twice its weight
    bounds = {
        "entropy": 1e-5,
        "squares": 2e-6,
        "along": 1e-5,
        "columns": 1e-6 * max(1.0, float(expected.columns.max())),
    }
    for name in ("entropy", "squares", "mass", "top", "bins", "columns", "along", "mean", "largest"):
        ours, exact = getattr(found, name), getattr(expected, name)
        assert ours.dtype == Weights.of(call).dtype
        torch.testing.assert_close(ours.double(), exact, atol=bounds.get(name, 1e-6), rtol=0)
    assert found.top_key.dtype == torch.int64
    weights = definition(call).weights
    torch.testing.assert_close(weights.gather(-1, found.top_key[..., None])[..., 0], expected.top, atol=1e-6, rtol=0)
    assert found.cell == expected.cell


@pytest.mark.exhaustive(per="engine")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize("picture", [1, 3, 8, 100])
def test_a_sweep_is_what_the_dense_weights_say(call, picture, engine):
    batch, keys = call.k.shape[0], call.k.shape[2]
    along = torch.randn(batch, 3, keys)
    cell = max(1, -(-max(call.q.shape[2], keys) // picture))
    weights = Weights.of(call)
    if engine == "the library" and not by_native.takes(weights):
        pytest.skip("the compiled library is not there, or has no sweep")
    same(BACKENDS[engine](weights, picture, along), gathered(call, along, cell), call)


@pytest.mark.parametrize("engine", BACKENDS)
def test_tensors_may_be_negated_lazily(engine):
    q, k, bias = (cast(Any, torch)._neg_view(-t) for t in torch.randn(3, 1, 2, KEYS, KEYS))
    call, along = called(q, k, mask=Causal(), bias=TensorBias(bias)), torch.randn(1, 2, KEYS)
    same(BACKENDS[engine](Weights.of(call), KEYS, along), gathered(call, along, 1), call)


def test_what_is_not_asked_for_is_not_made():
    found = sweep(Weights.of(drawn(mask=Causal())))
    assert (found.along, found.mean, found.largest, found.cell) == (None, None, None, 0)


def test_vectors_may_be_shared_by_the_batch():
    weights, along = Weights.of(drawn(mask=Causal())), torch.randn(1, 2, KEYS)
    shared, own = sweep(weights, along=along).along, sweep(weights, along=along.expand(2, -1, -1)).along
    assert shared is not None
    assert torch.equal(shared, own)


def test_the_first_of_equal_keys_is_the_top():
    q = k = torch.zeros(1, 1, 5, 3)
    found = sweep(Weights.of(called(q, k, mask=Causal() & Window(3))))
    assert found.top_key.tolist() == [[[0, 0, 0, 1, 2]]]


def test_a_bin_holds_what_lies_at_its_distances():
    q = k = torch.zeros(1, 1, 9, 3)
    found = sweep(Weights.of(called(q, k)))  # every row sees all nine keys
    assert (found.bins[0, 0, 0] * 9).round().tolist() == [1, 1, 2, 4, 1] + [0] * (BINS - 5)
    assert (found.bins[0, 0, 4] * 9).round().tolist() == [1, 2, 4, 2] + [0] * (BINS - 4)


def test_a_tick_is_heard_for_every_tile(small_tiles):
    ticks = []
    by_torch.swept(Weights.of(drawn()), None, None, lambda: ticks.append(1))
    assert len(ticks) > 3


def test_what_the_library_does_not_know_torch_sweeps():
    """A bias by a rule of one's own is neither a vector by distance nor a tensor."""
    weights = Weights.of(drawn(mask=Causal(), bias=Alibi(HEADS)))
    assert not by_native.takes(replace(weights, bias=Tilted()))
    sweep(replace(weights, bias=Tilted()))


def test_without_the_library_torch_sweeps(no_library):
    assert not by_native.takes(Weights(torch.zeros(1, 1, 5, 3), torch.zeros(1, 1, 5, 3), torch.zeros(1, 1, 5)))


def test_a_sweep_is_over_weights():
    with pytest.raises(ProblemError, match=r"^sweep takes the Weights of a call, and got int"):
        sweep(3)  # pyright: ignore[reportArgumentType]


def test_a_picture_without_cells_is_refused():
    with pytest.raises(ProblemError, match=r"picture=0: expected cells per side, at least 1"):
        sweep(Weights.of(drawn()), picture=0)


@pytest.mark.parametrize("shape", [(2, KEYS), (3, 1, KEYS), (1, 1, KEYS - 1)])
def test_vectors_of_another_shape_are_refused(shape):
    with pytest.raises(ProblemError, match=r"along is .* \[batch or 1, m, keys\] = \[2 or 1, m, 29\]"):
        sweep(Weights.of(drawn()), along=torch.zeros(shape))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_reaches_the_rows_alone_that_see_it(value):
    weights = Weights.of(drawn(mask=Causal()))
    along = torch.randn(2, 3, KEYS)
    changed = along.index_fill(2, torch.tensor([20]), value)
    found, expected = (cast(Tensor, sweep(weights, along=of).along) for of in (changed, along))
    sees = weights.positions >= 20
    assert found.isnan().equal(sees[..., None].expand_as(found))
    torch.testing.assert_close(found[:, :, ~sees.flatten()], expected[:, :, ~sees.flatten()])
