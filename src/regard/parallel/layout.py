"""Layouts: which tokens of a sequence each rank has."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from regard.describe.whole_number import whole
from regard.errors import ProblemError


@dataclass(frozen=True)
class Layout:
    """Which tokens of a sequence each rank has: each token belongs to one rank.

    A rank's shard has its tokens in the order of their positions. `Layout.contiguous`, `.zigzag` and `.striped` make
    the usual ones.

    Attributes:
        tokens: of the whole sequence.
        runs: per rank, the positions of its tokens as ranges: each ascends, and begins after the end of the one before.

    >>> Layout.zigzag(8, 2).positions(0)
    (range(0, 2), range(6, 8))
    >>> Layout.striped(8, 2).indices(1).tolist()
    [1, 3, 5, 7]
    """

    tokens: int
    runs: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        everything = np.concatenate([np.zeros(0, np.int64), *map(self.indices, range(self.ranks))])
        ascending = all((np.diff(self.indices(rank)) > 0).all() for rank in range(self.ranks))
        if not ascending or not np.array_equal(np.sort(everything), np.arange(self.tokens)):
            raise ProblemError(
                f"a layout of {self.tokens} tokens on {self.ranks} ranks: expected each position 0 to "
                f"{self.tokens - 1} on one rank, and those of a rank in ascending ranges."
            )

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.runs)

    def positions(self, rank: int) -> tuple[range, ...]:
        """The positions of a rank's tokens, as ascending ranges."""
        return self.runs[rank]

    def indices(self, rank: int) -> NDArray[np.int64]:
        """The positions of a rank's tokens, [tokens of the rank]: `x[:, :, layout.indices(rank)]` is its shard."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(r.start, r.stop, r.step) for r in self.runs[rank])])

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The count of each rank's tokens."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    @classmethod
    def contiguous(cls, tokens: int, ranks: int) -> "Layout":
        """Rank r has the r-th part of the sequence; the first ranks have one token more where it is uneven."""
        return cls(tokens, tuple((part,) if len(part) else () for part in _parts(tokens, ranks)))

    @classmethod
    def of_counts(cls, counts: Sequence[int]) -> "Layout":
        """Rank r has the next counts[r] tokens."""
        stops = np.cumsum([0, *counts]).tolist()
        parts = [range(a, b) for a, b in pairwise(stops)]
        return cls(stops[-1], tuple((part,) if len(part) else () for part in parts))

    @classmethod
    def zigzag(cls, tokens: int, ranks: int) -> "Layout":
        """Rank r has parts r and 2 * ranks - 1 - r of 2 * ranks: equal work under a causal mask."""
        parts = _parts(tokens, 2 * ranks)
        pairs = [(parts[r], parts[2 * ranks - 1 - r]) for r in range(ranks)]
        return cls(tokens, tuple(tuple(part for part in pair if len(part)) for pair in pairs))

    @classmethod
    def striped(cls, tokens: int, ranks: int) -> "Layout":
        """Rank r has the tokens r, r + ranks, r + 2 * ranks ..."""
        return cls(tokens, tuple((range(r, tokens, ranks),) if r < tokens else () for r in range(ranks)))


def _parts(tokens: int, parts: int) -> list[range]:
    size, more = divmod(whole(tokens, "tokens", least=0), whole(parts, "ranks", least=1))
    stops = [i * size + min(i, more) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(stops)]
