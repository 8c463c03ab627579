"""Schedules of calls of few pairs: every pair is evaluated, all of them at once.

`tiling.py` computes the same schedule by recursive splitting, which has fixed costs: some hundred calls of numpy, and a
table of counts where a mask is a tensor. Small calls under a mask of their own take a fraction of that.
"""

from functools import partial

import numpy as np
import torch

from regard.describe.mask import Bools, Ints, Mask, is_made_of, kept_pairs
from regard.describe.mask_by_rule import Causal, Dilated, Global, KeyLengths, Prefix, Window
from regard.describe.mask_by_table import Blocks, Documents, TensorMask, Tree
from regard.describe.mask_by_term import MaskTerm
from regard.describe.mask_function import MaskFunction
from regard.describe.outside_transforms import outside_transforms
from regard.plan.checks import check_is_not_mapped, mapped
from regard.plan.closed_form import Grid, schedule_of
from regard.plan.schedule import ONES, Schedule

PAIRS = 1 << 17
"""The most pairs. Tables of bools take less time at twice as many, masks with simple bounds more (Zen 4)."""

ELEMENTS = 1 << 20
"""The most pairs where all tiles are filled up: 256 tiles of few rows."""

WORDS = (
    Blocks, Causal, Dilated, Documents, Global, KeyLengths, MaskFunction, MaskTerm, Prefix, TensorMask, Tree, Window,
)  # fmt: skip
"""Masks whose bounds are known to agree with `keep`: those of a mask of a user are checked where they are split."""


def has_few_pairs(mask: Mask, grid: Grid) -> bool:
    """Whether `few_pairs` makes this schedule."""
    pairs = grid.maps[0] * grid.maps[1] * grid.queries * grid.keys
    elements = grid.rows * grid.across * grid.tile**2
    return 0 < pairs <= PAIRS and elements <= ELEMENTS and is_made_of(mask, WORDS)


def few_pairs(mask: Mask, grid: Grid) -> Schedule:
    """The schedule of a call, of at least one query and key."""
    tile, rows, across = grid.tile, grid.rows, grid.across
    filled = np.zeros((rows // grid.down, grid.down * tile, across * tile), dtype=bool)
    filled[:, : grid.queries, : grid.keys] = _kept(mask, grid)
    tiles = filled.reshape(rows, tile, across, tile).swapaxes(1, 2)
    bits = np.packbits(tiles, axis=3, bitorder="little")
    count = ONES[bits].sum(axis=(2, 3), dtype=np.int64)
    height = np.minimum(grid.queries - np.arange(0, grid.queries, tile), tile)
    width = np.minimum(grid.keys - np.arange(0, grid.keys, tile), tile)
    covered = count.reshape(-1, grid.down, across) == height[:, None] * width
    row, column = ((count > 0) & ~covered.reshape(rows, across)).nonzero()
    return schedule_of(grid, covered, row, column, [one.tobytes() for one in bits[row, column]])


def _kept(mask: Mask, grid: Grid) -> Bools:
    """`keep` of every pair, bool [maps, queries, keys]."""
    b, h = map(np.arange, grid.maps)
    q, k = np.arange(grid.offset, grid.offset + grid.queries), np.arange(grid.keys)
    kept = evaluated(mask, b[:, None, None, None], h[:, None, None], q[:, None], k)
    return np.broadcast_to(kept, (*grid.maps, grid.queries, grid.keys)).reshape(-1, grid.queries, grid.keys)


def evaluated(mask: Mask, b: Ints, h: Ints, q: Ints, k: Ints) -> Bools:
    """`keep` of positions that broadcast, as outside of `torch.func`: a mask is neither differentiated nor mapped."""
    with outside_transforms(partial(mapped, mask)):
        kept = kept_pairs(mask, *map(torch.from_numpy, (b, h, q, k)))
        check_is_not_mapped(mask, kept)
        return kept.cpu().numpy()
