# pyright: basic
"""The forward kernel for GPUs: a program takes one tile of queries, and walks the schedule's key tiles.

FULL tiles are computed without a mask; in PARTIAL tiles a pair is kept where the bit of the schedule's pattern is set.
The softmax is computed online (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691, §3.1).
Programs are started by the list in which the query tiles with the most keys come first, so the last ones are short,
whatever the mask.

A hidden value that is not finite reaches its row, as 0 * NaN is NaN. So tiles whose sums are not finite are computed a
second time, with care: such values are then added to the rows that see them alone. That is another start of the kernel,
whose programs mostly return at once: in one program, both would need more registers.

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
    unit_of,
    with_biases,
)
from regard.gpu.tokens import block_of


@triton.jit(do_not_specialize=OF_ANY_VALUE)
def forward(
    q, k, v, out, lse, sink, flags, distance, bias, k_described, v_described, seed_low, seed_high,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, out_batch, out_head, out_token,
    distance_head, bias_batch, bias_head, bias_query, bias_key,
    order, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    batch, heads, group, queries, keys, section, scale, softcap, threshold, keep_scale,
    MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PATCH: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, SINK: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PATCH_STAGES: tl.constexpr, CAREFUL: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """out [batch, heads, queries, v_dim] and lse [batch, heads, queries], float32, natural logarithm.

    Args:
        k_described, v_described: descriptors of blocks of KEYS keys and values, or None: read by address.
        order: query tiles of each map, those with the most keys first, [maps, query tiles].
        section: (batch row, head) whose keys and values share the L2 cache: their query tiles are computed together.
        scale: above 0 where there is no softcap and no bias.
        ROWS: queries of a program, of which TILE, the side of the schedule's tiles, is a multiple.
        KEYS, PATCH: keys computed at once in FULL and in PARTIAL tiles; TILE is a multiple of both.
        WIDE: whether products take float32 operands, for float32 and for the interpreter, which has no bf16 products.
        PRECISION: of products of float32 operands, as `tl.dot` names it.
        CAREFUL: whether out and lse are there, and only tiles in which something is not finite are computed.
        FLAGS: whether `flags` has an int32 for each program, whether its sums are not finite: set, and where CAREFUL
            read; if not, CAREFUL programs look at their rows of out and lse.
    """
    row, b, h, listed, first_query = unit_of(  # pyright: ignore[reportGeneralTypeIssues]
        tl.program_id(0), order, batch, heads, 1, tl.cdiv(queries, TILE), section, TILE, ROWS, MAPS_BATCH, MAPS_HEADS
    )
    i = first_query + tl.arange(0, ROWS)
    c = tl.arange(0, DIM_PADDED)
    cv = tl.arange(0, V_DIM_PADDED)
    base_out = out + b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head
    out_at = base_out + i[:, None].to(tl.int64) * out_token + cv[None, :]
    lse_at = lse + row.to(tl.int64) * queries + i
    inside = (i[:, None] < queries) & (cv[None, :] < V_DIM)
    if CAREFUL:
        if FLAGS:
            spoiled = tl.load(flags + tl.program_id(0))
        else:
            spoiled = tl.max(is_non_finite(tl.load(out_at, mask=inside, other=0.0)).to(tl.int32))
            spoiled |= tl.max(is_non_finite(tl.load(lse_at, mask=i < queries, other=0.0)).to(tl.int32))
        if spoiled == 0:
            return
    of_q = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + i[:, None].to(tl.int64) * q_token + c[None, :]
    rows = tl.load(of_q, mask=(i[:, None] < queries) & (c[None, :] < DIM), other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    base_k = k + b.to(tl.int64) * k_batch + (h // group).to(tl.int64) * k_head
    base_v = v + b.to(tl.int64) * v_batch + (h // group).to(tl.int64) * v_head
    base_bias = bias + b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head if BIAS else bias
    base_distance = distance + h.to(tl.int64) * distance_head if DISTANCE else distance
    top, total, sums = _walk(  # pyright: ignore[reportGeneralTypeIssues]
        rows, i, row, b, h // group, listed, base_k, k_token, base_v, v_token, k_described, v_described,
        base_distance, base_bias, bias_query, bias_key,
        run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
        queries, keys, scale, softcap, seed_low, seed_high, threshold, keep_scale,
        TILE, ROWS, KEYS, PATCH, DIM, DIM_PADDED, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS, DROPOUT,
        WIDE, PRECISION, STAGES, PATCH_STAGES, CAREFUL,
    )  # fmt: skip
    if FLAGS and not CAREFUL:
        tl.store(flags + tl.program_id(0), tl.max(is_non_finite(sums).to(tl.int32)))
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if not (SOFTCAP or DISTANCE or BIAS):
        top = top / LOG2E
    natural = tl.where(empty, float("-inf"), top + tl.log2(total) / LOG2E)
    if SINK:
        total = total + tl.where(empty, 0.0, tl.exp2((tl.load(sink + h).to(tl.float32) - top) * LOG2E))
    tl.store(lse_at, natural, mask=i < queries)
    tl.store(out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _walk(
    rows, i, row, b, g, listed, base_k, k_token, base_v, v_token, k_described, v_described,
    base_distance, base_bias, bias_query, bias_key,
    run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    queries, keys, scale, softcap, seed_low, seed_high, threshold, keep_scale,
    TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PATCH: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, SOFTCAP: tl.constexpr,
    DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PATCH_STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The maximum, total and sums of the rows over the key tiles of their list: first FULL ones, then PARTIAL ones.

    The keys of a FULL tile that the end of the keys cuts are computed with those of PARTIAL tiles.
    """
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_DIM_PADDED], tl.float32)
    last = tl.full([], 0, tl.int32)  # where those keys begin
    cut = tl.full([], 0, tl.int32)
    for run in tl.range(tl.load(run_start + listed), tl.load(run_start + listed + 1), num_stages=1):
        first = tl.load(run_tile + run) * TILE
        stop = tl.minimum(first + tl.load(run_length + run) * TILE, keys)
        whole = first + (stop - first) // KEYS * KEYS
        for j0 in tl.range(first, whole, KEYS, num_stages=STAGES):
            of_k = block_of(k_described, b, g, j0, base_k, k_token, keys, KEYS, DIM, DIM_PADDED, WIDE, False)
            of_v = block_of(v_described, b, g, j0, base_v, v_token, keys, KEYS, V_DIM, V_DIM_PADDED, WIDE, False)
            top, total, sums = _step(
                top, total, sums, rows, of_k, of_v, i, j0, base_v, v_token, 0, words,
                base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap,
                row.to(tl.uint32), seed_low, seed_high, threshold, keep_scale,
                TILE, KEYS, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS, DROPOUT, WIDE, PRECISION, False,
                CAREFUL,
            )  # fmt: skip
        cut = tl.where(whole < stop, tl.cdiv(stop - whole, PATCH), cut)
        last = tl.where(whole < stop, whole, last)
    begin, end = tl.load(patch_start + listed), tl.load(patch_start + listed + 1)
    steps: tl.constexpr = TILE // PATCH
    for step in tl.range(begin * steps, end * steps + cut, num_stages=PATCH_STAGES):
        patched = step < end * steps
        patch = step // steps
        at_edge = last + (step - end * steps) * PATCH
        j0 = tl.load(patch_tile + patch, mask=patched, other=0) * TILE + step % steps * PATCH
        j0 = tl.where(patched, j0, at_edge)
        pattern = tl.load(patch_pattern + patch, mask=patched, other=-1)
        of_k = block_of(
            k_described if PATCH == KEYS else None, b, g, j0, base_k, k_token, keys, PATCH, DIM, DIM_PADDED, WIDE, True
        )
        of_v = block_of(
            v_described if PATCH == KEYS else None, b, g, j0, base_v, v_token, keys, PATCH, V_DIM, V_DIM_PADDED, WIDE,
            True,
        )  # fmt: skip
        top, total, sums = _step(
            top, total, sums, rows, of_k, of_v, i, j0, base_v, v_token, pattern, words,
            base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap,
            row.to(tl.uint32), seed_low, seed_high, threshold, keep_scale,
            TILE, PATCH, V_DIM, V_DIM_PADDED, SOFTCAP, DISTANCE, BIAS, DROPOUT, WIDE, PRECISION, True, CAREFUL,
        )  # fmt: skip
    return top, total, sums


@triton.jit
def _step(
    top, total, sums, rows, of_k, of_v, i, j0, base_v, v_token, pattern, words,
    base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap,
    head_row, seed_low, seed_high, threshold, keep_scale,
    TILE: tl.constexpr, KEYS: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, SOFTCAP: tl.constexpr,
    DISTANCE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The running maximum, total and sums after the keys j0 to j0 + KEYS.

    The maximum is that of the scores times LOG2E where they are products alone, which saves a product for each pair;
    else that of the scores, as the least float32, for example, times LOG2E would be -inf.
    """
    j = j0 + tl.arange(0, KEYS)
    s = tl.dot(rows, tl.trans(of_k), input_precision=PRECISION)
    if SOFTCAP or DISTANCE or BIAS:
        s = with_biases(
            capped(s, scale, softcap, SOFTCAP), i[:, None], j[None, :], queries, keys,
            base_distance, base_bias, bias_query, bias_key, DISTANCE, BIAS,
        )  # fmt: skip
    if MASKED:
        s = tl.where(bits_of(words, pattern, i, j0, j, TILE) & (j[None, :] < keys), s, float("-inf"))
    if SOFTCAP or DISTANCE or BIAS:
        above = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)  # all hidden, or a bias of -inf
        weights = tl.exp2((s - safe[:, None]) * LOG2E)
        shrink = tl.exp2((top - safe) * LOG2E)
    else:
        above = tl.maximum(top, tl.max(s, 1) * (scale * LOG2E))
        safe = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2(s * (scale * LOG2E) - safe[:, None])
        shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(weights, 1)
    if DROPOUT:
        gone = dropped(head_row, i[:, None], j[None, :], seed_low, seed_high, threshold)
        weights = tl.where(gone, 0.0, weights * keep_scale)
    sums = sums * shrink[:, None]
    if MASKED and CAREFUL:
        bad = is_non_finite(of_v)
        if tl.max(bad.to(tl.int32)) > 0:  # a weight of 0 would let them through
            cv = tl.arange(0, V_DIM_PADDED)
            sums = add_seen_non_finite(sums, pattern, words, i, j0, base_v, v_token, cv, keys, KEYS, V_DIM, TILE)
        of_v = tl.where(bad, 0.0, of_v)
    sums = tl.dot(weights.to(of_v.dtype), of_v, sums, input_precision=PRECISION)
    return above, total, sums
