# pyright: basic
"""The forward kernel for GPUs: a program takes one tile of queries after another, and walks the schedule's key tiles.

FULL tiles are computed without a mask; in PARTIAL tiles a pair is kept where the bit of the schedule's pattern is set.
The softmax is computed online (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691, §3.1).
Programs are persistent: program p takes units p, p + programs, ... of a list in which the query tiles with the
most keys come first, so no multiprocessor waits long for the last ones, whatever the mask.

A row's bits depend on its query, its keys and their positions: one program computes a row, in the order of the keys.
"""

import triton
import triton.language as tl

from regard.gpu.scores import (
    LOG2E,
    OF_ANY_VALUE,
    add_seen_non_finite,
    bits_of,
    capped,
    dropped,
    is_non_finite,
    spoiled,
    unit_of,
    with_biases,
)


@triton.jit(do_not_specialize=OF_ANY_VALUE)
def forward(
    q, k, v, out, lse, sink,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, out_batch, out_head, out_token,
    distance, distance_head, bias, bias_batch, bias_head, bias_query, bias_key,
    order, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    batch, heads, group, queries, keys, section, scale, softcap, seed_low, seed_high, threshold, keep_scale,
    MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PATCH: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, SINK: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """out [batch, heads, queries, v_dim] and lse [batch, heads, queries], float32, natural logarithm.

    Args:
        order: query tiles of each map, those with the most keys first, [maps, query tiles].
        section: (batch row, head) whose keys and values share the L2 cache: their query tiles are computed together.
        ROWS: queries of a program, of which TILE, the side of the schedule's tiles, is a multiple.
        KEYS, PATCH: keys computed at once in FULL and in PARTIAL tiles; TILE is a multiple of both.
        WIDE: whether products take float32 operands, for float32 and for the interpreter, which has no bf16 products.
        PRECISION: of products of float32 operands, as `tl.dot` names it.
        REPAIR: whether out and lse have what another kernel computed, and only rows in which something is not finite
            are computed, with the others of their program.
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
        some = 1
        if REPAIR:
            there = out + b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head
            totals = tl.load(lse + row.to(tl.int64) * queries + i, mask=i < queries, other=0.0)
            some = spoiled(there, i, queries, cv, out_token, V_DIM) | tl.max(is_non_finite(totals).to(tl.int32))
            i = tl.where(some > 0, i, queries)  # beyond the end: nothing is read or written
        base_q = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
        base_k = k + b.to(tl.int64) * k_batch + (h // group).to(tl.int64) * k_head
        base_v = v + b.to(tl.int64) * v_batch + (h // group).to(tl.int64) * v_head
        base_bias = bias + b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head if BIAS else bias
        base_distance = distance + h.to(tl.int64) * distance_head if DISTANCE else distance
        rows = tl.load(
            base_q + i[:, None].to(tl.int64) * q_token + c[None, :],
            mask=(i[:, None] < queries) & (c[None, :] < DIM), other=0.0,
        )  # fmt: skip
        if WIDE:
            rows = rows.to(tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, V_DIM_PADDED], tl.float32)
        head_row = row.to(tl.uint32)

        last = tl.full([], 0, tl.int32)  # where the keys of a FULL tile that the end of the keys cuts begin
        cut = tl.full([], 0, tl.int32)
        for run in tl.range(tl.load(run_start + listed), tl.load(run_start + listed + some), num_stages=1):
            first = tl.load(run_tile + run) * TILE
            stop = tl.minimum(first + tl.load(run_length + run) * TILE, keys)
            whole = first + (stop - first) // KEYS * KEYS
            for j0 in tl.range(first, whole, KEYS, num_stages=STAGES):
                top, total, sums = _step(
                    top, total, sums, rows, i, j0, base_k, k_token, base_v, v_token, c, cv, 0, words,
                    base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap,
                    head_row, seed_low, seed_high, threshold, keep_scale,
                    TILE, KEYS, DIM, DIM_PADDED, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS, DROPOUT, WIDE, PRECISION, False,
                )  # fmt: skip
            cut = tl.where(whole < stop, tl.cdiv(stop - whole, PATCH), cut)
            last = tl.where(whole < stop, whole, last)
        begin, end = tl.load(patch_start + listed), tl.load(patch_start + listed + some)
        steps: tl.constexpr = TILE // PATCH
        for step in tl.range(begin * steps, end * steps + cut, num_stages=1):
            patched = step < end * steps
            patch = step // steps
            at_edge = last + (step - end * steps) * PATCH
            j0 = tl.load(patch_tile + patch, mask=patched, other=0) * TILE + step % steps * PATCH
            j0 = tl.where(patched, j0, at_edge)
            pattern = tl.load(patch_pattern + patch, mask=patched, other=-1)
            top, total, sums = _step(
                top, total, sums, rows, i, j0, base_k, k_token, base_v, v_token, c, cv, pattern, words,
                base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap,
                head_row, seed_low, seed_high, threshold, keep_scale,
                TILE, PATCH, DIM, DIM_PADDED, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS, DROPOUT, WIDE, PRECISION, True,
            )  # fmt: skip

        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        natural = tl.where(empty, float("-inf"), top + tl.log2(total) / LOG2E)
        if SINK:
            column = tl.load(sink + h).to(tl.float32)
            total = total + tl.where(empty, 0.0, tl.exp2((column - top) * LOG2E))
        sums = sums / total[:, None]
        tl.store(lse + row.to(tl.int64) * queries + i, natural, mask=i < queries)
        base_out = out + b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head
        tl.store(
            base_out + i[:, None].to(tl.int64) * out_token + cv[None, :], sums.to(out.dtype.element_ty),
            mask=(i[:, None] < queries) & (cv[None, :] < V_DIM),
        )  # fmt: skip


@triton.jit
def _step(
    top, total, sums, rows, i, j0, base_k, k_token, base_v, v_token, c, cv, pattern, words,
    base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap,
    head_row, seed_low, seed_high, threshold, keep_scale,
    TILE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr,
    V_DIM_PADDED: tl.constexpr, SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running maximum, total and sums after the keys j0 to j0 + KEYS."""
    j = j0 + tl.arange(0, KEYS)
    k_at = base_k + j[None, :].to(tl.int64) * k_token + c[:, None]  # transposed: [dim, keys]
    v_at = base_v + j[:, None].to(tl.int64) * v_token + cv[None, :]
    if MASKED:
        k = tl.load(k_at, mask=(j[None, :] < keys) & (c[:, None] < DIM), other=0.0)
        v = tl.load(v_at, mask=(j[:, None] < keys) & (cv[None, :] < V_DIM), other=0.0)
    elif DIM == DIM_PADDED and V_DIM == V_DIM_PADDED:
        k = tl.load(k_at)
        v = tl.load(v_at)
    else:
        k = tl.load(k_at, mask=c[:, None] < DIM, other=0.0)
        v = tl.load(v_at, mask=cv[None, :] < V_DIM, other=0.0)
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    s = capped(tl.dot(rows, k, input_precision=PRECISION), scale, softcap, SOFTCAP)
    s = with_biases(
        s, i[:, None], j[None, :], queries, keys, base_distance, base_bias, bias_query, bias_key, DISTANCE, BIAS
    )
    if MASKED:
        keep = bits_of(words, pattern, i, j0, j, TILE) & (j[None, :] < keys)
        s = tl.where(keep, s, float("-inf"))
    above = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(above == float("-inf"), 0.0, above)  # all hidden, or a bias of -inf
    weights = tl.exp2((s - safe[:, None]) * LOG2E)  # the least float32 times LOG2E would be -inf
    shrink = tl.exp2((top - safe) * LOG2E)
    total = total * shrink + tl.sum(weights, 1)
    if DROPOUT:
        gone = dropped(head_row, i[:, None], j[None, :], seed_low, seed_high, threshold)
        weights = tl.where(gone, 0.0, weights * keep_scale)
    sums = sums * shrink[:, None]
    if MASKED:
        bad = is_non_finite(v)
        if tl.max(bad.to(tl.int32)) > 0:  # a weight of 0 would let them through
            sums = add_seen_non_finite(sums, pattern, words, i, j0, base_v, v_token, cv, keys, KEYS, V_DIM, TILE)
        v = tl.where(bad, 0.0, v)
    sums = tl.dot(weights.to(v.dtype), v, sums, input_precision=PRECISION)
    return above, total, sums
