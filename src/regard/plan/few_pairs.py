"""Schedules of calls of few pairs: every pair is evaluated, all of them at once.

`tiling.py` computes the same schedule by recursive splitting, which has fixed costs: some hundred calls of numpy, and a
table of counts where a mask is a tensor. Small calls under a mask of their own take a fraction of that.
"""

import numpy as np
import torch

from regard.describe.mask import Bools, Mask, is_made_of, kept_pairs
from regard.describe.mask_by_rule import Causal, Dilated, Global, KeyLengths, Prefix, Window
from regard.describe.mask_by_table import Blocks, Documents, TensorMask, Tree
from regard.describe.mask_by_term import MaskTerm
from regard.describe.mask_function import MaskFunction
from regard.plan.checks import check_is_not_mapped
from regard.plan.closed_form import Grid, schedule_of
from regard.plan.schedule import ONES, Schedule
from regard.torch_internals import ignore_func_transforms

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
    queries, keys = np.arange(grid.offset, grid.offset + grid.queries), np.arange(grid.keys)
    # also under torch.func: a mask is only read, not differentiated or mapped
    with ignore_func_transforms():
        b, h, q, k = (torch.from_numpy(x) for x in (*map(np.arange, grid.maps), queries, keys))
        kept = kept_pairs(mask, b[:, None, None, None], h[:, None, None], q[:, None], k)
        check_is_not_mapped(mask, kept)
        return kept.cpu().expand(*grid.maps, grid.queries, grid.keys).numpy().reshape(-1, grid.queries, grid.keys)
