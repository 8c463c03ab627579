# pyright: basic
"""The backward kernel of queries and biases for GPUs: a program takes one tile of queries. `gradients.py` has the formulas.

The gradients of biases are added atomically, where many pairs share an element.

As in `forward.py`, what is not finite is computed a second time, with care, in another start of the kernel: NaN and inf
of hidden tokens are left out.
"""

import triton
import triton.language as tl

from regard.gpu.scores import (
    OF_ANY_VALUE,
    bits_of,
    dropped,
    is_non_finite,
    slope_of,
    unit_of,
    weights_of,
)
from regard.gpu.tokens import block_of


@triton.jit(do_not_specialize=OF_ANY_VALUE)
def gradient_of_queries(
    q, k, v, dout, top, rest, delta, dq, flags, distance, bias, ddistance, dbias, k_described, v_described,
    seed_low, seed_high,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    dout_batch, dout_head, dout_token, dq_batch, dq_head, dq_token,
    distance_head, bias_batch, bias_head, bias_query, bias_key,
    dbias_batch, dbias_head, dbias_query, dbias_key,
    order, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    batch, heads, group, queries, keys, section, scale, softcap, threshold, keep_scale,
    MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PATCH: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    DDISTANCE: tl.constexpr, DBIAS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PATCH_STAGES: tl.constexpr, CAREFUL: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """dq [batch, heads, queries, qk_dim], and the gradients of the biases, float32, added to zeros.

    Args:
        top, rest, delta: of `gradients.Rows`; the other arguments are those of `forward`, CAREFUL and FLAGS for the rows of dq.
    """
    query_tiles = tl.cdiv(queries, TILE)
    row, b, h, listed, first_query = unit_of(  # pyright: ignore[reportGeneralTypeIssues]
        tl.program_id(0), order, batch, heads, 1, query_tiles, section, TILE, ROWS, MAPS_BATCH, MAPS_HEADS
    )
    i = first_query + tl.arange(0, ROWS)
    c = tl.arange(0, DIM_PADDED)
    cv = tl.arange(0, V_DIM_PADDED)
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    dq_at = dq + b64 * dq_batch + h64 * dq_head + i[:, None].to(tl.int64) * dq_token + c[None, :]
    inside = (i[:, None] < queries) & (c[None, :] < DIM)
    if CAREFUL:
        if FLAGS:
            spoiled = tl.load(flags + tl.program_id(0))
        else:
            spoiled = tl.max(is_non_finite(tl.load(dq_at, mask=inside, other=0.0)).to(tl.int32))
        if spoiled == 0:
            return
    of_q = q + b64 * q_batch + h64 * q_head + i[:, None].to(tl.int64) * q_token + c[None, :]
    rows = tl.load(of_q, mask=inside, other=0.0)
    dout_at = dout + b64 * dout_batch + h64 * dout_head + i[:, None].to(tl.int64) * dout_token + cv[None, :]
    given = tl.load(dout_at, mask=(i[:, None] < queries) & (cv[None, :] < V_DIM), other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
        given = given.to(tl.float32)
    base_k = k + b64 * k_batch + (h // group).to(tl.int64) * k_head
    base_v = v + b64 * v_batch + (h // group).to(tl.int64) * v_head
    base_bias = bias + b64 * bias_batch + h64 * bias_head if BIAS else bias
    base_distance = distance + h64 * distance_head if DISTANCE else distance
    into_bias = dbias + b64 * dbias_batch + h64 * dbias_head if DBIAS else dbias
    into_distance = ddistance + h64 * (queries + keys - 1) if DDISTANCE else ddistance
    at = row.to(tl.int64) * (query_tiles * TILE) + i
    of_top = tl.load(top + at)
    of_rest = tl.load(rest + at) if DISTANCE or BIAS else of_top
    deltas = tl.load(delta + at)
    found = _walk(
        rows, given, of_top, of_rest, deltas, i, row, b, h // group, listed, base_k, k_token, base_v, v_token,
        k_described, v_described, base_distance, base_bias, bias_query, bias_key,
        into_distance, into_bias, dbias_query, dbias_key,
        run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
        queries, keys, scale, softcap, seed_low, seed_high, threshold, keep_scale,
        TILE, ROWS, KEYS, PATCH, DIM, DIM_PADDED, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS, DROPOUT,
        DDISTANCE, DBIAS, WIDE, PRECISION, STAGES, PATCH_STAGES, CAREFUL,
    )  # fmt: skip
    if FLAGS and not CAREFUL:
        tl.store(flags + tl.program_id(0), tl.max(is_non_finite(found).to(tl.int32)))
    tl.store(dq_at, (found * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _walk(
    rows, given, of_top, of_rest, deltas, i, row, b, g, listed, base_k, k_token, base_v, v_token,
    k_described, v_described, base_distance, base_bias, bias_query, bias_key,
    into_distance, into_bias, dbias_query, dbias_key,
    run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    queries, keys, scale, softcap, seed_low, seed_high, threshold, keep_scale,
    TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PATCH: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, SOFTCAP: tl.constexpr,
    DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, DDISTANCE: tl.constexpr, DBIAS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PATCH_STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries, without scale, over the key tiles of their list, in the order of `forward.py`."""
    found = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    last = tl.full([], 0, tl.int32)
    cut = tl.full([], 0, tl.int32)
    for run in tl.range(tl.load(run_start + listed), tl.load(run_start + listed + 1), num_stages=1):
        first = tl.load(run_tile + run) * TILE
        stop = tl.minimum(first + tl.load(run_length + run) * TILE, keys)
        whole = first + (stop - first) // KEYS * KEYS
        for j0 in tl.range(first, whole, KEYS, num_stages=STAGES):
            of_k = block_of(k_described, b, g, j0, base_k, k_token, keys, KEYS, DIM, DIM_PADDED, WIDE, False)
            of_v = block_of(v_described, b, g, j0, base_v, v_token, keys, KEYS, V_DIM, V_DIM_PADDED, WIDE, False)
            found = _step(
                found, rows, given, of_top, of_rest, deltas, of_k, of_v, i, j0, 0, words,
                base_distance, base_bias, bias_query, bias_key, into_distance, into_bias, dbias_query, dbias_key,
                queries, keys, scale, softcap, row.to(tl.uint32), seed_low, seed_high, threshold, keep_scale,
                TILE, KEYS, SOFTCAP, DISTANCE, BIAS, DROPOUT, DDISTANCE, DBIAS, WIDE, PRECISION, False,
                CAREFUL,
            )  # fmt: skip
        cut = tl.where(whole < stop, tl.cdiv(stop - whole, PATCH), cut)
        last = tl.where(whole < stop, whole, last)
    begin, end = tl.load(patch_start + listed), tl.load(patch_start + listed + 1)
    steps: tl.constexpr = TILE // PATCH
    for step in tl.range(begin * steps, end * steps + cut, num_stages=PATCH_STAGES):
        patched = step < end * steps
        patch = step // steps
        j0 = tl.load(patch_tile + patch, mask=patched, other=0) * TILE + step % steps * PATCH
        j0 = tl.where(patched, j0, last + (step - end * steps) * PATCH)
        pattern = tl.load(patch_pattern + patch, mask=patched, other=-1)
        of_k = block_of(
            k_described if PATCH == KEYS else None, b, g, j0, base_k, k_token, keys, PATCH, DIM, DIM_PADDED, WIDE, True
        )
        of_v = block_of(
            v_described if PATCH == KEYS else None, b, g, j0, base_v, v_token, keys, PATCH, V_DIM, V_DIM_PADDED, WIDE,
            True,
        )  # fmt: skip
        found = _step(
            found, rows, given, of_top, of_rest, deltas, of_k, of_v, i, j0, pattern, words,
            base_distance, base_bias, bias_query, bias_key, into_distance, into_bias, dbias_query, dbias_key,
            queries, keys, scale, softcap, row.to(tl.uint32), seed_low, seed_high, threshold, keep_scale,
            TILE, PATCH, SOFTCAP, DISTANCE, BIAS, DROPOUT, DDISTANCE, DBIAS, WIDE, PRECISION, True, CAREFUL,
        )  # fmt: skip
    return found


@triton.jit
def _step(
    found, rows, given, of_top, of_rest, deltas, of_k, of_v, i, j0, pattern, words,
    base_distance, base_bias, bias_query, bias_key, into_distance, into_bias, dbias_query, dbias_key,
    queries, keys, scale, softcap, head_row, seed_low, seed_high, threshold, keep_scale,
    TILE: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, DDISTANCE: tl.constexpr, DBIAS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries after the keys j0 to j0 + KEYS."""
    j = j0 + tl.arange(0, KEYS)
    s = tl.dot(rows, tl.trans(of_k), input_precision=PRECISION)
    dp = tl.dot(given, tl.trans(of_v), input_precision=PRECISION)
    weights, before = weights_of(  # pyright: ignore[reportGeneralTypeIssues]
        s, of_top[:, None], of_rest[:, None], i[:, None], j[None, :], queries, keys, scale, softcap,
        base_distance, base_bias, bias_query, bias_key, SOFTCAP, DISTANCE, BIAS,
    )  # fmt: skip
    if DROPOUT:
        gone = dropped(head_row, i[:, None], j[None, :], seed_low, seed_high, threshold)
        dp = tl.where(gone, 0.0, dp * keep_scale)
    ds = weights * (dp - deltas[:, None])
    if MASKED:
        keep = bits_of(words, pattern, i, j0, j, TILE) & (j[None, :] < keys)
        ds = tl.where(keep, ds, 0.0)
    if (DDISTANCE or DBIAS) and not CAREFUL:  # those of hidden pairs are 0, so the first start has added the right ones
        inside = (i[:, None] < queries) & (j[None, :] < keys)
        if DDISTANCE:
            tl.atomic_add(into_distance + (i[:, None] - j[None, :] + (keys - 1)), ds, mask=inside, sem="relaxed")
        if DBIAS:
            at = into_bias + i[:, None].to(tl.int64) * dbias_query + j[None, :].to(tl.int64) * dbias_key
            tl.atomic_add(at, ds, mask=inside, sem="relaxed")
    if SOFTCAP:
        ds = ds * slope_of(before, softcap, keep if MASKED else True, MASKED and CAREFUL)
    if MASKED and CAREFUL:
        of_k = tl.where(is_non_finite(of_k), 0.0, of_k)  # ds of queries that attend to it is NaN
    return tl.dot(ds.to(of_k.dtype), of_k, found, input_precision=PRECISION)
