"""95 % intervals: Wilson's for shares of right answers, the bootstrap for means of losses."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.errors import ProblemError

Floats = NDArray[np.float64]
Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""

BLOCK = 2**20
"""Samples that the bootstrap draws at once: 8 MiB of indices."""


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(right: float, count: int) -> Interval:
    """The share of right answers, with Wilson's score interval, which is never empty: Wilson 1927, JASA 22(158).

    For scores between 0 and 1 `right` is their sum. Their variance is at most that of right and wrong answers with the
    same mean, so the interval is wide enough for them, too.

    >>> wilson(10, 10)
    Interval(value=1.0, low=0.722..., high=1.0)
    >>> wilson(0, 0)
    Interval(value=nan, low=0.0, high=1.0)

    Raises:
        ProblemError: `right` is below 0 or above `count`.
    """
    if not 0 <= right <= count:
        raise ProblemError(f"wilson({right!r}, {count!r}): expected 0 <= right <= count.")
    if not count:
        return Interval(math.nan, 0.0, 1.0)
    share, z2 = right / count, Z * Z / count
    middle = (share + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    low, high = min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))  # rounding crosses these
    return Interval(share, 0.0 if not right else low, 1.0 if right == count else high)


def drawn(*columns: Floats, of: Callable[..., Floats], draws: int = 10_000) -> Interval:
    """A statistic of the means of these columns, [samples] each, with its bootstrap interval.

    All columns use the same resamples, so a difference of two columns is paired. Efron 1979, The Annals of Statistics
    7(1), §2; percentiles.

    >>> ours, theirs = np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.5, 2.5])
    >>> drawn(ours, theirs, of=lambda a, b: a - b)
    Interval(value=0.5, low=0.5, high=0.5)
    """
    count = len(columns[0])
    by, block = np.random.default_rng(0), max(1, BLOCK // count)
    means = np.empty((len(columns), draws))
    for start in range(0, draws, block):
        rows = by.integers(0, count, (min(block, draws - start), count))
        for column, mean in zip(columns, means, strict=True):
            mean[start : start + block] = column[rows].mean(1)
    low, high = np.percentile(of(*means), (2.5, 97.5))
    return Interval(float(of(*(column.mean() for column in columns))), float(low), float(high))
