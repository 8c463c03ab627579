"""Scores and their intervals: what is drawn anew, and what an interval is worth."""

import pytest
import torch

from regard.errors import ProblemError
from regard.inspect.measures.score import Score


def of(values, counted=None):
    return Score.of_rows(
        values, torch.zeros_like(values), torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    )


def test_a_score_is_the_mean_over_counted_rows():
    values = torch.tensor([[[1.0, 2.0, 6.0, torch.nan], [3.0, 5.0, 7.0, 9.0]]])
    counted = torch.tensor([[[True, True, True, False], [False, True, True, False]]])
    score = Score.of_rows(values, values / 2, counted)
    assert score.value.tolist() == [[3.0, 6.0]]
    assert score.chance.tolist() == [[1.5, 3.0]]


def test_nothing_counted_is_no_score():
    score = of(torch.ones(2, 3, 5), torch.zeros(2, 1, 5, dtype=torch.bool))
    assert score.value.isnan().all()
    assert score.chance.isnan().all()
    assert score.interval().low.isnan().all()


def test_blocks_of_rows_make_up_the_score():
    torch.manual_seed(0)
    values, counted = torch.rand(1, 3, 1009), torch.rand(1, 3, 1009) < 0.7
    score = of(values, counted)
    assert score.sums.shape == (1, 3, 32)
    torch.testing.assert_close((score.sums.sum(-1) / score.counts.sum(-1)).float(), score.value)
    assert score.counts.sum().item() == counted.sum().item()


def test_with_one_sequence_blocks_are_drawn_and_with_more_sequences():
    assert of(torch.rand(1, 2, 99)).interval().over == "blocks of rows"
    assert of(torch.rand(2, 2, 99)).interval().over == "sequences"
    assert of(torch.rand(1, 2, 1)).interval().over == "nothing"
    assert Score(torch.rand(1, 2), torch.zeros(1, 2)).interval().over == "nothing"
    assert Score(torch.rand(5, 2), torch.zeros(5, 2)).interval().over == "sequences"


def test_an_interval_over_sequences_is_that_of_their_mean():
    """Of two sequences a draw has the first twice (1/4), both (1/2) or the second twice (1/4)."""
    score = Score(torch.tensor([[0.0], [1.0]]), torch.zeros(2, 1))
    draws = score.draws(4000)[:, 0]
    shares = [(draws == value).double().mean().item() for value in (0, 0.5, 1)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert score.interval(0.4).low.item() == 0.5
    assert [score.interval(0.95).low.item(), score.interval(0.95).high.item()] == [0, 1]


def test_sequences_without_a_score_are_left_out():
    score = Score(torch.tensor([[0.2, 0.5], [0.4, torch.nan], [torch.nan, torch.nan]]), torch.zeros(3, 2))
    torch.testing.assert_close(score.mean(), torch.tensor([0.3, 0.5]))
    low, high, _ = score.interval()
    assert 0.2 <= low[0] <= 0.3 <= high[0] <= 0.4
    assert low[1].isnan()  # a single sequence tells nothing of others
    assert score.mean_chance().tolist() == [0, 0]


@pytest.mark.parametrize("rows", [200, 2000])
def test_intervals_hold_the_truth_about_as_often_as_they_say(rows):
    """Independent rows, 300 heads that all score 1/2: 95 % of the intervals hold it, within what chance allows."""
    torch.manual_seed(1)
    low, high, _ = of(torch.rand(1, 300, rows)).interval()
    held = ((low < 0.5) & (high > 0.5)).double().mean().item()
    assert 0.88 < held < 0.99
    wide = (high - low).mean().item()
    assert wide == pytest.approx(2 * 1.96 * (1 / 12 / rows) ** 0.5, rel=0.15)


def test_intervals_of_rows_that_hang_together_are_wider():
    """Runs of 20 equal rows: a bootstrap of single rows would be too narrow by the root of 20."""
    torch.manual_seed(2)
    runs = torch.rand(1, 300, 100).repeat_interleave(20, dim=-1)
    low, high, _ = of(runs).interval()
    assert ((low < 0.5) & (high > 0.5)).double().mean().item() > 0.88
    assert (high - low).mean().item() == pytest.approx(2 * 1.96 * (1 / 12 / 100) ** 0.5, rel=0.15)


def test_scores_of_a_shape_are_drawn_alike():
    x = torch.rand(1, 2, 300)
    torch.testing.assert_close(of(2 * x).draws(50), 2 * of(x).draws(50))
    assert not torch.equal(of(x).draws(50, seed=1), of(x).draws(50))


@pytest.mark.parametrize("level", [0, 1, 95])
def test_a_level_is_a_share(level):
    with pytest.raises(ProblemError, match=f"level is {level}: expected .* between 0 and 1"):
        of(torch.rand(1, 1, 9)).interval(level)


@pytest.mark.parametrize("draws", [0, -3])
def test_an_interval_takes_a_draw_at_least(draws):
    score = of(torch.rand(1, 1, 9))
    for draw in (lambda: score.interval(draws=draws), lambda: score.draws(draws)):
        with pytest.raises(ProblemError, match=f"draws is {draws}: expected how often"):
            draw()
