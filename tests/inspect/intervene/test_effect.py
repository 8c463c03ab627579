"""Effects and their intervals."""

import math

import pytest
import torch

from regard.errors import ProblemError
from regard.inspect.intervene.loss import Effect, bootstrap


def test_intervals_hold_the_mean_as_often_as_they_say():
    random = torch.Generator().manual_seed(1)
    samples = torch.randn(200, 40, generator=random)
    held = sum(low <= 0 <= high for low, high in (bootstrap(one, 0.9, draws=300) for one in samples))
    assert 165 <= held <= 195  # 180 expected, 4 the standard deviation


@pytest.mark.parametrize("examples", [4, 8])
def test_intervals_of_a_few_examples_hold_the_mean_nearly_as_often_as_they_say(examples):
    """A plain percentile interval of 4 holds it 79 times of 100, of 8 88 times."""
    random = torch.Generator().manual_seed(2)
    samples = torch.randn(800, examples, generator=random)
    held = sum(low <= 0 <= high for low, high in (bootstrap(one) for one in samples))
    assert 0.92 < held / 800 < 0.98


def test_pairs_stay_together():
    base = torch.randn(30).double() * 100
    low, high = Effect((), base, base + 1).interval()
    assert math.isclose(low, 1, abs_tol=1e-9)
    assert math.isclose(high, 1, abs_tol=1e-9)


def test_a_single_example_says_nothing_about_others():
    assert all(math.isnan(end) for end in bootstrap(torch.ones(1)))


def test_the_same_seed_gives_the_same_interval():
    values = torch.randn(20)
    assert bootstrap(values) == bootstrap(values) != bootstrap(values, seed=1)


@pytest.mark.parametrize("asked", [{"level": 1}, {"level": 0}, {"level": "95 %"}, {"draws": 0}, {"draws": 2.5}])
def test_an_interval_needs_a_level_and_draws(asked):
    with pytest.raises(ProblemError, match="expected a level between 0 and 1, and 1 draw or more"):
        Effect((), torch.zeros(3), torch.ones(3)).interval(**asked)
