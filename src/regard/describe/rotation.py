"""Rotation of pairs of dimensions by angles, as `Rope` does to queries and keys, in few passes over memory.

A pair (a, b) becomes `(a cos - b sin, b cos + a sin)`. A table has cosines and sines in the order of their use:

- i paired with i + pairs: `[tokens, 2, 2 * pairs]`, rows `(cos, cos)` and `(-sin, sin)`, for
  `x * row 0 + (x with its halves exchanged) * row 1`;
- neighbours paired: `[tokens, pairs, 2]`, `(cos, sin)`, so that rotation is one product of complex numbers.

Without a gradient or a trace, the rotation writes pieces that fit a core's cache into the output in place; the backward
pass does the same, since it is the inverse rotation. Everything else uses the formula.
"""

from typing import Any, cast

import torch
from torch import Tensor

from regard.describe.position_table import is_traced
from regard.describe.tensors import beside
from regard.torch_internals import in_forward_mode, is_legacy_batched

PIECE = 1 << 18
"""Elements rotated at a time: 1 MiB of float32. Smaller pieces cost more calls than they save reads."""

FEW = 1 << 15
"""Elements up to which the formula, with fewer calls, is faster than writing in place: decode."""


def rotation_table(angles: Tensor, magnitude: float, dtype: torch.dtype, *, interleaved: bool) -> Tensor:
    """Cosine and sine of float64 angles [..., pairs], times the magnitude, as a table of that type."""
    cos, sin = angles.cos(), angles.sin()
    if not interleaved:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return (torch.stack((cos, sin), _axis(interleaved)) * magnitude).to(dtype)


def rotate_pairs(x: Tensor, table: Tensor, *, interleaved: bool) -> Tensor:
    """x with its first dimensions rotated, as many as the table has; the others are unchanged.

    x: [..., tokens, dim] of any strides. table: [..., tokens, *row], broadcasting with x. The product is computed in
    the table's type and rounded to that of x. Differentiable to any order.
    """
    if is_traced() or table.requires_grad or is_watched(x):
        return _by_formula(x, beside(table, x), interleaved)
    if x.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _Rotation.apply(x, table, interleaved))
    return _in_place(x, table, interleaved)


class _Rotation(torch.autograd.Function):
    """The rotation, with the inverse rotation as its gradient; saves the table alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.interleaved = interleaved
        return _in_place(x.detach(), table, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (table,) = ctx.saved_tensors
        cos, sin = table.unbind(_axis(ctx.interleaved))
        back = torch.stack((cos, -sin), _axis(ctx.interleaved))
        return rotate_pairs(grad, back, interleaved=ctx.interleaved), None, None


def is_watched(x: Tensor) -> bool:
    """Whether writing in place would break forward-mode differentiation, a subclass, or batched gradients."""
    return in_forward_mode() or type(x) not in (Tensor, torch.nn.Parameter) or is_legacy_batched(x)


def _axis(interleaved: bool) -> int:
    """The axis of a table that cosine and sine are along."""
    return -1 if interleaved else -2


def _width(table: Tensor, interleaved: bool) -> int:
    """How many dimensions a table rotates."""
    return 2 * table.shape[-2] if interleaved else table.shape[-1]


def _by_formula(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    width = _width(table, interleaved)
    if width == x.shape[-1]:
        return (_neighbours if interleaved else _halves)(x.to(table.dtype), table).to(x.dtype)
    first, rest = x.split((width, x.shape[-1] - width), -1)
    return torch.cat((_by_formula(first, table, interleaved), rest), -1)


def _halves(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.unbind(-2)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _neighbours(x: Tensor, table: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    cos, sin = table.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)


def _in_place(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    if x.numel() <= FEW and not interleaved:
        return _by_formula(x, table, interleaved)
    width, tokens = _width(table, interleaved), x.shape[-2]
    out = torch.empty_like(x)
    source, target = x, out
    if width < x.shape[-1]:
        out[..., width:].copy_(x[..., width:])
        source, target = x[..., :width], out[..., :width]
    if x.numel() <= PIECE:
        _rotate_piece(source, target, table, interleaved)
        return out
    step = max(PIECE // (x.numel() // tokens), 1)
    for start in range(0, tokens, step):
        here = slice(start, start + step)
        _rotate_piece(source[..., here, :], target[..., here, :], table[..., here, :, :], interleaved)
    return out


def _rotate_piece(x: Tensor, out: Tensor, table: Tensor, interleaved: bool) -> None:
    if x.dtype != table.dtype:  # half precision: rotated in float32, rounded once
        wide = x.to(table.dtype)
        done = torch.empty_like(wide)
        _rotate_piece(wide, done, table, interleaved)
        out.copy_(done)
    elif interleaved:
        pairs = (x.shape[-1] // 2, 2)
        _rotate_neighbours(x.unflatten(-1, pairs), out.unflatten(-1, pairs), table)
    else:
        cos, sin = table.unbind(-2)
        (a, b), (out_a, out_b), (minus, plus) = x.chunk(2, -1), out.chunk(2, -1), sin.chunk(2, -1)
        torch.mul(x, cos, out=out)
        out_a.addcmul_(b, minus)
        out_b.addcmul_(a, plus)


def _rotate_neighbours(x: Tensor, out: Tensor, table: Tensor) -> None:
    if _is_complex(x) and _is_complex(out):
        torch.mul(torch.view_as_complex(x), torch.view_as_complex(table), out=torch.view_as_complex(out))
        return
    (a, b), (out_a, out_b), (cos, sin) = x.unbind(-1), out.unbind(-1), table.unbind(-1)
    torch.mul(x, cos.unsqueeze(-1), out=out)
    out_a.addcmul_(b, sin, value=-1)
    out_b.addcmul_(a, sin)


def _is_complex(pairs: Tensor) -> bool:
    """Whether the pairs have the memory layout of complex numbers."""
    *strides, last = pairs.stride()
    return last == 1 and not any(stride % 2 for stride in strides) and pairs.storage_offset() % 2 == 0
