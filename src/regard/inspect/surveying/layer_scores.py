"""The scores of a layer's heads as plain floats, without its tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from regard.inspect.measures.measure import Measure
from regard.inspect.measures.score import HeadScores
from regard.inspect.surveying.head import Estimate
from regard.inspect.surveying.kinds import NAMERS

DRAWS = 1000
"""The number of draws for intervals and for the certainty of a kind."""

SHARES = ("mass", "share")
"""Units of scores from 0 to 1."""


@dataclass(frozen=True, eq=False)
class LayerScores:
    """The scores of a layer's heads, and draws of those that name a head.

    Args:
        of: by measure, one for each head.
        drawn: by measure, its draws [draws, heads]; for `NAMERS` only. Scores of one sample share their draws.
    """

    of: dict[str, list[Estimate]] = field(default_factory=dict[str, list[Estimate]])
    drawn: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])

    def add(self, measure: Measure, score: HeadScores) -> None:
        """Add a score as plain floats; if it is the best of several, also which one, as `positional_at`."""
        draws = score.draws(DRAWS).double().cpu().numpy()
        self.of[measure.key] = list(_estimates(score, draws, bounded=measure.unit in SHARES))
        if measure.key in NAMERS:
            self.drawn[measure.key] = draws
        if score.at is not None and measure.at is not None:
            self.of[f"{measure.key}_at"] = [Estimate(number) for number in score.at[0].double().tolist()]

    def joined(self, other: "LayerScores | None") -> "LayerScores":
        """These scores and others of the same heads."""
        return self if other is None else LayerScores(self.of | other.of, self.drawn | other.drawn)

    def head(self, head: int) -> dict[str, Estimate]:
        """All scores of one head."""
        return {measure: scores[head] for measure, scores in self.of.items()}


def _estimates(score: HeadScores, draws: NDArray[np.float64], *, bounded: bool) -> Iterator[Estimate]:
    """The mean over sequences of each head, with its interval, which is cut to 0 to 1 where scores are bounded."""
    ends = _ends(score, draws)
    columns = (
        score.mean().double().tolist(),
        score.mean_chance().double().tolist(),
        *(ends.clip(0, 1) if bounded else ends),
    )
    for row in zip(*columns, strict=True):
        yield Estimate(*(None if math.isnan(number) else float(number) for number in row))


def _ends(score: HeadScores, draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ends of the 95 % interval of each head [2, heads]."""
    if score.over != "sequences":
        return interval(draws)
    low, high, _ = score.interval()
    return torch.stack([low, high]).double().cpu().numpy()


def interval(draws: NDArray[np.float64], level: float = 0.95) -> NDArray[np.float64]:
    """The ends of the percentile interval of draws [draws, heads], as `HeadScores.interval` has it: [2, heads].

    A survey takes some 700 of them: by partitioning, in a quarter of the time that torch needs to sort them. Columns
    in which a draw has no value go to the function that knows NaN.
    """
    ends, found = ((1 - level) / 2, (1 + level) / 2), np.full((2, draws.shape[1]), np.nan)
    without = np.isnan(draws)
    whole, none = ~without.any(0), without.all(0)
    found[:, whole] = np.quantile(draws[:, whole], ends, axis=0)
    if (some := ~whole & ~none).any():
        found[:, some] = np.nanquantile(draws[:, some], ends, axis=0)
    return found
