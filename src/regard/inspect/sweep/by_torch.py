"""What a sweep gathers, and the sweep in plain tensor operations, tile by tile.

This is the definition, and the way where the compiled sweep does not run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.inspect.brief import brief
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.tiles import Largest, Pooled, Tile

BINS = 24
"""Bins of distance: the last one has all distances of 2**22 tokens and more."""


@brief
@dataclass(frozen=True, eq=False)
class Sweep:
    """The results of `sweep`. Rows are queries, p_i the position of row i, A[i, j] the weight of key j in row i.

    A learned sink counts as one more key in `entropy` and `squares`, and nowhere else. A fully masked row is 0
    everywhere (with a sink above -inf, which then has all of its mass, 1 in `squares`).

    Attributes:
        entropy: -sum_j A[i, j] ln A[i, j], nats; [batch, heads, queries].
        squares: sum_j A[i, j] ** 2, whose inverse is a number of tokens; [batch, heads, queries].
        mass: sum_j A[i, j]: 1 less the sink's share; [batch, heads, queries].
        top: the largest weight of each row; [batch, heads, queries].
        top_key: the first key that has it; int64 [batch, heads, queries].
        bins: the mass by distance |p_i - j|: bin 0 is distance 0, bin b is 2**(b-1) <= distance < 2**b, and the last
            one has all larger distances; [batch, heads, queries, BINS].
        columns: sum_i A[i, j], over all rows; [batch, heads, keys].
        along: sum_j A[i, j] u[m, j] for the vectors u of `sweep`; [batch, heads, queries, m], or None.
        mean, largest: the weights in cells of `cell` x `cell` pairs, as `Weights.pooled` cuts them: the mean over the
            pairs that exist, and the largest; [batch, heads, cells, cells], or None.
        cell: pairs per side of a cell; 0 without a picture.
    """

    entropy: Tensor
    squares: Tensor
    mass: Tensor
    top: Tensor
    top_key: Tensor
    bins: Tensor
    columns: Tensor
    along: Tensor | None = None
    mean: Tensor | None = None
    largest: Tensor | None = None
    cell: int = 0


def bin_of(distance: Tensor) -> Tensor:
    """The bin of a distance in tokens, int64.

    >>> bin_of(torch.tensor([0, 1, 2, 3, 4, 1023, 1024, 2**40])).tolist()
    [0, 1, 2, 2, 3, 10, 11, 23]
    """
    starts = 2 ** torch.arange(BINS - 1, device=distance.device)
    return torch.bucketize(distance, starts, right=True)


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
        distance = (self._positions[..., rows, None] - keys).abs()
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
