"""The tiles of a call as the library reads them: intervals, from which it lists the tiles itself, or the lists.

Where the keys that a mask keeps are a union of few intervals, the library lists the tiles of each call
(native/listing.h), in less time than a cache would take to find them. Other masks, and calls of very many queries, have
a `Schedule`, whose lists are cached.
"""

import itertools
from array import array
from collections.abc import Hashable
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.fingerprint import Fingerprint
from regard.describe.interval import Edge, Interval
from regard.describe.mask import CallSizes, Ints, Mask, broadcast_shape_of, intervals_of, is_made_of
from regard.describe.mask_by_rule import KeyLengths
from regard.describe.ragged import OF_POSITIONS
from regard.describe.tensors import reads_again
from regard.lru_cache import LRUCache
from regard.plan.closed_form import FAR, is_by_query
from regard.plan.problem import MAX_OFFSET, Operands, Sizes
from regard.plan.schedule import Schedule
from regard.plan.tiling import cached_schedule

QUERIES = 1 << 16
"""The most queries of all maps whose tiles are listed in each call; those of more are listed once."""

FIXED = (*OF_POSITIONS, KeyLengths)
"""Masks whose intervals are the same in calls of all sizes."""

KEPT = 1024
"""The most tiles that are cached, for all kernels."""

KEPT_BYTES = 64 << 20
"""The most bytes of them."""


NO_TABLE, NO_LISTS = (0,) * 5, (0,) * 8
"""The fields of a schedule without them."""


class Tiles(NamedTuple):
    """The tiles of a call.

    Attributes:
        intervals, number: the address of the intervals, and how many each map has; 0, 0 for lists.
        maps_batch: 1 or the batch rows.
        lists: without intervals, the fields of `native_calls.CALL` from "maps_batch" to the last of the schedule.
        memory: the arrays whose addresses are in the fields.
    """

    intervals: int
    number: int
    maps_batch: int
    lists: tuple[int, ...]
    memory: tuple[memoryview, ...]

    def fields(self, queries: int, offset: int) -> tuple[int, ...]:
        """The fields of `native_calls.CALL` from "maps_batch" to the last of the schedule."""
        if not self.number:
            return self.lists
        return self.maps_batch, 1, self.intervals, self.number, offset, *NO_TABLE, -(-queries // 64), *NO_LISTS

    def fields_with_table(self, table: Tensor, queries: int, offset: int) -> tuple[int, ...] | None:
        """The same fields of the pairs of a table that the intervals keep, which are those of all maps.

        Args:
            table: bool, broadcastable to [batch, heads, queries, keys]; axes of size 1 broadcast.

        Returns:
            None if the table has no memory, or if the maps have more than `QUERIES` rows together.
        """
        sizes, strides = (1,) * (4 - table.ndim) + tuple(table.shape), (0,) * (4 - table.ndim) + table.stride()
        batch, head, row, key = (0 if size == 1 else step for size, step in zip(sizes, strides, strict=True))
        maps = sizes[0] if batch else 1, sizes[1] if head else 1
        if not (address := table.data_ptr()) or maps[0] * maps[1] * queries > QUERIES:
            return None
        rows = -(-queries // 64)
        return *maps, self.intervals, self.number, offset, address, batch, head, row, key, rows, *NO_LISTS

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(each.nbytes for each in self.memory)

    def keep(self, rows: Tensor, keys: int, offset: int) -> Tensor:
        """The pairs that the tiles keep of some queries, bool [batch or 1, heads or 1, rows, keys].

        Args:
            rows: int64, the places of the queries in the call.
        """
        return self._keep_of_intervals(rows, keys, offset) if self.number else self._keep_of_lists(rows, keys)

    def _keep_of_intervals(self, rows: Tensor, keys: int, offset: int) -> Tensor:
        edges = torch.from_numpy(np.asarray(self.memory[0])).view(self.maps_batch, 1, self.number, 1, 1, 4)
        left, right, start, stop = edges.unbind(-1)
        query, key = offset + rows[:, None], torch.arange(keys, device="cpu")
        first, end = torch.maximum(query + left, start), torch.minimum(query + right, stop)
        return ((first <= key) & (key < end)).any(2)

    def _keep_of_lists(self, rows: Tensor, keys: int) -> Tensor:
        (batch, heads), query_tiles = self.lists[:2], self.lists[5 + len(NO_TABLE)]
        lists, patterns = map(np.asarray, self.memory)
        starts = batch * heads * query_tiles + 1
        runs = int(lists[starts - 1])
        ends = np.cumsum((starts, runs, runs, starts, (len(lists) - 2 * (starts + runs)) // 2))
        run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern = np.split(lists, ends)
        keep = np.zeros((batch * heads, len(rows), -(-keys // 64), 64), dtype=np.bool_)
        query_tile, lanes = np.divmod(rows.numpy(), 64)
        for m, tile in itertools.product(range(batch * heads), np.unique(query_tile)):
            t, here = m * query_tiles + tile, np.flatnonzero(query_tile == tile)
            for run in range(run_start[t], run_start[t + 1]):
                keep[m, here, run_tile[run] : run_tile[run] + run_length[run]] = True
            patches = slice(patch_start[t], patch_start[t + 1])
            bits = patterns[patch_pattern[patches]][:, :, lanes[here] // 8] >> lanes[here] % 8 & 1
            keep[m, here[:, None], patch_tile[patches]] = bits.transpose(2, 0, 1)
        return torch.from_numpy(keep.reshape(batch, heads, len(rows), -1)[..., :keys])


def tiles_of(operands: Operands, posed: Schedule) -> tuple[Tiles, bool]:
    """The tiles of a call, and whether they are those of every call with its key.

    Args:
        posed: the schedule of the call that the kernel was made for.
    """
    mask, key, sizes = operands.mask, operands.key, operands.sizes
    if not sizes.batch * sizes.heads:  # there is nothing to compute, and no row of the mask to read
        return ALL, False
    if key is None:
        return _listed(posed), False
    name = sizes.batch, sizes.heads, key
    tiles = _kept.get(name)
    if tiles is not None:
        return tiles, True
    tiles = _made(mask, sizes, posed.tile)
    if not _is_of(mask, key):
        return tiles, False
    if tiles.number and mask is not None and is_made_of(mask, FIXED) and (own := mask.fingerprint()) == key.mask:
        _put_fixed(own, tiles)
    else:
        _kept.put(name, tiles)
    return tiles, True


def fixed_tiles(operands: Operands) -> Tiles | None:
    """The tiles of a call if they are known, and the same for all calls under its mask; some of other calls are not."""
    key = operands.key
    if key is None or key.mask is None or not -MAX_OFFSET <= operands.offset <= MAX_OFFSET:
        return None
    tiles = _fixed.get(key.mask)
    return tiles if tiles is not None and key.queries * tiles.maps_batch <= QUERIES else None


def tiles_beside_table(rest: Mask | None, sizes: CallSizes) -> Tiles | None:
    """The intervals of what a mask has besides a table of pairs, if they are those of every call and every map."""
    if rest is None:
        return NOTHING_ELSE
    union = intervals_of(rest, sizes) if is_made_of(rest, FIXED) else None
    if union is None or is_by_query(union) or broadcast_shape_of(rest) != (1, 1):
        return None
    return _of_intervals(union, 1)


class TilesByRow:
    """The tiles of calls over rows of different lengths, where the last query of a row is at its last key (`Ragged`).

    Args:
        tiles: of the mask within a row: intervals that are the same for all rows, or none.
        batch: rows of the calls.
        queries: of the calls.
    """

    def __init__(self, tiles: Tiles, batch: int, queries: int) -> None:
        edges = tiles.memory[0].tolist() if tiles.number else [*_NONE]
        self._intervals = [edges[i : i + 4] for i in range(0, len(edges), 4)]
        self._batch, self._queries = batch, queries
        self._latest: tuple[tuple[int, ...], int, Tiles] | None = None

    def __call__(self, lengths: tuple[int, ...], keys: int) -> Tiles | None:
        """The tiles of a batch with these lengths; None if they do not fit the call, or it has too many rows."""
        if (latest := self._latest) is not None and latest[0] == lengths and latest[1] == keys:  # of another layer
            return latest[2]
        fits = len(lengths) == self._batch and max(lengths, default=0) <= keys
        if not fits or not 0 < self._batch * self._queries <= QUERIES:
            return None
        memory = array("q")
        for length in lengths:
            back = length - keys  # from positions of the call to those of a row
            for left, right, start, stop in self._intervals:
                memory.extend((left + back, right + back, start, min(stop, length)))
        tiles = Tiles(memory.buffer_info()[0], len(self._intervals), len(lengths), (), (memoryview(memory),))
        self._latest = lengths, keys, tiles
        return tiles


def _put_fixed(mask: Fingerprint, tiles: Tiles) -> None:
    if len(_fixed) >= KEPT:
        _fixed.clear()
    _fixed[mask] = tiles


def _made(mask: Mask | None, sizes: CallSizes, tile: int) -> Tiles:
    maps, heads = (1, 1) if mask is None else broadcast_shape_of(mask)
    maps = sizes.batch if maps > 1 else 1
    few = 0 < sizes.queries * maps <= QUERIES
    if mask is not None and heads == 1 and few and abs(sizes.offset) <= MAX_OFFSET:
        union = intervals_of(mask, sizes)
        if union is not None and not is_by_query(union):
            return _of_intervals(union, maps)
    return _listed(cached_schedule(mask, sizes, tile))


def _of_intervals(union: list[Interval], maps: int) -> Tiles:
    edges = [_near(edge, none) for x in union or [_NOTHING] for edge, none in zip(x, _NONE, strict=True)]
    try:
        memory, maps = array("q", cast("list[int]", edges)), 1
    except TypeError:  # an edge is an array, [maps, 1]
        columns = [[edge] * maps if isinstance(edge, int) else edge[:maps, 0].tolist() for edge in edges]
        columns = [column if len(column) == maps else column * maps for column in columns]
        memory = array("q", [edge for row in zip(*columns, strict=True) for edge in row])
    return Tiles(memory.buffer_info()[0], len(edges) // 4, maps, (), (memoryview(memory),))


def _near(edge: Edge, none: int) -> int | Ints:
    """The edge; an int is cut to the distance FAR."""
    if edge is None:
        return none
    return edge if isinstance(edge, np.ndarray) else max(-FAR, min(edge, FAR))


def _listed(s: Schedule) -> Tiles:
    whole, patterns = s.lists, np.ascontiguousarray(s.transposed_patterns, dtype=np.uint8)
    addresses: list[int] = []
    address = int(whole.__array_interface__["data"][0])
    for one in (s.run_start, s.run_tile, s.run_length, s.patch_start, s.patch_tile, s.patch_pattern):
        addresses.append(address)
        address += 8 * len(one)
    lists = (*addresses, int(patterns.__array_interface__["data"][0]), len(patterns))
    fields = (*s.maps, 0, 0, 0, *NO_TABLE, s.query_tiles, *lists)
    return Tiles(0, 0, s.maps[0], fields, (whole.data, patterns.data))


def _is_of(mask: Mask | None, key: Sizes) -> bool:
    """Whether the tensors of the mask still have the content of the key: another thread may have written to them."""
    if mask is None or key.mask is None or key.mask.is_constant:
        return True
    return reads_again(lambda: mask.fingerprint().contents(), key.mask.contents())


_NONE = (-FAR, FAR, -FAR, FAR)
"""The edges of an interval that has none."""

_NOTHING = Interval(start=0, stop=0)
"""The interval of a union of none: the library reads lists where there are none."""

ALL = _of_intervals([Interval()], 1)
"""The tiles of a call without a mask, of up to `QUERIES` queries."""

NOTHING_ELSE = Tiles(0, 0, 1, (), ())
"""No intervals and no lists, for a table of pairs alone."""

_kept: LRUCache[Hashable, Tiles] = LRUCache(entries=KEPT, nbytes=KEPT_BYTES, size=lambda tiles: tiles.nbytes)
"""The tiles that are kept, by batch, heads and `Operands.key`."""

_fixed: dict[Fingerprint, Tiles] = {}
"""The tiles of masks whose intervals are the same in every call, by the mask's fingerprint."""
