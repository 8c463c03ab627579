"""Scores as plain numbers: what is kept of a layer's tensors once it has passed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.inspect.measures import places
from regard.inspect.measures.score import HeadScores
from regard.inspect.surveying.head import Estimate
from regard.inspect.surveying.kinds import DEFINITIONS, NAMERS

DRAWS = 1000
"""Draws for intervals and for how sure a kind is."""

SHARES = ("mass", "share")
"""Units of what lies from 0 to 1."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a layer's heads, and draws of those that name a head.

    Args:
        of: by measure, one for each head.
        drawn: by measure, draws of it [draws, heads]; of `NAMERS` alone. Scores of one sample are drawn together.
    """

    of: dict[str, list[Estimate]] = field(default_factory=dict[str, list[Estimate]])
    drawn: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])

    def add(self, scores: Mapping[str, HeadScores]) -> None:
        """Read these as plain numbers, and let go of them."""
        for measure, score in scores.items():
            draws = score.draws(DRAWS).double().cpu().numpy()
            self.of[measure] = list(_numbers(measure, score, draws))
            if measure in NAMERS:
                self.drawn[measure] = draws

    def add_best(self, scores: Mapping[str, HeadScores]) -> None:
        """The same, and of those that are the best of several where that is: `positional_at`, in a text of one."""
        self.add(scores)
        for measure, at in places(scores).items():
            self.add_numbers(measure, at[0])

    def add_numbers(self, measure: str, numbers: Tensor, chance: float | None = None) -> None:
        """Numbers of the heads that are no means over rows, [heads]: such as where a scan found its best."""
        self.of[measure] = [Estimate(number, chance) for number in numbers.double().tolist()]

    def joined(self, other: "Scores | None") -> "Scores":
        """These and others of the same heads."""
        return self if other is None else Scores(self.of | other.of, self.drawn | other.drawn)

    def head(self, head: int) -> dict[str, Estimate]:
        """Everything that one head scores."""
        return {measure: scores[head] for measure, scores in self.of.items()}


def _numbers(measure: str, score: HeadScores, draws: NDArray[np.float64]) -> Iterator[Estimate]:
    """The mean over sequences of each head, as what a report says."""
    columns = (score.mean().double().tolist(), score.mean_chance().double().tolist(), *_ends(measure, score, draws))
    for row in zip(*columns, strict=True):
        yield Estimate(*(None if math.isnan(number) else float(number) for number in row))


def _ends(measure: str, score: HeadScores, draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ends of the 95 % interval of each head [2, heads]; those of a share of something lie from 0 to 1."""
    if score.over == "sequences":
        low, high, _ = score.interval()
        found = torch.stack([low, high]).double().cpu().numpy()
    else:
        found = interval(draws)
    return found.clip(0, 1) if measure in DEFINITIONS and DEFINITIONS[measure].unit in SHARES else found


def interval(draws: NDArray[np.float64], level: float = 0.95) -> NDArray[np.float64]:
    """The ends of the percentile interval of draws [draws, heads], as `HeadScores.interval` has it: [2, heads].

    A survey takes some 700 of them: by partitioning, in a quarter of the time that torch needs to sort them. Columns in
    which a draw has no value are left to what knows of NaN.
    """
    ends, found = ((1 - level) / 2, (1 + level) / 2), np.full((2, draws.shape[1]), np.nan)
    without = np.isnan(draws)
    whole, none = ~without.any(0), without.all(0)
    found[:, whole] = np.quantile(draws[:, whole], ends, axis=0)
    if (some := ~whole & ~none).any():
        found[:, some] = np.nanquantile(draws[:, some], ends, axis=0)
    return found
