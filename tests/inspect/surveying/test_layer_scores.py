"""Scores as plain numbers: what a survey keeps of them is what they say themselves."""

from dataclasses import replace

import pytest
import torch

from regard.inspect.measures import HeadScores
from regard.inspect.measures.catalogue import BY_KEY
from regard.inspect.surveying.layer import LayerScores


@pytest.mark.parametrize("sequences", [1, 3])
def test_numbers_are_those_of_the_score_itself(sequences):
    torch.manual_seed(0)
    values = torch.rand(sequences, 5, 97)
    counted = torch.ones_like(values, dtype=torch.bool)
    counted[:, 1] = False  # nothing to count: no score
    counted[:, 2, 5:] = False  # hardly more than a block: draws without a value among those of one sequence
    counted[:, 3, 1:] = False  # a single row: a score without an interval, of one sequence
    score, scores = HeadScores.of_rows(values, torch.full_like(values, 0.25), counted), LayerScores()
    for measure in ("sink", "evenness"):
        scores.add(BY_KEY[measure], score)
    low, high, _ = score.interval()
    low, high = low.clamp(0, 1), high.clamp(0, 1)  # a mass
    for head, scored in enumerate(scores.of["sink"]):
        expected = (score.mean()[head], score.mean_chance()[head], low[head], high[head])
        found = [float("nan") if number is None else number for number in scored]
        assert found == pytest.approx([float(number) for number in expected], nan_ok=True, abs=1e-7)
    assert scores.of["evenness"] == scores.of["sink"]
    assert torch.equal(torch.from_numpy(scores.drawn["sink"]).isnan(), score.draws().isnan())
    assert set(scores.drawn) == {"sink"}  # what names a head
    assert scores.of["sink"][1].value is None


def test_where_the_best_of_several_stands_is_kept_beside_it():
    of_rows = (torch.rand(1, 2, 7), torch.zeros(1, 2, 7), torch.ones(1, 2, 7, dtype=torch.bool))
    plain, scores = HeadScores.of_rows(*of_rows), LayerScores()
    scores.add(BY_KEY["positional"], replace(plain, at=torch.tensor([[3, 1]])))
    scores.add(BY_KEY["sink"], plain)
    assert [scored.value for scored in scores.of["positional_at"]] == [3, 1]
    assert set(scores.of) == {"positional", "positional_at", "sink"}


def test_the_interval_of_a_mass_ends_where_masses_do():
    score, scores = HeadScores(torch.tensor([[0.7], [0.99], [0.99]]), torch.zeros(3, 1)), LayerScores()
    for measure in ("induction", "effective_tokens"):
        scores.add(BY_KEY[measure], score)
    assert score.interval().high > 1 == scores.of["induction"][0].high
    assert scores.of["effective_tokens"][0].high == pytest.approx(score.interval().high.item())
