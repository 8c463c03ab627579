"""Codecs: quantisation of keys and values to 8 or 4 bits, and back.

Keys have channels that are large in every token, so a key channel has one scale per group of *tokens*. Values have no
such channels, so each token has its own scales (Liu et al. 2024, KIVI, arXiv:2402.02750, §3). Tokens stay in full
precision until a whole group of them is older than the residual; then the group is quantised, once.

A decoded element is `code * scale + zero_point`. Scale and zero point are bf16, rounded so that the codes cover the
range of the input. Codes are computed with the rounded scale, so its rounding costs no accuracy. Where the largest code
would then decode beyond the input's type (in float16 from 65,504 on), scale and zero point are rounded the other way:
finite elements decode to finite elements. The product of code and scale is exact in float32, so every backend decodes
to the same bits.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from regard.describe.tensors import has_tangent, is_without_data
from regard.describe.whole_number import whole_field
from regard.errors import ProblemError

TILE = 16
"""Tokens that are adjacent in the codes of keys: the lanes of a vector."""

CHUNK = 32
"""Channels whose int4 codes fill 16 bytes of a value: byte i has channel i in its low, 16 + i in its high half."""


@dataclass(frozen=True)
class Codec:
    """How keys and values are quantised; abstract, see `Int8`, `Int4`, `Fp8`.

    Args:
        group: tokens per scale of a key channel, a multiple of 16; for `Int4` also channels per scale of a value.
        residual: latest tokens that stay in full precision, at least.
        sinks: first tokens that stay in full precision, rounded up to a whole group: models put much of their
            attention there (Xiao et al. 2023, arXiv:2309.17453), so an error there affects every query.
        keys: scales of keys are per "channel" (and group of tokens) or per "token". None: "channel", or "token" where
            an eviction policy removes single tokens from groups.
        rotate: whether keys and values are quantised after a Hadamard rotation of their channels, which spreads large
            channels over all (Ashkboos et al. 2024, QuaRot, arXiv:2404.00456, §3).

    Raises:
        ProblemError: an argument is out of range.
    """

    group: int = 32
    residual: int = 32
    sinks: int = 4
    keys: Literal["channel", "token"] | None = None
    rotate: bool = False

    kind: ClassVar[str] = ""
    bits: ClassVar[int] = 0
    most: ClassVar[float] = 0
    """The largest code."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, least in (("group", TILE), ("residual", 0), ("sinks", 0)):
            whole_field(self, field, least=least)
        if self.group % TILE:
            raise ProblemError(f"{name}(group={self.group!r}): expected a multiple of {TILE} tokens, {TILE} or more.")
        if self.keys is not None and (not isinstance(self.keys, str) or self.keys not in ("channel", "token")):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f'{name}(keys={self.keys!r}): expected "channel", "token" or None to let regard choose.')
        if not isinstance(self.rotate, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"{name}(rotate={self.rotate!r}): expected True or False.")

    def channels(self, dim: int) -> int:
        """The channels of a value that share a scale."""
        return dim


@dataclass(frozen=True)
class Int8(Codec):
    """Symmetric: integers from -127 to 127, no zero point.

    >>> Int8(residual=64)
    Int8(group=32, residual=64, sinks=4, keys=None, rotate=False)
    """

    kind: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    most: ClassVar[float] = 127


@dataclass(frozen=True)
class Int4(Codec):
    """Asymmetric: integers from 0 to 15; the zero point is the smallest element of the group."""

    kind: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    most: ClassVar[float] = 15

    def channels(self, dim: int) -> int:
        return min(self.group, dim)


@dataclass(frozen=True)
class Fp8(Codec):
    """8-bit floating point, e4m3: 3 bits of fraction, largest 448. Micikevicius et al. 2022, arXiv:2209.05433."""

    kind: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8
    most: ClassVar[float] = 448


class Codes(NamedTuple):
    """Quantised elements: codes as bytes, bf16 scales and zero points (None: symmetric)."""

    data: Tensor
    scale: Tensor
    zero_point: Tensor | None


def code_bytes(kind: str, dim: int, tiled: bool) -> int:
    """Bytes per token of the codes of keys (tiled) or of values."""
    if kind != "int4":
        return dim
    return (dim + 1) // 2 if tiled else (dim + CHUNK - 1) // CHUNK * CHUNK // 2


def encode_tiled(
    x: Tensor, codec: Codec, *, per_token: bool, group: int | None = None, is_checked: bool = False
) -> Codes:
    """Quantise keys; 16 tokens of a channel are adjacent.

    Args:
        x: [..., tokens, dim], tokens a multiple of the group.
        per_token: one scale per token, instead of one per channel and group of tokens.
        group: tokens per scale of a channel; None: the codec's.
        is_checked: whether all elements are known to be finite, so that none is read on the host.

    Returns:
        data uint8 [..., tokens // 16, units, 16]; scale and zero_point bf16 [..., tokens // group, dim], or
        [..., tokens].

    Raises:
        ProblemError: an element is NaN or infinite, or has a tangent.
    """
    _refuse_tangents(x, codec.kind)
    group = group or codec.group
    wide, (tokens, dim), end = x.float(), x.shape[-2:], _end(x.dtype)
    if per_token:
        scale, zero = _range(wide, codec, -1, end, is_checked)
        data = _codes(wide, codec, scale[..., None], None if zero is None else zero[..., None])
    else:
        grouped = wide.unflatten(-2, (tokens // group, group))
        scale, zero = _range(grouped, codec, -2, end, is_checked)
        over = None if zero is None else zero[..., None, :]
        data = _codes(grouped, codec, scale[..., None, :], over).flatten(-3, -2)
    if codec.kind == "int4":
        data = torch.nn.functional.pad(data, (0, dim % 2))
        data = data[..., 0::2] | data[..., 1::2] << 4
    tiles = data.unflatten(-2, (tokens // TILE, TILE)).transpose(-1, -2).contiguous()
    return Codes(tiles, scale, zero)


def encode_rows(x: Tensor, codec: Codec, *, is_checked: bool = False) -> Codes:
    """Quantise values; the channels of a token are adjacent.

    Args:
        x: [..., tokens, dim].
        is_checked: as for `encode_tiled`.

    Returns:
        data uint8 [..., tokens, units]; scale and zero_point bf16 [..., tokens, groups of channels].

    Raises:
        ProblemError: an element is NaN or infinite, or has a tangent.
    """
    _refuse_tangents(x, codec.kind)
    dim = x.shape[-1]
    group = codec.channels(dim)
    count = (dim + group - 1) // group
    padded = torch.nn.functional.pad(x.float(), (0, count * group - dim), mode="constant")
    grouped = padded.unflatten(-1, (count, group))
    if count * group > dim:  # padding must not widen the range of the last group
        grouped[..., -1, dim - count * group :] = grouped[..., -1, :1]
    scale, zero = _range(grouped, codec, -1, _end(x.dtype), is_checked)
    data = _codes(grouped, codec, scale[..., None], None if zero is None else zero[..., None]).flatten(-2)[..., :dim]
    if codec.kind == "int4":
        data = torch.nn.functional.pad(data, (0, -dim % CHUNK)).unflatten(-1, (-1, 2, CHUNK // 2))
        data = (data[..., 0, :] | data[..., 1, :] << 4).flatten(-2)
    return Codes(data.contiguous(), scale, zero)


def decode_tiled(codes: Codes, kind: str, *, dim: int, per_token: bool, group: int) -> Tensor:
    """The decoded elements of `encode_tiled`, float32 [..., tokens, dim]."""
    data = codes.data.transpose(-1, -2).flatten(-3, -2)
    if kind == "int4":
        data = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)[..., :dim]
    wide = _as_float(data, kind)

    def per_element(t: Tensor) -> Tensor:
        return t.float()[..., None] if per_token else t.float().repeat_interleave(group, dim=-2)

    found = wide * per_element(codes.scale)
    return found if codes.zero_point is None else found + per_element(codes.zero_point)


def decode_rows(codes: Codes, kind: str, *, dim: int, group: int) -> Tensor:
    """The decoded elements of `encode_rows`, float32 [..., tokens, dim]; `group` channels share a scale."""
    data = codes.data
    if kind == "int4":
        halves = data.unflatten(-1, (-1, CHUNK // 2))
        data = torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)[..., :dim]

    def per_element(t: Tensor) -> Tensor:
        return t.float().repeat_interleave(group, dim=-1)[..., :dim]

    found = _as_float(data, kind) * per_element(codes.scale)
    return found if codes.zero_point is None else found + per_element(codes.zero_point)


def _refuse_tangents(x: Tensor, kind: str) -> None:
    """Raise `ProblemError` if elements to be stored as codes have tangents, which would be lost."""
    if has_tangent(x):
        raise ProblemError(
            f"keys or values with tangents (forward-mode derivatives) cannot be stored as {kind} codes, which have no "
            "tangents: use a cache without a codec, or append outside of forward mode."
        )


def _range(x: Tensor, codec: Codec, axis: int, end: float, is_checked: bool) -> tuple[Tensor, Tensor | None]:
    """(scale, zero point) along an axis, bf16: the codes cover the range of x and decode to nothing beyond `end`."""
    least, largest = x.amin(axis), x.amax(axis)
    if not is_checked and not is_without_data(x) and not bool(torch.isfinite(largest - least).all()):
        raise ProblemError(
            f"NaN, infinite or too large elements cannot be stored as {codec.kind}: find where they come from, or use "
            "a cache without a codec."
        )
    if codec.kind != "int4":
        return _above(torch.maximum(largest, -least) / codec.most, end / codec.most), None
    zero = -_above(-least, end)
    return _above((largest - zero.float()) / codec.most, (end - zero.float()) / codec.most), zero


def _end(dtype: torch.dtype) -> float:
    """The largest element of a type, at most that of float32."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _above(x: Tensor, end: Tensor | float) -> Tensor:
    """The smallest bf16 >= x; where that exceeds `end` (>= x), the bf16 before it."""
    near = x.bfloat16()
    short = near.float() < x
    step = torch.where(near.view(torch.int16) < 0, -1, 1).to(torch.int16)  # towards 0 from below
    found = torch.where(short, (near.view(torch.int16) + step).view(torch.bfloat16), near)
    return torch.where(found.float() > end, (found.view(torch.int16) - 1).view(torch.bfloat16), found)


def _codes(x: Tensor, codec: Codec, scale: Tensor, zero: Tensor | None) -> Tensor:
    wide = scale.float()
    quotient = (x if zero is None else x - zero.float()) / torch.where(wide == 0, 1.0, wide)
    if codec.kind == "fp8":
        return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if codec.kind == "int8":
        return quotient.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return quotient.round().clamp(0, 15).to(torch.uint8)


def _as_float(codes: Tensor, kind: str) -> Tensor:
    if kind == "fp8":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    return codes.contiguous().view(torch.int8).float() if kind == "int8" else codes.float()
