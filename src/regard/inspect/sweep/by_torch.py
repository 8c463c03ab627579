"""The sweep in plain tensor operations, tile by tile: the definition, and the way wherever the compiled one is not."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regard.inspect.sweep.gathered import BINS, Sweep, bin_of
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.tiles import Largest, Pooled, Tile


def swept(weights: Weights, picture: int | None, along: Tensor | None, tick: Callable[[], None] | None = None) -> Sweep:
    """See `regard.inspect.sweep.sweep`, which has checked the arguments."""
    rows = _Rows(weights, along)
    cells = None if picture is None else (Pooled(weights, picture), Largest(weights, picture))
    for tile in weights.tiles() if weights.shape[3] else ():
        for gathering in (rows, *(cells or ())):
            gathering.add(tile)
        if tick is not None:
            tick()
    if cells is None:
        return rows.sweep()
    mean, largest = cells
    return replace(rows.sweep(), mean=mean.picture(), largest=largest.picture(), cell=mean.cell)


class _Rows:
    """Tiles summed by row and by column."""

    def __init__(self, weights: Weights, along: Tensor | None) -> None:
        batch, heads, queries, keys = weights.shape
        self._positions = weights.positions
        self._vectors = None if along is None else along.to(weights.dtype)[:, None].mT  # [batch or 1, 1, keys, m]
        empty = torch.zeros((batch, heads, queries), dtype=weights.dtype, device=weights.q.device)
        self.mass, self.top, self.top_key = empty, empty.clone(), torch.zeros_like(empty, dtype=torch.int64)
        self.entropy, self.squares = _of_the_sink(weights, empty)
        self.bins = empty.new_zeros((batch, heads, queries, BINS))
        # a column gains a little from every tile: in float32 131,072 rows would cost it the sixth digit
        self.columns = empty.new_zeros((batch, heads, keys), dtype=torch.float64)
        self.along = None if along is None else empty.new_zeros((batch, heads, queries, along.shape[1]))

    def add(self, tile: Tile) -> None:
        """Add what a tile has of its rows and columns."""
        a, rows, key = tile.weights, tile.rows, tile.keys
        self.mass[:, :, rows] += a.sum(-1)
        self.entropy[:, :, rows] += torch.special.entr(a).sum(-1)
        self.squares[:, :, rows] += a.square().sum(-1)
        top, where = a.max(-1)
        higher = top > self.top[:, :, rows]
        self.top[:, :, rows] = torch.where(higher, top, self.top[:, :, rows])
        self.top_key[:, :, rows] = torch.where(higher, where + tile.key, self.top_key[:, :, rows])
        keys = torch.arange(key.start, key.stop, device=a.device)
        distance = (self._positions[rows, None] - keys).abs()
        self.bins[:, :, rows] = self.bins[:, :, rows].scatter_add(-1, bin_of(distance).expand(a.shape), a)
        self.columns[:, :, key] += a.sum(-2, dtype=torch.float64)
        if self.along is not None and self._vectors is not None:
            self.along[:, :, rows] += a @ self._vectors[:, :, key]

    def sweep(self) -> Sweep:
        """What was gathered."""
        columns = self.columns.to(self.mass.dtype)
        return Sweep(self.entropy, self.squares, self.mass, self.top, self.top_key, self.bins, columns, self.along)


def _of_the_sink(weights: Weights, empty: Tensor) -> tuple[Tensor, Tensor]:
    """What a learned sink adds to the entropy and to the sum of squares of each row: [batch, heads, queries]."""
    if weights.sink is None:
        return empty.clone(), empty.clone()
    share = weights.sink_share
    return torch.special.entr(share), share.square()
