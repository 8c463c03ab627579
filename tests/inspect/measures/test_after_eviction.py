"""After an eviction a call does not tell which tokens of the text its keys are: measures by position say so."""

from dataclasses import replace

import pytest
import torch

from regard import Causal, attend
from regard.cache.evict_by_attention import TOVA
from regard.calls import after_dropped
from regard.errors import ProblemError
from regard.inspect.measures import (
    Inputs,
    alpha,
    distance_profile,
    entropy,
    induction,
    largest_column,
    local_mass,
    mean_distance,
    positional,
    previous_token,
    retrieval,
    sink,
    sink_output,
    syntactic,
    value_weighted,
)
from regard.inspect.measures.pattern import pattern_mass
from regard.inspect.measures.values import first_value
from regard.inspect.observing.observe import observe
from regard.inspect.observing.recorded import read_calls
from regard.integrate import regard_cache, use_regard
from regard.storage.stored import Rolling
from tests.inspect.small import llama

IDS = torch.arange(13)[None]


BY_POSITION = {
    "sink": sink,
    "alpha": alpha,
    "previous_token": previous_token,
    "induction": lambda w: induction(w, IDS[:, : w.shape[3]]),
    "pattern_mass": lambda w: pattern_mass(w, IDS, lambda tokens: (torch.tensor([7]), torch.tensor([0]))),
    "syntactic": lambda w: syntactic(w, [(0, 6, 0)]),
    "retrieval": lambda w: retrieval([w], IDS, IDS == 3, since=7),
    "mean_distance": lambda w: mean_distance(Inputs(w)),
    "local_mass": lambda w: local_mass(Inputs(w)),
    "distance_profile": lambda w: distance_profile(Inputs(w)),
    "positional": lambda w: positional(Inputs(w)),
    "first_value": lambda w: first_value(Inputs(w, v=torch.ones(1, 2, w.shape[3], 4))),
    "value_weighted": lambda w: value_weighted(Inputs(w, norms=torch.ones(1, 6, w.shape[3]))),
    "sink_output": lambda w: sink_output(Inputs(w, v=w.k, out=w.q, w_o=torch.ones(6, 4, 24))),
}


def observed_after(policy, layout=None, **options):
    """The weights of one step of a small model, after a prompt of 12 tokens."""
    model = use_regard(llama())
    cache = regard_cache(model, layout=layout, evict=policy)
    with torch.no_grad():
        model(IDS[:, :-1], past_key_values=cache)
        with observe(model, layers=0, **options) as calls:
            model(IDS[:, -1:], past_key_values=cache)
    return calls[0].weights


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_weights_tell_how_many_tokens_a_cache_dropped(tmp_path):
    assert observed_after(None).dropped == 0
    weights = observed_after(TOVA(6, sinks=0), to=tmp_path)
    assert weights.shape[3] + weights.dropped == 13
    assert weights.dropped == weights.only(0).heads([1]).in_float64().dropped == 6
    read = read_calls(tmp_path)[0].weights
    assert (read.dropped, read.has_gaps) == (6, True)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("name", BY_POSITION)
def test_measures_by_position_refuse_a_call_whose_cache_dropped_tokens(name):
    measure, weights = BY_POSITION[name], observed_after(TOVA(6, sinks=0))
    with pytest.raises(ProblemError, match="a cache dropped 6 tokens before this call"):
        measure(weights)
    measure(replace(weights, dropped=0))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_behind_a_window_distances_are_measured_and_positions_are_not():
    weights = observed_after(None, Rolling(6, sinks=0))
    assert (weights.dropped, weights.has_gaps, weights.shape[3]) == (7, False, 6)
    found = (weights.dense()[0, :, 0].double() * torch.arange(5, -1, -1)).sum(-1)
    torch.testing.assert_close(mean_distance(Inputs(weights)).value[0].double(), found, rtol=1e-5, atol=1e-5)
    distance_profile(Inputs(weights))
    previous_token(weights)
    with pytest.raises(ProblemError, match="a cache dropped 7 tokens"):
        sink(weights)
    with pytest.raises(ProblemError, match="a cache dropped 7 tokens"):
        mean_distance(Inputs(observed_after(None, Rolling(6, sinks=2))))


def test_other_measures_do_not_need_positions():
    q = torch.randn(1, 2, 3, 4)
    with after_dropped(5), observe() as calls:
        attend(q, q, q, mask=Causal())
    weights = calls[0].weights
    alone = replace(weights, dropped=0)
    for measure in (entropy, largest_column):
        assert torch.equal(measure(Inputs(weights)).value, measure(Inputs(alone)).value)
    assert torch.equal(weights.top(1)[1], alone.top(1)[1])
