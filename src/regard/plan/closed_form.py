"""Schedules in closed form, for masks whose kept keys are a union of few intervals per query (`Mask.intervals`).

No edge of an interval moves to the left from a query to the next. So the first and the last query of a query tile
determine which key tiles an interval reaches and which it covers. A tile that is reached but not covered has a *kind*,
the distances of the edges from its corner, which determines its bits; bits are cached by kind.

`tiling.py` computes the same schedule by recursive splitting, for any mask. The closed form takes some 50 calls of
numpy on small arrays, which makes schedules of short calls fast.
"""

from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np

from regard.describe.interval import FAR, Edge, Interval
from regard.describe.mask import Bools, Ints
from regard.lru_cache import LRUCache
from regard.plan.schedule import Schedule

CELLS = 1 << 16
"""The most tiles of a call in closed form, since each tile has an array entry; larger calls are split recursively."""

BELOW = np.tri(257, 256, -1, dtype=bool)
"""Row n is True below n: indexing rows takes a tenth of the time of comparisons."""


bits_of: LRUCache[object, bytes] = LRUCache(entries=4096, nbytes=4 << 20, size=len)
"""The bits of a tile, by its kind."""


class Grid(NamedTuple):
    """The tiles of a call.

    Attributes:
        maps: count of different maps along the batch and along the heads.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    offset: int
    tile: int
    maps: tuple[int, int]

    @property
    def down(self) -> int:
        """Tiles of queries."""
        return -(-self.queries // self.tile)

    @property
    def across(self) -> int:
        """Tiles of keys."""
        return -(-self.keys // self.tile)

    @property
    def rows(self) -> int:
        """Tiles of queries, over all maps."""
        return self.maps[0] * self.maps[1] * self.down


class Cells(NamedTuple):
    """Tiles whose bits are computed: map, and index in the call of the first query and key; arrays of equal length."""

    m: Ints
    query: Ints
    key: Ints


def closed_form(intervals: list[Interval], grid: Grid) -> Schedule:
    """The schedule of a call, of at least one query and key, that keeps a union of intervals for all heads."""
    intervals = [Interval(*(_near(edge, grid.maps[0]) for edge in x)) for x in intervals]
    covered, at = _covered_and_mixed(intervals, grid)
    row, column = np.divmod(at, grid.across)
    if not len(at):
        return schedule_of(grid, covered, row, column, [])
    m, t = np.divmod(row, grid.down)
    cells = Cells(m, t * grid.tile, column * grid.tile)
    bits = draw_tiles(intervals, grid, cells) if is_by_query(intervals) else _by_kind(intervals, grid, cells)
    count = {b: int.from_bytes(b, "little").bit_count() for b in set(bits)}
    kept = np.array([count[b] for b in bits])
    area = np.minimum(grid.queries - cells.query, grid.tile) * np.minimum(grid.keys - cells.key, grid.tile)
    some = (kept > 0) & (kept < area)
    if not some.all():
        covered.ravel()[at[kept == area]] = True
        row, column, bits = row[some], column[some], [b for b, mixed in zip(bits, some.tolist(), strict=True) if mixed]
    return schedule_of(grid, covered, row, column, bits)


def _near(edge: Edge, rows: int) -> Edge:
    """The edge, cut to the distance FAR, or to the first batch rows where the call has fewer than the mask."""
    if isinstance(edge, np.ndarray):
        return edge[:rows]
    return edge if edge is None else max(-FAR, min(edge, FAR))


def _covered_and_mixed(intervals: list[Interval], grid: Grid) -> tuple[Bools, Ints]:
    """(whether an interval covers the tile, [maps, query tiles, key tiles]; flat indices of those it only reaches)."""
    tile, across = grid.tile, grid.across
    first = np.arange(0, grid.queries, tile)  # of each query tile, as an index of the call
    last = np.minimum(first + (tile - 1), grid.queries - 1)
    reached, covered = np.zeros((2, grid.maps[0], grid.down, across), dtype=bool)
    for x in intervals:
        low, high = _lower(x, grid, first), _upper(x, grid, last)
        reached |= _below(-(-high // tile), across) > _below(low // tile, across)
        low, high = _lower(x, grid, last), _upper(x, grid, first)
        high = np.where(high == grid.keys, across, high // tile)  # the last tile of keys may be cut
        covered |= _below(high, across) > _below(-(-low // tile), across)
    return covered, np.greater(reached, covered).ravel().nonzero()[0]


def _lower(x: Interval, grid: Grid, query: Ints, m: Ints | None = None) -> Ints:
    """The first key of an interval.

    Args:
        query: queries, as indices of the call: [queries], or with a map for each row [n, queries].
        m: the map of each row; None for every map.

    Returns:
        Keys 0 to `grid.keys`, broadcastable to [maps, queries] or [n, queries].
    """
    return _edge(np.maximum, x.left, x.start, grid, query, m, 0)


def _upper(x: Interval, grid: Grid, query: Ints, m: Ints | None = None) -> Ints:
    """One past the last key of an interval; see `_lower`."""
    return _edge(np.minimum, x.right, x.stop, grid, query, m, grid.keys)


def _edge(join: np.ufunc, slope: Edge, level: Edge, grid: Grid, query: Ints, m: Ints | None, limit: int) -> Ints:
    sloped = None if slope is None else query + grid.offset + _read(slope, query, m)
    edge = limit if level is None else _read(level, query, m)
    edge = edge if sloped is None else sloped if level is None else join(sloped, edge)
    return np.minimum(np.maximum(edge, 0), grid.keys)


def _read(edge: Edge, query: Ints, m: Ints | None) -> int | Ints:
    """The edge of these queries, broadcastable to them."""
    if not isinstance(edge, np.ndarray):
        return edge or 0
    if m is not None:
        row = m[:, None] if len(edge) > 1 else 0
        return edge[row, query if edge.shape[1] > 1 else 0]
    return edge[:, query] if edge.shape[1] > 1 else edge


def _below(edge: Ints, across: int) -> Bools:
    """[..., across]: whether the index of a tile is less than the edge."""
    return BELOW[edge, :across] if across <= BELOW.shape[1] else np.arange(across) < np.asarray(edge)[..., None]


def is_by_query(intervals: list[Interval]) -> bool:
    """Whether an edge differs from query to query by more than its position."""
    return any(isinstance(edge, np.ndarray) and edge.shape[1] > 1 for x in intervals for edge in x)


def _by_kind(intervals: list[Interval], grid: Grid, cells: Cells) -> list[bytes]:
    """The bits of every tile; computed once for each kind that is not cached."""
    tile, (m, query, key) = grid.tile, cells
    corner = query - key + grid.offset
    slopes = [corner + _of_map(e, m) for x in intervals for e in (x.left, x.right) if e is not None]
    levels = [_of_map(e, m) - key for x in intervals for e in (x.start, x.stop) if e is not None]
    levels += [grid.queries - query, grid.keys - key]
    columns = [np.minimum(np.maximum(c, low), tile) for group, low in ((slopes, -tile), (levels, 0)) for c in group]
    form = (tile, *(edge is None for x in intervals for edge in x))
    kinds = list(zip(*(column.tolist() for column in columns), strict=True))
    bits = {kind: bits_of.get((form, kind)) for kind in dict.fromkeys(kinds)}
    missing = [kind for kind, found in bits.items() if found is None]
    if missing:
        at = [kinds.index(kind) for kind in missing]
        for kind, drawn in zip(missing, draw_tiles(intervals, grid, Cells(m[at], query[at], key[at])), strict=True):
            bits[kind] = drawn
            bits_of.put((form, kind), drawn)
    return [cast(bytes, bits[kind]) for kind in kinds]


def _of_map(edge: int | Ints, m: Ints) -> int | Ints:
    return edge[m if len(edge) > 1 else 0, 0] if isinstance(edge, np.ndarray) else edge


def draw_tiles(intervals: list[Interval], grid: Grid, cells: Cells) -> list[bytes]:
    """The bits of every tile, from the edges of each of its queries."""
    table, steps = _first_bits(grid.tile), np.arange(grid.tile)
    query, key = cells.query[:, None] + steps, cells.key[:, None]
    inside = np.minimum(query, grid.queries - 1)
    bits = np.zeros((*query.shape, *table.shape[1:]), table.dtype)
    for x in intervals:
        low, high = (side(x, grid, inside, cells.m) - key for side in (_lower, _upper))
        low, high = (np.minimum(np.maximum(edge, 0), grid.tile) for edge in (low, high))
        bits |= table[high] & ~table[low]
    if grid.queries % grid.tile:  # nothing is kept below the last query
        bits[query >= grid.queries] = 0
    raw, size = bits.tobytes(), grid.tile**2 // 8
    return [raw[i : i + size] for i in range(0, len(raw), size)]


@lru_cache
def _first_bits(tile: int) -> np.ndarray:
    """[tile + 1, uint64s]: the packed bits, least first, of a row of a tile that keeps its first n keys."""
    rows = np.packbits(np.tri(tile + 1, tile, -1, dtype=bool), axis=1, bitorder="little")
    return rows.view(np.uint64) if tile % 64 == 0 else rows


def schedule_of(grid: Grid, covered: Bools, row: Ints, column: Ints, bits: list[bytes]) -> Schedule:
    """The schedule with these FULL tiles, and PARTIAL ones with their bits."""
    starts = np.arange(grid.rows + 1)
    width = grid.across + 1  # one more column, False, ends the runs of a row
    padded = np.zeros(grid.rows * width + 1, dtype=bool)
    padded[1:].reshape(grid.rows, width)[:, :-1] = covered.reshape(grid.rows, -1)
    changes = (padded[1:] != padded[:-1]).nonzero()[0]
    run_row, run_tile = np.divmod(changes[::2], width)
    index = {b: i for i, b in enumerate(sorted(set(bits)))}
    patterns = np.frombuffer(bytearray().join(index), np.uint8).reshape(-1, grid.tile, grid.tile // 8)
    return Schedule(
        grid.batch, grid.heads, grid.queries, grid.keys, grid.offset, grid.tile, grid.maps,
        run_row.searchsorted(starts), run_tile, changes[1::2] - changes[::2],
        row.searchsorted(starts), column, np.array([index[b] for b in bits], dtype=np.int64), patterns,
    )  # fmt: skip
