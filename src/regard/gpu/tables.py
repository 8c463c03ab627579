"""The schedule in the memory of a device: the lists that the kernels walk, made once per schedule and device."""

from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from regard.plan.schedule import Schedule


class Tables(NamedTuple):
    """The lists of one direction, int32: per row of tiles its FULL runs and its PARTIAL tiles.

    For the forward pass a row is a tile of queries, and what it lists are key tiles; for gradients of keys and values a
    row is a tile of keys, and lists tiles of queries.
    """

    order: Tensor  # [maps, rows of a map]: the rows of a map, those with the most work first
    run_start: Tensor  # [all rows + 1]
    run_tile: Tensor  # [runs]
    run_length: Tensor  # [runs]
    patch_start: Tensor  # [all rows + 1]
    patch_tile: Tensor  # [patches]
    patch_pattern: Tensor  # [patches]
    words: Tensor  # int64 [patterns, tile, tile / 64]: a row for each token of a row, a bit for each listed one


def by_query(schedule: Schedule, device: torch.device) -> Tables:
    """For each tile of queries the key tiles that it needs."""
    return _kept(schedule, device, of_keys=False)


def by_key(schedule: Schedule, device: torch.device) -> Tables:
    """For each tile of keys the tiles of queries that need it."""
    return _kept(schedule, device, of_keys=True)


class Tiles(NamedTuple):
    """The tiles of a call whose queries are one tile.

    Attributes:
        kinds: int32 [maps, key tiles]: -2 hidden, -1 all kept, else the pattern.
        words: as in `Tables`.
        masked: whether anything is hidden.
    """

    kinds: Tensor
    words: Tensor
    masked: bool


def by_tile(schedule: Schedule, device: torch.device) -> Tiles:
    """What each key tile is, for a schedule of one tile of queries."""
    of_schedule = _tiles.setdefault(schedule, {})
    if device not in of_schedule:
        across = -(-schedule.keys // schedule.tile)
        kinds = np.full((len(schedule.run_start) - 1, across), -2, dtype=np.int32)
        for row, line in enumerate(kinds):
            for run in schedule.runs(row):
                line[run.start // schedule.tile : -(-run.stop // schedule.tile)] = -1
            for patch in schedule.patches(row):
                line[patch.start // schedule.tile] = patch.pattern
        masked = bool((kinds != -1).any())
        words = _words(schedule, of_keys=False)
        of_schedule[device] = Tiles(_on(device, kinds), words.to(device), masked) if masked else _unmasked(device)
    return of_schedule[device]


@cache
def _unmasked(device: torch.device) -> Tiles:
    """What no kernel reads: a step of decoding copies nothing to the device."""
    return Tiles(*(torch.zeros(1, 1, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)), masked=False)


_tiles: "WeakKeyDictionary[Schedule, dict[torch.device, Tiles]]" = WeakKeyDictionary()

_made: "WeakKeyDictionary[Schedule, dict[tuple[torch.device, bool], Tables]]" = WeakKeyDictionary()


def _kept(schedule: Schedule, device: torch.device, *, of_keys: bool) -> Tables:
    of_schedule = _made.setdefault(schedule, {})
    key = device, of_keys
    if key not in of_schedule:
        lists = transposed(schedule) if of_keys else _listed(schedule)
        of_schedule[key] = Tables(*(_on(device, x) for x in lists), words=_words(schedule, of_keys).to(device))
    return of_schedule[key]


def _listed(s: Schedule) -> tuple[np.ndarray, ...]:
    lists = s.run_start, s.run_tile, s.run_length, s.patch_start, s.patch_tile, s.patch_pattern
    return _order(s, s.query_tiles, *lists[:4]), *lists


def _order(
    s: Schedule, rows: int, run_start: np.ndarray, _: np.ndarray, run_length: np.ndarray, patch_start: np.ndarray
) -> np.ndarray:
    """The rows of each map by falling number of tiles, [maps, rows]."""
    full = np.concatenate([[0], np.cumsum(run_length)])
    tiles = full[run_start[1:]] - full[run_start[:-1]] + np.diff(patch_start)
    return np.argsort(-tiles.reshape(-1, rows), axis=1, kind="stable")


def transposed(s: Schedule) -> tuple[np.ndarray, ...]:
    """The lists with the parts of queries and keys exchanged."""
    maps, across = s.maps[0] * s.maps[1], -(-s.keys // s.tile)
    row = np.arange(maps * s.query_tiles)
    of_run = np.repeat(row, np.diff(s.run_start))
    full_row = np.repeat(of_run, s.run_length)
    step = np.arange(len(full_row)) - np.repeat(np.cumsum(s.run_length) - s.run_length, s.run_length)
    full_key = np.repeat(s.run_tile, s.run_length) + step
    line, tile = _sorted(full_row, full_key, s.query_tiles, across)
    begins = np.concatenate([[True], (np.diff(line) != 0) | (np.diff(tile) != 1)]) if len(line) else np.zeros(0, bool)
    at = np.flatnonzero(begins)
    length = np.diff(np.concatenate([at, [len(line)]]))
    run_start = np.searchsorted(line[at], np.arange(maps * across + 1))
    patch_row = np.repeat(row, np.diff(s.patch_start))
    order = np.lexsort((patch_row, s.patch_tile, patch_row // max(s.query_tiles, 1)))
    patch_line = patch_row[order] // max(s.query_tiles, 1) * across + s.patch_tile[order]
    patch_start = np.searchsorted(patch_line, np.arange(maps * across + 1))
    lists = run_start, tile[at], length, patch_start, patch_row[order] % s.query_tiles, s.patch_pattern[order]
    return _order(s, across, *lists[:4]), *lists


def _sorted(row: np.ndarray, key: np.ndarray, query_tiles: int, across: int) -> tuple[np.ndarray, np.ndarray]:
    """(line, query tile) of FULL tiles in the order of lines: a line is a key tile of a map."""
    line = row // max(query_tiles, 1) * across + key
    order = np.lexsort((row, line))
    return line[order], row[order] % max(query_tiles, 1)


def _words(schedule: Schedule, of_keys: bool) -> Tensor:
    patterns = schedule.transposed_patterns if of_keys else schedule.patterns
    if not len(patterns):
        patterns = np.zeros((1, schedule.tile, schedule.tile // 8), dtype=np.uint8)
    return torch.from_numpy(patterns.copy().view(np.int64))


def _on(device: torch.device, x: np.ndarray) -> Tensor:
    padded = x if x.size else np.zeros(1, dtype=np.int32)  # a kernel gets an address, also of nothing
    return torch.from_numpy(padded.astype(np.int32)).to(device)
