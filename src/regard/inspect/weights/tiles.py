"""The results of one sweep over tiles of weights: pictures of cells, and the largest weights of each row.

A map of 32,768 x 32,768 weights is read as a picture of a few hundred cells a side; no more than a tile is in memory.
Means of means are means (where cells divide), and maxima of maxima are maxima, so a picture can be made coarser without
reading the weights again. The mean hides a single large weight in a cell of thousands; the largest shows it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspect.weights.scores import CallScores


class Tile(NamedTuple):
    """The weights of queries `row` and on, keys `key` and on: [batch, heads, rows, keys]."""

    row: int
    key: int
    weights: Tensor

    @property
    def rows(self) -> slice:
        """The queries of the tile."""
        return slice(self.row, self.row + self.weights.shape[2])

    @property
    def keys(self) -> slice:
        """The keys of the tile."""
        return slice(self.key, self.key + self.weights.shape[3])


class Cells:
    """The cells of a picture of at most size x size cells, and the part of a tile in each.

    >>> cells = Cells(10, 7, 4)
    >>> cells.cell, cells.shape
    (3, (4, 3))
    >>> cells.of(Tile(2, 1, torch.ones(1, 1, 2, 4)), torch.sum)
    ((slice(0, 2, None), slice(0, 2, None)), tensor([[[[2., 2.],
                                                       [2., 2.]]]]))
    """

    def __init__(self, queries: int, keys: int, size: int) -> None:
        self.cell = max(1, -(-max(queries, keys) // size))
        self.shape = -(-queries // self.cell), -(-keys // self.cell)
        self._queries, self._keys = queries, keys

    def of(self, tile: Tile, reduce: Callable[..., Tensor]) -> tuple[tuple[slice, slice], Tensor]:
        """(rows, columns) of the cells that overlap a tile, and the reduced overlap: [batch, heads, rows, columns].

        Args:
            reduce: `reduce(weights, dim)`, such as `torch.sum`.
        """
        narrow = self._along(tile.weights, tile.key, 3, reduce)
        return (self._met(tile.rows), self._met(tile.keys)), self._along(narrow, tile.row, 2, reduce)

    def pairs(self, device: torch.device) -> Tensor:
        """The number of pairs in each cell: fewer than c x c in the last row and column."""
        rows, columns = (
            (tokens - torch.arange(0, tokens, self.cell, device=device)).clamp(max=self.cell)
            for tokens in (self._queries, self._keys)
        )
        return rows[:, None] * columns[None, :]

    def _met(self, tokens: slice) -> slice:
        """The cells that contain some of the tokens."""
        return slice(tokens.start // self.cell, -(-tokens.stop // self.cell))

    def _along(self, weights: Tensor, first: int, axis: int, reduce: Callable[..., Tensor]) -> Tensor:
        """Weights reduced cell by cell along an axis, whose first token is `first`: a partial cell, whole ones, a rest.

        Nothing is padded: one cell may be larger than all tiles together.
        """
        tokens = weights.shape[axis]
        begun = min(-first % self.cell, tokens)
        whole = (tokens - begun) // self.cell
        rest = tokens - begun - whole * self.cell
        sizes = [(1, begun), (whole, self.cell), (1, rest)]
        pieces = weights.split([count * size for count, size in sizes], dim=axis)
        full = [p.unflatten(axis, s) for p, s in zip(pieces, sizes, strict=True) if p.shape[axis]]
        return torch.cat([reduce(piece, axis + 1) for piece in full], dim=axis)


class Pooled:
    """Tiles of weights reduced to the mean of each cell; see `Weights.pooled`."""

    def __init__(self, call: CallScores, size: int) -> None:
        batch, heads, queries, keys = call.shape
        self._cells = Cells(queries, keys, size)
        self.cell = self._cells.cell
        # float64, since a cell sums up thousands of tiles: in float32 the mean would lose its last digits
        shape, self._dtype = (batch, heads, *self._cells.shape), call.dtype
        self._sums = torch.zeros(shape, dtype=torch.float64, device=call.q.device)

    def add(self, tile: Tile) -> None:
        """Add a tile's weights to their cells."""
        (down, across), sums = self._cells.of(tile, torch.sum)
        self._sums[..., down, across] += sums

    def picture(self) -> Tensor:
        """The mean weight of each cell, over the pairs that exist; [batch, heads, rows, columns]."""
        return (self._sums / self._cells.pairs(self._sums.device)).to(self._dtype)


class Largest:
    """Tiles of weights reduced to the largest of each cell; see `Weights.pooled`."""

    def __init__(self, call: CallScores, size: int) -> None:
        batch, heads, queries, keys = call.shape
        self._cells = Cells(queries, keys, size)
        self.cell = self._cells.cell
        self._tops = torch.zeros((batch, heads, *self._cells.shape), dtype=call.dtype, device=call.q.device)

    def add(self, tile: Tile) -> None:
        """Update the maxima of the cells with a tile's weights."""
        (down, across), tops = self._cells.of(tile, torch.amax)
        here = self._tops[..., down, across]
        torch.maximum(here, tops, out=here)

    def picture(self) -> Tensor:
        """The largest weight of each cell; [batch, heads, rows, columns]."""
        return self._tops


class Top:
    """Tiles of weights reduced to the `count` largest of each row; see `Weights.top`."""

    def __init__(self, call: CallScores, count: int) -> None:
        shape = *call.shape[:3], count
        self.weights = torch.zeros(shape, dtype=call.dtype, device=call.q.device)
        self.keys = torch.zeros(shape, dtype=torch.int64, device=call.q.device)

    def add(self, tile: Tile) -> None:
        """Update the largest weights of the rows with a tile's; tiles are added left to right."""
        at = _largest(tile.weights, self.keys.shape[3])
        weights = torch.cat([self.weights[:, :, tile.rows], tile.weights.gather(-1, at)], dim=-1)
        keys = torch.cat([self.keys[:, :, tile.rows], at + tile.key], dim=-1)
        # stable: of equal weights the left one is first; with too few weights, the initial zeros remain
        weights, order = torch.sort(weights, dim=-1, descending=True, stable=True)
        count = self.keys.shape[3]
        self.weights[:, :, tile.rows] = weights[..., :count]
        self.keys[:, :, tile.rows] = keys.gather(-1, order)[..., :count]


def _largest(weights: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest of each row, ascending; of equal weights, the first ones.

    `topk` takes any of several equal weights (as in a uniform head). Only rows where it had to choose are sorted,
    which costs twenty tiles' products; rows whose choice was among zeros do not matter.
    """
    keys = weights.shape[-1]
    if keys <= count:
        return torch.arange(keys, device=weights.device).expand(weights.shape)
    best, at = weights.topk(count + 1, dim=-1)
    at = at[..., :count]
    chosen = (best[..., count - 1] == best[..., count]) & (best[..., count] > 0)
    if bool(chosen.any()):
        sorted_ = torch.sort(weights[chosen], dim=-1, descending=True, stable=True).indices
        at[chosen] = sorted_[:, :count]
    return torch.sort(at, dim=-1).values
