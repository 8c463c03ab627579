# pyright: basic
"""The backward kernel of keys and values for GPUs: a program takes one tile of keys. `gradients.py` has the formulas.

As in `forward.py`, what is not finite is computed a second time, with care, in another start of the kernel: NaN and inf
of hidden tokens are left out.
"""

import triton
import triton.language as tl

from regard.gpu.scores import (
    OF_ANY_VALUE,
    add_seen_non_finite,
    bits_of,
    dropped,
    is_non_finite,
    slope_of,
    unit_of,
    weights_of,
)
from regard.gpu.tokens import block_of


@triton.jit(do_not_specialize=OF_ANY_VALUE)
def gradient_of_keys(
    q, k, v, dout, top, rest, delta, dk, dv, flags, distance, bias, q_described, dout_described, seed_low, seed_high,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    dout_batch, dout_head, dout_token, dk_batch, dk_head, dk_token, dv_batch, dv_head, dv_token,
    distance_head, bias_batch, bias_head, bias_query, bias_key,
    order, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    batch, heads, group, queries, keys, section, scale, softcap, threshold, keep_scale,
    MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    PATCH: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PATCH_STAGES: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, CAREFUL: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Writes dk if DK and dv if DV, each [batch, kv_heads, keys, dim]; a program adds up the query heads of its key head.

    The lists are those by key (`tables.by_key`), whose words have a row for each key and a bit for each query.

    Args:
        QUERIES: queries computed at once in FULL tiles, of which TILE is a multiple.
        CAREFUL, FLAGS: as in `forward`, for the rows of dk and dv.
    """
    key_tiles = tl.cdiv(keys, TILE)
    _row, b, g, first_listed, first_key = unit_of(  # pyright: ignore[reportGeneralTypeIssues]
        tl.program_id(0), order, batch, heads // group, group, key_tiles, section, TILE, ROWS, MAPS_BATCH, MAPS_HEADS
    )
    j = first_key + tl.arange(0, ROWS)
    c = tl.arange(0, DIM_PADDED)
    cv = tl.arange(0, V_DIM_PADDED)
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    dk_at = dk + b64 * dk_batch + g64 * dk_head + j[:, None].to(tl.int64) * dk_token + c[None, :]
    dv_at = dv + b64 * dv_batch + g64 * dv_head + j[:, None].to(tl.int64) * dv_token + cv[None, :]
    inside_k = (j[:, None] < keys) & (c[None, :] < DIM)
    inside_v = (j[:, None] < keys) & (cv[None, :] < V_DIM)
    if CAREFUL:
        spoiled = tl.full([], 0, tl.int32)
        if FLAGS:
            spoiled = tl.load(flags + tl.program_id(0))
        else:
            if DK:
                spoiled |= tl.max(is_non_finite(tl.load(dk_at, mask=inside_k, other=0.0)).to(tl.int32))
            if DV:
                spoiled |= tl.max(is_non_finite(tl.load(dv_at, mask=inside_v, other=0.0)).to(tl.int32))
        if spoiled == 0:
            return
    of_k = tl.load(
        k + b64 * k_batch + g64 * k_head + j[:, None].to(tl.int64) * k_token + c[None, :], mask=inside_k, other=0.0
    )
    if DK:
        v_at = v + b64 * v_batch + g64 * v_head + j[:, None].to(tl.int64) * v_token + cv[None, :]
        of_v = tl.load(v_at, mask=inside_v, other=0.0)
    else:
        of_v = of_k
    if WIDE:
        of_k = of_k.to(tl.float32)
        of_v = of_v.to(tl.float32)
    found_k, found_v = _walk(  # pyright: ignore[reportGeneralTypeIssues]
        of_k, of_v, j, b, g, first_listed, key_tiles, q, q_batch, q_head, q_token, dout, dout_batch, dout_head,
        dout_token, q_described, dout_described, top, rest, delta,
        distance, distance_head, bias, bias_batch, bias_head, bias_query, bias_key,
        run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
        heads, group, queries, keys, scale, softcap, seed_low, seed_high, threshold, keep_scale,
        MAPS_HEADS, TILE, ROWS, QUERIES, PATCH, DIM, DIM_PADDED, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS,
        DROPOUT, DK, DV, WIDE, PRECISION, STAGES, PATCH_STAGES, CAREFUL,
    )  # fmt: skip
    if FLAGS and not CAREFUL:
        spoiled = tl.max(is_non_finite(found_k).to(tl.int32)) | tl.max(is_non_finite(found_v).to(tl.int32))
        tl.store(flags + tl.program_id(0), spoiled)
    if DK:
        tl.store(dk_at, (found_k * scale).to(dk.dtype.element_ty), mask=inside_k)
    if DV:
        tl.store(dv_at, found_v.to(dv.dtype.element_ty), mask=inside_v)


@triton.jit
def _walk(
    of_k, of_v, j, b, g, first_listed, key_tiles, q, q_batch, q_head, q_token, dout, dout_batch, dout_head,
    dout_token, q_described, dout_described, top, rest, delta,
    distance, distance_head, bias, bias_batch, bias_head, bias_query, bias_key,
    run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    heads, group, queries, keys, scale, softcap, seed_low, seed_high, threshold, keep_scale,
    MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, PATCH: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PATCH_STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradients of the keys, without scale, and of the values, over the tiles of queries of their lists."""
    found_k = tl.zeros([ROWS, DIM_PADDED if DK else 1], tl.float32)
    found_v = tl.zeros([ROWS, V_DIM_PADDED if DV else 1], tl.float32)
    b64 = b.to(tl.int64)
    padded = tl.cdiv(queries, TILE) * TILE
    for h in tl.range(g * group, (g + 1) * group, num_stages=1):
        listed = first_listed + ((h - g * group) * key_tiles if MAPS_HEADS else 0)
        h64 = tl.cast(h, tl.int64)
        base_q = q + b64 * q_batch + h64 * q_head
        base_dout = dout + b64 * dout_batch + h64 * dout_head
        base_bias = bias + b64 * bias_batch + h64 * bias_head if BIAS else bias
        base_distance = distance + h64 * distance_head if DISTANCE else distance
        of_row = (b64 * heads + h64) * padded
        head_row = (b * heads + h).to(tl.uint32)
        for run in tl.range(tl.load(run_start + listed), tl.load(run_start + listed + 1), num_stages=1):
            first = tl.load(run_tile + run) * TILE
            stop = tl.minimum(first + tl.load(run_length + run) * TILE, queries)
            for i0 in tl.range(first, stop, QUERIES, num_stages=STAGES):
                of_q = block_of(q_described, b, h, i0, base_q, q_token, queries, QUERIES, DIM, DIM_PADDED, WIDE, True)
                of_dout = block_of(
                    dout_described, b, h, i0, base_dout, dout_token, queries, QUERIES, V_DIM, V_DIM_PADDED, WIDE, True
                )
                found_k, found_v = _step(
                    found_k, found_v, of_k, of_v, of_q, of_dout, i0, j, base_dout, dout_token,
                    top + of_row, rest + of_row, delta + of_row, 0, words,
                    base_distance, base_bias, bias_query, bias_key,
                    queries, keys, scale, softcap, head_row, seed_low, seed_high, threshold, keep_scale,
                    TILE, QUERIES, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS, DROPOUT, DK, DV, WIDE, PRECISION, False,
                    CAREFUL,
                )  # fmt: skip
        steps: tl.constexpr = TILE // PATCH
        begin, end = tl.load(patch_start + listed), tl.load(patch_start + listed + 1)
        for step in tl.range(begin * steps, end * steps, num_stages=PATCH_STAGES):
            i0 = tl.load(patch_tile + step // steps) * TILE + step % steps * PATCH
            pattern = tl.load(patch_pattern + step // steps)
            of_q = block_of(
                q_described if PATCH == QUERIES else None, b, h, i0, base_q, q_token, queries, PATCH, DIM, DIM_PADDED,
                WIDE, True,
            )  # fmt: skip
            of_dout = block_of(
                dout_described if PATCH == QUERIES else None, b, h, i0, base_dout, dout_token, queries, PATCH, V_DIM,
                V_DIM_PADDED, WIDE, True,
            )  # fmt: skip
            found_k, found_v = _step(
                found_k, found_v, of_k, of_v, of_q, of_dout, i0, j, base_dout, dout_token,
                top + of_row, rest + of_row, delta + of_row, pattern, words,
                base_distance, base_bias, bias_query, bias_key,
                queries, keys, scale, softcap, head_row, seed_low, seed_high, threshold, keep_scale,
                TILE, PATCH, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS, DROPOUT, DK, DV, WIDE, PRECISION, True,
                CAREFUL,
            )  # fmt: skip
    return found_k, found_v


@triton.jit
def _step(
    found_k, found_v, of_k, of_v, of_q, of_dout, i0, j, base_dout, dout_token, top, rest, delta, pattern, words,
    base_distance, base_bias, bias_query, bias_key,
    queries, keys, scale, softcap, head_row, seed_low, seed_high, threshold, keep_scale,
    TILE: tl.constexpr, QUERIES: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values after the queries i0 to i0 + QUERIES of a head. Scores are [keys, queries]."""
    i = i0 + tl.arange(0, QUERIES)
    of_top = tl.load(top + i)
    of_rest = tl.load(rest + i) if DISTANCE or BIAS else of_top
    deltas = tl.load(delta + i)
    s = tl.dot(of_k, tl.trans(of_q), input_precision=PRECISION)
    if DK:
        dp = tl.dot(of_v, tl.trans(of_dout), input_precision=PRECISION)
    weights, before = weights_of(  # pyright: ignore[reportGeneralTypeIssues]
        s, of_top[None, :], of_rest[None, :], i[None, :], j[:, None], queries, keys, scale, softcap,
        base_distance, base_bias, bias_query, bias_key, SOFTCAP, DISTANCE, BIAS,
    )  # fmt: skip
    if MASKED:
        keep = bits_of(words, pattern, j, i0, i, TILE)
        weights = tl.where(keep, weights, 0.0)
    if DROPOUT:
        gone = dropped(head_row, i[None, :], j[:, None], seed_low, seed_high, threshold)
    if DV:
        given = weights
        if DROPOUT:
            given = tl.where(gone, 0.0, given * keep_scale)
        if MASKED and CAREFUL:
            bad = is_non_finite(of_dout)
            if tl.max(bad.to(tl.int32)) > 0:
                cv = tl.arange(0, V_DIM_PADDED)
                found_v = add_seen_non_finite(
                    found_v, pattern, words, j, i0, base_dout, dout_token, cv, queries, QUERIES, V_DIM, TILE
                )
            found_v = tl.dot(given.to(of_dout.dtype), tl.where(bad, 0.0, of_dout), found_v, input_precision=PRECISION)
        else:
            found_v = tl.dot(given.to(of_dout.dtype), of_dout, found_v, input_precision=PRECISION)
    if DK:
        if DROPOUT:
            dp = tl.where(gone, 0.0, dp * keep_scale)
        ds = weights * (dp - deltas[None, :])
        if MASKED:
            ds = tl.where(keep, ds, 0.0)
        if SOFTCAP:
            ds = ds * slope_of(before, softcap, keep if MASKED else True, MASKED and CAREFUL)
        if MASKED and CAREFUL:
            of_q = tl.where(is_non_finite(of_q), 0.0, of_q)  # ds of keys that it attends to is NaN
        found_k = tl.dot(ds.to(of_q.dtype), of_q, found_k, input_precision=PRECISION)
    return found_k, found_v
