"""The weights read from (q, k, lse) are those of the definition, however they are asked for."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import Causal, Window
from regard.describe.score import Cosine, Dot
from regard.errors import ProblemError
from regard.inspect import weights as module
from regard.inspect.measures import breadth, sink
from regard.inspect.weights import TILE, Weights
from tests.inspect.dense import CASES, called, definition, drawn


@pytest.fixture(params=CASES)
def call(request):
    return CASES[request.param]()


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of a few rows and chunks of a few keys, so that small calls have many."""
    monkeypatch.setattr(module, "TILE", 2 * 6 * 29 * 3)
    monkeypatch.setattr(module, "CHUNK", 4)


def test_dense_weights_are_the_softmax(call):
    torch.testing.assert_close(Weights.of(call).dense().double(), definition(call).weights, atol=1e-6, rtol=0)


def test_rows_are_rows_of_the_dense_weights(call):
    rows = Weights.of(call).rows(2, 5)
    torch.testing.assert_close(rows.double(), definition(call).weights[:, :, 2:5], atol=1e-6, rtol=0)


def test_pairs_are_single_weights(call):
    weights = Weights.of(call)
    i, j = torch.randint(weights.shape[2], (101,)), torch.randint(weights.shape[3], (101,))
    torch.testing.assert_close(weights.pairs(i, j).double(), definition(call).weights[..., i, j], atol=1e-6, rtol=0)


@pytest.mark.usefixtures("small_tiles")
def test_tiles_cover_every_weight_once(call):
    weights = Weights.of(call)
    covered = torch.zeros(weights.shape, dtype=torch.float64)
    for tile in weights.tiles():
        covered[:, :, tile.rows, tile.key : tile.key + tile.weights.shape[3]] += tile.weights
    torch.testing.assert_close(covered, definition(call).weights, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("small_tiles")
def test_visible_counts_the_keys_of_each_row(call):
    weights = Weights.of(call)
    assert torch.equal(weights.visible.expand(weights.shape[:3]), definition(call).keep.sum(-1))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [1, 3, 8, 29, 100])
def test_a_pooled_picture_is_the_mean_of_each_cell(call, size):
    weights, exact = Weights.of(call), definition(call).weights
    cell = -(-max(exact.shape[2:]) // size)
    rows, columns = (torch.arange(n).split(cell) for n in exact.shape[2:])
    means = torch.stack([torch.stack([exact[:, :, r][..., c].mean((2, 3)) for c in columns], -1) for r in rows], -2)
    torch.testing.assert_close(weights.pooled(size).double(), means, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("small_tiles")
def test_one_sequence_of_a_batch_keeps_its_own_mask(call):
    weights, last = Weights.of(call), call.q.shape[0] - 1
    one, exact = weights.only(last), definition(call)
    torch.testing.assert_close(one.dense().double(), exact.weights[last:], atol=1e-6, rtol=0)
    assert torch.equal(one.visible.expand(one.shape[:3]), exact.keep[last:].sum(-1))


def test_rows_with_a_sink_sum_to_what_the_sink_leaves():
    call = drawn(mask=Causal(), sink=torch.randn(6))
    left = 1 - definition(call).sink_share
    assert left.max() < 0.999
    torch.testing.assert_close(Weights.of(call).dense().sum(-1).double(), left, atol=1e-6, rtol=0)


def test_what_the_mask_hides_cannot_spoil_the_weights():
    q, k = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 3)
    k[:, :, 3:] = torch.nan
    weights = Weights(q, k, torch.zeros(1, 2, 5), Causal())
    assert weights.rows(0, 3).isfinite().all()


def test_a_row_that_sees_nothing_has_no_weights():
    call = drawn(mask=Causal() & ~Causal())
    assert torch.equal(Weights.of(call).dense(), torch.zeros(2, 6, 29, 29))


def test_tiles_skip_what_the_mask_hides(monkeypatch):
    monkeypatch.setattr(module, "TILE", 512 * 16)
    q = k = torch.zeros(1, 1, 512, 2)
    looked_at = sum(tile.weights.numel() for tile in Weights(q, k, torch.zeros(1, 1, 512), Window(16, 1)).tiles())
    assert looked_at < 512 * 512 / 2


def test_dense_refuses_what_is_large():
    q = k = torch.zeros(1, 3, 13, 5)
    weights = Weights(q, k, torch.zeros(1, 3, 13))
    with pytest.raises(ProblemError, match=r"\[1, 3, 13, 13\] are 507 numbers .* limit of 100"):
        weights.dense(limit=100)


def test_a_call_that_compares_otherwise_is_refused():
    with pytest.raises(ProblemError, match=r"by Cosine\(\): .* scaled dot products only"):
        Weights.of(replace(drawn(), score=Cosine()))
    Weights.of(replace(drawn(), score=Dot()))


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that anything within it made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for tensor in (t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, torch.Tensor)):
            self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_a_sweep_holds_a_tile_and_never_the_matrix():
    call = called(torch.randn(1, 8, 2048, 16), torch.randn(1, 2, 2048, 16), mask=Causal(), backend="sdpa")
    weights = Weights.of(call)
    with Largest() as largest:
        breadth(weights)
        sink(weights)
        weights.pooled(64)
        weights.pairs(torch.arange(2048), torch.arange(2048))
    assert 0 < largest.elements <= TILE < 8 * 2048 * 2048 / 16
