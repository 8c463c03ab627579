# pyright: basic
"""What the GPU kernels share: scores and weights from products, the bits of PARTIAL tiles, and which weights dropout drops."""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

OF_ANY_VALUE = (
    "batch", "heads", "group", "queries", "keys", "section", "distance_head", "seed_low", "seed_high", "threshold",
)  # fmt: skip
"""Arguments whose value makes no other kernel: Triton would compile one more where it is 1, or a multiple of 16."""


@triton.jit
def capped(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores of the products s, before biases.

    Args:
        SOFTCAP: 0: none; 1: by few instructions, with an error of 2e-7 times the softcap; 2: with a small relative
            error. `launch.softcap_form` says which.
    """
    if SOFTCAP == 2:
        return softcap * tanh(s * scale * (1.0 / softcap))
    if SOFTCAP == 1:
        power = tl.exp2(s * (2.0 * LOG2E * scale / softcap))
        return softcap - 2.0 * softcap / (power + 1.0)  # 1 at inf
    return s * scale


@triton.jit
def tanh(x):
    """A fit of the relative error on |x| <= 9, where tanh is 1 to a rounding, as in native/exp.h; it errs by 6e-8.

    `1 - 2 / (exp(2 x) + 1)` would lose the digits of x where a large cap makes x small.
    """
    y = tl.where(x > 9.0, 9.0, tl.where(x < -9.0, -9.0, x))  # NaN stays
    z = y * y
    above = (1.8254649e-11 * z - 1.27801981e-8) * z + 9.26733668e-6
    above = (((above * z + 0.00292075230) * z + 0.129192194) * z + 0.999999941) * y
    below = ((0.000228098901 * z + 0.0237631291) * z + 0.462525033) * z + 1.0
    return above / below


@triton.jit
def with_biases(
    s, i, j, queries, keys, distance, bias, bias_query, bias_key, DISTANCE: tl.constexpr, BIAS: tl.constexpr
):
    """The scores s of queries i [.., 1] and keys j [1, ..] (or the other way round) with their biases.

    Args:
        DISTANCE: 0: no bias by distance; 1: `distance` has one element for each; 2: a slope and an offset.
    """
    if DISTANCE == 2:
        s -= tl.load(distance) * tl.abs((i.to(tl.float32) + tl.load(distance + 1)) - j.to(tl.float32))
    elif DISTANCE:
        inside = (i < queries) & (j < keys)
        s += tl.load(distance + (i - j + (keys - 1)), mask=inside, other=0.0)
    if BIAS:
        inside = (i < queries) & (j < keys)
        at = bias + i.to(tl.int64) * bias_query + j.to(tl.int64) * bias_key
        s += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return s


@triton.jit
def words_of(words, pattern, a, b0, TILE: tl.constexpr):
    """For each row a of a pattern the 64 bits in which column b0 is; pattern -1 has all bits set."""
    at = words + (pattern * TILE + a % TILE) * (TILE // 64) + b0 % TILE // 64
    return tl.load(at, mask=(pattern >= 0) & (a >= 0), other=-1)


@triton.jit
def bits_of(words, pattern, a, b0, b, TILE: tl.constexpr):
    """The bits of rows a and columns b of a pattern; the columns, from b0 on, are in one word of each row."""
    word = words_of(words, pattern, a, b0, TILE)
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)  # a shift of 64 bits takes several instructions
    half = tl.where((b % 64 < 32)[None, :], low[:, None], high[:, None])
    return (half >> (b % 32)[None, :]) & 1 != 0


@triton.jit
def add_seen_non_finite(
    sums, pattern, words, a, b0, v, v_token, cv, stop, COUNT: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr
):
    """NaN and inf of rows b0 to b0 + COUNT of v, added to the sums of exactly the rows a that see them.

    A weight of 0 in a product would let them through to all. This is the rare path, row by row.
    """
    bits = words_of(words, pattern, a, b0, TILE)
    for b in range(b0, tl.minimum(b0 + COUNT, stop)):
        row = tl.load(v + tl.cast(b, tl.int64) * v_token + cv, mask=cv < V_DIM, other=0.0).to(tl.float32)
        seen = (bits >> (b % 64)) & 1 != 0
        sums += tl.where(seen[:, None] & is_non_finite(row)[None, :], row[None, :], 0.0)
    return sums


@triton.jit
def is_non_finite(x):
    """Where NaN and inf are."""
    return (x != x) | (tl.abs(x) == float("inf"))


@triton.jit
def weighed_by(total):
    """The log-sum-exp of rows in base 2, by which weights are computed again; inf for rows whose weights are all 0."""
    return tl.where(total == float("-inf"), float("inf"), total * LOG2E)


@triton.jit
def powers_of(s, top, rest, BIASED: tl.constexpr):
    """The logarithms of the weights in base 2."""
    if BIASED:
        return tl.minimum((s - top) * LOG2E - rest, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return s * LOG2E - top


@triton.jit
def weights_of(
    s, top, rest, i, j, queries, keys, scale, softcap, base_distance, base_bias, bias_query, bias_key,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """(weights, scores before biases) of the products s of queries i and keys j, one along rows, one along columns."""
    if not (SOFTCAP or DISTANCE or BIAS):
        return tl.exp2(s * (scale * LOG2E) - top), s
    before = capped(s, scale, softcap, SOFTCAP)
    s = with_biases(before, i, j, queries, keys, base_distance, base_bias, bias_query, bias_key, DISTANCE, BIAS)
    return tl.exp2(powers_of(s, top, rest, DISTANCE or BIAS)), before


@triton.jit
def slope_of(before, softcap, keep, GUARDED: tl.constexpr):
    """The derivative of the softcap where scores are `before`; GUARDED: NaN of hidden ones, times 0, would be NaN."""
    if GUARDED:
        before = tl.where(keep, before, 0.0)
    share = before / softcap
    return 1.0 - share * share


@triton.jit
def totals_of(top, rest, at, mask, BIASED: tl.constexpr):
    """The log-sum-exp of rows as (top, rest): in base 2, or in two numbers (`far_rows.py`) where there are biases."""
    found = tl.load(top + at, mask=mask, other=float("inf"))
    if BIASED:
        return tl.where(found == float("-inf"), float("inf"), found), tl.load(rest + at, mask=mask, other=0.0)
    return weighed_by(found), found


@triton.jit
def mixed(x):
    """32 bits mixed (Wellons' lowbias32), as in native/dropout.h."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def dropped(head_row, i, j, seed_low, seed_high, threshold):
    """Which weights of queries i [.., 1] and keys j [1, ..] (or the other way round) dropout drops.

    The draws are those of the kernels for CPUs.
    """
    low = mixed(seed_low.to(tl.uint32))
    of_head = mixed(low ^ (seed_high.to(tl.uint32) + head_row * 0x9E3779B9))
    of_row = mixed(of_head + i.to(tl.uint32) * 0x85EBCA6B)
    of_key = mixed(j.to(tl.uint32) * 0xC2B2AE35 + 0x27D4EB2F)
    return mixed(of_row ^ of_key) < threshold.to(tl.uint32)


@triton.jit
def unit_of(
    unit, order, batch, heads, group, tiles, section,
    TILE: tl.constexpr, ROWS: tl.constexpr, MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr,
):  # fmt: skip
    """The unit of a program: (row, batch row, head, place in the lists, first token), row = b * heads + h.

    Args:
        order: tiles of each map, those with the most work first.
        heads: query heads (`group` 1) or key heads; a head has `group` maps, and the first one gives the order.
        tiles: of a map; section: rows whose units are computed together.
    """
    steps: tl.constexpr = TILE // ROWS
    part = unit // (tiles * steps * section)
    width = tl.minimum(section, batch * heads - part * section)
    inside = unit - part * tiles * steps * section
    row = part * section + inside % width
    b, h = row // heads, row % heads
    row_map = (b if MAPS_BATCH else 0) * (heads * group if MAPS_HEADS else 1) + (h * group if MAPS_HEADS else 0)
    t = tl.load(order + row_map * tiles + inside // width // steps)
    return row, b, h, row_map * tiles + t, t * TILE + inside // width % steps * ROWS
