"""Sinks of a whole model: shares of heads by both thresholds, with where they are and what they carry."""

import json
from dataclasses import replace

import pytest

from regard.inspect.measures import alpha, value_norms
from regard.inspect.observing.observe import observe
from regard.inspect.surveying.kinds import Estimate, Head
from regard.inspect.surveying.sinks import sink_shares, spans
from regard.inspect.surveying.survey import survey
from regard.integrate.transformers import use_regard
from tests.inspect.reports import report
from tests.inspect.small import TEXT, llama, words


def head(layer, number, alpha, low=None, high=None, value=None):
    return Head(layer, number, 0, {"alpha": Estimate(alpha, 0.1, low, high), "sink_value": Estimate(value, 1.0)})


MADE = [
    head(0, 0, 0.31, 0.2, 0.85, 0.5),
    head(0, 1, 0.3, 0.1, 0.4, 9.0),
    head(1, 0, 0.9, 0.85, 0.95, 0.1),
    head(2, 0, 0.05, 0.0, 0.1, 2.0),
]


def test_heads_above_a_threshold_are_counted_and_those_at_it_are_not():
    lower, upper = sink_shares(MADE)
    assert (lower.threshold, lower.share, upper.threshold, upper.share) == (0.3, 0.5, 0.8, 0.25)
    assert lower.layers == {0: 0.5, 1: 1.0, 2: 0.0}
    assert (lower.most, upper.most) == ((0, 1), (1,))


def test_a_share_has_what_it_would_be_at_either_end_of_the_intervals():
    lower, upper = sink_shares(MADE)
    assert (lower.low, lower.high) == (0.25, 0.75)
    assert (upper.low, upper.high) == (0.25, 0.5)
    [unknown, _] = sink_shares([*MADE, head(3, 0, 0.9)])
    assert unknown.low is unknown.high is None


def test_values_are_those_of_the_heads_with_a_sink():
    lower, upper = sink_shares(MADE)
    assert lower.value == pytest.approx(0.3)
    assert upper.value == 0.1
    assert [share.value for share in sink_shares([head(0, 0, 0.1, value=1.0)])] == [None, None]
    assert [share.value for share in sink_shares([head(0, 0, 0.9)])] == [None, None]


def test_without_alpha_there_are_no_shares():
    assert sink_shares([Head(0, 0, 0, {"sink": Estimate(0.9)})]) == ()
    assert report().sink_shares != ()
    assert replace(report(), heads=()).sink_shares == ()


def test_layers_are_printed_as_spans():
    assert [spans(layers) for layers in ((), (4,), (0, 1), (0, 2, 3, 4, 9))] == ["", "4", "0-1", "0, 2-4, 9"]


def test_json_has_them_with_their_layers_and_their_definition():
    output = json.loads(json.dumps(report().to_dict()))
    assert [(share["threshold"], share["share"]) for share in output["sinks"]] == [
        (0.3, 0.25),
        (0.8, pytest.approx(1 / 6)),
    ]
    assert output["sinks"][0]["layers"] == {"0": 0.25, "1": 0.25, "2": 0.25}
    assert output["sinks"][0]["most"] == []
    assert "A[i,0]" in output["definitions"]["sink_shares"]["formula"]


def test_a_survey_has_the_shares_and_the_norms_that_the_measures_have():
    model, tokenizer = llama(), words()
    made = survey(model, tokenizer, TEXT, new_tokens=0, compare_eager=False)
    use_regard(model)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with observe(model, lambda look: (alpha(look.weights), value_norms(look.call.v))) as seen:
        model(ids)
    shares = [(layer.value[0].value > 0.3).double().mean() for layer in seen]
    assert made.sink_shares[0].share == pytest.approx(float(sum(shares)) / 3)
    for of in made.heads:
        assert of.value("sink_value") == pytest.approx(float(seen[of.layer].value[1][0, of.kv_head, 0]))
        assert of.value("alpha") == pytest.approx(float(seen[of.layer].value[0].value[0, of.head]))
        assert of.score("sink_value").chance == 1
