"""Layouts: which tokens of a sequence each rank has.

The ring brings the keys of every rank to every rank, so each layout gives the same result; layouts differ in how evenly
they share the work of a mask:

    tokens 0 to 7, causal, on 2 ranks     pairs on rank 0 and rank 1
    contiguous    0 0 0 0 1 1 1 1         10, 26
    zigzag        0 0 1 1 1 1 0 0         18, 18
    striped       0 1 0 1 0 1 0 1         16, 20

Zigzag: Zhu 2024 (ring-flash-attention). Striped: Brandon et al. 2023, arXiv:2311.09431, §3. Balanced, for any mask:
`balance.py`. Importing this module imports no torch: costs are counted with it.
"""

import math
import operator
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import accumulate, pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from regard.errors import ProblemError
from regard.integers import as_integer, is_integer
from regard.parallel.digest import digest

if TYPE_CHECKING:
    from torch import Tensor

    from regard.cost.pairs import Pattern
    from regard.describe.mask import Mask

LIMIT = 1 << 60
"""A layout has fewer tokens: it can list the rank of each in 8 bytes."""

FEW = 64
"""The most pieces that are joined as views of a tensor; more are gathered by index."""


class Pieces(NamedTuple):
    """The sequence as pieces of consecutive tokens of one rank: piece i has edges[i] <= position < edges[i + 1]."""

    edges: NDArray[np.int64]
    ranks: NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Which tokens of a sequence each rank has: each token belongs to one rank.

    A rank's shard has its tokens in the order of their positions. `Layout.contiguous`, `.zigzag`, `.striped` and
    `.balanced` make the usual ones.

    Attributes:
        tokens: of the whole sequence.
        runs: per rank, the positions of its tokens as ranges: each ascends, and begins after the end of the one before;
            () where a rank has none.

    >>> Layout.zigzag(8, 2).positions(0)
    (range(0, 2), range(6, 8))
    >>> Layout.striped(8, 2).indices(1).tolist()
    [1, 3, 5, 7]
    """

    tokens: int
    runs: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        given = [_listed(each) for each in _listed(self.runs)]
        ranges = all(isinstance(run, range) for each in given for run in each)
        if not (is_integer(self.tokens, least=0) and ranges):
            raise ProblemError(
                f"a layout of {self.tokens!r} tokens with the ranges {reprlib.repr(self.runs)}: expected a whole "
                "number of tokens, and for each rank a tuple of ranges."
            )
        object.__setattr__(self, "tokens", as_integer(self.tokens))
        if self.tokens >= LIMIT:
            raise ProblemError(f"a layout of {self.tokens} tokens: expected fewer than {LIMIT}.")
        object.__setattr__(self, "runs", tuple(tuple(run for run in each if run) for each in given))
        runs = [run for each in self.runs for run in each]
        ascending = all(a[-1] < b[0] for each in self.runs for a, b in pairwise(each))
        inside = all(run.step > 0 and run[0] >= 0 and run[-1] < self.tokens for run in runs)
        once = sum(map(len, runs)) == self.tokens
        if not (ascending and inside and once and (self.owners >= 0).all()):
            raise ProblemError(
                f"a layout of {self.tokens} tokens on {self.ranks} ranks: expected each position 0 to "
                f"{self.tokens - 1} on one rank, and those of a rank in ascending ranges."
            )

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.runs)

    def positions(self, rank: int) -> tuple[range, ...]:
        """The positions of a rank's tokens, as ascending ranges; () where it has none."""
        if not 0 <= rank < self.ranks:
            raise ProblemError(f"rank {rank} in {self}: expected 0 to {self.ranks - 1}.")
        return self.runs[rank]

    def indices(self, rank: int) -> NDArray[np.int64]:
        """The positions of a rank's tokens, [tokens of the rank]: `x[:, :, layout.indices(rank)]` is its shard."""
        return positions_of(self.runs[rank])

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The count of each rank's tokens."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """[tokens]: the rank of each token."""
        found = np.full(self.tokens, -1, dtype=np.int64)
        for rank, runs in enumerate(self.runs):
            for run in runs:
                found[run.start : run.stop : run.step] = rank
        return found

    @cached_property
    def digest(self) -> str:
        """A short text that differs where the positions of a rank do, the same in every process."""
        return digest(repr(self.runs))

    @cached_property
    def pieces(self) -> Pieces:
        """The sequence as pieces of consecutive tokens of one rank, in the order of positions."""
        starts = np.flatnonzero(np.diff(self.owners, prepend=-1))
        return Pieces(np.append(starts, self.tokens), self.owners[starts])

    def shard(self, tensor: "Tensor", rank: int, dim: int = 2) -> "Tensor":
        """The rank's part of a tensor of the whole sequence: its tokens along `dim`, in the order of positions.

        A view where the rank has one range, else a copy; gradients flow.

        Raises:
            ProblemError: the tensor has another number of tokens.

        >>> import torch
        >>> Layout.zigzag(8, 2).shard(torch.arange(8), rank=0, dim=0).tolist()
        [0, 1, 6, 7]
        """
        runs = self.positions(rank)
        if tensor.shape[dim] != self.tokens:
            raise ProblemError(f"a tensor {list(tensor.shape)} for {self}: expected {self.tokens} tokens in dim {dim}.")
        if not runs:
            return tensor.narrow(dim, 0, 0)
        if len(runs) > FEW or any(run.step > 1 for run in runs):
            return _gather(tensor, dim, self.indices(rank))
        parts = [tensor.narrow(dim, run.start, len(run)) for run in runs]
        return parts[0] if len(parts) == 1 else _cat(parts, dim)

    def unshard(self, shards: "Sequence[Tensor]", dim: int = 2) -> "Tensor":
        """The tensor of the whole sequence from the shards of all ranks, in the order of ranks; gradients flow.

        Raises:
            ProblemError: another number of shards, or one with another number of tokens than its rank has.

        >>> import torch
        >>> layout, whole = Layout.striped(9, 2), torch.arange(9)
        >>> layout.unshard([layout.shard(whole, rank, dim=0) for rank in range(2)], dim=0).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
        """
        found = tuple(each.shape[dim] for each in shards)
        if found != self.counts:
            raise ProblemError(f"shards of {list(found)} tokens for {self}: expected {list(self.counts)}.")
        edges, ranks = self.pieces
        if len(ranks) > FEW:
            order = np.concatenate([self.indices(rank) for rank in range(self.ranks)])
            return _gather(_cat(shards, dim), dim, np.argsort(order))
        taken, parts = [0] * self.ranks, list["Tensor"]()
        for rank, size in zip(ranks.tolist(), np.diff(edges).tolist(), strict=True):
            parts.append(shards[rank].narrow(dim, taken[rank], size))
            taken[rank] += size
        return _cat(parts, dim) if parts else shards[0]

    @classmethod
    def contiguous(cls, tokens: int, ranks: int) -> "Layout":
        """Rank r has the r-th part of the sequence; the first ranks have one token more where it is uneven."""
        return cls(tokens, tuple((part,) if part else () for part in even_parts(tokens, ranks)))

    @classmethod
    def of_counts(cls, counts: Iterable[int]) -> "Layout":
        """Rank r has the next counts[r] tokens."""
        listed = _listed(counts)
        if not all(is_integer(count, least=0) for count in listed):
            raise ProblemError(f"Layout.of_counts({counts!r}): expected whole numbers of tokens, 0 or more.")
        stops = [0, *accumulate(operator.index(count) for count in listed)]
        parts = [range(a, b) for a, b in pairwise(stops)]
        return cls(stops[-1], tuple((part,) if part else () for part in parts))

    @classmethod
    def zigzag(cls, tokens: int, ranks: int) -> "Layout":
        """Rank r has parts r and 2 * ranks - 1 - r of 2 * ranks: equal work under a causal mask."""
        tokens, ranks = _whole(tokens, ranks)
        parts = even_parts(tokens, 2 * ranks)
        return cls(tokens, tuple(joined([parts[r], parts[2 * ranks - 1 - r]]) for r in range(ranks)))

    @classmethod
    def striped(cls, tokens: int, ranks: int, block: int = 1) -> "Layout":
        """Blocks of consecutive tokens are dealt in turn: with blocks of 1, rank r has r, r + ranks, r + 2 * ranks ...

        Args:
            block: tokens dealt at once. Kernels compute tiles of 64 tokens: with blocks of 64 or more, few of the tiles
                are partial.
        """
        tokens, ranks = _whole(tokens, ranks)
        if not is_integer(block, least=1):
            raise ProblemError(f"Layout.striped(block={block!r}): expected a whole number of tokens, 1 or more.")
        block = operator.index(block)
        if block == 1:
            return cls(tokens, tuple((range(r, tokens, ranks),) if r < tokens else () for r in range(ranks)))
        blocks = [range(start, min(start + block, tokens)) for start in range(0, tokens, block)]
        return cls(tokens, tuple(joined(blocks[r::ranks]) for r in range(ranks)))

    @classmethod
    def balanced(
        cls, tokens: int, ranks: int, mask: "Mask | Pattern | None", *,
        sending: float = 0.0, batch: int = 1, heads: int = 1,
    ) -> "Layout":  # fmt: skip
        """The layout that shares the work of this mask evenly, whatever the mask; see `balance.py`.

        The same on every rank, as it is computed from the mask alone, in integers.

        Args:
            mask: or a `regard.cost.Pattern`, which needs no torch; None keeps every pair.
            sending: how many pairs a rank computes in the time in which it sends one token's keys and values (a pair of
                H heads of dimension D is 4 H D FLOPs). With it, the layout is that of the shortest time: keys of short
                documents stay near. 0: sending costs nothing.
            batch, heads: of the calls, for a mask that differs between batch rows or heads and has no
                `broadcast_shape`: a `MaskFunction`, or one of your own. Its pairs are then counted in every row and
                head; by default in the first only.

        >>> from regard import Causal
        >>> Layout.balanced(4096, 2, Causal()).counts
        (2048, 2048)
        """
        tokens, ranks = _whole(tokens, ranks)
        is_number = isinstance(cast(object, sending), Real) and not isinstance(sending, bool)
        if not is_number or not 0 <= sending < math.inf:
            raise ProblemError(f"Layout.balanced(sending={sending!r}): expected a finite number of pairs, 0 or more.")
        if not (is_integer(batch, least=1) and is_integer(heads, least=1)):
            raise ProblemError(f"Layout.balanced(batch={batch!r}, heads={heads!r}): expected whole numbers, 1 or more.")
        make = import_module("regard.parallel.balance").balanced
        return make(tokens, ranks, mask, float(sending), operator.index(batch), operator.index(heads))

    def __str__(self) -> str:
        return f"a layout of {self.tokens} tokens on {self.ranks} ranks"


def positions_of(ranges: Sequence[range]) -> NDArray[np.int64]:
    """The positions in ranges, one after another."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(r.start, r.stop, r.step) for r in ranges)])


def even_parts(tokens: int, parts: int) -> list[range]:
    """The positions in parts of nearly equal length; the first ones have one more where it is uneven."""
    tokens, parts = _whole(tokens, parts)
    size, more = divmod(tokens, parts)
    stops = [i * size + min(i, more) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(stops)]


def _whole(tokens: int, parts: int) -> tuple[int, int]:
    """Both as Python's integers.

    Raises:
        ProblemError: one is no whole number, or too small.
    """
    if not (is_integer(tokens, least=0) and is_integer(parts, least=1)):
        raise ProblemError(
            f"a layout of {tokens!r} tokens in {parts!r} parts: expected whole numbers, 0 or more tokens and 1 or more "
            "parts."
        )
    return operator.index(tokens), operator.index(parts)


def joined(parts: Sequence[range]) -> tuple[range, ...]:
    """Ascending ranges without empty ones; neighbours are one."""
    found = list[range]()
    for part in parts:
        if part and found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        elif part:
            found.append(part)
    return tuple(found)


def _listed(given: object) -> Iterable[Any]:
    """An iterable; a list of what an iterator gives, which gives it once; [None] for what is no iterable."""
    iterable = cast("Iterable[Any]", given)
    try:
        is_iterator = iter(iterable) is iterable
    except TypeError:  # also by an array or tensor of no dimensions, which has `__iter__`
        return [None]
    return [*iterable] if is_iterator else iterable


def _cat(parts: "Sequence[Tensor]", dim: int) -> "Tensor":
    return import_module("torch").cat(list(parts), dim)  # here: layouts are counted with before torch is loaded


def _gather(tensor: "Tensor", dim: int, positions: NDArray[np.int64]) -> "Tensor":
    return tensor.index_select(dim, import_module("torch").from_numpy(positions).to(tensor.device))
