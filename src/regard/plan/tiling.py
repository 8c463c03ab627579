"""Making a schedule: in closed form for intervals (`closed_form.py`), else by splitting rectangles.

Calls of few rows or pairs have ways of their own (`few_rows.py`, `few_pairs.py`) to the same schedule.

`mask.bounds` is evaluated for rectangles of tiles, and only those that are undecided are split. All rectangles of a
level are evaluated at once, as arrays, so the cost follows the mask's boundary and not the square of the length. Tiles
that stay undecided are evaluated pair by pair, one tile for each signature (`Mask.signature`).
"""

import numpy as np

from regard.describe.fingerprint import Fingerprint
from regard.describe.interval import FAR, Interval, Union, step_left
from regard.describe.mask import (
    Bools,
    CallSizes,
    Ints,
    Mask,
    Rectangles,
    bounds_of,
    broadcast_shape_of,
    intervals_of,
    marked,
)
from regard.describe.tensors import reads_again, unchanged
from regard.lru_cache import LRUCache
from regard.plan.closed_form import CELLS, Grid, closed_form
from regard.plan.few_pairs import evaluated, few_pairs, has_few_pairs
from regard.plan.few_rows import few_rows, has_few_rows
from regard.plan.schedule import Schedule

CHUNK = 1 << 22
"""Pairs per call of `keep`: making a schedule takes a few times this many bytes of memory."""

KEPT_BYTES = 256 << 20
"""The most bytes of cached schedules."""

_schedules: LRUCache[object, Schedule] = LRUCache(entries=64, nbytes=KEPT_BYTES, size=lambda tiles: tiles.nbytes)
"""Cached schedules by the fingerprint of the mask, so no tensor of a caller is kept alive. A schedule depends on the
mask and the sizes alone: calls of another type or with another bias share it."""


def schedule(mask: Mask | None, *, batch: int, heads: int, queries: int, keys: int, offset: int, tile: int) -> Schedule:
    """The schedule of a mask that is bound to its call (`mask.bind`), or of no mask (None).

    Args:
        offset: position of the first query.
        tile: tokens per side, a multiple of 8.

    >>> from regard import Causal
    >>> s = schedule(Causal(), batch=1, heads=1, queries=256, keys=256, offset=0, tile=64)
    >>> s.tiles, s.pairs, len(s.patterns)
    ((6, 4, 6), 32896, 1)
    """
    shape = (1, 1) if mask is None else broadcast_shape_of(mask)
    if not batch * heads:
        mask, shape = None, (1, 1)
    maps = (batch if shape[0] > 1 else 1, heads if shape[1] > 1 else 1)
    grid = Grid(batch, heads, queries, keys, offset, tile, maps)
    intervals = _intervals(mask, grid)
    if intervals is None:
        if mask is not None and has_few_pairs(mask, grid):
            return few_pairs(mask, grid)
        return split_recursively(mask, grid)
    return few_rows(intervals, grid) if has_few_rows(intervals, grid) else closed_form(intervals, grid)


def cached_schedule(mask: Mask | None, sizes: CallSizes, tile: int) -> Schedule:
    """`schedule`, from a cache where the fingerprint of the mask tells when the mask changes."""
    content = None if mask is None else mask.fingerprint()
    key = (content, tile, *sizes)
    tiles = _schedules.get(key)
    if tiles is None:
        with unchanged():
            tiles = schedule(mask, tile=tile, **sizes._asdict())
        if mask is None or is_still(mask, content):
            _schedules.put(key, tiles)
    return tiles


def is_still(mask: Mask, content: Fingerprint | None) -> bool:
    """Whether a result of this mask may be cached by its fingerprint, which was taken before."""
    if content is None or not content.is_cacheable:
        return False
    return content.is_constant or reads_again(mask.fingerprint, content)


def forget_schedules() -> None:
    """Forget every schedule."""
    _schedules.clear()


def _intervals(mask: Mask | None, grid: Grid) -> Union:
    """The kept keys as intervals; None where the closed form is not used, as for edges that move to the left."""
    if (
        not grid.queries
        or not grid.keys
        or grid.maps[1] > 1
        or grid.rows * grid.across > CELLS
        or abs(grid.offset) > FAR
    ):
        return None
    sizes = CallSizes(grid.batch, grid.heads, grid.queries, grid.keys, grid.offset)
    union = [Interval()] if mask is None else intervals_of(mask, sizes)
    return None if union is None or any(map(step_left, union)) else union


def split_recursively(mask: Mask | None, grid: Grid) -> Schedule:
    """The schedule of any mask."""
    full, undecided = _split(mask, grid)
    sure, partial, pattern_of, patterns = _patterns(mask, grid, undecided)
    run_start, run_tile, run_length = _runs(grid, np.concatenate([_row_runs(full), sure]))
    order = np.lexsort((partial[:, 1], partial[:, 0]))
    patch_start = np.searchsorted(partial[order, 0], np.arange(grid.rows + 1))
    return Schedule(
        grid.batch, grid.heads, grid.queries, grid.keys, grid.offset, grid.tile, grid.maps,
        run_start, run_tile, run_length, patch_start, partial[order, 1], pattern_of[order], patterns,
    )  # fmt: skip


def _split(mask: Mask | None, grid: Grid) -> tuple[Ints, Ints]:
    """(rectangles of tiles that are all kept, single tiles that are undecided), as [n, (map, q0, q1, k0, k1)]."""
    maps = np.arange(grid.maps[0] * grid.maps[1])
    cells = np.stack([maps, 0 * maps, 0 * maps + grid.down, 0 * maps, 0 * maps + grid.across], axis=1)
    if not grid.down or not grid.across:
        cells = cells[:0]
    if mask is None:
        return cells, cells[:0]
    full, undecided = [cells[:0]], [cells[:0]]
    while len(cells):
        some, every = bounds_of(mask, _positions(grid, cells))
        full.append(cells[every])
        cells = cells[some & ~every]
        single = (cells[:, 2] - cells[:, 1] == 1) & (cells[:, 4] - cells[:, 3] == 1)
        undecided.append(cells[single])
        cells = _quarters(cells[~single])
    return np.concatenate(full), np.concatenate(undecided)


def _positions(grid: Grid, cells: Ints) -> Rectangles:
    """Rectangles of tiles [n, (map, q0, q1, k0, k1)] as rectangles of positions."""
    m, q0, q1, k0, k1 = cells.T
    top, bottom = q0 * grid.tile, np.minimum(q1 * grid.tile, grid.queries)
    left, right = k0 * grid.tile, np.minimum(k1 * grid.tile, grid.keys)
    return Rectangles(m // grid.maps[1], m % grid.maps[1], top + grid.offset, bottom + grid.offset, left, right)


def _quarters(cells: Ints) -> Ints:
    """Each rectangle split in two along each axis that is longer than a tile."""
    for low, high in ((1, 2), (3, 4)):
        middle = (cells[:, low] + cells[:, high] + 1) // 2
        first, second = cells.copy(), cells[cells[:, high] - cells[:, low] > 1]
        first[:, high] = middle
        second[:, low] = middle[cells[:, high] - cells[:, low] > 1]
        cells = np.concatenate([first, second])
    return cells


def _row_runs(rectangles: Ints) -> Ints:
    """Rectangles of tiles as runs [n, (map, row of tiles, first tile, tiles)], one for every row they span."""
    height = rectangles[:, 2] - rectangles[:, 1]
    rows = np.repeat(rectangles, height, axis=0)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(height) - height, height)
    return np.stack([rows[:, 0], rows[:, 1] + within, rows[:, 3], rows[:, 4] - rows[:, 3]], axis=1)


def _runs(grid: Grid, runs: Ints) -> tuple[Ints, Ints, Ints]:
    """Runs [n, (map, row of tiles, first tile, tiles)] in compressed sparse rows, neighbours merged."""
    row = runs[:, 0] * grid.down + runs[:, 1]
    order = np.lexsort((runs[:, 2], row))
    row, first, length = row[order], runs[order, 2], runs[order, 3]
    head = np.ones(len(row), dtype=bool)
    head[1:] = (row[1:] != row[:-1]) | (first[1:] != first[:-1] + length[:-1])
    starts = np.flatnonzero(head)
    lengths = np.add.reduceat(length, starts) if len(starts) else length
    return np.searchsorted(row[starts], np.arange(grid.rows + 1)), first[starts], lengths


def _patterns(mask: Mask | None, grid: Grid, cells: Ints) -> tuple[Ints, Ints, Ints, np.ndarray]:
    """Evaluate the undecided tiles, one per signature.

    Returns: runs of the tiles that are full after all, the PARTIAL tiles [n, (row, key tile)], their patterns'
        indices, the patterns.
    """
    nothing = np.zeros((0, grid.tile, grid.tile // 8), dtype=np.uint8)
    if mask is None or not len(cells):
        return np.zeros((0, 4), np.int64), np.zeros((0, 2), np.int64), np.zeros(0, np.int64), nothing
    r = _positions(grid, cells)
    edges = np.stack([r.q1 - r.q0, r.k1 - r.k0], axis=1)
    representative, group = _distinct(np.concatenate([marked(mask, r), edges], axis=1))
    bits, kept = _bits(mask, grid, Rectangles(*(side[representative] for side in r)))
    area = edges[representative].prod(axis=1)
    sure, partial = cells[(kept == area)[group]], (kept > 0) & (kept < area)
    chosen, number = _distinct(bits[partial].reshape(-1, grid.tile**2 // 8))
    pattern_of = np.full(len(bits), -1)
    pattern_of[partial] = number
    at = partial[group]
    runs = np.stack([sure[:, 0], sure[:, 1], sure[:, 3], np.ones(len(sure), np.int64)], axis=1)
    places = np.stack([cells[at, 0] * grid.down + cells[at, 1], cells[at, 3]], axis=1)
    return runs, places, pattern_of[group[at]], bits[partial][chosen]


def _distinct(rows: np.ndarray) -> tuple[Ints, Ints]:
    """(the first of each kind of row, the kind of each row): rows compared as bytes."""
    rows = np.ascontiguousarray(rows)
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    _, first, kind = np.unique(
        rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))), return_index=True, return_inverse=True
    )
    return first, kind.reshape(-1)


def _bits(mask: Mask, grid: Grid, r: Rectangles) -> tuple[np.ndarray, Ints]:
    """The patterns of tiles, packed, and how many pairs each keeps."""
    step = max(1, CHUNK // grid.tile**2)
    packed, kept = [], []
    for start in range(0, len(r.b), step):
        pattern = _evaluate(mask, grid.tile, Rectangles(*(side[start : start + step] for side in r)))
        packed.append(np.packbits(pattern, axis=2, bitorder="little"))
        kept.append(pattern.sum(axis=(1, 2), dtype=np.int64))
    return np.concatenate(packed), np.concatenate(kept)


def _evaluate(mask: Mask, tile: int, r: Rectangles) -> Bools:
    """`keep` of every pair of every tile, bool [tiles, tile, tile]; False beyond the edges of the call."""
    steps = np.arange(tile)
    b, h, q0, q1, k0, k1 = (side[:, None, None] for side in r)
    q, k = q0 + steps[:, None], k0 + steps
    kept = evaluated(mask, b, h, np.minimum(q, q1 - 1), np.minimum(k, k1 - 1))
    if (q1 - q0 == tile).all() and (k1 - k0 == tile).all():
        return np.broadcast_to(kept, (len(b), tile, tile))
    return kept & (q < q1) & (k < k1)
