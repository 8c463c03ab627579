"""The schedule: which tiles of the queries x keys rectangle are computed, and how.

For every tile of queries it lists runs of consecutive FULL key tiles (every pair kept, no mask needed) and PARTIAL
key tiles, each with the index of its bit pattern; equal patterns are stored once. Tiles that are not listed have no
kept pair. A schedule depends on the mask, not on a backend: backends, costs and rings take their loops from it.
`tiling.py` makes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from regard.describe.mask import Ints

ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
"""How many bits of each byte are set."""


class Span(NamedTuple):
    """Consecutive FULL key tiles of a query tile: keys start <= k < stop, kept by every query of the tile."""

    start: int
    stop: int


class Patch(NamedTuple):
    """A PARTIAL key tile: keys start <= k < stop, and the index of its pattern in `Schedule.patterns`."""

    start: int
    stop: int
    pattern: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """The tiles of a call.

    Batch rows and heads with the same mask share a map: there are `maps[0] * maps[1]` of them. The query tiles of all
    maps are counted one after another. Query tile t has the runs `run_start[t]` to `run_start[t + 1]` of FULL tiles and
    the patches `patch_start[t]` to `patch_start[t + 1]` of PARTIAL ones, in order of keys (compressed sparse rows).

    Attributes:
        batch, heads, queries, keys, offset: the call.
        tile: tokens per side of a tile.
        maps: (1 or batch, 1 or heads).
        run_start, run_tile, run_length: [query tiles + 1], [runs], [runs]; in key tiles.
        patch_start, patch_tile, patch_pattern: [query tiles + 1], [patches], [patches].
        patterns: packed bits, uint8 [patterns, tile, tile / 8], least bit first; 0 beyond the edges of the call.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    offset: int
    tile: int
    maps: tuple[int, int]
    run_start: Ints
    run_tile: Ints
    run_length: Ints
    patch_start: Ints
    patch_tile: Ints
    patch_pattern: Ints
    patterns: np.ndarray

    @property
    def query_tiles(self) -> int:
        """Tiles of queries in each map."""
        return -(-self.queries // self.tile)

    @cached_property
    def pairs(self) -> int:
        """Kept pairs of query and key, exactly, over all batch rows and heads."""
        bits = ONES[self.patterns].sum(axis=(1, 2), dtype=np.int64)
        return (self._full_pairs + int(bits[self.patch_pattern].sum())) * self.shared

    @cached_property
    def covered(self) -> int:
        """Pairs inside the listed tiles, over all batch rows and heads: the work of a backend of whole tiles."""
        patched = np.repeat(self._rows, np.diff(self.patch_start)) * self._patch_keys
        return (self._full_pairs + int(patched.sum())) * self.shared

    @cached_property
    def tiles(self) -> tuple[int, int, int]:
        """(full, partial, skipped) tiles, over all batch rows and heads."""
        full, partial = int(self.run_length.sum()), len(self.patch_tile)
        every = self.maps[0] * self.maps[1] * self.query_tiles * -(-self.keys // self.tile)
        return full * self.shared, partial * self.shared, (every - full - partial) * self.shared

    @cached_property
    def keys_read(self) -> int:
        """Keys that some query sees, counted once per map."""
        m, across = self.maps[0] * self.maps[1], -(-self.keys // self.tile)
        edges = np.zeros((m, across + 1), dtype=np.int64)  # +1 where runs begin, -1 where they end
        at = self._maps_of(self.run_start)
        np.add.at(edges, (at, self.run_tile), 1)
        np.add.at(edges, (at, self.run_tile + self.run_length), -1)
        in_runs = edges.cumsum(axis=1)[:, :across] > 0
        sizes = np.minimum(self.tile, self.keys - np.arange(across) * self.tile)
        return int((in_runs * sizes).sum()) + self._keys_of_patches(in_runs)

    @property
    def nbytes(self) -> int:
        """Bytes of the schedule in memory, with the transposed and unpacked patterns that backends make of it."""
        lists = (self.run_start, self.run_tile, self.run_length, self.patch_start, self.patch_tile, self.patch_pattern)
        return sum(x.nbytes for x in lists) + 10 * self.patterns.nbytes

    @cached_property
    def lists(self) -> Ints:
        """The six lists, one after the other, in memory of their own."""
        each = self.run_start, self.run_tile, self.run_length, self.patch_start, self.patch_tile, self.patch_pattern
        return np.concatenate(each, dtype=np.int64)

    @cached_property
    def transposed_patterns(self) -> np.ndarray:
        """The patterns with queries and keys exchanged: a row for each key, a bit for each query."""
        return np.packbits(self._bits.transpose(0, 2, 1), axis=2, bitorder="little")

    @property
    def shared(self) -> int:
        """How many (batch row, head) share each map."""
        return self.batch * self.heads // (self.maps[0] * self.maps[1]) if self.batch * self.heads else 0

    def runs(self, t: int) -> Iterator[Span]:
        """The runs of FULL tiles of query tile t (counted through all maps), in keys."""
        for i in range(self.run_start[t], self.run_start[t + 1]):
            start = int(self.run_tile[i]) * self.tile
            yield Span(start, min(start + int(self.run_length[i]) * self.tile, self.keys))

    def patches(self, t: int) -> Iterator[Patch]:
        """The PARTIAL tiles of query tile t (counted through all maps), in keys."""
        for i in range(self.patch_start[t], self.patch_start[t + 1]):
            start = int(self.patch_tile[i]) * self.tile
            yield Patch(start, min(start + self.tile, self.keys), int(self.patch_pattern[i]))

    def pattern(self, number: int) -> torch.Tensor:
        """Pattern `number` as a bool tensor [tile, tile]."""
        return torch.from_numpy(self._unpacked[number])

    def keep(self) -> torch.Tensor:
        """The mask in full, bool [batch or 1, heads or 1, queries, keys]: for small calls and for tests.

        >>> from regard import Causal
        >>> from regard.plan.tiling import schedule
        >>> schedule(Causal(), batch=1, heads=1, queries=2, keys=3, offset=0, tile=64).keep().int().tolist()
        [[[[1, 0, 0], [1, 1, 0]]]]
        """
        tile, rows = self.tile, self.maps[0] * self.maps[1] * self.query_tiles
        width = -(-self.keys // tile) * tile
        kept = torch.zeros(rows, tile, width, dtype=torch.bool, device="cpu")
        for t in range(rows):
            for run in self.runs(t):
                kept[t, :, run.start : run.stop] = True
            for patch in self.patches(t):
                kept[t, :, patch.start : patch.start + tile] = self.pattern(patch.pattern)
        return kept.view(*self.maps, self.query_tiles * tile, width)[:, :, : self.queries, : self.keys]

    @cached_property
    def _unpacked(self) -> np.ndarray:
        """[patterns, tile, tile], of numpy: a tensor would belong to the `torch.func` transform of its first use."""
        return self._bits.view(np.bool_)

    @property
    def _bits(self) -> np.ndarray:
        return np.unpackbits(self.patterns, axis=2, bitorder="little")

    @property
    def _full_pairs(self) -> int:
        start = self.run_tile * self.tile
        keys = np.minimum(start + self.run_length * self.tile, self.keys) - start
        return int((np.repeat(self._rows, np.diff(self.run_start)) * keys).sum())

    def _keys_of_patches(self, in_runs: np.ndarray) -> int:
        """Keys that some query sees in PARTIAL tiles alone; `in_runs`: key tiles in a run, bool [maps, key tiles]."""
        tiles = self._maps_of(self.patch_start) * in_runs.shape[1] + self.patch_tile
        others = ~in_runs.reshape(-1)[tiles]
        if not others.any():
            return 0
        columns = np.bitwise_or.reduce(self.patterns, axis=1)  # of a pattern: a bit for each key that is seen
        once = np.unique(tiles[others] * len(columns) + self.patch_pattern[others])
        tiles, pattern = np.divmod(once, len(columns))
        first = np.flatnonzero(np.diff(tiles, prepend=-1))  # of each tile
        return int(ONES[np.bitwise_or.reduceat(columns[pattern], first)].sum(dtype=np.int64))

    def _maps_of(self, start: Ints) -> Ints:
        """The map of each run or patch."""
        rows = np.arange(self.maps[0] * self.maps[1] * self.query_tiles)
        return np.repeat(rows, np.diff(start)) // max(self.query_tiles, 1)

    @property
    def _rows(self) -> Ints:
        """Queries in each query tile of each map."""
        one = np.minimum(self.tile, self.queries - np.arange(self.query_tiles) * self.tile)
        return np.tile(one, self.maps[0] * self.maps[1])

    @property
    def _patch_keys(self) -> Ints:
        return np.minimum(self.tile, self.keys - self.patch_tile * self.tile)
