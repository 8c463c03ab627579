"""Which blocks of keys travel where: known to every rank without communication, since every rank knows all positions.

The *block* of a rank is its keys and values. At step s, blocks have travelled s hops: up the ring (to rank + 1) or
down. A block goes as far as the last rank that needs it, and around no part of the ring where no rank does: of the
ranks that do not need it, the longest run is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regard.parallel.layout import Layout
from regard.parallel.pair_counts import IntervalCounts

if TYPE_CHECKING:
    from regard.describe.mask import Bools, Ints, Mask

MOST = 64
"""Ranges of a rank that are examined on their own; of more, several are taken for one where no intervals are known."""


class Visit(NamedTuple):
    """A block on a rank.

    Attributes:
        origin: the rank whose block it is.
        way: 1 if the block comes from the rank below and goes on to the rank above, -1 for the reverse.
        goes_on: whether the block goes on to the next rank.
        is_needed: whether the rank computes with it.
    """

    origin: int
    way: int
    goes_on: bool
    is_needed: bool


@dataclass(frozen=True)
class Route:
    """The way of every block.

    Attributes:
        needs: [rank, origin]: whether the queries of the rank see keys of the origin.

    >>> Route(np.tri(3, dtype=bool)).up, Route(np.tri(3, dtype=bool)).down
    ((2, 1, 0), (0, 0, 0))
    """

    needs: "Bools"

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.needs)

    @property
    def up(self) -> tuple[int, ...]:
        """How many hops the block of each rank goes up."""
        return tuple(up for up, _ in self._hops)

    @property
    def down(self) -> tuple[int, ...]:
        """How many hops the block of each rank goes down."""
        return tuple(down for _, down in self._hops)

    @cached_property
    def steps(self) -> int:
        """The hops of the block that goes farthest."""
        return max(map(max, self._hops), default=0)

    @cached_property
    def _hops(self) -> tuple[tuple[int, int], ...]:
        n = self.ranks
        return tuple(_hops([bool(self.needs[(o + d) % n, o]) for d in range(1, n)]) for o in range(n))

    def visits(self, rank: int, step: int) -> list[Visit]:
        """The blocks on a rank after `step` hops, in the order in which their states are merged; `step` >= 1."""
        found: list[Visit] = []
        for way, hops in ((1, self.up), (-1, self.down)):
            origin = (rank - way * step) % self.ranks
            if step <= hops[origin]:
                found.append(Visit(origin, way, step < hops[origin], bool(self.needs[rank, origin])))
        return found


class RingSteps(NamedTuple):
    """What each rank computes and sends at each step of a ring; [steps, ranks].

    Attributes:
        pairs: pairs that are computed.
        read: tokens whose keys and values are computed with.
        sent: tokens whose keys and values are sent.
    """

    pairs: "Ints"
    read: "Ints"
    sent: "Ints"


def ring_steps(pairs: "Ints", counts: Sequence[int]) -> RingSteps:
    """The steps of a ring in which a block of keys goes no farther than it is needed.

    Args:
        pairs: [ranks, ranks] of `rank_pairs`.
        counts: tokens of each rank.

    >>> causal = np.array([[3, 0], [4, 3]])  # 4 tokens, contiguous: rank 0 needs nothing of rank 1
    >>> ring_steps(causal, (2, 2)).sent.tolist()
    [[2, 0], [0, 0]]
    """
    route, tokens, rank = Route(pairs > 0), np.array(counts, dtype=np.int64), np.arange(len(counts))
    up, down = np.array(route.up), np.array(route.down)
    steps = RingSteps(*np.zeros((3, route.steps + 1, len(counts)), dtype=np.int64))
    own = pairs.diagonal()
    steps.pairs[0], steps.read[0], steps.sent[0] = own, tokens * (own > 0), tokens * ((up > 0).astype(int) + (down > 0))
    for step in range(1, route.steps + 1):
        for way, hops in ((1, up), (-1, down)):
            origin = (rank - way * step) % len(counts)
            arrived = np.where(hops[origin] >= step, pairs[rank, origin], 0)
            steps.pairs[step] += arrived
            steps.read[step] += tokens[origin] * (arrived > 0)
            steps.sent[step] += tokens[origin] * (hops[origin] > step)
    return steps


def needs_of(mask: "Mask | None", queries: Layout, keys: Layout, offset: int, maps: tuple[int, int]) -> "Bools":
    """[rank, origin]: whether the queries of a rank may see keys of the origin.

    By the bounds of the mask for the ranges of ranks. Where a rank has more than `MOST`, and the kept keys are
    intervals: exact, query by query, as `IntervalCounts` counts, which takes 0.1 s for a million queries.

    Args:
        mask: bound to the sequence.
        offset: position of the first query of the sequence.
        maps: batch rows and heads in which the mask differs.
    """
    needs = np.outer(np.array(queries.counts) > 0, np.array(keys.counts) > 0)
    if mask is None or not needs.any() or 0 in maps:  # an empty batch has no bounds
        return needs
    sees = np.zeros_like(needs)
    masks = import_module("regard.describe.mask")  # here: costs are counted before torch is loaded
    many = any(len(runs) > MOST for layout in (queries, keys) for runs in layout.runs)
    sizes = masks.CallSizes(*maps, queries.tokens, keys.tokens, offset)
    if many and (intervals := masks.intervals_of(mask, sizes)) is not None:
        counts, (edges, owners) = IntervalCounts(keys.tokens, intervals, offset), keys.pieces
        for rank in range(queries.ranks):
            sees[rank, owners[counts.sees(queries.positions(rank), edges)]] = True
        return sees
    columns = _hulls(keys)
    b, h, at = (index.ravel() for index in np.indices((*maps, len(columns))))
    for rank, start, stop in _hulls(queries).tolist():
        first, last = (np.full(len(at), edge + offset) for edge in (start, stop))
        some, _ = mask.bounds(masks.Rectangles(b, h, first, last, columns[at, 1], columns[at, 2]))
        sees[rank, columns[at[some], 0]] = True
    return needs & sees


def _hulls(layout: Layout) -> "Ints":
    """Ranges of positions (the rank, the first position, one past the last), [ranges, 3]; neighbours as one."""
    rows: list[tuple[int, int, int]] = []
    for rank in range(layout.ranks):
        ranges = [r for r in layout.positions(rank) if r]
        several = -(-len(ranges) // MOST)
        groups = [ranges[at : at + several] for at in range(0, len(ranges), several or 1)]
        rows += [(rank, group[0][0], group[-1][-1] + 1) for group in groups]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _hops(needed: Sequence[bool]) -> tuple[int, int]:
    """(hops up, hops down) to reach all ranks that need a block.

    Args:
        needed: whether the rank at distance 1, 2 ... up the ring needs it.

    >>> _hops([True, False, False, True]), _hops([True, True]), _hops([False])
    ((1, 1), (2, 0), (0, 0))
    """
    stops = [0, *(d + 1 for d, need in enumerate(needed) if need), len(needed) + 1]
    gaps = [b - a for a, b in pairwise(stops)]
    widest = len(gaps) - 1 - int(np.argmax(gaps[::-1]))  # the last of equals: then blocks go up
    return stops[widest], len(needed) + 1 - stops[widest + 1]
