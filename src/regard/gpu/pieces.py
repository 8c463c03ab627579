# pyright: basic
"""The order in which a program has the tokens and channels of a block of codes.

Codes are loaded as they lie: a thread has a piece of a tile of keys, up to 16 tokens of a channel side by side, and a
piece of a value, up to 16 channels. The tensor cores take tokens and channels in any order that is the same in both
operands, so blocks of codes have the order in which a warp's threads hold the pieces of 8 rows already: nothing is
moved between threads. The functions here say which token or channel that is.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def piece_size(count):
    """Tokens, or bytes of a value, that a thread has side by side: a block has 8 pieces or more, unless it is small."""
    return max(4, min(16, count // 8))


@triton.jit
def pieces_of(
    t0, k_first, there, first, end, low, high, low_2, high_2, KEYS: tl.constexpr, UNION: tl.constexpr,
    SHOWN: tl.constexpr,
):  # fmt: skip
    """(tile, whether one of its tokens is read) of each piece of a block of codes."""
    piece: tl.constexpr = piece_size(KEYS)
    count: tl.constexpr = KEYS // piece
    t = t0 + tl.arange(0, count) * piece
    found = (t + piece > first) & (t < end)
    if UNION > 0:
        found = found & (((t + piece > low) & (t < high)) | ((t + piece > low_2) & (t < high_2)))
    if SHOWN:
        found = found & (tl.max(tl.reshape(there.to(tl.int32), [piece, count]), 0) > 0)
    return (t0 + k_first) // 16 + tl.arange(0, count) // (16 // piece), found


@triton.jit
def token_of(n, KEYS: tl.constexpr, KIND: tl.constexpr):
    """Which token of a block its n-th column of scores is: the first ones of all pieces, then the second ones."""
    if KIND == "plain":
        return n
    count: tl.constexpr = KEYS // piece_size(KEYS)
    return n % count * piece_size(KEYS) + n // count


@triton.jit
def channel_of(n, KIND: tl.constexpr):
    """Which channel the n-th of a product is: each of 4 threads has two of the first 8, and two of the next."""
    if KIND == "plain":
        return n
    return n // 16 * 16 + n // 2 % 2 * 8 + n // 4 % 4 * 2 + n % 2


@triton.jit
def value_channel_of(n, V_DIM_PADDED: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr):
    """Which channel of values the n-th column is; codes of int4 have channels c (low half) and 16 + c in one byte."""
    if KIND == "plain":
        return n
    size: tl.constexpr = value_bytes(V_DIM_PADDED, KIND, WORDS)
    piece: tl.constexpr = piece_size(size)
    count: tl.constexpr = size // piece
    if KIND == "int4" and WORDS:
        unit = n % count * piece + n // count // 2
        return unit // 16 * 32 + n // count % 2 * 16 + unit % 16
    return n % count * piece + n // count


@triton.constexpr_function
def value_bytes(dim, kind, words):
    """Bytes that are decoded for a value with these dimensions, those of int4 twice if not in words."""
    return dim // 2 if kind == "int4" and words else dim


@triton.jit
def value_tokens(KEYS: tl.constexpr):
    """(place in the piece, piece) of the tokens whose values a thread has, [keys / 8, 2, 1, 4, 1]."""
    count: tl.constexpr = KEYS // piece_size(KEYS)
    place = tl.arange(0, KEYS // 8)[:, None, None, None, None]
    piece = tl.arange(0, 4)[None, None, None, :, None] * 2 + tl.arange(0, 2)[None, :, None, None, None]
    if count < 8:
        n = place * 8 + piece
        place, piece = n // count, n % count
    return place, piece


@triton.jit
def in_value_order(weights, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Weights in the order of the tokens of `coded_values`."""
    weights = tl.permute(tl.reshape(weights, [ROWS, KEYS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(weights, [ROWS, KEYS])
