"""The mask and the bias of a call for some of its query heads: they may differ by head."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.describe.bias import Bias, Sum, T5Bias, TensorBias
from regard.describe.mask import Bools, Ints, Mask, Positions, Rectangles, signature_of
from regard.describe.spec import spec
from regard.errors import ProblemError
from regard.inspect.weights.index import index_of


@spec
class OfHeads(Mask):
    """A mask whose head h is another mask's head `heads[h]`.

    >>> from regard import TensorMask, draw
    >>> both = TensorMask(torch.tensor([[[True, False], [True, True]], [[False, True], [False, False]]]))
    >>> print(draw(OfHeads(both, (1,)), 2, 2))
    · █
    · ·
    """

    mask: Mask
    heads: tuple[int, ...]

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self.mask.keep(b, _index(self.heads, h), q, k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return self.mask.bounds(self._there(r))

    def signature(self, r: Rectangles) -> Ints:
        return signature_of(self.mask, self._there(r))

    def broadcast_shape(self) -> tuple[int, int]:
        return self.mask.broadcast_shape()[0], len(self.heads)

    def bind(self, sizes: Any) -> Mask:
        """Itself, as the inner mask is bound to its call already."""
        return self

    def _there(self, r: Rectangles) -> Rectangles:
        return r._replace(h=np.asarray(self.heads, dtype=np.int64)[r.h])


@spec
class BiasOfHeads(Bias):
    """A bias whose head h is another bias's head `heads[h]`.

    >>> from regard import Alibi
    >>> BiasOfHeads(Alibi(4), (3,)).value(0, torch.tensor(0), 10, 2)
    tensor(-0.0312, dtype=torch.float64)
    """

    bias: Bias
    heads: tuple[int, ...]

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self.bias.value(b, _index(self.heads, h), q, k)

    def per_distance(self) -> bool:
        return self.bias.per_distance()


def mask_of_heads(mask: Mask | None, heads: Tensor) -> Mask | None:
    """The mask of a call, for these of its query heads."""
    return mask if mask is None or mask.broadcast_shape()[1] == 1 else OfHeads(mask, tuple(heads.tolist()))


def bias_of_heads(bias: Bias | None, heads: Tensor) -> Bias | None:
    """The bias of a call for these query heads; tables stay tables, which backends support."""
    if bias is None:
        return None
    if type(bias) is Sum:
        a, b = (bias_of_heads(term, heads) for term in (bias.a, bias.b))
        assert a is not None
        assert b is not None
        return a + b
    if type(bias) is T5Bias:
        return T5Bias(bias.table[:, heads.to(bias.table.device)], bias.bidirectional, bias.max_distance)
    if type(bias) is TensorBias:
        table = bias.tensor
        by_head = table.ndim >= 3 and table.shape[-3] > 1
        return TensorBias(table.index_select(-3, heads.to(table.device)), bias.offset) if by_head else bias
    return BiasOfHeads(bias, tuple(heads.tolist()))


def chosen_heads(index: int | Sequence[int] | Tensor, heads: int) -> Tensor:
    """Indices of query heads, int64 [chosen]. Raises `ProblemError` unless all are below `heads`.

    >>> chosen_heads(np.int64(3), 6), chosen_heads(range(2), 6)
    (tensor([3]), tensor([0, 1]))
    """
    value = index.reshape(-1) if isinstance(index, Tensor | np.ndarray) else index
    several: list[Any] = list(value) if isinstance(value, Iterable) else [value]
    chosen = [number for number in map(index_of, several) if number is not None and 0 <= number < heads]
    if not several or len(chosen) < len(several):
        raise ProblemError(f"heads({index!r}) of {heads} heads: expected one or more integers from 0 to {heads - 1}.")
    return torch.tensor(chosen)


def key_heads(chosen: Tensor, group: int) -> Tensor:
    """The key heads of query heads, grouped evenly as a call requires: one for several in a row, or one for each.

    >>> key_heads(torch.tensor([0, 1, 4, 5]), group=2), key_heads(torch.tensor([0, 1, 4]), group=2)
    (tensor([0, 2]), tensor([0, 0, 2]))
    """
    sharing, counts = torch.unique_consecutive(chosen // group, return_counts=True)
    return sharing if bool((counts == counts[0]).all()) else chosen // group


def _index(heads: tuple[int, ...], h: Positions) -> Positions:
    return torch.tensor(heads, device=h.device)[h] if isinstance(h, Tensor) else heads[h]
