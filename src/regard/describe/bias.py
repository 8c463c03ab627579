"""Biases: terms added to the scores, after the softcap and before the mask.

A bias has `value(b, h, q, k)` for positions, like the `keep` of a mask, differentiable in its tensors. `a + b` adds two
biases without rounding the sum: backends add each in the type that they compute in.
"""

import math
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from regard.describe.mask import CallSizes, Positions, as_tensors, broadcasts, check_takes_positions, wrong_shape
from regard.describe.not_a_spec import instead, received
from regard.describe.require_tensor import require_tensor
from regard.describe.spec import Spec, bound_to, spec
from regard.describe.whole_number import whole
from regard.errors import ProblemError


class Bias(Spec):
    """A term added to the scores; abstract, see `Alibi`, `T5Bias`, `TensorBias`."""

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        """The bias of query position q and key position k in head h of batch row b."""
        raise ProblemError(f"{type(self).__name__} is a bias without value: define value(self, b, h, q, k).")

    def bind(self, sizes: CallSizes) -> "Bias":
        """This bias in a call; the rows of `TensorBias` get positions. Raises `ProblemError` if it does not fit."""
        return self

    def per_distance(self) -> bool:
        """Whether the value depends on the head and on k - q alone, so that one vector per head has all values."""
        return False

    def terms(self) -> list["Bias"]:
        """The terms of this bias, a sum."""
        return [self]

    def widened(self, dtype: torch.dtype) -> "Bias":
        """This bias with floats of at least that type, so that gradients are summed in it and rounded once.

        One element of a T5 table is in many scores: a sum of their gradients in bfloat16 is 3 to 11 % off.

        >>> T5Bias(torch.zeros(32, 2, dtype=torch.bfloat16)).widened(torch.float32)
        T5Bias(table=float32[32, 2])
        """

        def wide(t: Tensor) -> Tensor:  # integers may be indices
            return t.to(torch.promote_types(t.dtype, dtype)) if t.is_floating_point() else t

        return self.with_tensors(wide)

    def __add__(self, other: "Bias") -> "Bias":
        return Sum(self, _bias(other))

    def __radd__(self, other: object) -> "Bias":
        return Sum(_bias(other), self)

    def __and__(self, other: object) -> NoReturn:
        raise _no_mask(f"{self!r} & {received(other)}")

    def __or__(self, other: object) -> NoReturn:
        raise _no_mask(f"{self!r} | {received(other)}")

    def __rand__(self, other: object) -> NoReturn:
        raise _no_mask(f"{received(other)} & {self!r}")

    def __ror__(self, other: object) -> NoReturn:
        raise _no_mask(f"{received(other)} | {self!r}")

    def __invert__(self) -> NoReturn:
        raise _no_mask(f"~({self!r})")

    def __mul__(self, other: object) -> NoReturn:
        raise _not_scaled(f"{self!r} * {received(other)}")

    def __rmul__(self, other: object) -> NoReturn:
        raise _not_scaled(f"{received(other)} * {self!r}")

    def __truediv__(self, other: object) -> NoReturn:
        raise _not_scaled(f"{self!r} / {received(other)}")

    def __sub__(self, other: object) -> NoReturn:
        raise _not_scaled(f"{self!r} - {received(other)}")

    def __rsub__(self, other: object) -> NoReturn:
        raise _not_scaled(f"{received(other)} - {self!r}")

    def __neg__(self) -> NoReturn:
        raise _not_scaled(f"-({self!r})")


def values_of(bias: Bias, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
    """`bias.value` of these positions.

    Raises:
        ProblemError: `value` takes other arguments, or returns no tensor that broadcasts to the positions.
    """
    try:
        values = cast(object, bias.value(b, h, q, k))  # of a user's bias, anything
    except TypeError as error:
        check_takes_positions(bias, "value", error)
        raise
    if not isinstance(values, Tensor):
        raise ProblemError(f"{bias!r}: value(b, h, q, k) returned {type(values).__name__}; expected a tensor.")
    if (wrong := wrong_shape(values, b, h, q, k)) is not None:
        raise ProblemError(f"{bias!r}: value(b, h, q, k) returned {wrong}.")
    if values.dtype == torch.bool or values.is_complex():
        hint = "" if values.is_complex() else "; to hide pairs, define keep of a Mask and pass it as mask="
        expected = f"expected numbers to add to scores{hint}"
        raise ProblemError(f"{bias!r}: value(b, h, q, k) returned {values.dtype}; {expected}.")
    return values


def _no_mask(written: str) -> ProblemError:
    return ProblemError(f"{written}: a bias adds to biases by +, and is passed as bias=.")


def _not_scaled(written: str) -> ProblemError:
    return ProblemError(
        f"{written}: a bias adds to biases by +, and has no other operator; to scale one, scale its tensors, such as "
        "Alibi(slopes=2 * t), T5Bias(2 * table) or TensorBias(2 * t)."
    )


def _bias(other: object) -> Bias:
    if isinstance(other, Bias):
        return other
    raise ProblemError(f"a bias adds to biases only, and got {received(other)}; {instead(other, 'bias')}.")


@spec
class Sum(Bias):
    """The sum `a + b` of two biases."""

    is_combined = True
    a: Bias
    b: Bias

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return values_of(self.a, b, h, q, k) + values_of(self.b, b, h, q, k)

    def bind(self, sizes: CallSizes) -> Bias:
        return self.with_fields(a=bound_to(self.a, sizes), b=bound_to(self.b, sizes))

    def per_distance(self) -> bool:
        return self.a.per_distance() and self.b.per_distance()

    def terms(self) -> list[Bias]:
        return [*self.a.terms(), *self.b.terms()] if type(self) is Sum else [self]

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"{parts[0]} + {parts[1]}"


@spec
class Alibi(Bias):
    """Attention with linear biases: `-slope[h] * |q - k|`. Press et al. 2022, arXiv:2108.12409, §3.

    With n heads, a power of two, head h (from 0) has slope `2 ** (-8 * (h + 1) / n)`. For other n the slopes are
    those of the greatest power of two below n, followed by every second slope of twice that power (the authors' own
    rule). The paper is causal; for keys after the query the distance counts as well, as in flash-attention.

    Args:
        heads: query heads of the call, at least 1; None: as many as there are slopes.
        slopes: slopes of your own in place of those of the paper, floats [heads], such as flash-attention's
            `alibi_slopes`; gradients flow to them. None: those of the paper.

    >>> Alibi(4).slope_per_head().tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> Alibi(3).slope_per_head().tolist()
    [0.0625, 0.00390625, 0.25]
    >>> learned = Alibi(slopes=torch.tensor([0.5, 0.25], requires_grad=True))
    >>> learned, learned.value(0, 1, torch.tensor(9), 5).item()
    (Alibi(heads=2, slopes=float32[2]), -1.0)
    """

    heads: int | None = None
    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        expected = "floats [heads], a slope per query head"
        if self.slopes is not None:
            slopes = require_tensor(self.slopes, "Alibi(slopes)", expected)
            if not slopes.is_floating_point() or slopes.ndim != 1 or self.heads not in (None, len(slopes)):
                for_heads = "" if self.heads is None else f" for {self.heads} heads"
                raise ProblemError(
                    f"Alibi(slopes) is {slopes.dtype} {list(slopes.shape)}{for_heads}: expected {expected}."
                )
            object.__setattr__(self, "heads", len(slopes))
        elif self.heads is None:
            raise ProblemError(
                "Alibi() has no heads: give a number of query heads, or slopes= with one per query head."
            )
        object.__setattr__(self, "heads", whole(self.heads, "Alibi(heads)", "query heads", least=1))

    def slope_per_head(self) -> Tensor:
        """The slope of each head, [heads]: float64 for those of the paper."""
        if self.slopes is not None:
            return self.slopes
        heads = cast(int, self.heads)
        power = 1 << (heads.bit_length() - 1)
        slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
        between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
        return torch.tensor((slopes + between)[:heads], dtype=torch.float64, device="cpu")

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        (distance,) = as_tensors(q - k)
        wide = torch.float32 if distance.device.type == "mps" else torch.float64  # MPS has no float64
        return -self.slope_per_head().to(wide).to(distance.device)[h] * distance.abs()

    def bind(self, sizes: CallSizes) -> Bias:
        if self.heads != sizes.heads:
            raise ProblemError(f"{self!r} has slopes for {self.heads} heads and the call has {sizes.heads}.")
        return self

    def per_distance(self) -> bool:
        return True


@spec
class T5Bias(Bias):
    """Learned relative bias: `table[bucket(k - q), h]`. Raffel et al. 2020, arXiv:1910.10683, §2.1.

    Half of the buckets (per direction) are for exact distances. The other half are logarithmic up to `max_distance`;
    longer distances share the last. Bidirectional: the upper half of the table is for keys after the query.

    Args:
        table: [buckets, heads]; gradients flow to it. transformers' `relative_attention_bias.weight`.
        bidirectional: True for encoders; False: all keys after the query are in bucket 0.
        max_distance: tokens.

    >>> T5Bias(torch.zeros(32, 2)).bucket(torch.tensor([0, -1, 1, -1000])).tolist()
    [0, 1, 17, 15]
    """

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        require_tensor(self.table, "T5Bias(table)", "floats [buckets, heads]")
        if not isinstance(cast(object, self.bidirectional), bool):
            raise ProblemError(f"T5Bias(bidirectional) is {self.bidirectional!r}: expected True or False.")
        needed = 4 if self.bidirectional else 2
        if self.table.ndim != 2 or self.table.shape[0] < needed or not self.table.is_floating_point():
            raise ProblemError(
                f"T5Bias(table) is {self.table.dtype} {list(self.table.shape)}: expected floats [buckets, heads] "
                f"with at least {needed} buckets."
            )
        object.__setattr__(self, "max_distance", whole(self.max_distance, "T5Bias(max_distance)"))
        if self.max_distance <= self._exact():
            raise ProblemError(
                f"T5Bias(max_distance={self.max_distance}): must exceed the {self._exact()} exact distances."
            )

    def _exact(self) -> int:
        return self.table.shape[0] // (4 if self.bidirectional else 2)

    def bucket(self, distance: Tensor) -> Tensor:
        """The row of the table for each k - q, int64."""
        exact, one_way = self._exact(), self.table.shape[0] // (2 if self.bidirectional else 1)
        offset = (distance > 0) * one_way if self.bidirectional else torch.zeros_like(distance)
        far = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        # float32 and the order of operations of the original, so that borders of buckets round the same way
        log = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact) * (one_way - exact)
        return offset + torch.where(far < exact, far, (exact + log.long()).clamp(max=one_way - 1))

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        bucket = self.bucket(*as_tensors(k - q))
        return self.table[bucket, h]

    def bind(self, sizes: CallSizes) -> Bias:
        if self.table.shape[1] != sizes.heads:
            raise ProblemError(f"{self!r} has a column for {self.table.shape[1]} heads and the call has {sizes.heads}.")
        return self

    def per_distance(self) -> bool:
        return True


@spec
class TensorBias(Bias):
    """Any bias as a tensor; gradients flow to it.

    Its rows are the queries of the call and its columns the keys. An entry of -inf hides a pair; a mask is better:
    masked tiles are not computed. Leave axes that broadcast at size 1: an expanded tensor gets a gradient for every
    element.

    Args:
        tensor: floats, broadcastable to [batch, heads, queries, keys].
        offset: position of its first row; None: the offset of the call (outside of a call: last row at last column).
    """

    tensor: Tensor
    offset: int | None = None

    def __post_init__(self) -> None:
        require_tensor(self.tensor, "TensorBias(tensor)", "floats, broadcastable to [batch, heads, queries, keys]")
        if self.offset is not None:
            object.__setattr__(self, "offset", whole(self.offset, "TensorBias(offset)"))
        if not self.tensor.is_floating_point() or self.tensor.ndim > 4:
            raise ProblemError(
                f"TensorBias(tensor) is {self.tensor.dtype} {list(self.tensor.shape)}: expected floats, "
                "broadcastable to [batch, heads, queries, keys]. A bool tensor is a mask: TensorMask(mask)."
            )

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        rows, columns = self._sizes()[2:]
        index = (b, h, q - (columns - rows if self.offset is None else self.offset), k)[4 - self.tensor.ndim :]
        return self.tensor[tuple(i * 0 if n == 1 else i for i, n in zip(index, self.tensor.shape, strict=True))]

    def bind(self, sizes: CallSizes) -> Bias:
        called = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        own, first = self._sizes(), sizes.offset if self.offset is None else self.offset
        placed = self.offset is not None and first <= sizes.offset and sizes.positions <= first + own[2]
        fits = [broadcasts(size, other) for size, other in zip(own, called, strict=True)]
        if not all(fits[:2]) or not fits[3] or not (own[2] == 1 or placed or (self.offset is None and fits[2])):
            raise ProblemError(
                f"{self!r} does not broadcast to [batch, heads, queries, keys] = {list(called)}, first query at "
                f"{sizes.offset}: every size must be equal or 1, and rows with an offset must cover the queries."
            )
        return self.with_fields(offset=first)

    def rows(self, queries: int, offset: int) -> Tensor:
        """The rows for the queries of a call, after `bind`: [batch or 1, heads or 1, queries or 1, keys or 1]."""
        whole = self.tensor[(None,) * (4 - self.tensor.ndim)]
        if broadcasts(whole.shape[2], queries) and (whole.shape[2] == 1 or self.offset == offset):
            return whole
        return whole.narrow(2, offset - cast(int, self.offset), queries)

    def _sizes(self) -> tuple[int, int, int, int]:
        return cast("tuple[int, int, int, int]", (1,) * (4 - self.tensor.ndim) + tuple(self.tensor.shape))


@spec
class DistanceBias(Bias):
    """Any bias that depends on the head and on the distance q - k, as a table; gradients flow to it.

    Args:
        table: floats [heads or 1, distances].
        first: the distance q - k of its first column.

    >>> DistanceBias(torch.tensor([[0.0, -1.0, -2.0]]), first=0).value(0, 0, 5, torch.tensor([4, 5])).tolist()
    [-1.0, 0.0]
    """

    table: Tensor
    first: int

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        """The value; distances beyond the table have that of its last column, and no call that binds has them."""
        rows, columns = self.table.shape
        head, distance = as_tensors(h, q - k)
        return self.table[head * 0 if rows == 1 else head, (distance - self.first).clamp(0, columns - 1)]

    def bind(self, sizes: CallSizes) -> Bias:
        rows, columns = self.table.shape
        low, high = sizes.offset - (sizes.keys - 1), sizes.positions - 1
        if not broadcasts(rows, sizes.heads) or low < self.first or high >= self.first + columns:
            raise ProblemError(
                f"{self!r} has distances {self.first} to {self.first + columns - 1} for {rows} heads, and the call has "
                f"distances {low} to {high} and {sizes.heads} heads."
            )
        return self

    def per_distance(self) -> bool:
        return True
