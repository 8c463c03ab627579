"""The mask and the bias of a call for some of its query heads: they may differ by head."""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.bias import Bias, Sum, T5Bias, TensorBias, values_of
from regard.describe.interval import Union
from regard.describe.mask import (
    Bools,
    CallSizes,
    Ints,
    Mask,
    Positions,
    Rectangles,
    bounds_of,
    broadcast_shape_of,
    intervals_of,
    kept_pairs,
    signature_of,
)
from regard.describe.score_function import ScoreFunction
from regard.describe.spec import spec


@spec
class MaskOfHeads(Mask):
    """The mask of a call whose head h is head `heads[h]` of another.

    Args:
        inner: the mask of all heads, bound to its call.

    >>> from regard import TensorMask, draw
    >>> both = TensorMask(torch.tensor([[[True, False], [True, True]], [[False, True], [False, False]]]))
    >>> print(draw(MaskOfHeads(both, (1,)), 2, 2))
    · █
    · ·
    """

    inner: Mask
    heads: tuple[int, ...]

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return kept_pairs(self.inner, b, _head_of(self.heads, h), q, k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return bounds_of(self.inner, self._of_inner(r))

    def signature(self, r: Rectangles) -> Ints:
        return signature_of(self.inner, self._of_inner(r))

    def intervals(self, sizes: CallSizes) -> Union:
        return intervals_of(self.inner, sizes)

    def broadcast_shape(self) -> tuple[int, int]:
        return broadcast_shape_of(self.inner)[0], len(self.heads)

    def bind(self, sizes: CallSizes) -> Mask:
        """Itself, as the inner mask is bound to its call already."""
        return self

    def _of_inner(self, r: Rectangles) -> Rectangles:
        return r._replace(h=np.asarray(self.heads, dtype=np.int64)[r.h])


@spec
class BiasOfHeads(Bias):
    """The bias of a call whose head h is head `heads[h]` of another.

    Args:
        inner: the bias of all heads, bound to its call.

    >>> from regard import Alibi
    >>> BiasOfHeads(Alibi(4), (3,)).value(0, torch.tensor(0), 10, 2)
    tensor(-0.0312, dtype=torch.float64)
    """

    inner: Bias
    heads: tuple[int, ...]

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return values_of(self.inner, b, _head_of(self.heads, h), q, k)

    def per_distance(self) -> bool:
        return self.inner.per_distance()


def mask_of_heads(mask: Mask | None, heads: tuple[int, ...]) -> Mask | None:
    """The mask of a call, which is bound to it, for these query heads.

    A mask of one head is that of every head, or of a call with one head: then it may read h, which has to stay 0.
    """
    of_every_head = mask is not None and broadcast_shape_of(mask)[1] == 1 and (len(heads) == 1 or any(heads))
    return mask if mask is None or of_every_head else MaskOfHeads(mask, heads)


def bias_of_heads(bias: Bias | None, heads: tuple[int, ...]) -> Bias | None:
    """The bias of a call, which is bound to it, for these query heads; tables stay tables, which backends support."""
    if bias is None:
        return None
    if type(bias) is Sum:
        return Sum(cast(Bias, bias_of_heads(bias.a, heads)), cast(Bias, bias_of_heads(bias.b, heads)))
    if type(bias) is T5Bias:
        return T5Bias(_chosen(bias.table, 1, heads), bias.bidirectional, bias.max_distance)
    if type(bias) is TensorBias:
        table = bias.tensor
        by_head = table.ndim >= 3 and table.shape[-3] > 1
        return TensorBias(_chosen(table, table.ndim - 3, heads), bias.offset) if by_head else bias
    return _function_of_heads(bias, heads) if isinstance(bias, ScoreFunction) else BiasOfHeads(bias, heads)


def _function_of_heads(bias: ScoreFunction, heads: tuple[int, ...]) -> ScoreFunction:
    def function(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bias.changed(scores, b, _head_of(heads, h), q, k)

    return ScoreFunction(function, tuple(bias.tensors()))


def _head_of(heads: tuple[int, ...], h: Positions) -> Positions:
    """`heads[h]`."""
    if _are_adjacent(heads):
        return h + heads[0]  # no table to copy to the device
    return torch.tensor(heads, device=h.device)[h] if isinstance(h, Tensor) else heads[h]


def _chosen(table: Tensor, axis: int, heads: tuple[int, ...]) -> Tensor:
    """The part of a table for these heads: a view where they are adjacent."""
    if _are_adjacent(heads):
        return table.narrow(axis, heads[0], len(heads))
    return table.index_select(axis, torch.tensor(heads, device=table.device))


def _are_adjacent(heads: tuple[int, ...]) -> bool:
    return heads == tuple(range(heads[0], heads[0] + len(heads)))
