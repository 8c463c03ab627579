"""The schedule as FlexAttention reads it: lists of key tiles for each query tile, and of query tiles for each key tile.

They are made once for a schedule and a device, so a repeated call copies nothing to the device.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from regard.plan.schedule import Schedule


class Blocks(NamedTuple):
    """What a `BlockMask` is made of, and the bits of tiles.

    Counts are int32 [maps, maps, rows of tiles], lists int32 [maps, maps, rows of tiles, tiles across]. The kernels for
    CUDA read them as contiguous, whatever their strides are.

    Attributes:
        kv: four tensors: for each query tile the number of its PARTIAL key tiles, their list, the same of FULL ones.
        q: for each key tile the same of query tiles.
        number: int32 [maps, maps, query tiles, key tiles], the pattern of each tile.
        patterns: bool [patterns, tile, tile]; the last two are those of hidden and of FULL tiles.
    """

    kv: tuple[Tensor, ...]
    q: tuple[Tensor, ...]
    number: Tensor
    patterns: Tensor


def blocks(schedule: Schedule, device: torch.device) -> Blocks:
    """The lists of a schedule in the memory of a device."""
    of_schedule = _made.setdefault(schedule, {})
    if device not in of_schedule:
        of_schedule[device] = _blocks(schedule, device)
    return of_schedule[device]


_made: "WeakKeyDictionary[Schedule, dict[torch.device, Blocks]]" = WeakKeyDictionary()


def _blocks(s: Schedule, device: torch.device) -> Blocks:
    maps, across = s.maps[0] * s.maps[1], -(-s.keys // s.tile)
    row = np.arange(maps * s.query_tiles)
    edges = np.zeros((len(row), across + 1), dtype=np.int8)  # +1 where a run begins, -1 where it ends
    of_run, of_patch = (np.repeat(row, np.diff(start)) for start in (s.run_start, s.patch_start))
    np.add.at(edges, (of_run, s.run_tile), 1)
    np.add.at(edges, (of_run, s.run_tile + s.run_length), -1)
    full = edges.cumsum(axis=1, dtype=np.int8)[:, :across] > 0
    partial, number = np.zeros_like(full), len(s.patterns) + full.astype(np.int32)
    partial[of_patch, s.patch_tile] = True
    number[of_patch, s.patch_tile] = s.patch_pattern
    shape = (*s.maps, s.query_tiles, across)
    sides = [torch.from_numpy(side).view(shape) for side in (partial, full)]
    kv, q = [t for side in sides for t in _listed(side)], [t for side in sides for t in _listed(side.mT)]
    bits = np.unpackbits(s.patterns, axis=2, bitorder="little").view(np.bool_)
    bits = np.concatenate([bits, *(np.full((1, s.tile, s.tile), kept, dtype=np.bool_) for kept in (False, True))])
    kv, q = (tuple(t.to(device) for t in side) for side in (kv, q))
    return Blocks(kv, q, torch.from_numpy(number).view(shape).to(device), torch.from_numpy(bits).to(device))


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row has, and which: those first."""
    counts, order = tiles.sum(dim=3), tiles.to(torch.int8).argsort(dim=3, descending=True, stable=True)
    counts, order = (t.to(torch.int32, memory_format=torch.contiguous_format) for t in (counts, order))
    return counts, order
