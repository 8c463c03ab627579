"""Scores and their intervals: what is drawn anew, and what an interval is worth."""

from dataclasses import replace

import pytest
import torch

from regard.errors import ProblemError
from regard.inspect.measures.score import HeadScores


def of(values, counted=None):
    return HeadScores.of_rows(
        values, torch.zeros_like(values), torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    )


def test_a_score_is_the_mean_over_counted_rows():
    values = torch.tensor([[[1.0, 2.0, 6.0, torch.nan], [3.0, 5.0, 7.0, 9.0]]])
    counted = torch.tensor([[[True, True, True, False], [False, True, True, False]]])
    score = HeadScores.of_rows(values, values / 2, counted)
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
    assert HeadScores(torch.rand(1, 2), torch.zeros(1, 2)).interval().over == "nothing"
    assert HeadScores(torch.rand(5, 2), torch.zeros(5, 2)).interval().over == "sequences"


def test_an_interval_over_sequences_is_that_of_their_mean():
    """Mean 1/2, standard error sqrt(0.2 / 3 / 4), and 3.182 of them to either side with three degrees of freedom."""
    score = HeadScores(torch.tensor([[0.2], [0.4], [0.6], [0.8]], dtype=torch.float64), torch.zeros(4, 1))
    low, high, _ = score.interval()
    assert (low.item(), high.item()) == pytest.approx((0.5 - 0.41085, 0.5 + 0.41085), abs=1e-5)


@pytest.mark.parametrize("sequence", [-1, 3, 0.5])
def test_a_sequence_that_is_not_there_has_no_score(sequence):
    with pytest.raises(ProblemError, match=r"only\(.*\) of 3 sequences: expected one of 0 to 2"):
        of(torch.rand(3, 2, 9)).only(sequence)


def test_sequences_without_a_score_are_left_out():
    score = HeadScores(torch.tensor([[0.2, 0.5], [0.4, torch.nan], [torch.nan, torch.nan]]), torch.zeros(3, 2))
    torch.testing.assert_close(score.mean(), torch.tensor([0.3, 0.5]))
    two = HeadScores(score.value[:2], score.chance[:2])
    low, high, _ = score.interval()
    assert (low[0], high[0]) == (two.interval().low[0], two.interval().high[0])
    assert low[1].isnan()  # a single sequence tells nothing of others
    assert score.draws()[:, 1].isnan().all()
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


@pytest.mark.parametrize("level", [0, 1, 95, "95 %"])
def test_a_level_is_a_share(level):
    with pytest.raises(ProblemError, match=f"level is {level}: expected .* between 0 and 1"):
        of(torch.rand(1, 1, 9)).interval(level)


@pytest.mark.parametrize("draws", [0, -3, 2.5])
def test_an_interval_takes_a_draw_at_least(draws):
    score = of(torch.rand(1, 1, 9))
    for draw in (lambda: score.interval(draws=draws), lambda: score.draws(draws)):
        with pytest.raises(ProblemError, match=f"draws is {draws}: expected the number of draws"):
            draw()


@pytest.mark.parametrize("sequences", [2, 4, 7])
def test_intervals_of_a_few_sequences_cover_the_truth_as_often_as_they_say(sequences):
    """Normal scores around 1/2: a percentile bootstrap of 4 covers it 79 times of 100, of 2 50 times."""
    random = torch.Generator().manual_seed(3)
    values = 0.5 + 0.1 * torch.randn(sequences, 4001, generator=random, dtype=torch.float64)
    score = HeadScores(values, torch.zeros_like(values))
    for level in (0.8, 0.95):
        low, high, over = score.interval(level)
        covered = ((low < 0.5) & (high > 0.5)).double().mean().item()
        assert over == "sequences"
        assert covered == pytest.approx(level, abs=4 * (level * (1 - level) / 4001) ** 0.5)  # 4 standard deviations


def test_draws_of_sequences_are_spread_as_the_interval_says():
    values = torch.rand(4, 5, dtype=torch.float64)
    values[2, 1] = torch.nan  # a head with three sequences
    score = HeadScores(values, torch.zeros_like(values))
    ends = score.draws(100_000).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    low, high, _ = score.interval()
    torch.testing.assert_close(ends[1] - ends[0], high - low, rtol=0.03, atol=0)
    torch.testing.assert_close(ends.mean(0), score.mean(), rtol=0.02, atol=0)


def test_draws_of_sequences_go_together():
    """Of two scores that differ in sign alone, one is above its mean where the other is below."""
    values = torch.rand(4, 1, dtype=torch.float64)
    up, down = HeadScores(values, torch.zeros(4, 1)), HeadScores(1 - values, torch.zeros(4, 1))
    torch.testing.assert_close(up.draws(), 1 - down.draws())


def test_the_best_of_sequences_without_a_score_is_not_counted():
    value = torch.tensor([[torch.nan, 0.5], [torch.nan, torch.nan], [0.5, torch.nan]])
    scores = HeadScores(value, value, at=torch.tensor([[9, 1], [9, 8], [3, 8]]))
    at = scores.most_common_at()
    assert at is not None
    assert at.tolist() == [3, 1]
    assert replace(scores, at=None).most_common_at() is None
