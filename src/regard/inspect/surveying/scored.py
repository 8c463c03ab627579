"""Scores as plain numbers: what is kept of a layer's tensors once it has passed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard.inspect.measures.score import Score
from regard.inspect.surveying.head import Scored
from regard.inspect.surveying.kinds import NAMERS

DRAWS = 1000
"""Bootstrap draws for intervals and for how sure a kind is."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a layer's heads, and draws of those that name a head.

    Args:
        of: by measure, one for each head.
        drawn: by measure, bootstrap draws [draws, heads]; of `NAMERS` alone. Scores of one sample are drawn together.
    """

    of: dict[str, list[Scored]] = field(default_factory=dict[str, list[Scored]])
    drawn: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])

    def add(self, scores: Mapping[str, Score]) -> None:
        """Read these as plain numbers, and let go of them."""
        for measure, score in scores.items():
            self.of[measure] = list(_numbers(score))
            if measure in NAMERS:
                self.drawn[measure] = score.draws(DRAWS).double().cpu().numpy()

    def add_numbers(self, measure: str, numbers: Tensor, chance: float | None = None) -> None:
        """Numbers of the heads that are no means over rows, [heads]: such as where a scan found its best."""
        self.of[measure] = [Scored(number, chance) for number in numbers.double().tolist()]

    def joined(self, other: "Scores | None") -> "Scores":
        """These and others of the same heads."""
        return self if other is None else Scores(self.of | other.of, self.drawn | other.drawn)

    def head(self, head: int) -> dict[str, Scored]:
        """Everything that one head scores."""
        return {measure: scores[head] for measure, scores in self.of.items()}


def _numbers(score: Score) -> Iterator[Scored]:
    """The mean over sequences of each head, as what a report says."""
    interval = score.interval(draws=DRAWS)
    columns = (score.mean(), score.mean_chance(), interval.low, interval.high)
    for row in zip(*(column.double().tolist() for column in columns), strict=True):
        yield Scored(*(None if math.isnan(number) else number for number in row))
