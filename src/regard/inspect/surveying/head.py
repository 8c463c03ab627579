"""A head and its scores, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from regard.inspect.brief import brief


class Estimate(NamedTuple):
    """One measure of one head: `chance` is the score of uniform attention, low to high its 95 % interval.

    A field is None where it does not exist: a measure that does not apply, a score without chance value or interval.
    """

    value: float | None
    chance: float | None = None
    low: float | None = None
    high: float | None = None


NONE = Estimate(None)
"""The estimate of a measure that a head does not have."""


@brief
@dataclass(frozen=True)
class Head:
    """One query head of one layer: its scores by the keys of `DEFINITIONS`, and its kind.

    `kind`, `remarkable` and `sure` are filled in by `kinds.ranked`. `sure` is the share of draws on
    other texts in which the head has the same kind; None where no other text was read.
    """

    layer: int
    head: int
    kv_head: int
    scores: Mapping[str, Estimate]
    kind: str = "mixed"
    remarkable: float = 0.0
    sure: float | None = None

    @property
    def name(self) -> str:
        """`18.6`: layer and head, both from 0."""
        return f"{self.layer}.{self.head}"

    def score(self, measure: str) -> Estimate:
        """The head's score, `NONE` where it does not have the measure."""
        return self.scores.get(measure, NONE)

    def value(self, measure: str) -> float | None:
        """The value of a score, None where there is none."""
        return self.score(measure).value
