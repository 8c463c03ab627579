"""Masks and biases of a call whose batch rows start at different positions: `attend(..., offset=tensor_of_batch)`.

Query i of row b is at position first[b] + i. The call itself starts at position 0, so a spec of positions moves its
queries by first[b], and one that is laid out by the call (`TensorMask`, `TensorBias`) stays as it is, unless it has
an `offset` of its own: then its rows are positions. A user's class with such a table in it may use both, so each row
has a copy of it, which is bound at the row's own offset.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.bias import Bias, Sum, TensorBias, values_of
from regard.describe.interval import Union, for_queries_moved
from regard.describe.mask import (
    And,
    Bools,
    CallSizes,
    Ints,
    Mask,
    Not,
    Or,
    Positions,
    Rectangles,
    broadcast_shape_of,
    kept_pairs,
    signature_of,
)
from regard.describe.mask_by_rule import Causal, KeyLengths, Prefix, Window
from regard.describe.mask_by_table import TensorMask, Tree
from regard.describe.ragged import Ragged
from regard.describe.spec import Spec, bound_to, spec
from regard.errors import ProblemError

S = TypeVar("S", Mask, Bias)


@spec
class MaskByRow(Mask):
    """A mask of positions in a call whose row b starts at position first[b].

    Args:
        inner: the mask.
        first: position of the first query of each row.

    >>> from regard import Causal, draw
    >>> print(draw(MaskByRow(Causal(), (0, 2)), 2, 4, offset=0, batch=1))
    █ █ █ ·
    █ █ █ █
    """

    inner: Mask
    first: Sequence[int]

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self.inner.keep(b, h, q + _of_rows(self.first, b), k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return self.inner.bounds(self._moved(r))

    def intervals(self, sizes: CallSizes) -> Union:
        inner = self.inner.intervals(sizes) if type(self.inner) in (Causal, Window) else None
        by = np.asarray(self.first, dtype=np.int64)[:, None]
        return inner and [for_queries_moved(x, by) for x in inner]

    def signature(self, r: Rectangles) -> Ints:
        return signature_of(self.inner, self._moved(r))

    def broadcast_shape(self) -> tuple[int, int]:
        return len(self.first), broadcast_shape_of(self.inner)[1]

    def bind(self, sizes: CallSizes) -> Mask:
        return MaskByRow(bound_to(self.inner, _of_all_rows(sizes, self.first)), self.first)

    def _moved(self, r: Rectangles) -> Rectangles:
        by = np.asarray(self.first, dtype=np.int64)[r.b]
        return r._replace(q0=r.q0 + by, q1=r.q1 + by)


@spec
class BiasByRow(Bias):
    """A bias of positions in a call whose row b starts at position first[b].

    Args:
        inner: the bias.
        first: position of the first query of each row.
    """

    inner: Bias
    first: Sequence[int]

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self.inner.value(b, h, q + _of_rows(self.first, b), k)

    def bind(self, sizes: CallSizes) -> Bias:
        return BiasByRow(bound_to(self.inner, _of_all_rows(sizes, self.first)), self.first)


@spec
class MaskOfEachRow(Mask):
    """A mask of positions and of the queries of the call, in a call whose row b starts at position first[b].

    Args:
        rows: the mask of each row.
        first: position of the first query of each row.
    """

    rows: tuple[Mask, ...]
    first: Sequence[int]

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return _chosen(b, len(self.rows), lambda row, b: kept_pairs(self.rows[row], b, h, q + self.first[row], k))

    def broadcast_shape(self) -> tuple[int, int]:
        return len(self.rows), max((broadcast_shape_of(row)[1] for row in self.rows), default=1)

    def bind(self, sizes: CallSizes) -> Mask:
        return self.with_fields(rows=_bound_rows(self.rows, self.first, sizes))


@spec
class BiasOfEachRow(Bias):
    """A bias of positions and of the queries of the call, in a call whose row b starts at position first[b].

    Args:
        rows: the bias of each row.
        first: position of the first query of each row.
    """

    rows: tuple[Bias, ...]
    first: Sequence[int]

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return _chosen(b, len(self.rows), lambda row, b: values_of(self.rows[row], b, h, q + self.first[row], k))

    def bind(self, sizes: CallSizes) -> Bias:
        return self.with_fields(rows=_bound_rows(self.rows, self.first, sizes))


def mask_by_row(mask: Mask | None, first: tuple[int, ...]) -> Mask | None:
    """The mask of a call whose row b starts at position first[b], and which itself starts at 0.

    Raises:
        ProblemError: the mask has a `Tree`, whose place is the end of the call's keys.
    """
    if mask is None or type(mask) in (Prefix, KeyLengths) or _is_laid_out_by_call(mask):
        return mask
    if type(mask) is And or type(mask) is Or:
        return type(mask)(cast(Mask, mask_by_row(mask.a, first)), cast(Mask, mask_by_row(mask.b, first)))
    if type(mask) is Not:
        return Not(cast(Mask, mask_by_row(mask.a, first)))
    if isinstance(mask, Tree):
        raise ProblemError(
            f"{mask!r} with an offset for each batch row: a tree is at the last keys of the call. Call attend row by "
            "row."
        )
    if first and _has_table_of_call(mask):
        return MaskOfEachRow((mask,) * len(first), first)
    return MaskByRow(mask, first)


def bias_by_row(bias: Bias | None, first: tuple[int, ...]) -> Bias | None:
    """The bias of a call whose row b starts at position first[b], and which itself starts at 0."""
    if bias is None or _is_laid_out_by_call(bias):
        return bias
    if type(bias) is Sum:
        return Sum(cast(Bias, bias_by_row(bias.a, first)), cast(Bias, bias_by_row(bias.b, first)))
    if first and _has_table_of_call(bias):
        return BiasOfEachRow((bias,) * len(first), first)
    return BiasByRow(bias, first)


def row_starts(mask: Mask | None, bias: Bias | None, queries: int) -> tuple[int, ...] | None:
    """The position of the first query of each batch row, from the mask or the bias of a call of `queries` queries.

    None where neither has positions by row: the call then starts at its offset.

    >>> from regard import Causal, Prefix
    >>> row_starts(Prefix(1) | MaskByRow(Causal(), (9, 4)), None, 3), row_starts(Causal(), None, 3)
    ((9, 4), None)
    >>> row_starts(Ragged(Causal(), (16, 11)), None, 3)
    (13, 8)
    """
    found = (_starts(spec, queries) for spec in (mask, bias) if spec is not None)
    return next((starts for starts in found if starts is not None), None)


def _starts(spec: Spec, queries: int) -> tuple[int, ...] | None:
    if isinstance(spec, MaskByRow | BiasByRow | MaskOfEachRow | BiasOfEachRow):
        return tuple(spec.first)
    if isinstance(spec, Ragged):
        return tuple(length - queries for length in spec.lengths)
    found = (_starts(part, queries) for part in spec.parts() if isinstance(part, Spec))
    return next((starts for starts in found if starts is not None), None)


def _is_laid_out_by_call(spec: Spec) -> bool:
    """Whether its first row is for the first query of the call, at whatever position that is."""
    if isinstance(spec, TensorMask):
        kind = type(spec)
        return spec.offset is None and kind.keep is TensorMask.keep and kind.bind is TensorMask.bind
    if isinstance(spec, TensorBias):
        kind = type(spec)
        return spec.offset is None and kind.value is TensorBias.value and kind.bind is TensorBias.bind
    return False


def _has_table_of_call(spec: Spec) -> bool:
    """Whether it is, or has as a part, a table whose rows are the queries of the call."""
    if isinstance(spec, TensorMask | TensorBias):
        return spec.offset is None
    return any(_has_table_of_call(part) for part in spec.parts() if isinstance(part, Spec))


def _chosen(b: Positions, rows: int, of_row: Callable[[int, Positions], Tensor]) -> Tensor:
    """`of_row(b, b)`; for a tensor b, all rows are computed, and each pair takes the value of its own row."""
    if isinstance(b, int):
        return of_row(b, b)
    found = of_row(0, b.new_zeros(()))
    for row in range(1, rows):
        found = torch.where(b == row, of_row(row, b.new_full((), row)), found)
    return found


def _bound_rows(rows: Sequence[S], first: Sequence[int], sizes: CallSizes) -> tuple[S, ...]:
    """The mask or bias of each row, bound at the row's own offset."""
    return tuple(bound_to(row, sizes._replace(offset=start)) for row, start in zip(rows, first, strict=True))


def _of_all_rows(sizes: CallSizes, first: Sequence[int]) -> CallSizes:
    """The positions of the queries of all rows together, as of one row."""
    least, most = min(first, default=0), max(first, default=0)
    return sizes._replace(queries=sizes.queries + most - least, offset=least)


def _of_rows(first: Sequence[int], b: Positions) -> Positions:
    """The position of the first query in rows b."""
    if isinstance(b, int):
        return first[b]
    return torch.tensor(first, dtype=torch.int64, device=b.device)[b]
