"""Schedules in closed form for calls of few query tiles, in plain integers.

The same arithmetic as in `closed_form.py`. For one decoded token or a short prompt, the fixed costs of some 50 calls of
numpy exceed the work: integers take a fifth of the time.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from regard.describe.interval import Interval
from regard.describe.mask import CallSizes
from regard.plan.closed_form import Cells, Grid, bits_of, draw_tiles, is_by_query
from regard.plan.schedule import Schedule

ROWS = 12
"""The most query tiles, over all maps."""

FEW_QUERIES = 12
"""Tiles of more queries are drawn by numpy."""

_NO_MAP = np.zeros(1, np.int64)


class _Edges(NamedTuple):
    """An interval of one map in integers; None is no limit."""

    left: int | None
    right: int | None
    start: int | None
    stop: int | None

    def low(self, q: int, keys: int) -> int:
        """The first key of the query at position q, 0 to `keys`."""
        found = 0 if self.left is None else q + self.left
        if self.start is not None and self.start > found:
            found = self.start
        return 0 if found < 0 else min(found, keys)

    def high(self, q: int, keys: int) -> int:
        """One past the last key."""
        found = keys if self.right is None else q + self.right
        if self.stop is not None and self.stop < found:
            found = self.stop
        return 0 if found < 0 else min(found, keys)


class _Tile(NamedTuple):
    """A key tile that is neither covered nor out of reach: its first query and key, and its bits."""

    tile: int
    bits: bytes


def cover(intervals: list[Interval], sizes: CallSizes) -> bool:
    """Whether one interval, the same for all batch rows and queries, surely has every key of every query."""
    first, last, keys = sizes.offset, sizes.positions - 1, sizes.keys
    plain = [_of_map(x, 0) for x in intervals if not any(isinstance(edge, np.ndarray) for edge in x)]
    return any(x.low(last, keys) == 0 and x.high(first, keys) == keys for x in plain)


def has_few_rows(intervals: list[Interval], grid: Grid) -> bool:
    """Whether `few_rows` takes the call."""
    return grid.rows <= ROWS and not is_by_query(intervals)


def few_rows(intervals: list[Interval], grid: Grid) -> Schedule:
    """The schedule of a call, of at least one query and key, that keeps a union of intervals for all heads."""
    run_start = [0]
    run_tile: list[int] = []
    run_length: list[int] = []
    patch_start, patches = [0], list[_Tile]()
    for m in range(grid.maps[0]):
        union = [_of_map(x, m) for x in intervals]
        for first in range(0, grid.queries, grid.tile):
            runs, mixed = _row(union, grid, first)
            for start, stop in runs:
                run_tile.append(start)
                run_length.append(stop - start)
            patches += mixed
            run_start.append(len(run_tile))
            patch_start.append(len(patches))
    index = {bits: i for i, bits in enumerate(sorted({patch.bits for patch in patches}))}
    patterns = np.frombuffer(b"".join(index), np.uint8).reshape(-1, grid.tile, grid.tile // 8)
    each = run_start, run_tile, run_length, patch_start, [x.tile for x in patches], [index[x.bits] for x in patches]
    lists, ends = np.array([n for one in each for n in one], dtype=np.int64), [0, *accumulate(map(len, each))]
    a, b, c, d, e, f = (lists[start:end] for start, end in pairwise(ends))
    schedule = Schedule(
        grid.batch, grid.heads, grid.queries, grid.keys, grid.offset, grid.tile, grid.maps, a, b, c, d, e, f, patterns
    )
    schedule.__dict__["lists"] = lists  # as `Schedule.lists` would copy them
    if index:
        transposed = [_transposed(bits, grid.tile) for bits in index]
        schedule.__dict__["transposed_patterns"] = transposed[0] if len(transposed) == 1 else np.concatenate(transposed)
    return schedule


@lru_cache(maxsize=1024)
def _transposed(bits: bytes, tile: int) -> np.ndarray:
    """`Schedule.transposed_patterns` of one pattern: a window in a decoding loop has it again every `tile` tokens."""
    rows = np.unpackbits(np.frombuffer(bits, np.uint8).reshape(tile, tile // 8), axis=1, bitorder="little")
    transposed = np.packbits(rows.T, axis=1, bitorder="little")[None]
    transposed.flags.writeable = False
    return transposed


def _of_map(x: Interval, m: int) -> _Edges:
    return _Edges(*[int(e[m if len(e) > 1 else 0, 0]) if isinstance(e, np.ndarray) else e for e in x])


def _row(union: list[_Edges], grid: Grid, first: int) -> tuple[list[tuple[int, int]], list[_Tile]]:
    """(runs of FULL tiles, from and to; PARTIAL tiles) of the query tile that begins at query `first`."""
    tile, keys = grid.tile, grid.keys
    q0 = first + grid.offset
    q1 = min(first + tile, grid.queries) - 1 + grid.offset
    reached, covered = list[tuple[int, int]](), list[tuple[int, int]]()
    for x in union:
        start, stop = x.low(q0, keys) // tile, -(-x.high(q1, keys) // tile)
        if start < stop:
            reached.append((start, stop))
            start, stop = -(-x.low(q1, keys) // tile), x.high(q0, keys)
            stop = grid.across if stop == keys else stop // tile  # the last tile of keys may be cut
            if start < stop:
                covered.append((start, stop))
    undecided = sorted({t for start, stop in reached for t in _outside(start, stop, covered)})
    mixed = list[_Tile]()
    for t in undecided:
        bits = _bits(union, grid, first, t * tile)
        kept = int.from_bytes(bits, "little").bit_count()
        if kept == (q1 - q0 + 1) * min(tile, keys - t * tile):
            covered.append((t, t + 1))
        elif kept:
            mixed.append(_Tile(t, bits))
    return _merge(covered), mixed


def _outside(start: int, stop: int, covered: list[tuple[int, int]]) -> list[int]:
    """The tiles from `start` to `stop` that are not covered."""
    left = [(start, stop)]
    for a, b in covered:
        left = [(x, y) for s, e in left for x, y in ((s, min(e, a)), (max(s, b), e)) if x < y]
    return [t for s, e in left for t in range(s, e)]


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of the ranges, in order, neighbours joined."""
    merged = list[tuple[int, int]]()
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _bits(union: list[_Edges], grid: Grid, query: int, key: int) -> bytes:
    """The bits of a tile, from the cache if a tile of its kind was drawn before."""
    tile, corner = grid.tile, query - key + grid.offset
    kind = [-tile if d < -tile else min(d, tile) for x in union for e in x[:2] if e is not None for d in (corner + e,)]
    levels = [e - key for x in union for e in x[2:] if e is not None]
    levels += (grid.queries - query, grid.keys - key)
    kind += [0 if d < 0 else min(d, tile) for d in levels]
    name = ((tile, *[edge is None for x in union for edge in x]), tuple(kind))
    bits = bits_of.get(name)
    if bits is None:
        if min(tile, grid.queries - query) > FEW_QUERIES:
            (bits,) = draw_tiles(
                [Interval(*x) for x in union], grid, Cells(_NO_MAP, np.array([query]), np.array([key]))
            )
        else:
            bits = _draw(union, grid, query, key)
        bits_of.put(name, bits)
    return bits


def _draw(union: list[_Edges], grid: Grid, query: int, key: int) -> bytes:
    rows = list[bytes]()
    for q in range(query + grid.offset, min(query + grid.tile, grid.queries) + grid.offset):
        row = 0
        for x in union:
            low, high = (min(max(edge - key, 0), grid.tile) for edge in (x.low(q, grid.keys), x.high(q, grid.keys)))
            if low < high:
                row |= (1 << high) - (1 << low)
        rows.append(row.to_bytes(grid.tile // 8, "little"))
    return b"".join(rows).ljust(grid.tile**2 // 8, b"\0")
