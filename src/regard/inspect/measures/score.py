"""A score of each head, with its chance value, and an interval that says how far it can be trusted.

A score is a mean over rows: sum over the counted rows of x[i], divided by how many there are. Besides the mean a
`Score` keeps these sums for up to 32 contiguous blocks of rows, so that it can be drawn anew.

Intervals are percentile bootstraps (Efron 1979). Rows of one text depend on each other, so rows are never resampled one
by one: with two sequences or more what is drawn are sequences, with one its blocks of rows (Carlstein 1986, blocks that
do not overlap). `Interval.over` says which. Neither knows of texts unlike these.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ProblemError

BLOCKS = 32
"""Blocks that the rows of a sequence are cut into: enough to draw from, and long, to hold what hangs together."""


class Interval(NamedTuple):
    """Where a score lies, [heads] each; `over` is what was resampled: "sequences", "blocks of rows" or "nothing"."""

    low: Tensor
    high: Tensor
    over: str


@dataclass(frozen=True, eq=False)
class Score:
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
    >>> Score.of_rows(x, torch.full_like(x, 0.1), torch.tensor([[[True, True, False]]]))
    Score(value=tensor([[0.3000]]), chance=tensor([[0.1000]]))
    """

    value: Tensor
    chance: Tensor
    sums: Tensor | None = field(default=None, repr=False)
    counts: Tensor | None = field(default=None, repr=False)
    at: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of_rows(cls, values: Tensor, chance: Tensor, counted: Tensor) -> "Score":
        """The mean over the counted rows; all [batch, heads, rows], of which chance and counted may broadcast."""
        values, chance, counted = torch.broadcast_tensors(values, chance, counted)
        sums, counts = _blocks(values.where(counted, 0.0)), _blocks(counted)
        total = counts.sum(-1)
        by_chance = chance.where(counted, 0.0).sum(-1, dtype=torch.float64) / total
        return cls((sums.sum(-1) / total).to(values.dtype), by_chance.to(values.dtype), sums, counts)

    def mean(self) -> Tensor:
        """The mean over the sequences that have a score, [heads]: what `interval` is about."""
        return self.value.nanmean(0)

    def mean_chance(self) -> Tensor:
        """The mean chance value of the sequences that have a score, [heads]."""
        return self.chance.where(~self.value.isnan(), torch.nan).nanmean(0)

    @property
    def over(self) -> str:
        """What an interval resamples: "sequences", "blocks of rows" or, where there is one of neither, "nothing"."""
        if self.value.shape[0] > 1:
            return "sequences"
        several = self.counts is not None and bool(((self.counts > 0).sum(-1) > 1).any())
        return "blocks of rows" if several else "nothing"

    def draws(self, draws: int = 1000, seed: int = 0) -> Tensor:
        """Bootstrap draws of `mean`, [draws, heads]; NaN where there is nothing to resample.

        The same seed draws the same sequences, or blocks, for every score of the same shape: scores drawn alike can be
        compared draw by draw.

        Raises:
            ProblemError: no draws.
        """
        if draws < 1:
            raise ProblemError(f"draws is {draws}: expected how often to draw anew, 1 or more (1,000 by default).")
        if self.over == "nothing":
            return self.value.new_full((draws, self.value.shape[1]), torch.nan)
        if self.value.shape[0] > 1 or self.sums is None or self.counts is None:
            sums, counts = self.value.nan_to_num(0.0).mT.double(), (~self.value.isnan()).mT.double()
        else:
            sums, counts = self.sums[0], self.counts[0]
        drawn = _drawn(sums.shape[1], draws, seed).to(sums.device)  # [draws, of what is resampled]
        found = (drawn @ sums.mT) / (drawn @ counts.mT)
        alone = (counts > 0).sum(-1) < 2  # one sequence, or one block, that has a score
        return found.masked_fill(alone, torch.nan).to(self.value.dtype)

    def interval(self, level: float = 0.95, draws: int = 1000, seed: int = 0) -> Interval:
        """The percentile interval of `mean`, each [heads]; NaN where there are no two sequences or blocks with a score.

        Raises:
            ProblemError: a level that is not between 0 and 1, or no draws.
        """
        if not 0 < level < 1:
            raise ProblemError(f"level is {level}: expected the share of draws in the interval, between 0 and 1.")
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=self.value.device)
        low, high = self.draws(draws, seed).double().nanquantile(ends, dim=0).to(self.value.dtype)
        return Interval(low, high, self.over)


def _blocks(values: Tensor) -> Tensor:
    """Sums of contiguous blocks along the last axis, in float64: [..., at most BLOCKS]."""
    rows = values.shape[-1]
    size = max(1, -(-rows // BLOCKS))
    padded = torch.nn.functional.pad(values.double(), (0, -rows % size))
    return padded.unflatten(-1, (-1, size)).sum(-1)


@lru_cache(maxsize=8)  # 256 KiB for blocks; every score of a report is drawn alike
def _drawn(of: int, draws: int, seed: int) -> Tensor:
    """How often each of `of` things is drawn in `of` draws with replacement: float64 [draws, of]."""
    random = torch.Generator().manual_seed(seed)
    picked = torch.randint(of, (draws, of), generator=random)
    return torch.zeros(draws, of, dtype=torch.float64).scatter_add_(
        1, picked, torch.ones(1, 1, dtype=torch.float64).expand(draws, of)
    )
