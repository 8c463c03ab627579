"""What dense weights showed of SmolLM2-135M before there was regard is found again: its sinks, its induction heads."""

import numpy as np
import pytest

from regard.inspect import MEASURES, Report, measure, survey
from regard.inspect.surveying.closeup import close_up_rows
from regard.inspect.surveying.kinds import NAMERS, Estimate, kind_of
from regard.integrate.checkpoint import load

pytestmark = [pytest.mark.model, pytest.mark.exhaustive]  # small models are in the default run

MEANS = [m.key for m in MEASURES if not m.on_demand and "circuit" not in m.needs and m.key != "sink_value"]

KNOWN = {(18, 6), (17, 3), (17, 4), (18, 7)}
TEXT = """Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and
nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.
It is a way I have of driving off the spleen and regulating the circulation."""


@pytest.fixture(scope="module")
def report() -> Report:
    model, tokenizer, _ = load(None)
    return survey(model, tokenizer, TEXT, new_tokens=4, heads=[(18, 6), (23, 0)])


def scores(report: Report, measure: str) -> dict[tuple[int, int], float]:
    return {(head.layer, head.head): head.value(measure) or 0.0 for head in report.heads}


def test_the_model_is_the_same_with_the_attention_of_regard(report: Report):
    assert report.run.eager_difference is not None
    assert report.run.eager_difference < 2e-4  # of logits up to about 20, in float32, after 30 layers


@pytest.mark.parametrize("measure", ["induction", "induction_jittered", "best_shift"])
def test_the_known_induction_heads_lead_on_repeats_fixed_and_jittered(report: Report, measure: str):
    by_induction = scores(report, measure)
    ordered = sorted(by_induction, key=by_induction.__getitem__, reverse=True)
    assert ordered[0] == (18, 6)
    assert KNOWN - {(18, 7)} <= set(ordered[:5])
    assert set(ordered[:9]) >= KNOWN
    assert by_induction[18, 6] > 0.8
    assert min(by_induction[place] for place in KNOWN) > 0.5


def test_the_known_induction_heads_are_called_so_and_surely(report: Report):
    known = [head for head in report.heads if (head.layer, head.head) in KNOWN]
    assert {head.kind for head in known} == {"induction"}
    assert min(head.sure or 0.0 for head in known) > 0.95
    assert all(head.value("best_shift_at") == 1 for head in known)
    assert report.heads[0].kind == "induction"
    for head in known:
        value, chance, low, _ = head.score("induction")
        assert value is not None
        assert chance is not None
        assert low is not None
        assert chance < 0.05 < low < value


def test_late_layers_put_most_of_their_mass_on_the_first_token(report: Report):
    sinks = scores(report, "sink")
    by_layer = [np.mean([sinks[layer, head] for head in range(9)]) for layer in range(30)]
    assert int(np.argmax(by_layer)) in {23, 24}
    assert by_layer[23] > 0.7
    assert sum(mass > 0.4 for mass in by_layer[13:]) >= 14
    assert max(by_layer[:2]) < 0.1


def test_every_score_is_there_with_its_chance_and_every_mean_with_its_interval(report: Report):
    for head in report.heads:
        for key in MEANS:
            value, chance, low, high = head.score(key)
            assert value is not None, key
            assert chance is not None, key
            if key != "column":  # a maximum, and no mean over rows
                assert low is not None, key
                assert high is not None, key
                assert low <= value + 1e-6, key
                assert high >= value - 1e-6, key


def test_close_ups_show_the_weights_that_the_pictures_show(report: Report):
    assert [(close.layer, close.head) for close in report.close_ups] == [(18, 6), (23, 0)]
    pictures = {(picture.layer, picture.head): picture for picture in report.pictures}
    for close in report.close_ups:
        shown = close_up_rows(close, 0, len(close.q))
        picture = pictures[close.layer, close.head]
        assert picture.pooled == 1
        assert np.abs(np.sqrt(shown) - picture.weights / 255).max() < 0.5 / 255 + 0.02
        assert np.abs(shown - (picture.weights / 255) ** 2).max() < 0.005  # a byte's 0.004


NEWS = """LISBON - The city council voted on Thursday to close eleven streets of the old town to cars from June. Shop
owners had protested against the plan for two years. The mayor said that deliveries would be allowed until nine in the
morning and that residents would keep their permits. A spokesman for the taxi drivers called the decision a mistake.
Traffic in the quarter has doubled since 2011, according to a study of the university."""


@pytest.mark.exhaustive
def test_heads_that_are_sure_of_their_kind_have_it_on_a_text_that_nobody_read(report: Report):
    """Of heads that only kept their kind in draws from one text, one in eight had another."""
    model, tokenizer, _ = load()
    on_news = [m.key for m in MEASURES if m.key in NAMERS and m.on == "text"]
    news = measure(model, NEWS, on_news, tokenizer=tokenizer)
    there: dict[str, str] = {}
    for head in report.heads:  # repeated random tokens are the same for every text
        place = head.layer, head.head
        own = {key: Estimate(float(of.value[place]), float(of.chance[place])) for key, of in news.items()}
        there[head.name] = kind_of({**head.scores, **own})
    sure = [head for head in report.heads if (head.sure or 0) >= 0.99]
    assert len(sure) > 90
    assert sum(there[head.name] == head.kind for head in sure) / len(sure) > 0.97
    kept = sum(there[head.name] == head.kind for head in report.heads) / len(report.heads)
    assert sum(head.sure or 0 for head in report.heads) / len(report.heads) < kept + 0.05
