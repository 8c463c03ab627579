"""What a change does to the loss, example by example, so that an interval can be given."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.score import student_quantile
from regard.inspect.names import HeadName


class Interval(NamedTuple):
    """Where a mean lies; NaN from a single example, which says nothing about others."""

    low: float
    high: float


@brief
@dataclass(frozen=True, eq=False)
class Effect:
    """The losses with some heads changed, beside those of the model as it is.

    Args:
        heads: which were changed.
        base, losses: of each example without and with the change; float64 [examples].

    >>> Effect(((0, 1),), base=torch.tensor([1.0, 2.0]), losses=torch.tensor([1.5, 2.0])).change
    0.25
    """

    heads: tuple[HeadName, ...]
    base: Tensor
    losses: Tensor

    @property
    def change(self) -> float:
        """The mean change of the loss; above 0 the heads were of use."""
        return (self.losses - self.base).mean().item()

    def interval(self, level: float = 0.95, draws: int = 1000, seed: int = 0) -> Interval:
        """A bootstrap interval of the change: over examples, in pairs.

        >>> Effect((), torch.zeros(4), torch.tensor([1.0, 1, 1, 1])).interval()
        Interval(low=1.0, high=1.0)
        """
        return bootstrap(self.losses - self.base, level, draws, seed)


def bootstrap(values: Tensor, level: float = 0.95, draws: int = 1000, seed: int = 0) -> Interval:
    """The percentile interval of the mean of `values`, [examples], Efron & Tibshirani 1993, chapter 13, widened.

    Draws of a few values lie too close together, by sqrt((examples - 1) / examples), and do not count that their spread
    is a guess as well: the interval is as much wider as Student's is than one of normal values whose spread is known.
    Hesterberg 2015, arXiv:1411.5279, §3.2.

    Raises:
        ProblemError: a level that is not between 0 and 1, or no draws.
    """
    if not 0 < level < 1 or draws < 1:
        raise ProblemError(f"level is {level} and draws {draws}: expected a level between 0 and 1, and 1 draw or more.")
    if len(values) < 2:
        return Interval(float("nan"), float("nan"))
    random = torch.Generator().manual_seed(seed)
    means = values.double()[torch.randint(len(values), (draws, len(values)), generator=random)].mean(1)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    middle, count = values.double().mean(), len(values)
    students_t = student_quantile((1 + level) / 2, count - 1)
    wider = students_t / NormalDist().inv_cdf((1 + level) / 2) * (count / (count - 1)) ** 0.5
    low, high = (middle + wider * (means.quantile(ends) - middle)).tolist()
    return Interval(low, high)
