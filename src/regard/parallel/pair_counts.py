"""The pairs that a mask keeps between the queries of one rank and the keys of another, exactly, without listing pairs.

Where a mask's kept keys are intervals (causal, windows, sinks, packed documents, lengths), each query costs a few
operations of numpy: 10 million tokens take seconds. Other masks are counted from the tiles of their schedule.

The count of |[0, x) and a segment of keys| over many x is two histograms: of the segments that the x fall in, and of
the distances of x from the start of their segment. A kept interval [low, high) is [0, high) less [0, low).
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regard.cost.pairs import Pattern
from regard.describe.interval import Interval
from regard.errors import ProblemError
from regard.parallel.layout import Layout, positions_of

if TYPE_CHECKING:
    from regard.describe.mask import CallSizes, Mask

Ints: TypeAlias = NDArray[np.int64]

CHUNK = 1 << 20
"""Queries counted at once."""


class PairCounts(Protocol):
    """The kept pairs of one call over `tokens` tokens, summed over batch rows and heads that differ in their mask."""

    tokens: int

    def per_key(self, queries: Sequence[range], edges: Ints) -> Ints:
        """int64 [segments]: pairs of these queries with the keys of each segment, edges[i] <= key < edges[i + 1]."""
        ...

    def before(self, positions: Ints) -> Ints:
        """int64, as positions: pairs of all queries before each position."""
        ...


def pair_counts(mask: "Mask | Pattern | None", tokens: int, batch: int = 1, heads: int = 1) -> PairCounts:
    """The counts of a mask over a sequence that attends to itself.

    Args:
        mask: None keeps every pair; a `regard.cost.Pattern` is counted without loading torch.
        batch, heads: of the calls. A mask that differs between them and has no `broadcast_shape`, as a `MaskFunction`
            or one of a user, is counted in this many rows and heads; other masks have their own `broadcast_shape`.

    Raises:
        ProblemError: it is no mask, or does not fit the number of tokens.

    >>> counts = pair_counts(Pattern(), tokens=10)
    >>> counts.per_key([range(5, 10)], np.array([0, 5, 10])).tolist()
    [25, 15]
    """
    if mask is None:
        return IntervalCounts(tokens, [Interval()])
    if isinstance(mask, Pattern):
        return IntervalCounts(tokens, _intervals_of(mask, tokens))
    masks = import_module("regard.describe.mask")
    if not isinstance(mask, masks.Mask):
        raise ProblemError(f"mask is {mask!r}: expected a regard Mask, a regard.cost.Pattern, or None.")
    own_batch, own_heads = masks.broadcast_shape_of(mask)
    sizes: CallSizes = masks.CallSizes(max(own_batch, batch), max(own_heads, heads), tokens, tokens, 0)
    bound = import_module("regard.describe.spec").bound_to(mask, sizes)
    sizes = masks.CallSizes(*masks.broadcast_shape_of(bound), tokens, tokens, 0)
    intervals = masks.intervals_of(bound, sizes)
    if intervals is not None:
        return IntervalCounts(tokens, intervals)
    return import_module("regard.parallel.tile_counts").tile_counts(bound, sizes)


def rank_pairs(counts: PairCounts, layout: Layout) -> Ints:
    """int64 [ranks, ranks]: the kept pairs of rank i's queries with rank j's keys.

    In step s of a ring, rank i has the keys of rank (i - s) % ranks: `step_pairs`.

    >>> rank_pairs(pair_counts(Pattern(), tokens=8), Layout.zigzag(8, 2)).tolist()
    [[10, 8], [8, 10]]
    """
    if layout.tokens != counts.tokens:
        raise ProblemError(f"{layout}, and pair counts of {counts.tokens:,} tokens: expected the same.")
    edges, owners = layout.pieces
    found = np.zeros((layout.ranks, layout.ranks), dtype=np.int64)
    for rank in range(layout.ranks):
        np.add.at(found[rank], owners, counts.per_key(layout.positions(rank), edges))
    return found


def step_pairs(pairs: Ints) -> Ints:
    """int64 [steps, ranks] of `rank_pairs`: what rank i computes in step s, where it has the keys of rank i - s."""
    ranks = len(pairs)
    rank, step = np.arange(ranks), np.arange(ranks)[:, None]
    return pairs[rank, (rank - step) % ranks]


class IntervalCounts:
    """Counts of a mask whose kept keys are a union of intervals.

    Args:
        tokens: how many keys there are.
        offset: position of the first query.
    """

    def __init__(self, tokens: int, intervals: list[Interval], offset: int = 0) -> None:
        self.tokens, self.intervals, self.offset = tokens, intervals, offset
        edges = [edge for each in intervals for edge in each if isinstance(edge, np.ndarray)]
        self.rows = max((len(edge) for edge in edges), default=1)
        self._before: Ints | None = None

    def per_key(self, queries: Sequence[range], edges: Ints) -> Ints:
        found = np.zeros(len(edges) - 1, dtype=np.int64)
        for query in _chunks(queries):
            for low, high in self._kept(query):
                found += inside(high, edges) - inside(low, edges)
        return found

    def sees(self, queries: Sequence[range], edges: Ints) -> NDArray[np.bool_]:
        """bool [segments]: whether any of these queries sees a key of the segment, edges[i] <= key < edges[i + 1]."""
        change = np.zeros(len(edges), dtype=np.int64)  # from a segment to the next, of how many intervals overlap it
        for query in _chunks(queries):
            for low, high in self._kept(query):
                some = low < high
                np.add.at(change, edges.searchsorted(low[some], side="right") - 1, 1)
                np.add.at(change, edges.searchsorted(high[some] - 1, side="right"), -1)
        return change.cumsum()[:-1] > 0

    def before(self, positions: Ints) -> Ints:
        if self._before is None:
            each = [sum(high - low for low, high in self._kept(query)) for query in _chunks([range(self.tokens)])]
            self._before = np.concatenate([[0], *each]).cumsum()
        return self._before[positions]

    def _kept(self, query: Ints) -> Iterator[tuple[Ints, Ints]]:
        """(first key, one past the last) of each query: intervals that do not overlap, of every row."""
        for row in range(self.rows):
            sides = [self._sides(each, row, query) for each in self.intervals]
            if len(sides) > 1:
                order = np.argsort(np.stack([low for low, _ in sides]), axis=0, kind="stable")
                lows = np.take_along_axis(np.stack([low for low, _ in sides]), order, 0)
                highs = np.take_along_axis(np.stack([high for _, high in sides]), order, 0)
                sides = list(zip(lows, highs, strict=True))
            end = np.zeros_like(query)
            for low, high in sides:
                first = np.maximum(low, end)  # what an interval before has is counted there
                end = np.maximum(high, first)
                yield first, end

    def _sides(self, x: Interval, row: int, query: Ints) -> tuple[Ints, Ints]:
        low, high = np.zeros_like(query), np.full_like(query, self.tokens)
        for join, slope, level, edge in ((np.maximum, x.left, x.start, low), (np.minimum, x.right, x.stop, high)):
            if slope is not None:
                join(edge, query + self.offset + _read(slope, row, query), out=edge)
            if level is not None:
                join(edge, _read(level, row, query), out=edge)
            np.clip(edge, 0, self.tokens, out=edge)
        return low, np.maximum(low, high)


def inside(x: Ints, edges: Ints) -> Ints:
    """The sum over x of the tokens that [0, x) has in each segment; edges begin at 0 and end at the last x or later."""
    segments = len(edges) - 1
    at = np.minimum(edges.searchsorted(x, side="right") - 1, segments - 1)
    within = np.bincount(at, weights=x - edges[at], minlength=segments).astype(np.int64)  # exact below 2**53
    beyond = np.bincount(at, minlength=segments)[::-1].cumsum()[::-1]
    return within + np.append(beyond[1:], 0) * np.diff(edges)


def _read(edge: "int | Ints", row: int, query: Ints) -> "int | Ints":
    """An interval's edge for these queries, in one batch row."""
    if not isinstance(edge, np.ndarray):
        return edge
    of_row = edge[row if len(edge) > 1 else 0]
    return of_row[query] if len(of_row) > 1 else of_row


def _chunks(ranges: Sequence[range]) -> Iterator[Ints]:
    """The positions of ranges, at most CHUNK at once."""
    cut = [each[at : at + CHUNK] for each in ranges for at in range(0, len(each), CHUNK)]
    chunk, size = list[range](), 0
    for part in cut:
        if chunk and size + len(part) > CHUNK:
            yield positions_of(chunk)
            chunk, size = [], 0
        chunk.append(part)
        size += len(part)
    if chunk:
        yield positions_of(chunk)


def _intervals_of(pattern: Pattern, tokens: int) -> list[Interval]:
    """A pattern as the intervals of the mask that it describes."""
    right = 1 if pattern.causal else None
    if pattern.chunk:
        starts = np.arange(tokens, dtype=np.int64)[None] // pattern.chunk * pattern.chunk
        return [Interval(right=right, start=starts)]
    if pattern.step > 1:
        raise ProblemError(f"{pattern}: the keys that a dilated query sees are no intervals; pass the mask itself.")
    if pattern.window is None:
        found = [Interval(right=right)]
        return [*found, Interval(stop=pattern.prefix)] if pattern.prefix else found
    kept = [Interval(left=1 - pattern.window, right=right or pattern.window)]
    return [*kept, Interval(right=right, stop=pattern.sinks)] if pattern.sinks else kept
