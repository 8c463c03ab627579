"""A score of each head, with its chance value, and an interval that says how far it can be trusted.

A score is a mean over rows: sum over the counted rows of x[i], divided by how many there are. Besides the mean a
`HeadScores` keeps these sums for up to 32 contiguous blocks of rows, so that blocks can be resampled.

Rows of one text depend on each other, so rows are never resampled one by one.

    two sequences or more   Student's t interval of the mean of the sequences' scores, which is exact for normal scores,
                            however few sequences there are
    one sequence            percentile bootstrap (Efron 1979) over its blocks of rows (Carlstein 1986, blocks that do
                            not overlap)

`Interval.over` says which. Neither knows of texts unlike these.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.weights.index import count_of, index_of

BLOCKS = 32
"""Blocks that the rows of a sequence are cut into: enough to draw from, and long, to hold what hangs together."""


class Interval(NamedTuple):
    """The ends of an interval, [heads] each; `over` is its sample: "sequences", "blocks of rows" or "nothing"."""

    low: Tensor
    high: Tensor
    over: str


@brief
@dataclass(frozen=True, eq=False)
class HeadScores:
    """A measure of each head, and what uniform attention over the same mask would score; both [batch, heads].

    NaN where there is nothing to count: no row that has a target, no token that repeats.

    Args:
        value: the score of each sequence.
        chance: its chance value.
        sums, counts: of blocks of rows, [batch, heads, blocks], with value = sums / counts over all blocks. None where
            the score is no mean over rows: it then has an interval over sequences only.
        at: of a score that is the best of several, which of them: the shift, the distance or the key that it is of,
            int64 [batch, heads]; None of any other.

    >>> x = torch.tensor([[[0.2, 0.4, 0.6]]])
    >>> HeadScores.of_rows(x, torch.full_like(x, 0.1), torch.tensor([[[True, True, False]]]))
    HeadScores(value=tensor([[0.3000]]), chance=tensor([[0.1000]]))
    """

    value: Tensor
    chance: Tensor
    sums: Tensor | None = field(default=None, repr=False)
    counts: Tensor | None = field(default=None, repr=False)
    at: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of_rows(cls, values: Tensor, chance: Tensor, counted: Tensor) -> "HeadScores":
        """The mean over the counted rows; all [batch, heads, rows], of which chance and counted may broadcast."""
        values, chance, counted = torch.broadcast_tensors(values, chance, counted)
        sums, counts = _blocks(values.where(counted, 0.0)), _blocks(counted)
        total = counts.sum(-1)
        by_chance = chance.where(counted, 0.0).sum(-1, dtype=torch.float64) / total
        return cls((sums.sum(-1) / total).to(values.dtype), by_chance.to(values.dtype), sums, counts)

    def only(self, sequence: int) -> "HeadScores":
        """The score of one sequence, [1, heads].

        Raises:
            ProblemError: there is no such sequence.
        """
        sequences = self.value.shape[0]
        if (number := index_of(sequence)) is None or not 0 <= number < sequences:
            raise ProblemError(f"only({sequence!r}) of {sequences} sequences: expected one of 0 to {sequences - 1}.")

        def one(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[number : number + 1]

        value, chance = (t[number : number + 1] for t in (self.value, self.chance))
        return HeadScores(value, chance, one(self.sums), one(self.counts), one(self.at))

    def mean(self) -> Tensor:
        """The mean over the sequences that have a score, [heads]; `interval` is an interval of this mean."""
        return self.value.nanmean(0)

    def mean_chance(self) -> Tensor:
        """The mean chance value of the sequences that have a score, [heads]."""
        return self.chance.where(~self.value.isnan(), torch.nan).nanmean(0)

    def most_common_at(self) -> Tensor | None:
        """`at` of most of the sequences that have a score, [heads], in a tie that of the first of them; None if None.

        >>> nothing = torch.zeros(3, 1)
        >>> HeadScores(nothing, nothing, at=torch.tensor([[4], [2], [2]])).most_common_at()
        tensor([2])
        """
        if self.at is None:
            return None
        counted = ~self.value.isnan()  # [batch, heads]
        votes = ((self.at[:, None] == self.at) & counted).sum(1) * counted
        return self.at.gather(0, votes.argmax(0, keepdim=True))[0]

    @property
    def over(self) -> str:
        """The samples of an interval: "sequences", "blocks of rows", or "nothing" where there are not two of either."""
        if self.value.shape[0] > 1:
            return "sequences"
        several = self.counts is not None and bool(((self.counts > 0).sum(-1) > 1).any())
        return "blocks of rows" if several else "nothing"

    def draws(self, draws: int = 1000, seed: int = 0) -> Tensor:
        """Random draws of `mean`, [draws, heads]; NaN where there is nothing to draw from.

        For sequences, Student's t around their mean; for blocks of rows, a bootstrap. Scores of the same shape and seed
        have the same random draws, so they can be compared draw by draw.

        Raises:
            ProblemError: no draws.
        """
        draws = count_of("draws", draws, "the number of draws")
        over = self.over
        if over == "sequences":
            return self._around_the_mean(draws, seed)
        if over == "nothing" or self.sums is None or self.counts is None:
            return self.value.new_full((draws, self.value.shape[1]), torch.nan)
        sums, counts = self.sums[0], self.counts[0]
        drawn = _draw(sums.shape[1], draws, seed).to(sums.device)  # [draws, blocks]
        found = (drawn @ sums.mT) / (drawn @ counts.mT)
        alone = (counts > 0).sum(-1) < 2  # one block that has a score
        return found.masked_fill(alone, torch.nan).to(self.value.dtype)

    def interval(self, level: float = 0.95, draws: int = 1000, seed: int = 0) -> Interval:
        """The interval of `mean`, each [heads]; NaN where fewer than two sequences or blocks have a score.

        With few sequences it may exceed the range of a score, such as 1 for a mass.

        Args:
            draws, seed: parameters of the bootstrap over blocks of rows; Student's interval ignores them.

        Raises:
            ProblemError: a level that is not between 0 and 1, or no draws.
        """
        if not is_level(level):
            raise ProblemError(f"level is {level}: expected the share of draws in the interval, between 0 and 1.")
        if self.over == "sequences":
            return self._student(level)
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=self.value.device)
        low, high = self.draws(draws, seed).double().nanquantile(ends, dim=0).to(self.value.dtype)
        return Interval(low, high, self.over)

    def _student(self, level: float) -> Interval:
        mean, error, count = self._of_sequences()
        t = torch.tensor([student_quantile((1 + level) / 2, n - 1) if n > 1 else math.nan for n in count.tolist()])
        reach = t.to(error) * error
        return Interval((mean - reach).to(self.value.dtype), (mean + reach).to(self.value.dtype), "sequences")

    def _around_the_mean(self, draws: int, seed: int) -> Tensor:
        """Student's t, [draws, heads]: random normal weights on the deviations of sequences, over a random chi."""
        mean, error, count = self._of_sequences()
        normal, square = (part.to(mean.device) for part in _normal(self.value.shape[0], draws, seed))
        off = (self.value.double() - mean).nan_to_num(0.0)  # [batch, heads]
        spread = off.square().sum(0).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        degrees = (count - 1).clamp(min=1)
        chi = (square[:, degrees - 1] / degrees).sqrt()  # [draws, heads]
        return (mean + error * (normal @ off) / spread / chi).to(self.value.dtype)

    def _of_sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean over sequences with a score, its standard error (NaN for one), and their number; [heads]."""
        values, there = self.value.double(), ~self.value.isnan()
        count, mean = there.sum(0), values.nanmean(0)
        squares = (values - mean).square().where(there, 0.0).sum(0)
        return mean, (squares / (count * (count - 1))).sqrt().where(count > 1, math.nan), count


def is_level(level: object) -> bool:
    """Whether it is the level of an interval, a number between 0 and 1."""
    return isinstance(level, Real) and 0 < float(level) < 1


def _blocks(values: Tensor) -> Tensor:
    """Sums of contiguous blocks along the last axis, in float64: [..., at most BLOCKS]."""
    rows = values.shape[-1]
    size = max(1, -(-rows // BLOCKS))
    padded = torch.nn.functional.pad(values.double(), (0, -rows % size))
    return padded.unflatten(-1, (-1, size)).sum(-1)


@lru_cache(maxsize=8)  # 256 KiB for blocks; all scores of a report share the draws
def _draw(of: int, draws: int, seed: int) -> Tensor:
    """The counts of `of` items in `of` draws with replacement: float64 [draws, of]."""
    random = torch.Generator().manual_seed(seed)
    picked = torch.randint(of, (draws, of), generator=random)
    return torch.zeros(draws, of, dtype=torch.float64).scatter_add_(
        1, picked, torch.ones(1, 1, dtype=torch.float64).expand(draws, of)
    )


@lru_cache(maxsize=8)
def _normal(of: int, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Normal weights [draws, of], and sums of 1, 2, ... squares of other normal values [draws, of - 1]; float64.

    Every weight is paired with its negative, so that the draws are symmetric around their mean.
    """
    random = torch.Generator().manual_seed(seed)
    half = torch.randn((-(-draws // 2), 2 * of - 1), generator=random, dtype=torch.float64)
    weights = torch.stack([half[:, :of], -half[:, :of]], dim=1).flatten(0, 1)[:draws]
    return weights, half[:, of:].square().cumsum(1).repeat_interleave(2, dim=0)[:draws]


@lru_cache(maxsize=64)
def student_quantile(share: float, degrees: int) -> float:
    """The quantile of Student's t at `share`; degrees of freedom: values less 1.

    With 4 values the standard error is itself uncertain, which the percentile bootstrap ignores: for 4 normal values
    its 95 % interval covers the mean in 79 of 100 samples, Student's in 95.

    By substituting t = sqrt(degrees) tan(x): the density of x is proportional to cos(x)^(degrees - 1).

    >>> round(student_quantile(0.975, 3), 3), round(student_quantile(0.975, 31), 3), round(student_quantile(0.5, 7), 3)
    (3.182, 2.04, 0.0)
    """
    x = np.linspace(-math.pi / 2, math.pi / 2, 20_001)
    density = np.maximum(np.cos(x), 0.0) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp(share, below / below[-1], x)))
