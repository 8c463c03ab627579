"""The rules of a report, recomputed by hand, and what a report turns into."""

import json
from typing import Any

import numpy as np
import pytest

from regard.inspect.report import DEFINITIONS, Head, Picture, Report, Run, kind_of, lift, ranked


def head(layer=0, entropy=1.0, **scores):
    given: dict[str, Any] = {"sink": 0.1, "previous": 0.1, "induction": 0.1} | scores
    given |= {"sink_chance": 0.1, "previous_chance": 0.1, "entropy_chance": 2.0}
    given.setdefault("induction_chance", 0.1)
    return Head(layer=layer, head=0, kv_head=0, entropy=entropy, effective_tokens=2.0, **given)


def test_lift_is_the_way_from_chance_to_certainty():
    assert lift(0.1, 0.1) == 0
    assert lift(1.0, 0.1) == 1
    assert lift(0.55, 0.1) == pytest.approx(0.5)
    assert lift(0.0, 0.5) == -1
    assert lift(None, None) == lift(1.0, 1.0) == 0


@pytest.mark.parametrize(
    ("scores", "kind"),
    [
        ({"sink": 0.9}, "sink"),
        ({"sink": 0.9, "previous": 0.38}, "previous token"),  # 0.38 is a lift of 0.311 over a chance of 0.1
        ({"sink": 0.9, "previous": 0.36}, "sink"),  # and 0.36 one of 0.289
        ({"sink": 0.9, "previous": 0.9, "induction": 0.4}, "induction"),
        ({"entropy": 1.4}, "broad"),  # exp(1.4 - 2.0) = 0.55 of what it sees
        ({"entropy": 1.2}, "mixed"),  # exp(1.2 - 2.0) = 0.45
        ({"induction": None, "induction_chance": None}, "mixed"),
    ],
)
def test_a_head_is_named_after_the_first_score_that_stands_out(scores, kind):
    assert kind_of(head(**scores)) == kind


def test_what_is_strong_and_rare_is_remarkable():
    sinks = [head(layer, sink=1.0) for layer in range(7)]
    order = ranked([*sinks, head(7, previous=0.73), head(8), head(9, entropy=1.9)])
    assert [(h.layer, h.kind) for h in order[:2]] == [(7, "previous token"), (0, "sink")]
    assert order[0].remarkable == pytest.approx(0.7 * 0.9)  # lift 0.63 / 0.9, one head of ten
    assert order[1].remarkable == pytest.approx(1.0 * 0.3)  # seven of ten
    assert order[-1].remarkable == 0


def report():
    run = Run("m", 1, 1, 1, 2, 10, ("sdpa",), 1.0, None, 0.1, 3, 1e-6, "cpu", {"torch": "2"}, {"prompt": 1.0})
    picture = Picture(0, 0, 2, 1, np.zeros((2, 2), np.uint8))
    return Report(run, "a b", ("a", " b"), 2, "", ranked([head()]), (picture,))


def test_a_report_is_json_without_its_pictures():
    told = json.loads(json.dumps(report().to_dict()))
    assert told["run"]["backends"] == ["sdpa"]
    assert told["heads"][0]["sink_chance"] == 0.1
    assert set(told["definitions"]) == set(DEFINITIONS)
    assert "pictures" not in told


def test_every_score_of_a_head_is_defined():
    scores = {name.removesuffix("_chance") for name in Head.__dataclass_fields__} - {"layer", "head", "kv_head"}
    assert scores == set(DEFINITIONS)
    assert all(definition.formula and definition.source and definition.chance for definition in DEFINITIONS.values())
