# pyright: basic
"""The backward kernels for GPUs: gradients of queries and biases by tile of queries, of keys and values by tile of keys.

Weights are computed again from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135, §3.1): p = exp(s - total), where the
total includes the sink's column; biases may need it in two numbers (`far_rows.py`), top and rest. With delta = out . dout of each row, the gradient of a score is ds = p (dp - delta),
dp = dout . v. Each gradient has one program that sums it, in the order of the schedule's lists, so its bits are the
same from run to run; the gradients of biases are added atomically, where many pairs share an element.
"""

import triton
import triton.language as tl

from regard.gpu.scores import (
    OF_ANY_VALUE,
    add_seen_non_finite,
    bits_of,
    capped,
    dropped,
    is_non_finite,
    spoiled,
    totals_of,
    unit_of,
    weights_of,
    with_biases,
)


@triton.jit(do_not_specialize=OF_ANY_VALUE)
def gradient_of_queries(
    q, k, v, dout, top, rest, delta, dq,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    dout_batch, dout_head, dout_token, dq_batch, dq_head, dq_token,
    distance, distance_head, bias, bias_batch, bias_head, bias_query, bias_key,
    ddistance, dbias, dbias_batch, dbias_head, dbias_query, dbias_key,
    order, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    batch, heads, group, queries, keys, section, scale, softcap, seed_low, seed_high, threshold, keep_scale,
    MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PATCH: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    DDISTANCE: tl.constexpr, DBIAS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    REPAIR: tl.constexpr,
):  # fmt: skip
    """dq [batch, heads, queries, qk_dim], and the gradients of the biases, float32, added to zeros.

    With REPAIR as in `forward`, for the rows of dq.
    """
    query_tiles = tl.cdiv(queries, TILE)
    for unit in tl.range(
        tl.program_id(0), batch * heads * query_tiles * (TILE // ROWS), tl.num_programs(0), num_stages=1
    ):
        row, b, h, listed, first_query = unit_of(  # pyright: ignore[reportGeneralTypeIssues]
            unit, order, batch, heads, 1, query_tiles, section, TILE, ROWS, MAPS_BATCH, MAPS_HEADS
        )
        i = first_query + tl.arange(0, ROWS)
        c = tl.arange(0, DIM_PADDED)
        cv = tl.arange(0, V_DIM_PADDED)
        b64, h64 = b.to(tl.int64), h.to(tl.int64)
        some = 1
        if REPAIR:
            some = spoiled(dq + b64 * dq_batch + h64 * dq_head, i, queries, c, dq_token, DIM)
            i = tl.where(some > 0, i, queries)
        base_k = k + b64 * k_batch + (h // group).to(tl.int64) * k_head
        base_v = v + b64 * v_batch + (h // group).to(tl.int64) * v_head
        base_bias = bias + b64 * bias_batch + h64 * bias_head if BIAS else bias
        base_distance = distance + h64 * distance_head if DISTANCE else distance
        into_bias = dbias + b64 * dbias_batch + h64 * dbias_head if DBIAS else dbias
        into_distance = ddistance + h64 * (queries + keys - 1) if DDISTANCE else ddistance
        q_at = q + b64 * q_batch + h64 * q_head + i[:, None].to(tl.int64) * q_token + c[None, :]
        rows = tl.load(q_at, mask=(i[:, None] < queries) & (c[None, :] < DIM), other=0.0)
        dout_at = dout + b64 * dout_batch + h64 * dout_head + i[:, None].to(tl.int64) * dout_token + cv[None, :]
        given = tl.load(dout_at, mask=(i[:, None] < queries) & (cv[None, :] < V_DIM), other=0.0)
        if WIDE:
            rows = rows.to(tl.float32)
            given = given.to(tl.float32)
        at = row.to(tl.int64) * queries + i
        biased: tl.constexpr = DISTANCE or BIAS
        of_top, of_rest = totals_of(  # pyright: ignore[reportGeneralTypeIssues]
            top, rest, at, i < queries, biased
        )
        deltas = tl.load(delta + at, mask=i < queries, other=0.0)
        found = tl.zeros([ROWS, DIM_PADDED], tl.float32)

        last = tl.full([], 0, tl.int32)
        cut = tl.full([], 0, tl.int32)
        for run in tl.range(tl.load(run_start + listed), tl.load(run_start + listed + some), num_stages=1):
            first = tl.load(run_tile + run) * TILE
            stop = tl.minimum(first + tl.load(run_length + run) * TILE, keys)
            whole = first + (stop - first) // KEYS * KEYS
            for j0 in tl.range(first, whole, KEYS, num_stages=STAGES):
                found = _queries_step(
                    found, rows, given, of_top, of_rest, deltas, i, j0, base_k, k_token, base_v, v_token, c, cv, 0, words,
                    base_distance, base_bias, bias_query, bias_key, into_distance, into_bias, dbias_query, dbias_key,
                    queries, keys, scale, softcap, row.to(tl.uint32), seed_low, seed_high, threshold, keep_scale,
                    TILE, KEYS, DIM, V_DIM, SOFTCAP, DISTANCE, BIAS, DROPOUT, DDISTANCE, DBIAS, WIDE, PRECISION, False,
                )  # fmt: skip
            cut = tl.where(whole < stop, tl.cdiv(stop - whole, PATCH), cut)
            last = tl.where(whole < stop, whole, last)
        begin, end = tl.load(patch_start + listed), tl.load(patch_start + listed + some)
        steps: tl.constexpr = TILE // PATCH
        for step in tl.range(begin * steps, end * steps + cut, num_stages=1):
            patched = step < end * steps
            patch = step // steps
            j0 = tl.load(patch_tile + patch, mask=patched, other=0) * TILE + step % steps * PATCH
            j0 = tl.where(patched, j0, last + (step - end * steps) * PATCH)
            pattern = tl.load(patch_pattern + patch, mask=patched, other=-1)
            found = _queries_step(
                found, rows, given, of_top, of_rest, deltas, i, j0, base_k, k_token, base_v, v_token, c, cv, pattern, words,
                base_distance, base_bias, bias_query, bias_key, into_distance, into_bias, dbias_query, dbias_key,
                queries, keys, scale, softcap, row.to(tl.uint32), seed_low, seed_high, threshold, keep_scale,
                TILE, PATCH, DIM, V_DIM, SOFTCAP, DISTANCE, BIAS, DROPOUT, DDISTANCE, DBIAS, WIDE, PRECISION, True,
            )  # fmt: skip
        dq_at = dq + b64 * dq_batch + h64 * dq_head + i[:, None].to(tl.int64) * dq_token + c[None, :]
        tl.store(dq_at, (found * scale).to(dq.dtype.element_ty), mask=(i[:, None] < queries) & (c[None, :] < DIM))


@triton.jit
def _queries_step(
    found, rows, given, of_top, of_rest, deltas, i, j0, base_k, k_token, base_v, v_token, c, cv, pattern, words,
    base_distance, base_bias, bias_query, bias_key, into_distance, into_bias, dbias_query, dbias_key,
    queries, keys, scale, softcap, head_row, seed_low, seed_high, threshold, keep_scale,
    TILE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    DDISTANCE: tl.constexpr, DBIAS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries after the keys j0 to j0 + KEYS."""
    j = j0 + tl.arange(0, KEYS)
    k = tl.load(
        base_k + j[:, None].to(tl.int64) * k_token + c[None, :],
        mask=(j[:, None] < keys) & (c[None, :] < DIM), other=0.0,
    )  # fmt: skip
    v = tl.load(
        base_v + j[None, :].to(tl.int64) * v_token + cv[:, None],
        mask=(j[None, :] < keys) & (cv[:, None] < V_DIM), other=0.0,
    )  # fmt: skip
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    before = capped(tl.dot(rows, tl.trans(k), input_precision=PRECISION), scale, softcap, SOFTCAP)
    s = with_biases(
        before, i[:, None], j[None, :], queries, keys, base_distance, base_bias, bias_query, bias_key, DISTANCE, BIAS
    )
    weights = weights_of(s, of_top[:, None], of_rest[:, None], DISTANCE or BIAS)
    if MASKED:
        keep = bits_of(words, pattern, i, j0, j, TILE) & (j[None, :] < keys)
        weights = tl.where(keep, weights, 0.0)
    dp = tl.dot(given, v, input_precision=PRECISION)
    if DROPOUT:
        gone = dropped(head_row, i[:, None], j[None, :], seed_low, seed_high, threshold)
        dp = tl.where(gone, 0.0, dp * keep_scale)
    ds = weights * (dp - deltas[:, None])
    if MASKED:
        ds = tl.where(keep, ds, 0.0)
        before = tl.where(keep, before, 0.0)  # NaN times a gradient of 0 would be NaN
        k = tl.where(is_non_finite(k), 0.0, k)  # for those that see it, ds is NaN
    if DDISTANCE or DBIAS:
        inside = (i[:, None] < queries) & (j[None, :] < keys)
        if DDISTANCE:
            tl.atomic_add(into_distance + (i[:, None] - j[None, :] + (keys - 1)), ds, mask=inside, sem="relaxed")
        if DBIAS:
            at = into_bias + i[:, None].to(tl.int64) * dbias_query + j[None, :].to(tl.int64) * dbias_key
            tl.atomic_add(at, ds, mask=inside, sem="relaxed")
    if SOFTCAP:
        share = before / softcap
        ds = ds * (1.0 - share * share)
    return tl.dot(ds.to(k.dtype), k, found, input_precision=PRECISION)


@triton.jit(do_not_specialize=OF_ANY_VALUE)
def gradient_of_keys(
    q, k, v, dout, top, rest, delta, dk, dv,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    dout_batch, dout_head, dout_token, dk_batch, dk_head, dk_token, dv_batch, dv_head, dv_token,
    distance, distance_head, bias, bias_batch, bias_head, bias_query, bias_key,
    order, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    batch, heads, group, queries, keys, section, scale, softcap, seed_low, seed_high, threshold, keep_scale,
    MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    PATCH: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """dk and dv [batch, kv_heads, keys, dim], those that DK and DV ask for: a program sums over the heads of a group.

    The lists are those by key (`tables.by_key`), whose words have a row for each key and a bit for each query.
    With REPAIR as in `forward`, for the rows of dk and dv.
    """
    key_tiles = tl.cdiv(keys, TILE)
    kv_heads = heads // group
    for unit in tl.range(
        tl.program_id(0), batch * kv_heads * key_tiles * (TILE // ROWS), tl.num_programs(0), num_stages=1
    ):
        _row, b, g, first_listed, first_key = unit_of(  # pyright: ignore[reportGeneralTypeIssues]
            unit, order, batch, kv_heads, group, key_tiles, section, TILE, ROWS, MAPS_BATCH, MAPS_HEADS
        )
        j = first_key + tl.arange(0, ROWS)
        c = tl.arange(0, DIM_PADDED)
        cv = tl.arange(0, V_DIM_PADDED)
        b64, g64 = b.to(tl.int64), g.to(tl.int64)
        some = 1
        if REPAIR:
            some = 0
            if DK:
                some |= spoiled(dk + b64 * dk_batch + g64 * dk_head, j, keys, c, dk_token, DIM)
            if DV:
                some |= spoiled(dv + b64 * dv_batch + g64 * dv_head, j, keys, cv, dv_token, V_DIM)
            j = tl.where(some > 0, j, keys)
        k_at = k + b64 * k_batch + g64 * k_head + j[:, None].to(tl.int64) * k_token + c[None, :]
        v_at = v + b64 * v_batch + g64 * v_head + j[:, None].to(tl.int64) * v_token + cv[None, :]
        of_k = tl.load(k_at, mask=(j[:, None] < keys) & (c[None, :] < DIM), other=0.0)
        if DK:
            of_v = tl.load(v_at, mask=(j[:, None] < keys) & (cv[None, :] < V_DIM), other=0.0)
        else:
            of_v = of_k
        if WIDE:
            of_k = of_k.to(tl.float32)
            of_v = of_v.to(tl.float32)
        found_k = tl.zeros([ROWS, DIM_PADDED if DK else 1], tl.float32)
        found_v = tl.zeros([ROWS, V_DIM_PADDED if DV else 1], tl.float32)
        for h in tl.range(g * group, (g + 1) * group, num_stages=1):
            listed = first_listed + ((h - g * group) * key_tiles if MAPS_HEADS else 0)
            h64 = tl.cast(h, tl.int64)
            base_q = q + b64 * q_batch + h64 * q_head
            base_dout = dout + b64 * dout_batch + h64 * dout_head
            base_bias = bias + b64 * bias_batch + h64 * bias_head if BIAS else bias
            base_distance = distance + h64 * distance_head if DISTANCE else distance
            of_row = (b64 * heads + h64) * queries
            head_row = (b * heads + h).to(tl.uint32)
            for run in tl.range(tl.load(run_start + listed), tl.load(run_start + listed + some), num_stages=1):
                first = tl.load(run_tile + run) * TILE
                stop = tl.minimum(first + tl.load(run_length + run) * TILE, queries)
                for i0 in tl.range(first, stop, QUERIES, num_stages=STAGES):
                    found_k, found_v = _keys_step(
                        found_k, found_v, of_k, of_v, i0, j, base_q, q_token, base_dout, dout_token,
                        top + of_row, rest + of_row, delta + of_row, c, cv, 0, words,
                        base_distance, base_bias, bias_query, bias_key,
                        queries, keys, scale, softcap, head_row, seed_low, seed_high, threshold, keep_scale,
                        TILE, QUERIES, DIM, V_DIM, SOFTCAP, DISTANCE, BIAS, DROPOUT, DK, DV, WIDE, PRECISION, False,
                    )  # fmt: skip
            steps: tl.constexpr = TILE // PATCH
            begin, end = tl.load(patch_start + listed), tl.load(patch_start + listed + some)
            for step in tl.range(begin * steps, end * steps, num_stages=1):
                i0 = tl.load(patch_tile + step // steps) * TILE + step % steps * PATCH
                pattern = tl.load(patch_pattern + step // steps)
                found_k, found_v = _keys_step(
                    found_k, found_v, of_k, of_v, i0, j, base_q, q_token, base_dout, dout_token,
                    top + of_row, rest + of_row, delta + of_row, c, cv, pattern, words,
                    base_distance, base_bias, bias_query, bias_key,
                    queries, keys, scale, softcap, head_row, seed_low, seed_high, threshold, keep_scale,
                    TILE, PATCH, DIM, V_DIM, SOFTCAP, DISTANCE, BIAS, DROPOUT, DK, DV, WIDE, PRECISION, True,
                )  # fmt: skip
        dk_at = dk + b64 * dk_batch + g64 * dk_head + j[:, None].to(tl.int64) * dk_token + c[None, :]
        dv_at = dv + b64 * dv_batch + g64 * dv_head + j[:, None].to(tl.int64) * dv_token + cv[None, :]
        if DK:
            tl.store(dk_at, (found_k * scale).to(dk.dtype.element_ty), mask=(j[:, None] < keys) & (c[None, :] < DIM))
        if DV:
            tl.store(dv_at, found_v.to(dv.dtype.element_ty), mask=(j[:, None] < keys) & (cv[None, :] < V_DIM))


@triton.jit
def _keys_step(
    found_k, found_v, of_k, of_v, i0, j, base_q, q_token, base_dout, dout_token, base_top, base_rest, base_delta,
    c, cv, pattern, words, base_distance, base_bias, bias_query, bias_key,
    queries, keys, scale, softcap, head_row, seed_low, seed_high, threshold, keep_scale,
    TILE: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values after the queries i0 to i0 + QUERIES of a head. Scores are [keys, queries]."""
    i = i0 + tl.arange(0, QUERIES)
    q = tl.load(
        base_q + i[:, None].to(tl.int64) * q_token + c[None, :],
        mask=(i[:, None] < queries) & (c[None, :] < DIM), other=0.0,
    )  # fmt: skip
    dout = tl.load(
        base_dout + i[:, None].to(tl.int64) * dout_token + cv[None, :],
        mask=(i[:, None] < queries) & (cv[None, :] < V_DIM), other=0.0,
    )  # fmt: skip
    of_top, of_rest = totals_of(  # pyright: ignore[reportGeneralTypeIssues]
        base_top, base_rest, i, i < queries, DISTANCE or BIAS
    )
    deltas = tl.load(base_delta + i, mask=i < queries, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
        dout = dout.to(tl.float32)
    before = capped(tl.dot(of_k, tl.trans(q), input_precision=PRECISION), scale, softcap, SOFTCAP)
    s = with_biases(
        before, i[None, :], j[:, None], queries, keys, base_distance, base_bias, bias_query, bias_key, DISTANCE, BIAS
    )
    weights = weights_of(s, of_top[None, :], of_rest[None, :], DISTANCE or BIAS)
    if MASKED:
        keep = bits_of(words, pattern, j, i0, i, TILE)
        weights = tl.where(keep, weights, 0.0)
    if DROPOUT:
        gone = dropped(head_row, i[None, :], j[:, None], seed_low, seed_high, threshold)
    if DK:
        dp = tl.dot(of_v, tl.trans(dout), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(gone, 0.0, dp * keep_scale)
        ds = weights * (dp - deltas[None, :])
        if MASKED:
            ds = tl.where(keep, ds, 0.0)
            before = tl.where(keep, before, 0.0)  # NaN times a gradient of 0 would be NaN
            q = tl.where(is_non_finite(q), 0.0, q)  # for the keys that it sees, ds is NaN
        if SOFTCAP:
            share = before / softcap
            ds = ds * (1.0 - share * share)
        found_k = tl.dot(ds.to(q.dtype), q, found_k, input_precision=PRECISION)
    if DV:
        if MASKED:
            bad = is_non_finite(dout)
            if tl.max(bad.to(tl.int32)) > 0:
                found_v = add_seen_non_finite(
                    found_v, pattern, words, j, i0, base_dout, dout_token, cv, queries, QUERIES, V_DIM, TILE
                )
            dout = tl.where(bad, 0.0, dout)
        if DROPOUT:
            weights = tl.where(gone, 0.0, weights * keep_scale)
        found_v = tl.dot(weights.to(dout.dtype), dout, found_v, input_precision=PRECISION)
    return found_k, found_v
