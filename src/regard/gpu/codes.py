# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Keys and values from their codes (`storage/codec.py`), as the kernel of decoding on GPUs loads them.

A decoded element is `code * scale + zero_point` in float32, rounded to the type of the call, as on a CPU. Blocks have the
order of `pieces.py`.
"""

import triton
import triton.language as tl

from regard.gpu.codes_to_float import halves_of_bytes, rounded, scaled
from regard.gpu.pieces import piece_size, value_bytes


@triton.jit
def coded_keys(
    base, tile, c0, piece_there, there, scale, zero, scale_token, group,
    DIM: tl.constexpr, COUNT: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, PER_TOKEN: tl.constexpr,
    IN_KEYS: tl.constexpr, dtype: tl.constexpr, WIDE: tl.constexpr, K_PAIRED: tl.constexpr, WORDS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """COUNT channels of keys from c0 on, [dim, keys], in the type of the call; the arguments are those of `span._keys`.

    Channels of int4 are two in a byte. In words both are decoded from one load; else, as Triton (3.6) compiles what
    joins them for several warps to wrong numbers, each loads its byte, as a code of 8 bits.
    """
    piece: tl.constexpr = piece_size(KEYS)
    count: tl.constexpr = KEYS // piece
    each: tl.constexpr = 2 if KIND == "int4" and WORDS else 1  # channels of a byte that are decoded together
    # by 8 channels, the bytes of two, pieces, the pairs of 4 threads, and words of 4 tokens
    r = tl.arange(0, COUNT // 8)[:, None, None, None, None]
    byte = tl.arange(0, 2 // each)[None, :, None, None, None]
    h = tl.arange(0, count)[None, None, :, None, None]
    x = tl.arange(0, 4)[None, None, None, :, None]
    n = c0 // each + (r * 4 + x) * (2 // each) + byte
    inside = piece_there[None, None, :, None, None]
    shape: tl.constexpr = [COUNT // 8, 2 // each, count, 4, piece]
    unit = n // 2 if KIND == "int4" and not WORDS else n
    at = base[None, None, :, None, None] + (unit * 16 + h % (16 // piece) * piece)
    codes = _codes(at, inside & (n * each < DIM), shape, piece, piece, WORDS)
    if KIND == "int4" and not WORDS:
        codes = (codes >> (n % 2 * 4).to(tl.uint8)) & 15
    if PER_TOKEN:
        y = h % (16 // piece) * piece + tl.arange(0, piece)[None, None, None, None, :]
        at = (tile[None, None, :, None, None] * 16 + y) * scale_token
        if IN_KEYS:
            inside = tl.permute(tl.reshape(there, [1, 1, 1, piece, count]), [0, 1, 4, 2, 3])
        scale_low = _loaded(scale[None, None, :, None, None] + at, inside)
        scale_high = scale_low
        if KIND == "int4":
            zero_low = _loaded(zero[None, None, :, None, None] + at, inside)
            zero_high = zero_low
    else:
        c = c0 + tl.arange(0, COUNT // 8)[:, None, None] * 8 + tl.arange(0, 4)[None, None, :] * 2
        at = (tile // (group // 16) * scale_token)[None, :, None] + c
        there = piece_there[None, :, None]
        scales = _pairs(scale[None, :, None] + at, c, there, DIM, COUNT // 8, count, K_PAIRED)
        if KIND == "int4":
            zeros = _pairs(zero[None, :, None] + at, c, there, DIM, COUNT // 8, count, K_PAIRED)
        if each == 2:
            scale_low, scale_high = tl.split(scales)
            scale_low, scale_high = scale_low[:, None, :, :, None], scale_high[:, None, :, :, None]
            zero_low, zero_high = tl.split(zeros)
            zero_low, zero_high = zero_low[:, None, :, :, None], zero_high[:, None, :, :, None]
        else:
            scale_low = tl.permute(scales, [0, 3, 1, 2])[:, :, :, :, None]
            if KIND == "int4":
                zero_low = tl.permute(zeros, [0, 3, 1, 2])[:, :, :, :, None]
    if each == 2:
        low, high = halves_of_bytes(codes, shape, PTX)
        low = rounded(low * scale_low + zero_low, dtype, WIDE)
        high = rounded(high * scale_high + zero_high, dtype, WIDE)
        found = tl.permute(tl.reshape(tl.join(low, high), [COUNT // 16, 2, count, 4, piece, 2]), [0, 3, 1, 5, 4, 2])
    else:
        if KIND == "int4":
            found = rounded(codes.to(tl.float32) * scale_low + zero_low, dtype, WIDE)
        else:
            found = rounded(scaled(codes, scale_low, KIND, shape, WORDS, PTX), dtype, WIDE)
        found = tl.permute(tl.reshape(found, [COUNT // 16, 2, 2, count, 4, piece]), [0, 4, 1, 2, 5, 3])
    return tl.reshape(found, [COUNT, KEYS])


@triton.jit
def _codes(
    at, there, shape: tl.constexpr, PIECE: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Codes, or words of four, of pieces at these addresses [shape without its last axis, 1].

    They are loaded along one axis of pieces, of which Triton gives each 32 to a warp, in their order.

    Args:
        ALIGNED: bytes that the first of the addresses in a row are a multiple of.
    """
    rows: tl.constexpr = shape[0] * shape[1] * shape[2] * shape[3]
    multiple: tl.constexpr = ALIGNED if ALIGNED < PIECE else PIECE
    at, there = tl.reshape(at, [rows])[:, None], tl.reshape(there, [rows])[:, None]
    if WORDS:
        at = tl.multiple_of(at.to(tl.pointer_type(tl.uint32), bitcast=True), [multiple, multiple])
        found = tl.load(at + tl.arange(0, PIECE // 4)[None, :], mask=there, other=0)
        found = tl.reshape(found, [shape[0], shape[1], shape[2], shape[3], PIECE // 4])
    else:
        at = tl.multiple_of(at, [multiple, multiple])
        found = tl.reshape(tl.load(at + tl.arange(0, PIECE)[None, :], mask=there, other=0), shape)
    return found


@triton.jit
def _pairs(
    at, c, there, DIM: tl.constexpr, EIGHTHS: tl.constexpr, PIECES: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    """Scales or zero points of channels c and c + 1, float32 [by 8 channels, pieces, 4, 2]."""
    rows: tl.constexpr = EIGHTHS * PIECES * 4
    at, both = tl.reshape(at, [rows])[:, None], tl.arange(0, 2)[None, :]
    if PAIRED:
        there = tl.reshape(there & (c < DIM), [rows])[:, None]
        found = tl.load(tl.multiple_of(at, [4, 4]) + both, mask=there, other=0.0)
    else:
        c = tl.reshape(tl.where(there, c, DIM), [rows])[:, None]
        found = tl.load(at + both, mask=c + both < DIM, other=0.0)
    return tl.reshape(found.to(tl.float32), [EIGHTHS, PIECES, 4, 2])


@triton.jit
def _loaded(at, mask):
    """Scales or zero points, float32."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def value_scales(
    scale, zero, there, group,
    V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, PAIRED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Scales of values, and for int4 zero points and both of the high halves of bytes, for each piece of a value.

    Args:
        PAIRED: whether both halves of a byte have the same scale.
    """
    size: tl.constexpr = value_bytes(V_DIM_PADDED, KIND, WORDS)
    piece: tl.constexpr = piece_size(size)
    shape: tl.constexpr = [KEYS // 8, 2, size // piece, 4, 1]
    if KIND == "int4" and not WORDS:
        c = tl.arange(0, size // piece)[None, None, :, None, None] * piece
        inside = there & (c < V_DIM)
        one, of_zero = _of_pieces(scale + c // group, inside, shape), _of_pieces(zero + c // group, inside, shape)
        found = one, of_zero, one, of_zero
    elif KIND == "int4":
        c = tl.arange(0, size // piece)[None, None, :, None, None] * piece // 16 * 32  # the first of 16 with a scale
        inside = there & (c < V_DIM)
        scale_low = _of_pieces(scale + c // group, inside, shape)
        zero_low = _of_pieces(zero + c // group, inside, shape)
        if PAIRED:
            found = scale_low, zero_low, scale_low, zero_low
        else:
            c += 16
            inside = there & (c < V_DIM)
            scale_high = _of_pieces(scale + c // group, inside, shape)
            found = scale_low, zero_low, scale_high, _of_pieces(zero + c // group, inside, shape)
    else:
        # loaded once for each thread: with one load per token, Triton would move the codes between threads
        one = _of_pieces(scale, there, shape)
        found = one, one, one, one
    return found


@triton.jit
def _of_pieces(at, there, shape: tl.constexpr):
    """The scale or zero point of each piece of a value, in the thread that has the piece."""
    rows: tl.constexpr = shape[0] * shape[1] * shape[2] * shape[3]
    at, there = tl.broadcast_to(at, shape), tl.broadcast_to(there, shape)
    return tl.reshape(tl.load(tl.reshape(at, [rows]), mask=tl.reshape(there, [rows]), other=0.0), shape)


@triton.jit
def coded_values(
    base, scales, there,
    V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Values [keys, dim] in the type of the call; addresses are those of the tokens that `value_tokens` names."""
    halves: tl.constexpr = KIND == "int4" and not WORDS  # each channel loads its byte, see `coded_keys`
    size: tl.constexpr = value_bytes(V_DIM_PADDED, KIND, WORDS)
    real_size: tl.constexpr = V_DIM if halves or KIND != "int4" else (V_DIM + 31) // 32 * 16
    piece: tl.constexpr = piece_size(size)
    count: tl.constexpr = size // piece
    shape: tl.constexpr = [KEYS // 8, 2, count, 4, piece]
    begin = tl.arange(0, count)[None, None, :, None, None] * piece
    if halves:
        n = begin + tl.arange(0, piece)[None, None, None, None, :]
        codes = tl.load(base + (n // 32 * 16 + n % 16), mask=there & (n < real_size), other=0)
        codes = (codes >> (n // 16 % 2 * 4).to(tl.uint8)) & 15
    elif real_size % piece == 0:
        codes = _codes(base + begin, there & (begin < real_size), shape, piece, ALIGNED, WORDS)
    else:  # the rest of a piece is in another value, or in none
        n = begin + tl.arange(0, piece)[None, None, None, None, :]
        codes = tl.load(base + n, mask=there & (n < real_size), other=0)
    scale_low, zero_low, scale_high, zero_high = scales
    if KIND == "int4" and WORDS:
        low, high = halves_of_bytes(codes, shape, PTX)
        low = rounded(low * scale_low.to(tl.float32) + zero_low.to(tl.float32), dtype, WIDE)
        high = rounded(high * scale_high.to(tl.float32) + zero_high.to(tl.float32), dtype, WIDE)
        found = tl.reshape(tl.join(low, high), [KEYS // 16, 2, 2, count, 4, piece, 2])
        found = tl.permute(found, [0, 4, 1, 2, 5, 6, 3])
    else:
        if halves:
            found = rounded(codes.to(tl.float32) * scale_low.to(tl.float32) + zero_low.to(tl.float32), dtype, WIDE)
        else:
            found = rounded(scaled(codes, scale_low.to(tl.float32), KIND, shape, WORDS, PTX), dtype, WIDE)
        found = tl.permute(tl.reshape(found, [KEYS // 16, 2, 2, count, 4, piece]), [0, 4, 1, 2, 5, 3])
    return tl.reshape(found, [KEYS, V_DIM_PADDED])
