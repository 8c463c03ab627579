"""Codecs: how the numbers of keys and values are written in fewer bits, and read again.

Keys have channels that are large in every token, so a channel of a key shares its scale along *tokens*; values have no
such channels, so each token has scales of its own (Liu et al. 2024, KIVI, arXiv:2402.02750, §3). Tokens wait in full
precision until a whole group of them is there and older than the residual; then they are written once, never again.

A stored number is `code * scale + low`. Scales and `low` are bf16, rounded so that the range covers what came in; codes
are chosen for the rounded ones, so that their rounding costs no accuracy. Where the range would then reach beyond the
type that numbers came in, as of float16 it may (65,504 is the last), they are rounded the other way: what is read is
finite like what was written. The product of a code and a scale is exact in float32, so whoever computes the number gets
the same bits.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from regard.describe.tensors import is_without_data
from regard.describe.whole_number import whole_field
from regard.errors import ProblemError

TILE = 16
"""Tokens that stand side by side in the codes of keys: the lanes of a vector."""

CHUNK = 32
"""Channels whose int4 codes fill 16 bytes of a value: byte i holds channel i, and above it channel 16 + i."""


@dataclass(frozen=True)
class Codec:
    """How numbers are written; abstract, see `Int8`, `Int4`, `Fp8`.

    Args:
        group: tokens that share the scale of a channel of their keys, a multiple of 16; for `Int4` also the channels
            that share a scale of a value.
        residual: so many of the latest tokens, at least, stay as they came.
        sinks: so many of the first tokens stay as they came, rounded up to a whole group: models put much of their
            attention there (Xiao et al. 2023, arXiv:2309.17453), so an error there is seen everywhere.
        keys: what shares a scale among keys: "channel" (along tokens) or "token" (along channels). None: "channel",
            or "token" where an eviction policy takes tokens out of groups.
        rotate: whether keys and values are written after a Hadamard rotation of their channels, which spreads large
            ones over all (Ashkboos et al. 2024, QuaRot, arXiv:2404.00456, §3).

    Raises:
        ProblemError: a number that makes no sense.
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
    """Whole numbers from -127 to 127.

    >>> Int8(residual=64)
    Int8(group=32, residual=64, sinks=4, keys=None, rotate=False)
    """

    kind: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    most: ClassVar[float] = 127


@dataclass(frozen=True)
class Int4(Codec):
    """Whole numbers from 0 to 15, counted from the smallest of their group (`low`)."""

    kind: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    most: ClassVar[float] = 15

    def channels(self, dim: int) -> int:
        return min(self.group, dim)


@dataclass(frozen=True)
class Fp8(Codec):
    """Floating point in 8 bits, e4m3: 3 of fraction, the largest 448. Micikevicius et al. 2022, arXiv:2209.05433."""

    kind: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8
    most: ClassVar[float] = 448


class Codes(NamedTuple):
    """Numbers as they are written: codes as bytes, bf16 scales, and what is added (None: nothing)."""

    data: Tensor
    scale: Tensor
    zero_point: Tensor | None


def code_bytes(kind: str, dim: int, tiled: bool) -> int:
    """The bytes that the codes of one token take: those of keys (tiled), or of values."""
    if kind != "int4":
        return dim
    return (dim + 1) // 2 if tiled else (dim + CHUNK - 1) // CHUNK * CHUNK // 2


def encode_tiled(x: Tensor, codec: Codec, *, per_token: bool, group: int | None = None) -> Codes:
    """Codes of keys, 16 tokens of a channel side by side.

    Args:
        x: [..., tokens, dim], tokens a whole number of groups.
        per_token: one scale for each token, instead of one for each channel and group of tokens.
        group: tokens that share a channel's scale; None for the codec's.

    Returns:
        data uint8 [..., tokens // 16, units, 16]; scale and low bf16 [..., tokens // group, dim], or [..., tokens].

    Raises:
        ProblemError: a number is NaN or infinite.
    """
    group = group or codec.group
    wide, (tokens, dim), end = x.float(), x.shape[-2:], _end(x.dtype)
    if per_token:
        scale, low = _range(wide, codec, -1, end)
        numbers = _codes(wide, codec, scale[..., None], None if low is None else low[..., None])
    else:
        grouped = wide.unflatten(-2, (tokens // group, group))
        scale, low = _range(grouped, codec, -2, end)
        over = None if low is None else low[..., None, :]
        numbers = _codes(grouped, codec, scale[..., None, :], over).flatten(-3, -2)
    if codec.kind == "int4":
        numbers = torch.nn.functional.pad(numbers, (0, dim % 2))
        numbers = numbers[..., 0::2] | numbers[..., 1::2] << 4
    tiles = numbers.unflatten(-2, (tokens // TILE, TILE)).transpose(-1, -2).contiguous()
    return Codes(tiles, scale, low)


def encode_rows(x: Tensor, codec: Codec) -> Codes:
    """Codes of values, token after token.

    Args:
        x: [..., tokens, dim].

    Returns:
        data uint8 [..., tokens, units]; scale and low bf16 [..., tokens, groups of channels].

    Raises:
        ProblemError: a number is NaN or infinite.
    """
    dim = x.shape[-1]
    group = codec.channels(dim)
    count = (dim + group - 1) // group
    padded = torch.nn.functional.pad(x.float(), (0, count * group - dim), mode="constant")
    grouped = padded.unflatten(-1, (count, group))
    if count * group > dim:  # what is padded must not widen the range of the last group
        grouped[..., -1, dim - count * group :] = grouped[..., -1, :1]
    scale, low = _range(grouped, codec, -1, _end(x.dtype))
    numbers = _codes(grouped, codec, scale[..., None], None if low is None else low[..., None]).flatten(-2)[..., :dim]
    if codec.kind == "int4":
        numbers = torch.nn.functional.pad(numbers, (0, -dim % CHUNK)).unflatten(-1, (-1, 2, CHUNK // 2))
        numbers = (numbers[..., 0, :] | numbers[..., 1, :] << 4).flatten(-2)
    return Codes(numbers.contiguous(), scale, low)


def decode_tiled(codes: Codes, kind: str, *, dim: int, per_token: bool, group: int) -> Tensor:
    """The numbers of `encode_tiled`, float32 [..., tokens, dim]."""
    numbers = codes.data.transpose(-1, -2).flatten(-3, -2)
    if kind == "int4":
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)[..., :dim]
    wide = _numbers(numbers, kind)

    def spread(t: Tensor) -> Tensor:
        return t.float()[..., None] if per_token else t.float().repeat_interleave(group, dim=-2)

    found = wide * spread(codes.scale)
    return found if codes.zero_point is None else found + spread(codes.zero_point)


def decode_rows(codes: Codes, kind: str, *, dim: int, group: int) -> Tensor:
    """The numbers of `encode_rows`, float32 [..., tokens, dim]; `group` channels share a scale."""
    numbers = codes.data
    if kind == "int4":
        halves = numbers.unflatten(-1, (-1, CHUNK // 2))
        numbers = torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)[..., :dim]

    def spread(t: Tensor) -> Tensor:
        return t.float().repeat_interleave(group, dim=-1)[..., :dim]

    found = _numbers(numbers, kind) * spread(codes.scale)
    return found if codes.zero_point is None else found + spread(codes.zero_point)


def _range(x: Tensor, codec: Codec, axis: int, end: float) -> tuple[Tensor, Tensor | None]:
    """(scale, low) along an axis, bf16: together with the codes they reach all of x, and nothing beyond `end`."""
    least, largest = x.amin(axis), x.amax(axis)
    if not is_without_data(x) and not bool(torch.isfinite(largest - least).all()):
        raise ProblemError(
            f"NaN, infinite or too large numbers came to be stored as {codec.kind}, which cannot hold them: find where "
            "they come from, or use a cache without a codec."
        )
    if codec.kind != "int4":
        return _above(torch.maximum(largest, -least) / codec.most, end / codec.most), None
    low = -_above(-least, end)
    return _above((largest - low.float()) / codec.most, (end - low.float()) / codec.most), low


def _end(dtype: torch.dtype) -> float:
    """The largest number of a type, of those that float32 has."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _above(x: Tensor, end: Tensor | float) -> Tensor:
    """The nearest bf16 that is not less; where that is more than `end`, which is not less than x, the one before."""
    near = x.bfloat16()
    short = near.float() < x
    step = torch.where(near.view(torch.int16) < 0, -1, 1).to(torch.int16)  # towards 0 from below
    found = torch.where(short, (near.view(torch.int16) + step).view(torch.bfloat16), near)
    return torch.where(found.float() > end, (found.view(torch.int16) - 1).view(torch.bfloat16), found)


def _codes(x: Tensor, codec: Codec, scale: Tensor, low: Tensor | None) -> Tensor:
    wide = scale.float()
    numbers = (x if low is None else x - low.float()) / torch.where(wide == 0, 1.0, wide)
    if codec.kind == "fp8":
        return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if codec.kind == "int8":
        return numbers.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return numbers.round().clamp(0, 15).to(torch.uint8)


def _numbers(codes: Tensor, kind: str) -> Tensor:
    if kind == "fp8":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    return codes.contiguous().view(torch.int8).float() if kind == "int8" else codes.float()
