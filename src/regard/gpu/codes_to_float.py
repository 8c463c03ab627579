# pyright: basic, reportGeneralTypeIssues=false
"""Codes of 8 and 4 bits as float32, and elements in the type of a call, for the kernel of decoding on GPUs."""

import triton
import triton.language as tl


@triton.jit
def scaled(codes, scale, KIND: tl.constexpr, shape: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr):
    """Codes of 8 bits, alone or four in a word, times their scales, float32.

    The bits of e4m3 numbers, moved, are those of float16 that are 256 times smaller; two of them are moved at once.
    """
    if not WORDS:
        if KIND == "int8":
            found = codes.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            found, _ = _halves(((codes & 0x80).to(tl.uint32) << 8) | ((codes & 0x7F).to(tl.uint32) << 7))
            scale *= 256.0
    elif KIND == "int8":
        found = _bytes(codes ^ 0x80808080, 8388736.0, PTX)
    elif PTX >= 89:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [codes], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
        a, b = _halves(low)
        c, d = _halves(high)
        found = _in_order(a, b, c, d)
    else:
        a, c = _halves((codes << 8 & 0x80008000) | (codes << 7 & 0x3F803F80))
        b, d = _halves((codes & 0x80008000) | (codes >> 1 & 0x3F803F80))
        found = _in_order(a, b, c, d)
        scale *= 256.0
    return tl.reshape(found, shape) * scale


@triton.jit
def halves_of_bytes(codes, shape: tl.constexpr, PTX: tl.constexpr):
    """The low and the high halves of bytes, four in a word, float32."""
    low = tl.reshape(_bytes(codes & 0x0F0F0F0F, 8388608.0, PTX), shape)
    return low, tl.reshape(_bytes(codes >> 4 & 0x0F0F0F0F, 8388608.0, PTX), shape)


@triton.jit
def _halves(words):
    """Two float16 in a word, as float32."""
    low = words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bytes(words, zero: tl.constexpr, PTX: tl.constexpr):
    """The four bytes of words less a number, float32 [..., 2, 2]; `zero` is that number and 2^23.

    Bytes become the last bits of floats from 2^23 on: GPUs convert integers at an eighth of the speed of additions.
    """
    if PTX > 0:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ prmt.b32 $0, $4, 0x4B000000, 0x7650; prmt.b32 $1, $4, 0x4B000000, 0x7651; "
            "prmt.b32 $2, $4, 0x4B000000, 0x7652; prmt.b32 $3, $4, 0x4B000000, 0x7653; }",
            "=r,=r,=r,=r,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a = ((words & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        b = ((words >> 8 & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        c = ((words >> 16 & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        d = ((words >> 24) | 0x4B000000).to(tl.float32, bitcast=True)
    return _in_order(a - zero, b - zero, c - zero, d - zero)


@triton.jit
def _in_order(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def rounded(x, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Elements in the type of the call; WIDE: as float32 then."""
    x = x.to(dtype)
    if WIDE:
        x = x.to(tl.float32)
    return x
