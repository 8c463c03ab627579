# pyright: basic
"""The log-sum-exp in two numbers, for rows in which one float32 does not tell how many keys share the weight.

A finite number in place of -inf (-1e9, or the least one of a type) that hides every key of a row lowers all its scores
alike: its log-sum-exp is -1e9 plus the logarithm of n, which in float32 is -1e9, and each of n weights computed again
by `exp(score - lse)` would be 1 in place of 1 / n. So the scores of these few rows are computed once more, and the
backward kernels get their largest one and the logarithm of the sum of `exp(score - largest)`.

No row is read on the host: a program whose rows are all near 0 returns at once.
"""

import torch
import triton
import triton.language as tl

from regard.gpu.scores import LOG2E, OF_ANY_VALUE, bits_of, capped, unit_of, with_biases
from regard.plan.far_lse import FAR_LSE

FAR: tl.constexpr = tl.constexpr(FAR_LSE[torch.float32])
"""The distance from 0 from which on a log-sum-exp is in two numbers."""


@triton.jit(do_not_specialize=OF_ANY_VALUE)
def far_rows(
    q, k, lse, top, rest,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    distance, distance_head, bias, bias_batch, bias_head, bias_query, bias_key,
    order, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    batch, heads, group, queries, keys, section, scale, softcap,
    MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PATCH: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """top and rest of each row, float32 [batch, heads, queries]: lse = top + rest / LOG2E; lse and 0 if it is near 0.

    Args:
        lse: log-sum-exp of each row, natural logarithm.
    """
    row, b, h, listed, first_query = unit_of(  # pyright: ignore[reportGeneralTypeIssues]
        tl.program_id(0), order, batch, heads, 1, tl.cdiv(queries, TILE), section, TILE, ROWS, MAPS_BATCH, MAPS_HEADS
    )
    i = first_query + tl.arange(0, ROWS)
    at = row.to(tl.int64) * queries + i
    near = tl.load(lse + at, mask=i < queries, other=0.0)
    far = (tl.abs(near) > FAR) & (tl.abs(near) < float("inf"))
    some = tl.max(far.to(tl.int32)) > 0
    c = tl.arange(0, DIM_PADDED)
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    base_k = k + b64 * k_batch + (h // group).to(tl.int64) * k_head
    base_bias = bias + b64 * bias_batch + h64 * bias_head if BIAS else bias
    base_distance = distance + h64 * distance_head if DISTANCE else distance
    q_at = q + b64 * q_batch + h64 * q_head + i[:, None].to(tl.int64) * q_token + c[None, :]
    rows = tl.load(q_at, mask=(i[:, None] < queries) & (c[None, :] < DIM) & some, other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    begin, end = tl.load(run_start + listed), tl.load(run_start + listed + 1)
    for run in tl.range(begin, tl.where(some, end, begin), num_stages=1):
        first = tl.load(run_tile + run) * TILE
        stop = tl.minimum(first + tl.load(run_length + run) * TILE, keys)
        for j0 in tl.range(first, stop, PATCH, num_stages=1):
            largest, total = _step(
                largest, total, rows, i, j0, base_k, k_token, c, -1, words, base_distance, base_bias, bias_query,
                bias_key, queries, keys, scale, softcap, TILE, PATCH, DIM, SOFTCAP, DISTANCE, BIAS, WIDE, PRECISION,
            )  # fmt: skip
    steps: tl.constexpr = TILE // PATCH
    begin, end = tl.load(patch_start + listed), tl.load(patch_start + listed + 1)
    for step in tl.range(begin * steps, tl.where(some, end, begin) * steps, num_stages=1):
        j0 = tl.load(patch_tile + step // steps) * TILE + step % steps * PATCH
        pattern = tl.load(patch_pattern + step // steps)
        largest, total = _step(
            largest, total, rows, i, j0, base_k, k_token, c, pattern, words, base_distance, base_bias, bias_query,
            bias_key, queries, keys, scale, softcap, TILE, PATCH, DIM, SOFTCAP, DISTANCE, BIAS, WIDE, PRECISION,
        )  # fmt: skip
    tl.store(top + at, tl.where(far, largest, near), mask=i < queries)
    tl.store(rest + at, tl.where(far, tl.log2(total), 0.0), mask=i < queries)


@triton.jit
def _step(
    largest, total, rows, i, j0, base_k, k_token, c, pattern, words, base_distance, base_bias, bias_query,
    bias_key, queries, keys, scale, softcap, TILE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest score and the total after the keys j0 to j0 + KEYS."""
    j = j0 + tl.arange(0, KEYS)
    k_at = base_k + j[None, :].to(tl.int64) * k_token + c[:, None]
    k = tl.load(k_at, mask=(j[None, :] < keys) & (c[:, None] < DIM), other=0.0)
    if WIDE:
        k = k.to(tl.float32)
    s = with_biases(
        capped(tl.dot(rows, k, input_precision=PRECISION), scale, softcap, SOFTCAP),
        i[:, None], j[None, :], queries, keys, base_distance, base_bias, bias_query, bias_key, DISTANCE, BIAS,
    )  # fmt: skip
    keep = bits_of(words, pattern, i, j0, j, TILE) & (j[None, :] < keys)
    s = tl.where(keep, s, float("-inf"))
    above = tl.maximum(largest, tl.max(s, 1))
    safe = tl.where(above == float("-inf"), 0.0, above)
    sums = tl.sum(tl.exp2((s - safe[:, None]) * LOG2E), 1)
    return above, total * tl.exp2((largest - safe) * LOG2E) + sums
