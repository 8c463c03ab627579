"""Tables for the bounds of masks with data: one look-up per rectangle.

Both tables round a rectangle outward to blocks of tokens, so bounds are sound but not always exact. Both are small
compared with the data: `RangeExtremes` has n / 64 * log2(n / 64) elements, `BlockCounts` two counts per 64 x 64 pairs.
"""

from dataclasses import dataclass

import numpy as np

from regard.describe.mask import Bools, Ints, Rectangles

BLOCK = 64
EVERYWHERE = 1 << 62
BAND = 16 * BLOCK
"""Rows that are copied at a time, where they are."""
EIGHT_TRUE = np.uint64(0x0101010101010101)


class RangeExtremes:
    """The least and the greatest of values[row, start:stop], by a sparse table over blocks of 64.

    Bender & Farach-Colton 2000, "The LCA problem revisited", §3: level j has the extremes of 2^j blocks, and two
    overlapping entries cover any range.
    """

    def __init__(self, values: np.ndarray) -> None:
        rows, tokens = values.shape
        padded = np.pad(values, ((0, 0), (0, -tokens % BLOCK)), mode="edge").reshape(rows, -1, BLOCK)
        self.lowest, self.highest = [padded.min(axis=2)], [padded.max(axis=2)]
        for level in range(int(self.lowest[0].shape[1]).bit_length() - 1):
            low, high, step = self.lowest[level], self.highest[level], 1 << level
            self.lowest.append(np.minimum(low[:, :-step], low[:, step:]))
            self.highest.append(np.maximum(high[:, :-step], high[:, step:]))

    def __call__(self, row: Ints, start: Ints, stop: Ints) -> tuple[np.ndarray, np.ndarray]:
        """(least, greatest) over blocks that cover start <= i < stop, for arrays of queries at once."""
        first, last = start // BLOCK, (stop - 1) // BLOCK
        level = np.frexp(last - first + 1)[1] - 1  # floor(log2(blocks))
        low, high = np.empty((2, len(start)), dtype=self.lowest[0].dtype)
        for j in np.unique(level):
            at = level == j
            left, right = first[at], last[at] - (1 << int(j)) + 1
            low[at] = np.minimum(self.lowest[j][row[at], left], self.lowest[j][row[at], right])
            high[at] = np.maximum(self.highest[j][row[at], left], self.highest[j][row[at], right])
        return low, high


@dataclass(frozen=True)
class BlockCounts:
    """Counts, in a rectangle of a [batch, heads, rows, columns] table, of blocks with some True and of blocks all True.

    `some` and `every` are cumulative sums over both axes, with a leading zero, so a rectangle costs four look-ups.
    """

    some: Ints
    every: Ints
    rows: int
    columns: int

    @staticmethod
    def of_layout(layout: Bools, size: int) -> "BlockCounts":
        """The counts of a layout, which has an entry for each block of size x size tokens."""
        sums = _cumulative_sums(layout)
        return BlockCounts(sums, sums, size, size)

    @staticmethod
    def of_table(table: Bools) -> "BlockCounts":
        """The counts of a table of pairs, in blocks of 64 x 64; an axis of 1 broadcasts, so one block covers it."""
        down, across = (1 if n == 1 else BLOCK for n in table.shape[2:])
        rows, columns = (EVERYWHERE if n == 1 else BLOCK for n in table.shape[2:])
        some, every = (_joined(table, down, -(-across // 8), join) for join in (np.bitwise_or, np.bitwise_and))
        return BlockCounts(_cumulative_sums(some != 0), _cumulative_sums(every == EIGHT_TRUE), rows, columns)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        """(some, all) of each rectangle of rows and columns."""
        b = r.b if self.some.shape[0] > 1 else np.zeros_like(r.b)
        h = r.h if self.some.shape[1] > 1 else np.zeros_like(r.h)
        top, bottom = _blocks(r.q0, r.q1, self.rows)
        left, right = _blocks(r.k0, r.k1, self.columns)

        def within(sums: Ints) -> Ints:
            return sums[b, h, bottom, right] - sums[b, h, top, right] - sums[b, h, bottom, left] + sums[b, h, top, left]

        return within(self.some) > 0, within(self.every) == (bottom - top) * (right - left)


def _blocks(first: Ints, end: Ints, size: int) -> tuple[Ints, Ints]:
    """The blocks of this size that hold entries from first to end; one block holds negative entries too."""
    if size == EVERYWHERE:
        return np.zeros_like(first), np.ones_like(first)
    return first // size, (end - 1) // size + 1


def _joined(table: Bools, down: int, across: int, join: np.ufunc) -> np.ndarray:
    """Entries of blocks of rows and of eights of columns, joined, in bytes of a uint64."""
    bands = (table[:, :, first : first + BAND] for first in range(0, max(1, table.shape[2]), BAND))
    rows = np.concatenate([_joined_along(2, _octets(band), down, join) for band in bands], axis=2)
    return _joined_along(3, rows, across, join)


def _octets(table: Bools) -> np.ndarray:
    """Eight columns as one uint64, since reading n x n bools is what a table costs; the last column is repeated."""
    if table.shape[3] % 8:
        table = np.pad(table, ((0, 0), (0, 0), (0, 0), (0, -table.shape[3] % 8)), mode="edge")
    return (table if table.strides[3] == 1 else np.ascontiguousarray(table)).view(np.uint64)


def _joined_along(axis: int, table: np.ndarray, size: int, join: np.ufunc) -> np.ndarray:
    return join.reduceat(table, np.arange(0, table.shape[axis], size), axis=axis)


def _cumulative_sums(blocks: Bools) -> Ints:
    sums = blocks.cumsum(axis=2, dtype=np.int64).cumsum(axis=3)
    return np.pad(sums, ((0, 0), (0, 0), (1, 0), (1, 0)))
