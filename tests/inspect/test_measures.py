"""Measures equal their formulas on dense weights; patterns made by hand score what one can count; chance is uniform."""

import math

import pytest
import torch

from regard import Causal, Lengths, Window, attend
from regard.errors import ProblemError
from regard.inspect import weights as module
from regard.inspect.measures import breadth, induction, matches, offset_score, previous_token, sink
from regard.inspect.stimulus import Repeats
from regard.inspect.weights import Weights
from tests.inspect.dense import CASES, called, definition, drawn, pattern

SHARP = 40.0
"""A score so far above the others, at 0, that it takes all of the mass: they are left 4e-18."""


@pytest.fixture(params=CASES)
def call(request, monkeypatch):
    monkeypatch.setattr(module, "TILE", 2 * 6 * 29 * 3)
    return CASES[request.param]()


def mean_over(rows, values):
    """The mean over rows that count; [batch, heads]."""
    return torch.where(rows, values, 0.0).sum(-1) / rows.sum(-1)


def equal(found, exact):
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=0, equal_nan=True)


def uniform_of(exact):
    """Uniform attention over the same mask."""
    return exact.keep.double() / exact.keep.sum(-1, keepdim=True).clamp(min=1)


def test_entropy_is_that_of_the_dense_weights(call):
    exact, found = definition(call), breadth(Weights.of(call))
    sees, visible = exact.keep.any(-1), exact.keep.sum(-1).double()
    entropies = torch.special.entr(exact.weights).sum(-1) + torch.special.entr(exact.sink_share)
    equal(found.entropy.value, mean_over(sees, entropies))
    equal(found.effective_tokens.value / 29, mean_over(sees, entropies.exp()) / 29)
    equal(found.entropy.chance, mean_over(sees, visible.clamp(min=1).log()))
    equal(found.effective_tokens.chance / 29, mean_over(sees, visible) / 29)


@pytest.mark.parametrize("token", [0, 3])
def test_sink_mass_is_a_column_of_the_dense_weights(call, token):
    exact, found = definition(call), sink(Weights.of(call), token)
    rows = exact.keep.any(-1) & (call.offset + torch.arange(call.q.shape[2]) > token)
    equal(found.value, mean_over(rows, exact.weights[..., token]))
    equal(found.chance, mean_over(rows, uniform_of(exact)[..., token]))


@pytest.mark.parametrize("offset", [0, 1, 4, -1])
def test_offset_scores_are_diagonals_of_the_dense_weights(call, offset):
    exact, found = definition(call), offset_score(Weights.of(call), offset)
    target = call.offset + torch.arange(call.q.shape[2]) - offset
    keys = call.k.shape[2]
    rows = exact.keep.any(-1) & (target >= 0) & (target < keys)
    at = target.clamp(0, keys - 1)[None, None, :, None]
    for value, dense in ((found.value, exact.weights), (found.chance, uniform_of(exact))):
        equal(value, mean_over(rows, dense.gather(-1, at.expand(*dense.shape[:3], 1))[..., 0]))


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_induction_is_the_sum_over_matches_of_the_dense_weights(call, shift):
    exact = definition(call)
    batch, keys = call.q.shape[0], call.k.shape[2]
    tokens = torch.randint(5, (batch, keys))
    i, j = call.offset + torch.arange(call.q.shape[2])[:, None], torch.arange(keys)[None, :]
    before = tokens[:, (j[0] - shift).clamp(min=0)]  # [batch, keys], the token `shift` before each key
    current = tokens[:, i[:, 0]]
    earlier = (j >= shift) & (j - shift < i) & (j <= i)  # [queries, keys]
    match = (before[:, None, :] == current[:, :, None]) & earlier  # [batch, queries, keys]
    found = induction(Weights.of(call), tokens, shift)
    for value, dense in ((found.value, exact.weights), (found.chance, uniform_of(exact))):
        masses = torch.where(match[:, None], dense, 0.0).sum(-1)
        equal(value, mean_over(match.any(-1)[:, None].expand_as(masses), masses))


def test_rows_that_are_padding_do_not_count():
    real = torch.tensor([[True] * 29, [True] * 11 + [False] * 18])
    call = drawn(mask=Causal() & Lengths(real.sum(-1)))
    short = called(call.q[1:, :, :11], call.k[1:, :, :11], mask=Causal())
    for measure in (sink, previous_token, lambda w, rows=None: breadth(w, rows).entropy):
        torch.testing.assert_close(measure(Weights.of(call), rows=real).value[1:], measure(Weights.of(short)).value)


def test_a_head_that_copies_the_previous_token_scores_one():
    q, k = SHARP * torch.eye(13)[None], torch.eye(13).roll(1, 1)[None]  # q_i . k_j = SHARP where j + 1 = i
    weights = pattern(q, k, mask=Causal())
    assert previous_token(weights).value.item() == pytest.approx(1)
    assert sink(weights).value.item() == pytest.approx(1 / 12)  # of rows 1 to 12, row 1 alone looks at token 0
    assert breadth(weights).entropy.value.item() == pytest.approx(0, abs=1e-6)


def test_a_head_that_halves_its_mass_scores_a_half():
    q = SHARP * torch.cat([torch.eye(13), torch.ones(13, 1)], dim=1)[None]
    k = torch.cat([torch.eye(13).roll(1, 1), torch.zeros(13, 1)], dim=1)[None]
    k[0, 0, 13] = 1  # every row also scores SHARP at token 0; row 1 has both at token 0
    weights = pattern(q, k, mask=Causal())
    expected = (1 + 11 * 0.5) / 12
    assert previous_token(weights).value.item() == pytest.approx(expected)
    assert sink(weights).value.item() == pytest.approx(expected)
    assert breadth(weights).entropy.value.item() == pytest.approx(11 * math.log(2) / 13)
    assert breadth(weights).effective_tokens.value.item() == pytest.approx((2 + 11 * 2) / 13)


def repeated():
    return Repeats(7, 3).draw(list(range(1, 40)), 0, sequences=1)


def hot(tokens):
    return torch.nn.functional.one_hot(tokens, 40).float()


def test_an_induction_head_scores_one_and_a_duplicate_token_head_none():
    tokens = repeated()
    before = hot(tokens).roll(1, 1)
    before[:, 0] = 0
    finds_induction = pattern(SHARP * hot(tokens), before, mask=Causal())
    finds_duplicates = pattern(SHARP * hot(tokens), hot(tokens), mask=Causal() & ~Window(1))
    assert induction(finds_induction, tokens).value.item() == pytest.approx(1)
    assert induction(finds_induction, tokens, shift=0).value.item() == pytest.approx(0, abs=1e-6)
    assert induction(finds_duplicates, tokens).value.item() == pytest.approx(0, abs=1e-6)
    assert induction(finds_duplicates, tokens, shift=0).value.item() == pytest.approx(1)


def test_an_induction_head_that_finds_one_match_of_two_scores_by_its_mass():
    """Attention to the latest match only: still all of its mass is on matches. To the first token only: none is."""
    tokens = repeated()
    latest = torch.zeros(1, 22, 22)
    latest[0, torch.arange(8, 22), torch.arange(8, 22) - 6] = SHARP  # period 7: the token after the last occurrence
    assert induction(pattern(latest, torch.eye(22)[None], mask=Causal()), tokens).value.item() == pytest.approx(1)
    first = pattern(SHARP * torch.eye(22)[:1].expand(22, 22)[None], torch.eye(22)[None], mask=Causal())
    assert induction(first, tokens).value.item() == pytest.approx(0, abs=1e-6)


def test_uniform_attention_scores_its_chance():
    """The chance values, by hand: causal, 25 random tokens four times after a first one."""
    tokens = Repeats().draw(list(range(1, 100)), 0, sequences=1)
    n = 101
    weights = pattern(torch.zeros(2, n, 3), torch.zeros(1, n, 3), mask=Causal())
    one_in = sum(1 / (i + 1) for i in range(1, n)) / (n - 1)
    by_matches = [((i - 1) // 25) / (i + 1) for i in range(26, n)]  # earlier periods, of the i + 1 keys that row i sees
    entropy = sum(math.log(i + 1) for i in range(n)) / n
    for score, expected in (
        (sink(weights), one_in),
        (previous_token(weights), one_in),
        (induction(weights, tokens), sum(by_matches) / 75),
        (breadth(weights).entropy, entropy),
        (breadth(weights).effective_tokens, (n + 1) / 2),
    ):
        assert score.value.tolist() == [[pytest.approx(expected, rel=1e-5)] * 2]
        assert score.chance.tolist() == [[pytest.approx(expected, rel=1e-5)] * 2]


def test_chance_in_a_window_is_that_of_the_window():
    weights = pattern(torch.zeros(1, 10, 3), torch.zeros(1, 10, 3), mask=Causal() & Window(3))
    assert previous_token(weights).chance.item() == pytest.approx((1 / 2 + 8 / 3) / 9)
    assert sink(weights).chance.item() == pytest.approx((1 / 2 + 1 / 3) / 9)


def test_matches_are_what_followed_earlier_occurrences():
    i, j = matches(torch.tensor([5, 5, 6, 5]))
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == [(1, 1), (3, 1), (3, 2)]


def test_a_sequence_in_which_nothing_repeats_has_no_induction_score():
    assert induction(Weights.of(drawn(mask=Causal())), torch.arange(29).expand(2, 29)).value.isnan().all()


def test_induction_needs_a_token_per_key():
    with pytest.raises(ProblemError, match=r"tokens is \[29\]: .* \[2, 29\]"):
        induction(Weights.of(drawn()), torch.arange(29))


def test_measures_leave_the_gradients_of_a_call_alone():
    q = torch.randn(1, 2, 5, 3, requires_grad=True)
    call = called(q, q, mask=Causal())
    breadth(Weights.of(call))
    attend(q, q, q, mask=Causal()).sum().backward()
    assert q.grad is not None
