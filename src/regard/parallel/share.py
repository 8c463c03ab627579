"""Which heads and tokens each rank has in `ulysses_attend`, and the all-to-all that exchanges one for the other.

A rank has some tokens of all heads before and after the attention, and all tokens of some heads in between. Query heads
are split evenly; a rank gets the key heads that its query heads use, so a key head may be on several ranks.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.mask import Ints
from regard.parallel.derivatives import no_tangents
from regard.parallel.layout import Layout, even_parts
from regard.parallel.ranks import Ranks
from regard.torch_internals import leave_out_of_graphs
from regard.wide import wide_of


class Segment(NamedTuple):
    """Some of a rank's heads: its query heads share its key heads evenly.

    Attributes:
        heads: the query heads, numbered in the call.
        q, k: the query heads and the key heads, numbered on the rank.
    """

    heads: range
    q: slice
    k: slice


@dataclass(frozen=True)
class Tokens:
    """The tokens of the ranks that share heads.

    Attributes:
        layout: of all ranks.
        first: the rank of the layout that is first of those that share heads with this one.
        sharing: how many these are.
    """

    layout: Layout
    first: int
    sharing: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each of the ranks has."""
        return self.layout.counts[self.first : self.first + self.sharing]

    @cached_property
    def order(self) -> Ints:
        """The tokens of all, rank by rank, in the order of their positions."""
        return np.argsort(np.concatenate([self.layout.indices(self.first + i) for i in range(self.sharing)]))

    @cached_property
    def places(self) -> list[Ints]:
        """Where the tokens of each rank are, in the order of positions."""
        return np.split(np.argsort(self.order), np.cumsum(self.counts)[:-1])

    @cached_property
    def of_ring(self) -> Layout:
        """Which tokens each group of ranks that share heads has."""
        n = self.sharing
        return Layout(self.layout.tokens, tuple(_union(self.layout, i, n) for i in range(self.layout.ranks // n)))


class Share:
    """Which heads and tokens are on each rank."""

    def __init__(self, ranks: Ranks, ring: Ranks, queries: Layout, keys: Layout, heads: int, kv_heads: int) -> None:
        self.ranks, self.group = ranks, heads // kv_heads
        self.kv_heads, first = kv_heads, ring.rank * ranks.size
        self.queries, self.keys = _tokens(queries, first, ranks.size), _tokens(keys, first, ranks.size)
        self.heads = even_parts(heads, ranks.size)
        self.kv = [_kv(h, self.group) for h in self.heads]

    @property
    def segments(self) -> list[Segment]:
        """This rank's heads: whole groups of query heads together, parts of a group on their own."""
        mine, kv, n = self.heads[self.ranks.rank], self.kv[self.ranks.rank], self.group
        inner = (-(-mine.start // n) * n, mine.stop // n * n)
        edges = sorted({mine.start, mine.stop, *(edge for edge in inner if mine.start < edge < mine.stop)})
        return [
            Segment(
                range(a, b),
                slice(a - mine.start, b - mine.start),
                slice(a // n - kv.start, (b - 1) // n + 1 - kv.start),
            )
            for a, b in pairwise(edges)
        ]

    def to_heads(self, tensors: list[Tensor], kinds: str) -> list[Tensor]:
        """All tokens of this rank's heads, from this rank's tokens of all heads.

        Args:
            kinds: "q" or "k" per tensor: whose heads and tokens it has.
        """
        me, size = self.ranks.rank, self.ranks.size
        if size == 1:
            return tensors
        sent = [[_heads(t, self._heads(kind, p)) for t, kind in zip(tensors, kinds, strict=True)] for p in range(size)]
        shapes = [
            [(t.shape[0], len(self._heads(kind, me)), self._tokens(kind).counts[p], t.shape[3])
             for t, kind in zip(tensors, kinds, strict=True)]
            for p in range(size)
        ]  # fmt: skip
        parts = zip(*_exchange(self.ranks, sent, shapes), strict=True)
        return [_ordered(torch.cat(part, 2), self._tokens(kind).order) for part, kind in zip(parts, kinds, strict=True)]

    def to_tokens(self, tensors: list[Tensor], kinds: str) -> list[Tensor]:
        """This rank's tokens of all heads, from all tokens of this rank's heads; sums where ranks share a key head."""
        me, size = self.ranks.rank, self.ranks.size
        if size == 1:
            return tensors
        sent = [
            [_ordered(t, self._tokens(kind).places[p]) for t, kind in zip(tensors, kinds, strict=True)]
            for p in range(size)
        ]
        shapes = [
            [(t.shape[0], len(self._heads(kind, p)), self._tokens(kind).counts[me], t.shape[3])
             for t, kind in zip(tensors, kinds, strict=True)]
            for p in range(size)
        ]  # fmt: skip
        parts = zip(*_exchange(self.ranks, sent, shapes), strict=True)
        return [
            torch.cat(part, 1) if kind == "q" else self._summed(part) for part, kind in zip(parts, kinds, strict=True)
        ]

    def _summed(self, parts: tuple[Tensor, ...]) -> Tensor:
        b, _, n, d = parts[0].shape
        total = torch.zeros((b, self.kv_heads, n, d), dtype=wide_of(parts[0].dtype), device=parts[0].device)
        for part, heads in zip(parts, self.kv, strict=True):
            total[:, heads.start : heads.stop] += part
        return total.to(parts[0].dtype)

    def _heads(self, kind: str, rank: int) -> range:
        return (self.heads if kind == "q" else self.kv)[rank]

    def _tokens(self, kind: str) -> Tokens:
        return self.queries if kind == "q" else self.keys


class Exchange(torch.autograd.Function):
    """Tensors by heads, from tensors by tokens, or the way back: each is the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, share: Share, kinds: str, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = share, kinds, not to_heads
        move = share.to_heads if to_heads else share.to_tokens
        return tuple(t.view_as(t) for t in move(list(tensors), kinds))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *cast("tuple[Tensor, ...]", Exchange.apply(*ctx.back, *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise no_tangents("the backward pass of attention over ranks")


leave_out_of_graphs(Exchange.backward)


def _exchange(ranks: Ranks, sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
    """What each rank sent to this one, from what this one sends to each."""
    sizes_in = [sum(t.numel() for t in part) for part in sent]
    each = [[int(np.prod(shape)) for shape in part] for part in shapes]
    sizes_out = [sum(part) for part in each]
    flat = torch.cat([t.reshape(-1) for part in sent for t in part])
    received = torch.empty(sum(sizes_out), dtype=flat.dtype, device=flat.device)
    ranks.wait(ranks.start_all_to_all(received, flat, sizes_out, sizes_in))
    return [
        [t.view(shape) for t, shape in zip(part.split(counts), wanted, strict=True)]
        for part, counts, wanted in zip(received.split(sizes_out), each, shapes, strict=True)
    ]


def _heads(t: Tensor, heads: range) -> Tensor:
    return t[:, heads.start : heads.stop]


def _ordered(t: Tensor, order: Ints) -> Tensor:
    """The tokens in another order; a view where they are consecutive."""
    first = int(order[0]) if len(order) else 0
    if np.array_equal(order, np.arange(first, first + len(order))):
        return t[:, :, first : first + len(order)]
    return t.index_select(2, torch.from_numpy(order).to(t.device))


def _kv(heads: range, group: int) -> range:
    """The key heads of query heads."""
    return range(heads.start // group, (heads.stop - 1) // group + 1) if heads else range(0)


def _union(layout: Layout, ring: int, sharing: int) -> tuple[range, ...]:
    """The positions of all ranks that share heads, as ascending ranges."""
    if layout.ranks == sharing:
        return (range(layout.tokens),) if layout.tokens else ()
    at = np.sort(np.concatenate([layout.indices(ring * sharing + i) for i in range(sharing)]))
    if sharing == 1:
        return layout.positions(ring)
    edges = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
    return tuple(range(int(at[a]), int(at[b - 1]) + 1) for a, b in pairwise(edges) if b > a)


@lru_cache(maxsize=64)
def _tokens(layout: Layout, first: int, sharing: int) -> Tokens:
    return Tokens(layout, first, sharing)
