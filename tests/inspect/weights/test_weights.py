"""The weights read from (q, k, lse) are those of the definition, however they are asked for."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import Causal, Prefix, TensorBias, Window
from regard.errors import ProblemError
from regard.inspect.measures import sink
from regard.inspect.weights import lazy as module
from regard.inspect.weights.lazy import ROWS, TILE, Weights
from tests.inspect.dense import called, definition, drawn


def test_dense_weights_are_the_softmax(call):
    torch.testing.assert_close(Weights.of(call).dense().double(), definition(call).weights, atol=1e-6, rtol=0)


def test_rows_are_rows_of_the_dense_weights(call):
    first, last = call.q.shape[2] // 3, call.q.shape[2] - 1
    rows = Weights.of(call).rows(first, last)
    torch.testing.assert_close(rows.double(), definition(call).weights[:, :, first:last], atol=1e-6, rtol=0)


def test_columns_are_columns_of_the_dense_weights(call):
    columns = Weights.of(call).columns(2, 11)
    torch.testing.assert_close(columns.double(), definition(call).weights[..., 2:11], atol=1e-6, rtol=0)


def test_pairs_are_single_weights(call):
    weights = Weights.of(call)
    i, j = torch.randint(weights.shape[2], (101,)), torch.randint(weights.shape[3], (101,))
    torch.testing.assert_close(weights.pairs(i, j).double(), definition(call).weights[..., i, j], atol=1e-6, rtol=0)


def test_pairs_may_be_lists_or_of_short_integers():
    weights, i, j = Weights.of(drawn(mask=Causal())), [3, 28, 5], [1, 28, 9]
    expected = weights.pairs(torch.tensor(i), torch.tensor(j))
    assert torch.equal(weights.pairs(i, j), expected)
    assert torch.equal(weights.pairs(torch.tensor(i, dtype=torch.int32), torch.tensor(j)), expected)
    assert weights.pairs([], []).shape == (2, 6, 0)


@pytest.mark.usefixtures("small_tiles")
def test_in_float64_nothing_is_left_of_the_error_of_float32(call):
    exact = definition(call)
    wide = Weights.of(call).in_float64()
    torch.testing.assert_close(wide.dense(), exact.weights, atol=1e-12, rtol=0)
    torch.testing.assert_close(wide.sink_share, exact.sink_share, atol=1e-12, rtol=0)


def test_large_scores_cost_float32_its_digits_and_float64_none():
    call = drawn(mask=Causal(), scale=30.0)
    exact = definition(call).weights
    assert 1e-6 < (Weights.of(call).dense() - exact).abs().max() < 1e-4
    assert (Weights.of(call).in_float64().dense() - exact).abs().max() < 1e-12


@pytest.mark.usefixtures("small_tiles")
def test_tiles_cover_every_weight_once(call):
    weights = Weights.of(call)
    covered = torch.zeros(weights.shape, dtype=torch.float64)
    for tile in weights.tiles():
        covered[:, :, tile.rows, tile.keys] += tile.weights
    torch.testing.assert_close(covered, definition(call).weights, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("small_tiles")
def test_rows_and_what_the_sink_takes_sum_to_1(call):
    weights, sees = Weights.of(call), definition(call).keep.any(-1)
    whole = weights.dense().sum(-1) + weights.sink_share
    torch.testing.assert_close(whole[sees], torch.ones_like(whole[sees]), atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.sink_share.double(), definition(call).sink_share, atol=1e-6, rtol=0)


def test_a_row_that_sees_nothing_gives_all_to_the_sink():
    weights = Weights.of(drawn(mask=Causal() & ~Causal(), sink=torch.randn(6)))
    assert torch.equal(weights.dense(), torch.zeros(2, 6, 29, 29))
    assert torch.equal(weights.sink_share, torch.ones(2, 6, 29))


def test_a_row_that_sees_nothing_has_no_weights():
    call = drawn(mask=Causal() & ~Causal())
    assert torch.equal(Weights.of(call).dense(), torch.zeros(2, 6, 29, 29))


def test_a_row_that_a_bias_hides_whole_has_no_weights():
    hidden = torch.zeros(29, 29)
    hidden[5] = -torch.inf
    dense = Weights.of(drawn(mask=Causal(), bias=TensorBias(hidden))).dense()
    assert torch.equal(dense[:, :, 5], torch.zeros(2, 6, 29))
    assert dense.isfinite().all()


def test_what_the_mask_hides_cannot_spoil_the_weights():
    q, k = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 3)
    k[:, :, 3:] = torch.nan
    weights = Weights(q, k, torch.zeros(1, 2, 5), Causal())
    assert weights.rows(0, 3).isfinite().all()


@pytest.mark.parametrize("mask", [Causal(), Window(16, 1), Causal() & (Window(16) | Prefix(4))], ids=str)
def test_tiles_skip_what_the_mask_hides(mask, monkeypatch):
    monkeypatch.setattr(module, "TILE", 512 * 16)
    q = k = torch.zeros(1, 1, 1024, 2)
    looked_at = sum(tile.weights.numel() for tile in Weights(q, k, torch.zeros(1, 1, 1024), mask).tiles())
    assert looked_at < 1024 * 1024 * 2 / 3


def test_tiles_of_long_rows_have_many_rows_and_whole_chunks_of_keys():
    q = k = torch.zeros(1, 2, 8192, 2)
    sizes = {tile.weights.shape[2:] for tile in Weights(q, k, torch.zeros(1, 2, 8192)).tiles()}
    assert sizes == {(ROWS, TILE // (2 * ROWS))}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda w: w.rows(20, 31), r"rows\(20, 31\) of 29 queries: expected 0 <= start <= stop <= 29"),
        (lambda w: w.columns(-3, 4), r"columns\(-3, 4\) of 29 keys"),
        (lambda w: w.scores(5, 4), r"scores\(5, 4\) of 29 queries"),
        (lambda w: w.rows(0.5, 2), r"rows\(0\.5, 2\) of 29 queries"),
        (lambda w: w.top(1.5), r"top\(k=1\.5\): expected the number of weights"),
        (lambda w: w.pooled(2.5), r"pooled\(size=2\.5"),
        (lambda w: w.top(0), r"top\(k=0\): expected the number of weights"),
        (lambda w: w.pooled(0), r"pooled\(size=0, by='mean'\): expected 1 cell"),
        (lambda w: w.pooled(4, by="median"), r"by='median'\): expected .* 'mean' or 'max'"),
        (lambda w: w.pairs(torch.tensor([0, 3]), torch.tensor([0, -1])), r"pairs has key -1, .* 29: expected 0 to 28"),
        (
            lambda w: w.pairs(torch.tensor([29]), torch.tensor([0])),
            r"pairs has row 29, .* expected 0 to 28; rows count",
        ),
        (lambda w: w.pairs([5], [99]), "pairs has key 99"),
        (lambda w: w.pairs(torch.tensor([0, 1]), torch.tensor([0])), r"pairs of \[2\] torch.int64 and \[1\]"),
        (lambda w: w.pairs(torch.tensor([0.0]), torch.tensor([0])), r"pairs of \[1\] torch.float32 .* expected a row"),
        (lambda w: w.pairs(torch.ones(2, 2).long(), torch.ones(2, 2).long()), r"pairs of \[2, 2\]"),
        (lambda w: w.pairs([[1], [1, 2]], [1, 2]), r"pairs of no integers \(expected sequence of length 1"),
        (lambda w: w.only(9), r"only\(9\) of 2 sequences: expected one of 0 to 1"),
        (lambda w: w.only(-1), r"only\(-1\) of 2 sequences"),
        (lambda w: w.only(0.5), r"only\(0\.5\) of 2 sequences"),
        (lambda w: w.dense(limit=100), r"\[2, 6, 29, 29\] are 10,092 elements .* limit of 100"),
    ],
)
def test_what_is_not_there_cannot_be_asked_for(asked, message):
    with pytest.raises(ProblemError, match=message):
        asked(Weights.of(drawn()))


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that anything within it made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for tensor in (t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, torch.Tensor)):
            self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.exhaustive
def test_a_sweep_holds_a_tile_and_never_the_matrix():
    call = called(torch.randn(1, 8, 2048, 16), torch.randn(1, 2, 2048, 16), mask=Causal(), backend="sdpa")
    weights = Weights.of(call)
    with Largest() as largest:
        sink(weights)
        weights.pooled(64)
        weights.pooled(64, by="max")
        weights.top(4)
        weights.pairs(torch.arange(2048), torch.arange(2048))
    assert 0 < largest.elements <= TILE < 8 * 2048 * 2048 / 16


def test_a_notebook_shows_sizes_and_mask():
    q, k = torch.zeros(1, 6, 5, 4), torch.zeros(1, 2, 5, 4)
    shown = Weights(q, k, torch.zeros(1, 6, 5), Causal())._repr_html_()
    assert "<td>6 on 2 key heads</td>" in shown
    assert "<td>5 x 5</td>" in shown
    assert "<td>Causal()</td>" in shown


def test_a_plot_is_the_pooled_weights_of_one_head(monkeypatch):
    plotted = {}
    monkeypatch.setattr(module, "heat_map", lambda cells, **named: plotted.update(named, cells=cells))
    weights = Weights.of(drawn(mask=Causal()))
    weights.plot(head=1, size=8)
    side = -(-weights.shape[3] // 8)
    assert torch.equal(plotted["cells"], weights.pooled(8)[0, 1])
    assert plotted["title"] == f"weights of head 1, cells of {side} x {side} tokens"
    with pytest.raises(ProblemError, match=r"heads\(99\)"):
        weights.plot(head=99)
