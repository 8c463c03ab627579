"""The kept pairs of a mask whose intervals are unknown, counted from its schedule; this file loads torch."""

from collections.abc import Sequence

import numpy as np

from regard.describe.mask import CallSizes, Ints, Mask
from regard.parallel.layout import positions_of
from regard.parallel.pair_counts import inside
from regard.plan.schedule import ONES, Schedule
from regard.plan.tiling import cached_schedule

TILE = 64
"""The tile of the schedule."""


def tile_counts(mask: Mask, sizes: CallSizes) -> "TileCounts":
    """The counts of a mask that is bound to a call of these sizes."""
    return TileCounts(cached_schedule(mask, sizes, TILE))


class TileCounts:
    """Counts of a mask from its schedule: FULL tiles by their edges, PARTIAL ones by their bits."""

    def __init__(self, tiles: Schedule) -> None:
        self.tokens, self.tiles = tiles.queries, tiles
        self._before: Ints | None = None

    def per_key(self, queries: Sequence[range], edges: Ints) -> Ints:
        found = np.zeros(len(edges) - 1, dtype=np.int64)
        s = self.tiles
        positions = positions_of(queries)
        tile, first = np.unique(positions // s.tile, return_index=True)
        for t, rows in zip(tile.tolist(), np.split(positions % s.tile, first[1:]), strict=False):
            for m in range(s.maps[0] * s.maps[1]):
                found += self._row(m * s.query_tiles + t, rows, edges)
        return found

    def before(self, positions: Ints) -> Ints:
        if self._before is None:
            found, s = np.zeros(self.tokens + 1, dtype=np.int64), self.tiles
            for t in range(s.maps[0] * s.maps[1] * s.query_tiles):
                first = t % s.query_tiles * s.tile
                each = self._per_query(t)[: self.tokens - first]
                found[first + 1 : first + 1 + len(each)] += each
            self._before = found.cumsum()
        return self._before[positions]

    def _per_query(self, t: int) -> Ints:
        """The pairs of each row of a query tile."""
        s = self.tiles
        runs, patches = (slice(start[t], start[t + 1]) for start in (s.run_start, s.patch_start))
        first = s.run_tile[runs] * s.tile
        full = np.minimum(first + s.run_length[runs] * s.tile, s.keys) - first
        return full.sum() + ONES[s.patterns[s.patch_pattern[patches]]].sum(axis=(0, 2), dtype=np.int64)

    def _row(self, t: int, rows: Ints, edges: Ints) -> Ints:
        """The pairs of some rows of a query tile."""
        s, count = self.tiles, len(rows)
        runs, patches = (slice(start[t], start[t + 1]) for start in (s.run_start, s.patch_start))
        first = s.run_tile[runs] * s.tile
        last = np.minimum(first + s.run_length[runs] * s.tile, s.keys)
        found = count * (inside(last, edges) - inside(first, edges))
        bits = np.unpackbits(s.patterns[s.patch_pattern[patches]][:, rows], axis=2, bitorder="little")
        patch, key = np.nonzero(kept := bits.sum(axis=1, dtype=np.int64))
        at = edges.searchsorted(s.patch_tile[patches][patch] * s.tile + key, side="right") - 1
        np.add.at(found, at, kept[patch, key])
        return found
