"""The rules by which heads are named and ranked, recomputed by hand."""

import numpy as np
import pytest

from regard.inspect.surveying.kinds import Estimate, Head, keeping, kind_of, kinds_of, lift, ranked, strength

CHANCE = {"entropy": 2.0}


def scores(entropy=1.0, **given):
    values = {"sink": 0.1, "previous": 0.1, "induction": 0.1, "entropy": entropy} | given
    return {name: Estimate(value, CHANCE.get(name, 0.1)) for name, value in values.items()}


def head(layer=0, **given):
    return Head(layer, 0, 0, scores(**given))


def test_lift_is_the_way_from_chance_to_certainty():
    assert lift(Estimate(0.1, 0.1)) == 0
    assert lift(Estimate(1.0, 0.1)) == 1
    assert lift(Estimate(0.55, 0.1)) == pytest.approx(0.5)
    assert lift(Estimate(0.0, 0.5)) == -1
    assert lift(Estimate(None)) == lift(Estimate(1.0)) == lift(Estimate(1.0, 1.0)) == lift(Estimate(np.nan, 0.1)) == 0


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"sink": 0.9}, "sink"),
        ({"sink": 0.9, "previous": 0.38}, "previous token"),  # 0.38 is a lift of 0.311 over a chance of 0.1
        ({"sink": 0.9, "previous": 0.36}, "sink"),  # and 0.36 one of 0.289
        ({"sink": 0.9, "previous": 0.9, "induction": 0.4}, "induction"),
        ({"induction": 0.9, "induction_jittered": 0.4}, "induction"),
        ({"induction": 0.9, "induction_jittered": 0.3}, "mixed"),  # it counts back a fixed distance
        ({"induction": 0.1, "induction_jittered": 0.9}, "mixed"),
        ({"induction": 0.1, "best_shift": 0.6, "sink": 0.9}, "shifted induction"),
        ({"induction": 0.9, "induction_jittered": 0.9, "best_shift": 0.9}, "induction"),
        ({"sink": 0.9, "duplicate": 0.5}, "duplicate token"),
        ({"previous": 0.9, "duplicate": 0.5}, "previous token"),
        ({"positional": 0.91}, "positional"),
        ({"positional": 0.91, "sink": 0.5}, "sink"),
        ({"positional": 0.89}, "mixed"),
        ({"entropy": 1.4}, "broad"),  # exp(1.4 - 2.0) = 0.55 of what it sees
        ({"entropy": 1.2}, "mixed"),  # exp(1.2 - 2.0) = 0.45
        ({"induction": None}, "mixed"),
        ({"induction": np.nan}, "mixed"),
    ],
)
def test_a_head_is_named_after_the_first_score_that_stands_out(given, kind):
    assert kind_of(scores(**given)) == kind


def test_a_lift_of_just_the_threshold_names_a_head():
    at, below = ({"sink": Estimate(value, 0.0)} for value in (0.3, np.nextafter(0.3, 0.0)))
    assert (kind_of(at), kind_of(below)) == ("sink", "mixed")


def test_a_head_without_scores_is_mixed():
    assert kind_of({}) == kind_of({"entropy": Estimate(None)}) == "mixed"


def test_what_is_strong_and_rare_is_remarkable():
    heads = ranked([head(0, sink=0.9), head(1, sink=0.8), head(2, sink=0.7), head(3, previous=0.6), head(4)])
    assert [h.layer for h in heads] == [3, 0, 1, 2, 4]
    lone, strongest = heads[0], heads[1]
    assert lone.remarkable == pytest.approx((0.6 - 0.1) / 0.9 * (1 - 1 / 5))
    assert strongest.remarkable == pytest.approx((0.9 - 0.1) / 0.9 * (1 - 3 / 5))
    assert heads[-1].remarkable == 0


def test_the_strength_of_a_head_is_that_of_what_names_it():
    assert strength(Head(0, 0, 0, scores(sink=1.0, previous=0.55), kind="previous token")) == pytest.approx(0.5)
    assert strength(Head(0, 0, 0, scores(sink=0.19), kind="mixed")) == pytest.approx(0.1)
    both = scores(induction=1.0, induction_jittered=0.55)
    assert strength(Head(0, 0, 0, both, kind="induction")) == pytest.approx(0.5)
    assert strength(Head(0, 0, 0, {}, kind="mixed")) == 0
    assert strength(Head(0, 0, 0, scores(sink=0.0, previous=0.0, induction=0.0), kind="broad")) == 0


def test_many_heads_are_named_at_once_as_each_by_itself():
    rng = np.random.default_rng(3)
    names = ("sink", "previous", "induction", "induction_jittered", "best_shift", "duplicate", "positional", "entropy")
    values = {name: rng.random(40) ** 4 * (2 if name == "entropy" else 1.1) for name in names}
    chances = {name: np.full(40, CHANCE.get(name, 0.1)) for name in names}
    kinds = kinds_of(values, chances)
    one_by_one = [kind_of({n: Estimate(values[n][i], chances[n][i]) for n in names}) for i in range(40)]
    assert kinds.tolist() == one_by_one
    assert len(set(one_by_one)) > 4


def test_confidence_is_the_share_of_draws_in_which_a_kind_is_kept():
    chances = {"sink": np.array([0.1, 0.1]), "previous": np.array([0.1, 0.1])}
    drawn = {"sink": np.array([[0.9, 0.2], [0.9, 0.5], [0.1, 0.2], [0.9, 0.2]]), "previous": np.full((4, 2), 0.1)}
    assert keeping(np.array(["sink", "mixed"]), drawn, chances).tolist() == [0.75, 0.75]
