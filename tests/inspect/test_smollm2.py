"""What dense weights showed of SmolLM2-135M before there was regard is found again: its sinks, its induction heads."""

import pytest

from regard.inspect import Report, survey
from regard.integrate.checkpoint import load

pytestmark = pytest.mark.model

TEXT = """Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and
nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.
It is a way I have of driving off the spleen and regulating the circulation."""


@pytest.fixture(scope="module")
def report() -> Report:
    model, tokenizer, _ = load(None)
    return survey(model, tokenizer, TEXT, new_tokens=4)


def test_the_model_is_the_same_with_the_attention_of_regard(report: Report):
    assert report.run.eager_difference is not None
    assert report.run.eager_difference < 2e-4  # of logits up to about 20, in float32, after 30 layers


def test_the_known_induction_heads_lead(report: Report):
    by_induction = sorted(report.heads, key=lambda h: -(h.induction or 0))
    assert (by_induction[0].layer, by_induction[0].head) == (18, 6)
    assert {(18, 6), (17, 3), (17, 4)} <= {(h.layer, h.head) for h in by_induction[:5]}
    scores = {(h.layer, h.head): h.induction or 0 for h in report.heads}
    assert scores[18, 6] > 0.85
    assert min(scores[17, 3], scores[17, 4], scores[18, 7]) > 0.5
    assert report.heads[0].kind == "induction"


def test_late_layers_put_most_of_their_mass_on_the_first_token(report: Report):
    by_layer = [sum(h.sink for h in report.heads if h.layer == layer) / 9 for layer in range(30)]
    assert max(range(30), key=by_layer.__getitem__) in {23, 24}
    assert by_layer[23] > 0.7
    assert sum(mass > 0.4 for mass in by_layer[13:]) >= 14
    assert max(by_layer[:2]) < 0.1
