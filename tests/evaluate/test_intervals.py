"""Intervals of losses: the bootstrap in blocks is that of all resamples at once, in little memory."""

import tracemalloc

import numpy as np
import pytest

from regard import ProblemError
from regard.evaluate import intervals

MEBI = 2**20


def ratio(total, count):
    return total / count


def columns(samples):
    by = np.random.default_rng(1)
    return by.random(samples), 1 + by.random(samples)


@pytest.mark.parametrize("block", [1, 700, 2**20])
def test_the_interval_does_not_depend_on_the_size_of_a_block(block, monkeypatch):
    total, count = columns(101)
    rows = np.random.default_rng(0).integers(0, 101, (500, 101))
    low, high = np.percentile(ratio(total[rows].mean(1), count[rows].mean(1)), (2.5, 97.5))
    monkeypatch.setattr(intervals, "BLOCK", block)
    assert intervals.drawn(total, count, of=ratio, draws=500) == (ratio(total.mean(), count.mean()), low, high)


def test_the_memory_of_an_interval_does_not_grow_with_the_windows():
    total, count = columns(20_011)
    tracemalloc.start()
    try:
        intervals.drawn(total, count, of=ratio, draws=1000)
        assert tracemalloc.get_traced_memory()[1] < 30 * MEBI
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("right", "count"), [(11, 10), (-1, 10), (1, -1), (float("nan"), 3)])
def test_a_share_that_is_none_is_refused(right, count):
    with pytest.raises(ProblemError, match="expected 0 <= right <= count"):
        intervals.wilson(right, count)
