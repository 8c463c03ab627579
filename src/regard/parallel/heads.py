"""Masks and biases of some of the heads of a call."""

from typing import cast

from torch import Tensor

from regard.describe.bias import Bias, Sum, TensorBias
from regard.describe.interval import Union
from regard.describe.mask import (
    Bools,
    CallSizes,
    Ints,
    Mask,
    Positions,
    Rectangles,
    broadcast_shape_of,
    intervals_of,
    signature_of,
)
from regard.describe.score_function import ScoreFunction
from regard.describe.spec import spec


@spec
class HeadsMask(Mask):
    """The mask of a call whose head h is head `first + h` of another.

    Args:
        inner: the mask of all heads, bound to its call.
        first: the first head.
        heads: how many heads the call has.
    """

    inner: Mask
    first: int
    heads: int

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self.inner.keep(b, h + self.first, q, k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return self.inner.bounds(r._replace(h=r.h + self.first))

    def signature(self, r: Rectangles) -> Ints:
        return signature_of(self.inner, r._replace(h=r.h + self.first))

    def intervals(self, sizes: CallSizes) -> Union:
        return intervals_of(self.inner, sizes)

    def broadcast_shape(self) -> tuple[int, int]:
        return broadcast_shape_of(self.inner)[0], self.heads

    def bind(self, sizes: CallSizes) -> Mask:
        return self


@spec
class HeadsBias(Bias):
    """The bias of a call whose head h is head `first + h` of another.

    Args:
        inner: the bias of all heads, bound to its call.
        first: the first head.
    """

    inner: Bias
    first: int

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self.inner.value(b, h + self.first, q, k)

    def per_distance(self) -> bool:
        return self.inner.per_distance()


def mask_of_heads(mask: Mask | None, heads: range) -> Mask | None:
    """The mask of some heads."""
    return mask if mask is None or broadcast_shape_of(mask)[1] == 1 else HeadsMask(mask, heads.start, len(heads))


def bias_of_heads(bias: Bias | None, heads: range) -> Bias | None:
    """The bias of some heads."""
    if bias is None:
        return None
    if type(bias) is Sum:
        return Sum(cast(Bias, bias_of_heads(bias.a, heads)), cast(Bias, bias_of_heads(bias.b, heads)))
    if type(bias) is TensorBias:
        whole = bias.tensor[(None,) * (4 - bias.tensor.ndim)]
        return bias if whole.shape[1] == 1 else TensorBias(whole[:, heads.start : heads.stop], bias.offset)
    return _function(bias, heads.start) if isinstance(bias, ScoreFunction) else HeadsBias(bias, heads.start)


def _function(bias: ScoreFunction, first: int) -> ScoreFunction:
    def function(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bias.changed(scores, b, h + first, q, k)

    return ScoreFunction(function, tuple(bias.tensors()))
