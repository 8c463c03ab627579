"""Calls whose batch rows start at different positions: the measures of each row are those of the row alone."""

import pytest
import torch

from regard import Alibi, Causal, Prefix, Window, attend
from regard.calls import Call, observe_calls
from regard.errors import ProblemError
from regard.inspect.measures import HeadScores, Inputs, distance_profile, previous_token, retrieval, syntactic
from regard.inspect.weights.lazy import Weights
from regard.storage.stored import StoredTensor
from tests.inspect.dense import called
from tests.inspect.measures.formulas import equal, pair_measures, sweep_measures

OFFSETS, QUERIES, KEYS = (11, 4, 0), 7, 19
TOKENS = torch.arange(len(OFFSETS) * KEYS).view(-1, KEYS) % 5

CALLS = {
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(5)},
    "alibi": {"mask": Causal(), "bias": Alibi(6)},
    "a bias alone": {"bias": Alibi(6)},
    "some see ahead": {"mask": Causal() | Prefix(9)},
}


@pytest.fixture(params=CALLS)
def weights(request):
    """(those of the call, those of its rows alone)."""
    torch.manual_seed(5)
    q, k = torch.randn(len(OFFSETS), 6, QUERIES, 7), torch.randn(len(OFFSETS), 3, KEYS, 7)
    words = CALLS[request.param]
    alone = [called(q[b : b + 1], k[b : b + 1], offset=at, **words) for b, at in enumerate(OFFSETS)]
    return Weights.of(called(q, k, offset=torch.tensor(OFFSETS), **words)), [Weights.of(one) for one in alone]


def measured(weights: Weights, tokens: torch.Tensor) -> dict[str, HeadScores]:
    """All measures that need no model and do not choose one pattern for the whole batch."""
    scores = pair_measures(weights, tokens) | sweep_measures(Inputs(weights, rarity=(tokens + 1).float()))
    return {name: score for name, score in scores.items() if score.at is None or name in ("positional", "column")}


def test_positions_are_those_of_each_row(weights):
    of_call, alone = weights
    expected = torch.tensor(OFFSETS)[:, None, None] + torch.arange(QUERIES)
    assert torch.equal(of_call.positions, expected)
    for b, one in enumerate(alone):
        assert torch.equal(of_call.only(b).heads([1]).positions, one.positions)


def test_each_row_scores_as_alone(weights):
    of_call, alone = weights
    together = measured(of_call, TOKENS)
    assert {"sink", "previous", "induction", "positional", "local_mass"} <= set(together)
    for b, one in enumerate(alone):
        scores = measured(one, TOKENS[b : b + 1])
        for name in set(scores) & set(together):  # a row alone may see nothing ahead
            equal(together[name].only(b).value, scores[name].value, 1e-5)
            chance = together[name].chance
            equal(chance[b % len(chance)], scores[name].chance[0], 1e-5)


def test_profiles_have_distances_of_each_row(weights):
    of_call, alone = weights
    together = distance_profile(Inputs(of_call))
    for b, one in enumerate(alone):
        profile = distance_profile(Inputs(one))
        bins = len(profile.edges)
        equal(together.value[b : b + 1, :, :bins], profile.value)
        equal(together.chance[b : b + 1, :, :bins].expand_as(profile.value), profile.chance.expand_as(profile.value))
        assert not together.value[b, :, bins:].any()


def test_pairs_are_at_the_positions_of_their_row(weights):
    of_call, alone = weights
    pairs = torch.tensor([[b, first + i, i] for b, first in enumerate(OFFSETS) for i in (1, 4)])
    found = syntactic(of_call, pairs)
    for b, one in enumerate(alone):
        own = pairs[pairs[:, 0] == b]
        equal(found.mass.value[b : b + 1], syntactic(one, own - torch.tensor([b, 0, 0])).mass.value)
    with pytest.raises(ProblemError, match="queries at positions 0 to 17, each sequence from its own"):
        syntactic(of_call, torch.tensor([[2, 11, 0]]))  # row 2 ends at position 6


def test_a_needle_is_copied_at_the_positions_of_each_row(weights):
    of_call, alone = weights
    needle = torch.zeros_like(TOKENS, dtype=torch.bool)
    needle[:, :4] = True
    found = retrieval(of_call, TOKENS, needle, since=2)
    for b, one in enumerate(alone):
        own = retrieval(one, TOKENS[b : b + 1], needle[b : b + 1], since=2)
        equal(found.value[b : b + 1], own.value)
        equal(found.chance[b : b + 1], own.chance)
    with pytest.raises(ProblemError, match="no row generated a token at position 12 or later in sequence 1"):
        retrieval(of_call, TOKENS, needle, since=12)


def test_rows_that_start_alike_are_one_call():
    q, k = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 13, 7)
    by_row, whole = (Weights.of(called(q, k, mask=Causal(), offset=at)) for at in (torch.tensor([6, 6]), 6))
    assert by_row.first_position == 6
    assert torch.equal(previous_token(by_row).value, previous_token(whole).value)


def test_rows_of_stored_lengths_end_at_their_last_key():
    q, k, v = (torch.randn(2, 3, tokens, 7) for tokens in (4, 13, 13))
    lengths = torch.tensor([13, 6])
    keys, values = (StoredTensor(StoredTensor.of(t).parts, (2, 3, 13, 7), t.dtype, lengths) for t in (k, v))
    calls: list[Call] = []
    with observe_calls(calls.append):
        attend(q, keys, values, mask=Causal())
        attend(q[1:], k[1:, :, :6], v[1:, :, :6], mask=Causal())
    together, alone = (Weights.of(call) for call in calls)
    assert together.first_positions == (9, 2)
    equal(previous_token(together).value[1:], previous_token(alone).value)


def test_several_starts_are_no_single_one(weights):
    with pytest.raises(ProblemError, match="start at different positions, 0 to 11: read one sequence at a time"):
        _ = weights[0].first_position
