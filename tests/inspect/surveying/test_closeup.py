"""CloseUp-ups: one head of a call, kept in O(n), shows the weights that the call had, or there is none."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from regard import Alibi, Causal, Dilated, Documents, Prefix, T5Bias, TensorBias, TensorMask, Window
from regard.inspect.surveying import closeup
from regard.inspect.surveying.closeup import CloseUpCollector, Pair, close_up, close_up_rows, strongest, visible_runs
from regard.inspect.surveying.kinds import Head
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import CASES, HEADS, KEYS, QUERIES, called, definition, drawn

TOLD = (
    "no mask",
    "causal",
    "window with sinks",
    "window both ways",
    "scale and softcap",
    "learned sinks",
    "padding to the right",
    "padding to the left",
    "alibi",
    "two biases in half precision",
    "heads without groups",
    "a single key head",
    "float64",
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2)


@pytest.mark.parametrize("case", TOLD)
def test_a_close_up_shows_the_weights_of_the_call(case):
    call = CASES[case]()
    exact = definition(call)
    for head in range(call.q.shape[1]):
        close = close_up(Weights.of(call).only(0), 3, head)
        assert close is not None
        assert (close.layer, close.head) == (3, head)
        shown = close_up_rows(close, 0, len(close.q))
        assert np.abs(shown - exact.weights[0, head].numpy()).max() < 4e-3
        assert (shown[~exact.keep[0, head].numpy()] == 0).all()


def test_some_rows_are_the_same_as_all():
    close = close_up(Weights.of(drawn(mask=Causal() & Window(7), bias=Alibi(HEADS))).only(0), 0, 2)
    assert close is not None
    assert np.allclose(close_up_rows(close, 11, 17), close_up_rows(close, 0, QUERIES)[11:17], atol=1e-6)


def test_a_bias_by_distance_tells_before_from_behind():
    call = drawn(bias=T5Bias(torch.randn(32, HEADS), bidirectional=True))
    close, exact = close_up(Weights.of(call).only(0), 0, 1), definition(call)
    assert close is not None
    assert np.abs(close_up_rows(close, 0, QUERIES) - exact.weights[0, 1].numpy()).max() < 4e-3


def test_a_row_that_sees_nothing_shows_nothing():
    call = drawn(mask=Causal() & ~Prefix(5))
    close = close_up(Weights.of(call).only(0), 0, 1)
    assert close is not None
    assert (close_up_rows(close, 0, 5) == 0).all()
    assert close_up_rows(close, 5, 6).sum() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        {"mask": TensorMask(torch.rand(1, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(0)) < 0.5)},
        {"mask": Causal() & ~(Window(9) & ~Window(3))},
        {"bias": TensorBias(torch.ones(1, HEADS, QUERIES, KEYS))},
    ],
    ids=["any mask", "a hole in the middle", "a bias by pair"],
)
def test_what_cannot_be_shown_so_has_no_close_up(words):
    assert close_up(Weights.of(drawn(**words)).only(0), 0, 1) is None


@pytest.mark.parametrize("dim", [1, 5])
def test_a_close_up_that_would_be_wrong_is_not_returned(dim):
    # float32 says scores of 5e8 to 30. A product of one dimension rounds alike everywhere, so it agrees with itself
    call = called(1e4 * torch.randn(1, 2, 13, dim), 1e4 * torch.randn(1, 2, 13, dim), mask=Causal(), scale=1.0)
    assert close_up(Weights.of(call), 0, 0) is None


@pytest.mark.parametrize("words", [{}, {"sink": torch.ones(HEADS)}], ids=["plain", "a learned sink"])
def test_a_close_up_of_a_wrong_lse_is_not_returned(words):
    fine = Weights.of(drawn(mask=Causal(), **words)).only(0)
    assert close_up(fine, 0, 1) is not None
    assert close_up(replace(fine, lse=fine.lse + 0.01), 0, 1) is None


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_close_up_of_what_is_no_number_is_not_returned(odd):
    q = torch.ones(1, 2, 13, 5)
    q[0, 0, 12] = odd
    weights = Weights.of(called(q, torch.ones(1, 2, 13, 5), mask=Causal()))
    assert [close_up(weights, 0, head) is None for head in (0, 1)] == [True, False]


def test_the_pairs_of_a_mask_are_looked_at_once(monkeypatch):
    weights, known = Weights.of(drawn(mask=Causal() & Window(5))).only(0), {}
    first = close_up(weights, 0, 0, known)
    monkeypatch.setattr(closeup, "visible_runs", lambda *_: pytest.fail("looked again"))
    second = close_up(weights, 0, 4, known)
    assert first is not None
    assert second is not None
    assert np.array_equal(first.first, second.first)


def test_heads_with_masks_of_their_own_have_runs_of_their_own():
    kept = torch.ones(1, HEADS, QUERIES, KEYS, dtype=torch.bool).tril()
    kept[:, 1] &= ~torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(-3)
    weights, known = Weights.of(drawn(mask=TensorMask(kept))).only(0), {}
    lasts = [close_up(weights, 0, head, known) for head in (0, 1)]
    assert [close is not None and int(close.first[-1]) for close in lasts] == [0, KEYS - 3]


@pytest.mark.parametrize(("rows", "chunk"), [(128, 128), (3, 7), (7, 2)])
def test_the_keys_of_a_row_are_a_run_and_the_first_few(rows, chunk, monkeypatch):
    monkeypatch.setattr(closeup, "ROWS", rows)
    monkeypatch.setattr(closeup, "CHUNK", chunk)
    runs = visible_runs(Weights.of(drawn(mask=Causal() & (Window(5) | Prefix(2)))), 0)
    assert runs is not None
    assert runs.prefix == 2
    assert runs.last.tolist() == list(range(1, QUERIES + 1))
    assert runs.first.tolist() == [0] * 7 + list(range(3, QUERIES - 4))
    documents = visible_runs(Weights.of(drawn(mask=Documents(torch.tensor([0] * 10 + [1] * (KEYS - 10))))), 0)
    assert documents is not None
    assert documents.prefix == 0
    assert documents.first.tolist() == [0] * 10 + [10] * (KEYS - 10)


MASKS = {
    "causal": Causal(),
    "window with sinks": Causal() & (Window(5) | Prefix(2)),
    "sinks within a chunk": Causal() & (Window(3) | Prefix(9)),
    "window both ways": Window(4, 3),
    "documents": Documents(torch.tensor([0] * 10 + [1] * (KEYS - 10))),
    "padding": Causal() & ~Prefix(5),
    "a hole": Causal() & ~(Window(9) & ~Window(3)),
    "holes": Causal() & Dilated(3),
    "anything": TensorMask(torch.rand(1, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(3)) < 0.9),
    "sinks for some": Causal() & (Window(4) | Prefix(3) & Window(20)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("rows", "chunk"), [(128, 128), (5, 4), (3, 7), (1, 1)])
def test_runs_show_what_the_mask_keeps_or_there_are_none(mask, rows, chunk, monkeypatch):
    monkeypatch.setattr(closeup, "ROWS", rows)
    monkeypatch.setattr(closeup, "CHUNK", chunk)
    weights = Weights.of(drawn(mask=mask)).only(0)
    i, j = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None]
    kept, runs = weights.keep(i, j)[0, 0].numpy(), visible_runs(weights, 0)
    last = [int(row.nonzero()[0].max(initial=-1)) + 1 for row in kept]
    first = [int((~row[:end]).nonzero()[0].max(initial=-1)) + 1 for row, end in zip(kept, last, strict=True)]
    prefix = max(int((~row).argmax()) if begin else 0 for row, begin in zip(kept, first, strict=True))
    spans = zip(first, last, strict=True)
    shown = [[key < end and (key >= begin or key < prefix) for key in range(KEYS)] for begin, end in spans]
    assert (runs is not None) == (shown == kept.tolist())
    assert runs is None or (runs.first.tolist(), runs.last.tolist(), runs.prefix) == (first, last, prefix)


@pytest.mark.parametrize("mask", [Causal(), Causal() & (Window(999) | Prefix(4))])
def test_runs_of_a_long_text_ask_for_few_pairs(mask, monkeypatch):
    asked, tokens = [], 20_011
    keep = Weights.keep
    monkeypatch.setattr(Weights, "keep", lambda self, i, j: asked.append(i.numel() * j.numel()) or keep(self, i, j))
    q = torch.zeros(1, 1, tokens, 1)
    assert visible_runs(Weights(q, q, q[..., 0], mask), 0) is not None
    assert sum(asked) < 1200 * tokens


def test_sinks_that_some_rows_do_not_see_are_no_runs():
    odd = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril() & ~torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(-4)
    odd[20:, :2] = True
    assert visible_runs(Weights.of(drawn(mask=TensorMask(odd))), 0) is None
    odd[4:, :2] = True
    assert visible_runs(Weights.of(drawn(mask=TensorMask(odd))), 0) is not None


def test_the_strongest_pairs_leave_out_the_first_token_and_the_token_itself(monkeypatch):
    scores = torch.zeros(7, 7, dtype=torch.float64)
    for query, key, score in ((6, 2, 5.0), (4, 3, 4.0), (5, 1, 3.0), (3, 3, 9.0), (2, 0, 9.0)):
        scores[query, key] = score
    call = called(scores[None, None], torch.eye(7, dtype=torch.float64)[None, None], mask=Causal(), scale=1.0)
    close, exact = close_up(Weights.of(call), 0, 0), definition(call).weights[0, 0]
    assert close is not None
    for tile in (2**20, 14):
        monkeypatch.setattr(closeup, "TILE", tile)
        found = strongest(close, 3)
        assert [(p.query, p.key) for p in found] == [(6, 2), (4, 3), (5, 1)]
        assert [p.weight for p in found] == pytest.approx([float(exact[p.query, p.key]) for p in found], abs=1e-3)
    assert strongest(close, 1, from_key=0)[0][:2] == (2, 0)
    assert strongest(close, 0) == []
    assert isinstance(found[0], Pair)


def test_the_strongest_pairs_of_a_window_compute_what_the_window_keeps(monkeypatch):
    tokens, computed = 4001, []
    weights = closeup._log_weights

    def counted(close, rows, keys):
        computed.append((rows.stop - rows.start) * (keys.stop - keys.start))
        return weights(close, rows, keys)

    monkeypatch.setattr(closeup, "_log_weights", counted)
    q, k = torch.randn(1, 1, tokens, 5), torch.randn(1, 1, tokens, 5)
    close = close_up(Weights.of(called(q, k, mask=Causal() & (Window(256) | Prefix(3)))), 0, 0)
    assert close is not None
    computed.clear()
    found = strongest(close, 9)
    assert sum(computed) < 2.1 * 256 * tokens
    everything = close_up_rows(close, 0, tokens)
    everything[:, 0] = 0
    np.fill_diagonal(everything, 0)
    assert [pair.weight for pair in found] == pytest.approx(np.sort(everything, axis=None)[:-10:-1].tolist(), rel=1e-5)
    assert {(pair.query, pair.key): pair.weight for pair in found} == pytest.approx(
        {(pair.query, pair.key): everything[pair.query, pair.key] for pair in found}, rel=1e-5
    )


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: drawn(bias=TensorBias(torch.randn(QUERIES, KEYS))), "its mask or its bias is another"),
        (lambda: called(*torch.full((2, 1, HEADS, QUERIES, 5), torch.nan)), "its weights are not finite"),
        (lambda: drawn(scale=1e9), "its scores are too large for the page's float32 totals"),
    ],
    ids=["a bias by pair", "no numbers", "large scores"],
)
def test_a_selected_head_without_a_close_up_has_a_note_that_says_why(call, why):
    weights = Weights.of(call()).only(0)
    collector = CloseUpCollector([(4, 1)], others=False)
    collector.offer(weights, [Head(4, head, 0, {}) for head in range(2)])
    (note,) = collector.notes
    assert list(collector.missing) == [(4, 1)]
    assert note.startswith("Head 4.1 has no close-up: ")
    assert why in note
    assert collector.of([]) == ()
