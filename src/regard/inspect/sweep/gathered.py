"""The result of one sweep over all weights of a call: sums by row, by column and by cell."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.inspect.brief import brief

BINS = 24
"""Bins of distance: the last one has all distances of 2**22 tokens and more."""


@brief
@dataclass(frozen=True, eq=False)
class Sweep:
    """The results of `sweep`. Rows are queries, p_i the position of row i, A[i, j] the weight of key j in row i.

    A learned sink counts as one more key in `entropy` and `squares`, and nowhere else. A fully masked row is 0
    everywhere (with a sink, which then has all of its mass, 1 in `squares`).

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
