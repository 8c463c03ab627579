"""Patterns made by hand score what one can count."""

import math

import pytest
import torch

from regard import Causal, MaskFunction, TensorMask, Window, attend
from regard.errors import ProblemError
from regard.inspect.measures import (
    Inputs,
    alpha,
    best,
    distance_profile,
    effective_tokens,
    entropy,
    induction,
    largest_column,
    largest_weight,
    local_mass,
    matches,
    mean_distance,
    offset_scan,
    positional,
    previous_token,
    rare_word,
    rarest_hits,
    rarity,
    retrieval,
    sink,
    syntactic,
    value_norms,
)
from regard.inspect.measures.means import looks_ahead
from regard.inspect.measures.score import HeadScores
from regard.inspect.measures.sink import THRESHOLDS
from regard.inspect.measures.stimulus import Repeats
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import called, drawn, pattern
from tests.inspect.measures.formulas import SHARP, looking, pair_measures, places, sweep_measures


def head_that_looks_at(*keys):
    """A causal head whose row i looks at keys[i] only."""
    return pattern(*looking(torch.tensor([keys])), mask=Causal())


def test_a_head_that_copies_the_previous_token_scores_one():
    weights = head_that_looks_at(0, *range(12))
    assert previous_token(weights).value.item() == pytest.approx(1)
    assert sink(weights).value.item() == pytest.approx(1 / 12)  # of rows 1 to 12, row 1 alone looks at token 0
    assert alpha(weights).value.item() == pytest.approx(2 / 13)  # and row 0, which has no choice
    assert entropy(Inputs(weights)).value.item() == pytest.approx(0, abs=1e-6)
    found = best(offset_scan(weights))
    assert (found.at.item(), found.value.item()) == (1, pytest.approx(1))


def test_a_head_that_halves_its_mass_scores_a_half():
    q = SHARP * torch.cat([torch.eye(13), torch.ones(13, 1)], dim=1)[None]
    k = torch.cat([torch.eye(13).roll(1, 1), torch.zeros(13, 1)], dim=1)[None]
    k[0, 0, 13] = 1  # every row also scores SHARP at token 0; row 1 has both at token 0
    weights = pattern(q, k, mask=Causal())
    expected = (1 + 11 * 0.5) / 12
    assert previous_token(weights).value.item() == pytest.approx(expected)
    assert sink(weights).value.item() == pytest.approx(expected)
    assert entropy(Inputs(weights)).value.item() == pytest.approx(11 * math.log(2) / 13)
    assert effective_tokens(Inputs(weights)).value.item() == pytest.approx((2 + 11 * 2) / 13)


def test_the_best_of_a_scan_is_the_furthest_above_chance():
    def rows(value, chance):
        return HeadScores.of_rows(torch.full((1, 2, 9), value), torch.full((1, 2, 9), chance), torch.ones(1, 2, 9) > 0)

    found = best({1: rows(0.5, 0.45), 2: rows(0.4, 0.1), 3: rows(0.2, 0.1)})
    assert found.at.tolist() == [[2, 2]]
    assert found.value.tolist() == [[pytest.approx(0.4)] * 2]
    assert found.chance.tolist() == [[pytest.approx(0.1)] * 2]
    assert found.interval().low.tolist() == [pytest.approx(0.4)] * 2


def test_the_best_of_several_says_which():
    """Head 0 looks three tokens back, head 1 one token back, and both at token 1 more than at any other."""
    three, one = [0, 1, 1, 0, 1, 2, 3, 4], [0, 0, 1, 1, 1, 4, 5, 6]
    weights = pattern(*looking(torch.tensor([three, one])), mask=Causal())
    found = pair_measures(weights) | sweep_measures(Inputs(weights))
    assert {name: at.tolist() for name, at in places(found).items()} == {
        "best_offset_at": [[3, 1]],
        "positional_at": [[3, 1]],
        "column_at": [[1, 1]],
    }
    assert found["best_offset"].value.tolist() == [[pytest.approx(1), pytest.approx(5 / 7)]]
    assert found["previous"].at is None


def test_sinks_are_a_share_of_heads():
    """Of ten rows one head gives token 0 nine, one four, and one its own row only."""
    heads = torch.tensor([[0] * 9 + [9], [0] * 4 + list(range(4, 10)), list(range(10))])
    found = alpha(pattern(*looking(heads), mask=Causal())).value
    assert found.tolist() == [pytest.approx([0.9, 0.4, 0.1])]
    assert {bound: (found > bound).double().mean().item() for bound in THRESHOLDS} == pytest.approx(
        {0.3: 2 / 3, 0.8: 1 / 3}
    )


def test_a_delimiter_can_be_the_sink():
    weights = head_that_looks_at(0, 0, 2, 2, 2, 2, 2, 2)
    alphas = [alpha(weights, token).value.item() for token in range(4)]
    assert alphas == pytest.approx([2 / 8, 0, 1, 0], abs=1e-6)
    found = largest_column(Inputs(weights))
    assert (found.at.item(), found.value.item()) == (2, pytest.approx(6 / 8))


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
    latest = head_that_looks_at(*[0] * 8, *range(2, 16))  # period 7: the token after the last occurrence
    assert induction(latest, tokens).value.item() == pytest.approx(1)
    assert induction(head_that_looks_at(*[0] * 22), tokens).value.item() == pytest.approx(0, abs=1e-6)


def test_our_induction_score_counts_fewer_rows_than_that_of_transformer_lens():
    """`detect_head`, "mul": the sum of A times its pattern over the sum of A, so rows without a match count too."""
    tokens = repeated()
    torch.manual_seed(5)
    weights = pattern(torch.randn(2, 22, 5), torch.randn(2, 22, 5), mask=Causal())
    a, same = weights.dense()[0], tokens[0][:, None] == tokens[0]
    theirs = (same.tril(-1).roll(1, 1) & (torch.arange(22) > 0)).tril()  # what followed an earlier occurrence
    for ours, found, counted in (
        (induction(weights, tokens), theirs, theirs.any(-1).sum()),
        (previous_token(weights), torch.eye(22).roll(-1, 1).tril() > 0, 21),
    ):
        mul = (a * found).sum((1, 2)) / a.sum((1, 2))
        torch.testing.assert_close(ours.value[0] * counted / 22, mul)


def test_uniform_attention_scores_its_chance_by_hand():
    """Causal, 25 random tokens four times after a first one."""
    tokens = Repeats().draw(list(range(1, 100)), 0, sequences=1)
    n = 101
    weights = pattern(torch.zeros(2, n, 3), torch.zeros(1, n, 3), mask=Causal())
    one_in = sum(1 / (i + 1) for i in range(1, n)) / (n - 1)
    by_matches = [((i - 1) // 25) / (i + 1) for i in range(26, n)]  # earlier periods, of the i + 1 keys that row i sees
    nats = sum(math.log(i + 1) for i in range(n)) / n
    for score, expected in (
        (sink(weights), one_in),
        (previous_token(weights), one_in),
        (alpha(weights), (1 + one_in * (n - 1)) / n),
        (induction(weights, tokens), sum(by_matches) / 75),
        (entropy(Inputs(weights)), nats),
        (effective_tokens(Inputs(weights)), (n + 1) / 2),
    ):
        assert score.value.tolist() == [[pytest.approx(expected, rel=1e-5)] * 2]
        assert score.chance.tolist() == [[pytest.approx(expected, rel=1e-5)] * 2]


def test_chance_in_a_window_is_that_of_the_window():
    weights = pattern(torch.zeros(1, 10, 3), torch.zeros(1, 10, 3), mask=Causal() & Window(3))
    assert previous_token(weights).chance.item() == pytest.approx((1 / 2 + 8 / 3) / 9)
    assert sink(weights).chance.item() == pytest.approx((1 / 2 + 1 / 3) / 9)


def test_a_positional_head_and_one_that_is_not():
    weights = head_that_looks_at(0, 0, 0, 1, 2, 3, 4, 5, 6, 0)  # two back, but for the first two rows and the last
    share = positional(Inputs(weights))
    assert (share.value.item(), share.at.item()) == (pytest.approx(7 / 10), 2)
    assert share.chance.item() == pytest.approx(sum(1 / (i + 1) for i in range(2, 10)) / 10)
    assert largest_weight(Inputs(weights)).value.item() == pytest.approx(1)


def test_distances_of_a_head_that_looks_four_back():
    weights = head_that_looks_at(0, 1, 2, 3, *range(16))  # the first four rows look at themselves
    inputs = Inputs(weights)
    profile = distance_profile(inputs)
    assert profile.edges == (0, 1, 2, 4, 8, 16)
    assert profile.value[0, 0].tolist() == pytest.approx([4 / 20, 0, 0, 16 / 20, 0, 0])
    assert profile.chance.sum().item() == pytest.approx(1)
    assert local_mass(inputs, 4).value.item() == pytest.approx(4 / 20)
    assert local_mass(inputs, 8).value.item() == pytest.approx(1)
    found = mean_distance(inputs)
    assert found.value.item() == pytest.approx(16 * 4 / 20)
    assert found.chance.item() == pytest.approx(19 / 4)  # row i is i / 2 from what it sees, in the mean


def test_what_bounds_leave_open_is_looked_at_pair_by_pair():
    """A mask by a function has no bounds: whether it looks ahead is found from its pairs."""
    for ahead in (0, 1):
        mask = MaskFunction(lambda b, h, q, k, ahead=ahead: k <= q + ahead * (q == 5))
        weights = Weights.of(called(torch.randn(1, 2, 9, 3), torch.randn(1, 2, 9, 3), mask=mask))
        assert looks_ahead(weights) == bool(ahead)


def test_rows_before_all_keys_look_ahead():
    """The first rows of more queries than keys are at negative positions; the mask has several blocks of keys."""
    q, k = torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 200, 4)
    weights = Weights.of(called(q, k, mask=TensorMask(torch.ones(5, 200, dtype=torch.bool)), offset=-10))
    assert looks_ahead(weights)
    with pytest.raises(ProblemError, match="later keys"):
        mean_distance(Inputs(weights))
    nothing = TensorMask(torch.zeros(5, 20, dtype=torch.bool))
    assert not looks_ahead(Weights.of(called(q, k[:, :, :20], mask=nothing, offset=-10)))


def test_a_head_that_looks_at_the_rarest_token():
    tokens = torch.tensor([[5, 9, 5, 7, 5]])
    rare = rarity(tokens, torch.tensor([1, 1, 1, 1, 1, 96, 1, 3, 1, 1]))
    assert rare[0, 1] > rare[0, 3] > rare[0, 0]
    weights = head_that_looks_at(0, 1, 1, 3, 1)
    inputs = Inputs(weights, rarity=rare)
    hits = rarest_hits(inputs)
    assert hits.value.item() == pytest.approx(4 / 5)
    assert hits.chance.item() == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 5)
    assert rarest_hits(inputs, among=2).value.item() == pytest.approx(1)
    r = rare[0].tolist()
    looked, seen = (r[0], r[1], r[1], r[3], r[1]), [sum(r[: i + 1]) / (i + 1) for i in range(5)]
    expected = sum(a - b for a, b in zip(looked, seen, strict=True)) / 5
    score = rare_word(inputs)
    assert score.value.item() == pytest.approx(expected, abs=1e-6)


def test_values_are_measured_against_the_mean_token():
    v = torch.zeros(1, 1, 4, 2)
    v[0, 0, :, 0] = torch.tensor([0.5, 1, 1, 1.5])
    assert value_norms(v)[0, 0].tolist() == pytest.approx([0.5, 1, 1, 1.5])


def test_a_head_that_follows_a_relation():
    """Of four pairs the head gets three; always looking two back gets two."""
    weights = head_that_looks_at(0, 0, 0, 0, 2, 1, 4, 3)
    pairs = torch.tensor([[0, 4, 2], [0, 5, 1], [0, 6, 4], [0, 7, 2]])
    found = syntactic(weights, pairs)
    assert found.accuracy.value.item() == pytest.approx(3 / 4)
    assert found.mass.value.item() == pytest.approx(3 / 4)
    assert found.accuracy.chance.item() == pytest.approx((1 / 5 + 1 / 6 + 1 / 7 + 1 / 8) / 4)
    assert (found.baseline, found.offset) == (0.5, 2)
    assert found.follows.tolist() == [True]
    assert syntactic(weights, pairs[[0, 2, 3]]).follows.tolist() == [False]  # no better than two back


def test_a_row_without_weights_follows_no_relation():
    """Its mask hides every key, or its sink takes all: neither looks at key 0."""
    q = torch.zeros(1, 1, 4, 3)
    hidden = Weights.of(called(q, q, mask=Causal() & ~(MaskFunction(lambda b, h, q, k: q == 2))))
    sunk = Weights.of(called(q, q, mask=Causal(), sink=torch.tensor([300.0])))
    for weights in (hidden, sunk):
        found = syntactic(weights, [(0, 2, 0)])
        assert (found.accuracy.value.item(), found.mass.value.item()) == (0, 0)


def test_relations_in_a_batch_and_past_an_offset():
    torch.manual_seed(0)
    call = drawn(queries=5, mask=Causal())
    weights, dense = Weights.of(call), Weights.of(call).dense()
    pairs = torch.tensor([[1, 25, 3], [0, 28, 28], [1, 24, 0]])
    found = syntactic(weights, pairs)
    assert torch.allclose(found.mass.value[0], dense[0, :, 4, 28], atol=1e-6)
    assert torch.allclose(found.mass.value[1], (dense[1, :, 1, 3] + dense[1, :, 0, 0]) / 2, atol=1e-6)
    tops = (dense[1, :, 1].argmax(-1) == 3).float() + (dense[1, :, 0].argmax(-1) == 0)
    assert torch.allclose(found.accuracy.value[1], tops / 2)


@pytest.mark.parametrize("pairs", [[[0, 3]], [[0, 8, 1]], [[0, 2, -1]], [[1, 2, 2]]])
def test_pairs_that_are_not_there_are_refused(pairs):
    with pytest.raises(ProblemError, match="pairs"):
        syntactic(head_that_looks_at(*[0] * 8), torch.tensor(pairs))


def test_a_head_that_retrieves_a_needle():
    """Prompt 7 6 7 8 9, needle the last 7 8; the model writes 7 8: row 4 writes the first, row 5 the second."""
    tokens = torch.tensor([[7, 6, 7, 8, 9, 7, 8]])
    needle = torch.tensor([[False, False, True, True, False, False, False]])
    for looked, score in (((2, 3), 1), ((2, 2), 0.5), ((0, 3), 0.5), ((3, 2), 0), ((4, 5), 0)):
        weights = head_that_looks_at(0, 0, 0, 0, *looked)  # rows of the last written token are not needed
        found = retrieval(weights, tokens, needle, since=5)
        assert found.value.item() == pytest.approx(score)
        assert found.chance.item() == pytest.approx((1 / 5 + 1 / 6) / 2)


def test_a_token_of_a_needle_counts_once_however_often_it_is_copied():
    """Prompt 5 7 8 6, needle the 7; the model writes 7 7 7."""
    tokens = torch.tensor([[5, 7, 8, 6, 7, 7, 7]])
    needle = torch.arange(7)[None] == 1
    found = retrieval(head_that_looks_at(0, 0, 0, 1, 1, 1), tokens, needle, since=4)
    assert found.value.item() == pytest.approx(1)
    assert found.chance.item() == pytest.approx(1 - 3 / 4 * 4 / 5 * 5 / 6)


def test_retrieval_by_steps_is_that_of_the_whole():
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 12, 5), torch.randn(2, 2, 12, 5)
    tokens = torch.randint(3, (2, 13))
    needle = torch.arange(13).expand(2, -1) < 6
    whole = Weights.of(called(q, k, mask=Causal()))
    steps = [Weights.of(called(q[:, :, t : t + 1], k[:, :, : t + 1], mask=Causal())) for t in range(7, 12)]
    expected = retrieval(whole, tokens, needle, since=8)
    found = retrieval(steps, tokens, needle, since=8)
    torch.testing.assert_close(found.value, expected.value)
    torch.testing.assert_close(found.chance, expected.chance)
    assert 0 < expected.value.max() <= 5 / 6


@pytest.mark.parametrize(
    ("tokens", "needle", "since", "message"),
    [
        (torch.zeros(1, 5).long(), torch.zeros(1, 4) > 0, 4, r"tokens is \[1, 5\] and needle \[1, 4\]"),
        (torch.zeros(1, 4).long(), torch.zeros(1, 4) > 0, 4, "expected prompt and answer"),
        (torch.zeros(1, 6).long(), torch.zeros(1, 6) > 0, 5, "a needle has no tokens"),
        (torch.zeros(1, 6).long(), torch.zeros(1, 6) == 0, 6, "no row generated a token at position 6"),
    ],
)
def test_needles_that_do_not_fit_are_refused(tokens, needle, since, message):
    with pytest.raises(ProblemError, match=message):
        retrieval(head_that_looks_at(*[0] * 5), tokens, needle, since)


def test_a_sequence_in_which_nothing_repeats_has_no_induction_score():
    weights = Weights.of(drawn(mask=Causal()))
    tokens = torch.stack([torch.arange(29), torch.arange(29) % 7])
    score = induction(weights, tokens)
    assert score.value[0].isnan().all()
    assert not score.value[1].isnan().any()
    assert torch.equal(score.mean(), score.value[1])


def test_matches_are_what_followed_earlier_occurrences():
    i, j = matches(torch.tensor([5, 5, 6, 5]))
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [(1, 1), (3, 1), (3, 2)]


def test_measures_leave_the_gradients_of_a_call_alone():
    q = torch.randn(1, 2, 5, 3, requires_grad=True)
    weights = Weights.of(called(q, q, mask=Causal()))
    pair_measures(weights, torch.zeros(1, 5).long())
    sweep_measures(Inputs(weights))
    attend(q, q, q, mask=Causal()).sum().backward()
    assert q.grad is not None
