"""The arguments of linear attention: which are refused, and in which words."""

from typing import Any, cast

import pytest
import torch

from regard import ProblemError
from regard.extend import spec
from regard.linear import Decay, Delta, Elu1, Favor, Gated, LinearState, Relu, Rule, Taylor, linear_attend, retnet_decay
from tests.linear.calls import numbers

X = torch.randn(1, 2, 7, 4)

FAVOR = Favor(4, features=4)


def _state(**words: Any) -> LinearState:
    return linear_attend(X, X, X, **words).state


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another k": ({"k": torch.randn(1, 2, 7, 5)}, "5"),
    "heads that do not divide": ({"q": torch.randn(1, 3, 7, 4)}, "q has 3 heads and k has 2"),
    "no word": ({"features": "elu"}, "features is 'elu': expected a Feature or None"),
    "a class": ({"features": Elu1}, "expected a Feature or None"),
    "a form": ({"form": "fast"}, "form='fast': expected one of chunked, parallel, recurrent"),
    "a chunk": ({"chunk": 0}, "chunk is 0: expected at least 1 tokens"),
    "a flag as a chunk": ({"chunk": True}, "chunk is True: expected a whole number of tokens"),
    "a scale for elu": ({"scale": 0.5}, "its weights are no function of q . k"),
    "a scale below 0": ({"scale": -1.0, "features": None}, "expected a finite number above 0"),
    "favor of another size": ({"features": Favor(5)}, "maps vectors of 5 elements, and these have 4"),
    "favor without a normaliser": ({"features": Favor(4), "normalise": False}, "without normalisation"),
    "favor gated": ({"features": Favor(4, features=4), "rule": Gated(torch.zeros(1, 2, 7, 4))}, "other features"),
    "favor with delta": (
        {"features": FAVOR, "rule": Delta(torch.ones(1, 2, 7))},
        "expected Decay or no rule, or other",
    ),
    "dot products normalised": ({"features": None, "normalise": True}, "may be negative"),
    "delta normalised": ({"rule": Delta(torch.ones(1, 2, 7)), "normalise": True}, "Delta replaces the value of a key"),
    "too many decays": ({"rule": Decay(torch.ones(3))}, "has 3 decays, and k has 2 heads"),
    "gates of another size": ({"rule": Gated(torch.zeros(1, 2, 7, 3))}, "[1, 2, 7, 4]"),
    "betas of another size": ({"rule": Delta(torch.ones(1, 2, 6))}, "[1, 2, 7]"),
    "a state of another size": ({"state": _state(features=Taylor())}, "this call needs [1, 2, 4, 4]"),
    "a state without z": ({"state": _state(features=None)}, "without z, without log_scale, and this call makes one"),
    "a tensor as a state": ({"state": X}, "expected a LinearState"),
    "a state of a list": ({"state": LinearState(cast(Any, [1.0]))}, "S of the state is list: expected floats [batch,"),
    "a z of another size": (
        {"state": LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 1, 4))},
        "z of the state is [1, 1, 4] on cpu, and S is [1, 2, 4, 4] on cpu: expected [1, 2, 4]",
    ),
    "a z elsewhere": (
        {"state": LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, device="meta"))},
        "z of the state is [1, 2, 4] on meta, and S",
    ),
    "a log_scale for one head": (
        {"features": FAVOR, "state": LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4), torch.zeros(1, 1))},
        "log_scale of the state is [1, 1] on cpu, and S is [1, 2, 4, 4] on cpu: expected [1, 2]",
    ),
    "a log_scale of ints": (
        {"state": LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64))},
        "log_scale of the state is torch.int64 [1, 2]: expected floats [batch, kv_heads]",
    ),
    "a text to normalise": ({"normalise": "no"}, "normalise is 'no': expected True, False or None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_with_its_sizes(name: str):
    given, message = REFUSED[name]
    call = {"q": X, "k": X, "v": X} | given
    with pytest.raises(ProblemError) as caught:
        linear_attend(**call)
    assert message in str(caught.value)


WORDS = {
    "gamma 0": (lambda: Decay(0.0), "0 < gamma <= 1"),
    "gamma above 1": (lambda: Decay(torch.tensor([0.5, 1.5])), "0 < gamma <= 1"),
    "gammas for batch rows": (lambda: Decay(torch.ones(2, 3)), "[kv_heads]"),
    "gates above 0": (lambda: Gated(torch.full((1, 1, 2, 3), 0.5)), "values up to 0.5: expected logarithms"),
    "a gate for all": (lambda: Gated(-0.5), "expected a tensor"),
    "decays above 0": (lambda: Delta(torch.ones(1, 1, 2), torch.ones(1, 1, 2)), "expected logarithms, at most 0"),
    "betas below 0": (lambda: Delta(torch.full((1, 1, 2), -5.0)), "values down to -5: expected fractions from 0 to 1"),
    "decays of another size": (lambda: Delta(torch.ones(1, 1, 2), -torch.ones(1, 1, 3)), "expected the same"),
    "no heads": (lambda: retnet_decay(0), "at least 1"),
    "half a head": (lambda: retnet_decay(cast(int, 1.5)), "retnet_decay(heads) is 1.5: expected a whole number"),
    "an array as a form": (lambda: _state(form=torch.zeros(2).numpy()), "expected one of"),
    "states of rules": (
        lambda: _state(rule=Decay(0.5)) | _state(rule=Decay(0.5)),
        "do not merge: with a rule (Decay, Gated, Delta)",
    ),
    "states of other words": (lambda: _state() | _state(features=None), "states merge if they are of one kind"),
    "states with another z": (
        lambda: (
            LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4))
            | LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 1))
        ),
        "z of the state is [1, 2, 1] on cpu",
    ),
    "states on two devices": (
        lambda: LinearState(torch.zeros(1, 2, 4, 4)) | LinearState(torch.zeros(1, 2, 4, 4, device="meta")),
        "the states are on cpu and meta",
    ),
    "no state": (lambda: _state() | cast(Any, X), "merges with a LinearState"),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_that_make_no_sense_are_refused(name: str):
    make, message = WORDS[name]
    with pytest.raises(ProblemError) as caught:
        make()
    assert message in str(caught.value)


def test_features_causal_and_state_may_be_given_in_this_order():
    n = numbers("elu", tokens=11)
    state = linear_attend(n.q, n.k, n.v).state
    found = linear_attend(n.q, n.k, n.v, Elu1(), True, state)
    assert torch.equal(found.out, linear_attend(n.q, n.k, n.v, features=Elu1(), state=state).out)


def test_under_a_rule_weights_are_plain_dot_products_unless_features_are_named():
    n = numbers("elu", tokens=11)
    for rule in (Decay(0.9), Delta(n.beta)):
        plain = linear_attend(n.q, n.k, n.v, features=None, rule=rule)
        assert torch.equal(linear_attend(n.q, n.k, n.v, rule=rule).out, plain.out)
    assert torch.equal(linear_attend(n.q, n.k, n.v).out, linear_attend(n.q, n.k, n.v, features=Elu1()).out)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"features": Elu1()}, {"features": Relu()}),
        ({"features": Favor(5, features=8)}, {"features": Favor(5, features=8).redraw(1)}),
        ({"features": Favor(5, features=8)}, {"features": Favor(5, features=8), "scale": 0.1}),
        ({"features": None}, {"rule": Decay(0.5)}),
    ],
)
def test_a_state_of_other_words_is_refused(one: dict[str, Any], other: dict[str, Any]):
    q = torch.randn(1, 2, 7, 5)
    state, wrong = linear_attend(q, q, q, **one).state, linear_attend(q, q, q, **other).state
    with pytest.raises(ProblemError, match="features and rule must be equal"):
        linear_attend(q, q, q, **other, state=state)
    if wrong.adds:
        with pytest.raises(ProblemError, match="features and rule must be equal"):
            _ = state | wrong
    by_hand = LinearState(state.S, state.z, state.log_scale)
    assert linear_attend(q, q, q, **other, state=by_hand).out.shape == q.shape


def test_a_rule_of_a_user_is_refused():
    @spec
    class Fading(Rule):
        by: float

    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ProblemError, match=r"rule is Fading\(by=0.5\): expected Decay, Gated, Delta, or None"):
        linear_attend(q, q, q, rule=Fading(0.5))
