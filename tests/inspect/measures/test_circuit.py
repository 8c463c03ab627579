"""The induction circuit of two layers, built by hand: found as it is and shifted, and no head that counts."""

import pytest
import torch

from regard import Causal, attend
from regard.calls import observe_calls
from regard.inspect.measures import best, induction, induction_scan, offset_scan, previous_token
from regard.inspect.measures.stimulus import Jittered, Repeats, Walks
from regard.inspect.weights.lazy import Weights
from tests.inspect.measures.formulas import SHARP, looking

VOCABULARY = 60
STIMULI = {"repeats": Repeats(), "jittered": Jittered(), "walks": Walks()}


@pytest.fixture(params=STIMULI)
def tokens(request):
    return STIMULI[request.param].draw(list(range(1, VOCABULARY)), 0, sequences=3)


def circuit(tokens, back=1):
    """The weights of both layers of a model that predicts by induction.

    Layer 0 looks `back` tokens back and writes down which token stood there; layer 1 asks for its own token among what
    was written.
    """
    n, calls = tokens.shape[1], []
    one_hot = torch.nn.functional.one_hot(tokens, VOCABULARY).double()[:, None]  # [sequences, 1, tokens, vocabulary]
    q, k = looking((torch.arange(n) - back).clamp(min=0)[None])
    written = one_hot.clone()
    written[:, :, 0] = 0  # the token that begins every sequence is not written down: who looks at it, looks nowhere
    with observe_calls(calls.append):
        stood = attend(
            q.expand(len(tokens), -1, -1, -1), k.expand(len(tokens), -1, -1, -1), written, mask=Causal(), scale=1.0
        )
        stood[:, :, :back] = 0
        attend(SHARP * one_hot, stood, stood, mask=Causal(), scale=1.0)
    return [Weights.of(call) for call in calls]


def counting(tokens, back):
    """The weights of a head that always looks `back` tokens back."""
    n, calls = tokens.shape[1], []
    q, k = (t.expand(len(tokens), -1, -1, -1) for t in looking((torch.arange(n) - back).clamp(min=0)[None]))
    with observe_calls(calls.append):
        attend(q, k, k, mask=Causal(), scale=1.0)
    return Weights.of(calls[0])


def test_the_circuit_scores_one_in_both_layers(tokens):
    first, second = circuit(tokens)
    assert previous_token(first).value.tolist() == [[pytest.approx(1)]] * 3
    assert induction(second, tokens).value.tolist() == [[pytest.approx(1)]] * 3
    assert induction(first, tokens).mean().item() < 0.5
    assert previous_token(second).mean().item() < 0.2


@pytest.mark.parametrize("back", [2, 4])
@pytest.mark.parametrize("stimulus", ["repeats", "jittered"])
def test_a_shifted_circuit_scores_nothing_and_the_scan_finds_it(back, stimulus):
    tokens = STIMULI[stimulus].draw(list(range(1, VOCABULARY)), 0, sequences=3)
    first, second = circuit(tokens, back)
    assert previous_token(first).mean().item() == pytest.approx(1 / (tokens.shape[1] - 1))  # row 1, which has no choice
    assert induction(second, tokens).mean().item() < 0.05
    offset, shift = best(offset_scan(first)), best(induction_scan(second, tokens))
    assert offset.at.unique().item() == shift.at.unique().item() == back
    assert offset.mean().item() > 0.95
    assert shift.value.tolist() == [[pytest.approx(1)]] * 3


def test_a_head_that_counts_the_period_scores_on_repeats_and_not_on_jittered_ones():
    """25 tokens a period: the token after the last occurrence is 24 back."""
    fixed, jittered = (
        STIMULI[name].draw(list(range(1, VOCABULARY)), 0, sequences=8) for name in ("repeats", "jittered")
    )
    assert induction(counting(fixed, 24), fixed).mean().item() == pytest.approx(1)
    impostors = [induction(counting(jittered, back), jittered) for back in range(14, 35)]
    assert max(score.mean().item() for score in impostors) < 0.3
    assert sum(score.mean().item() for score in impostors) / 21 < 0.1
    assert induction(circuit(jittered)[1], jittered).mean().item() == pytest.approx(1)
