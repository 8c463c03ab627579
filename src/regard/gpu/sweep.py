# pyright: basic
"""The sweep over all weights of a call on GPUs: weights stay in registers, and only sums over them are written.

A program takes tiles of queries as the forward kernel does, and computes each weight again from the log-sum-exp. Sums
of rows are in its registers. Sums of columns and of the cells of a picture get theirs from many programs, by atomic
additions in float64: their order differs from run to run, and float32 does not show it.
"""

import triton
import triton.language as tl

from regard.gpu.scores import LOG2E, OF_ANY_VALUE, bits_of, capped, powers_of, totals_of, unit_of, with_biases


@triton.jit(do_not_specialize=OF_ANY_VALUE)
def sweep(
    q, k, total, rest, mass, entropy, squares, top, top_key, bins, columns, mean, largest,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    distance, distance_head, bias, bias_batch, bias_head, bias_query, bias_key,
    order, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern, words,
    batch, heads, group, queries, keys, section, scale, softcap, offset, cell, cells_down, cells_across,
    MAPS_BATCH: tl.constexpr, MAPS_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BINS: tl.constexpr, SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr,
    BIAS: tl.constexpr, PICTURE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `regard.inspect.sweep.Sweep` has, by the same names; the sink is not added.

    Args:
        total, rest: log-sum-exp of each row with its sink, [batch, heads, queries], as `totals.py` has it.
        columns: float64 zeros [batch, heads, keys]; mean: float64 zeros, sums of cells; largest: zeros, the bits of
            weights, which are in the order of the weights.
    """
    row, b, h, listed, first_query = unit_of(  # pyright: ignore[reportGeneralTypeIssues]
        tl.program_id(0), order, batch, heads, 1, tl.cdiv(queries, TILE), section, TILE, ROWS, MAPS_BATCH, MAPS_HEADS
    )
    i = first_query + tl.arange(0, ROWS)
    c = tl.arange(0, DIM_PADDED)
    b64, h64, row64 = b.to(tl.int64), h.to(tl.int64), row.to(tl.int64)
    base_k = k + b64 * k_batch + (h // group).to(tl.int64) * k_head
    base_bias = bias + b64 * bias_batch + h64 * bias_head if BIAS else bias
    base_distance = distance + h64 * distance_head if DISTANCE else distance
    q_at = q + b64 * q_batch + h64 * q_head + i[:, None].to(tl.int64) * q_token + c[None, :]
    rows = tl.load(q_at, mask=(i[:, None] < queries) & (c[None, :] < DIM), other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    at = row64 * queries + i
    sums_of, rest_of = totals_of(  # pyright: ignore[reportGeneralTypeIssues]
        total, rest, at, i < queries, DISTANCE or BIAS
    )
    of_mass = tl.zeros([ROWS], tl.float32)
    of_entropy = tl.zeros([ROWS], tl.float32)
    of_squares = tl.zeros([ROWS], tl.float32)
    of_top = tl.zeros([ROWS], tl.float32)
    of_key = tl.zeros([ROWS], tl.int32)
    of_bins = tl.zeros([ROWS, 32], tl.float32)
    into_columns = columns + row64 * keys
    into_mean = mean + row64 * cells_down * cells_across
    into_largest = largest + row64 * cells_down * cells_across
    for run in tl.range(tl.load(run_start + listed), tl.load(run_start + listed + 1), num_stages=1):
        first = tl.load(run_tile + run) * TILE
        stop = tl.minimum(first + tl.load(run_length + run) * TILE, keys)
        for j0 in tl.range(first, stop, KEYS):
            of_mass, of_entropy, of_squares, of_top, of_key, of_bins = _step(
                of_mass, of_entropy, of_squares, of_top, of_key, of_bins, into_columns, into_mean, into_largest,
                rows, sums_of, rest_of, i, j0, base_k, k_token, c, -1, words,
                base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap,
                offset, cell, cells_across,
                TILE, KEYS, DIM, BINS, SOFTCAP, DISTANCE, BIAS, PICTURE, WIDE, PRECISION,
            )  # fmt: skip
    steps: tl.constexpr = TILE // KEYS
    begin, end = tl.load(patch_start + listed), tl.load(patch_start + listed + 1)
    for step in tl.range(begin * steps, end * steps, num_stages=1):
        j0 = tl.load(patch_tile + step // steps) * TILE + step % steps * KEYS
        pattern = tl.load(patch_pattern + step // steps)
        of_mass, of_entropy, of_squares, of_top, of_key, of_bins = _step(
            of_mass, of_entropy, of_squares, of_top, of_key, of_bins, into_columns, into_mean, into_largest,
            rows, sums_of, rest_of, i, j0, base_k, k_token, c, pattern, words,
            base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap,
            offset, cell, cells_across,
            TILE, KEYS, DIM, BINS, SOFTCAP, DISTANCE, BIAS, PICTURE, WIDE, PRECISION,
        )  # fmt: skip
    there = i < queries
    tl.store(mass + at, of_mass, mask=there)
    tl.store(entropy + at, of_entropy, mask=there)
    tl.store(squares + at, of_squares, mask=there)
    tl.store(top + at, of_top, mask=there)
    tl.store(top_key + at, of_key.to(tl.int64), mask=there)
    n = tl.arange(0, 32)
    tl.store(bins + at[:, None] * BINS + n[None, :], of_bins, mask=there[:, None] & (n[None, :] < BINS))


@triton.jit
def _step(
    of_mass, of_entropy, of_squares, of_top, of_key, of_bins, into_columns, into_mean, into_largest,
    rows, sums_of, rest_of, i, j0, base_k, k_token, c, pattern, words,
    base_distance, base_bias, bias_query, bias_key, queries, keys, scale, softcap, offset, cell, cells_across,
    TILE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BINS: tl.constexpr, SOFTCAP: tl.constexpr,
    DISTANCE: tl.constexpr, BIAS: tl.constexpr, PICTURE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of rows after the keys j0 to j0 + KEYS."""
    j = j0 + tl.arange(0, KEYS)
    k_at = base_k + j[None, :].to(tl.int64) * k_token + c[:, None]
    k = tl.load(k_at, mask=(j[None, :] < keys) & (c[:, None] < DIM), other=0.0)
    if WIDE:
        k = k.to(tl.float32)
    s = capped(tl.dot(rows, k, input_precision=PRECISION), scale, softcap, SOFTCAP)
    s = with_biases(
        s, i[:, None], j[None, :], queries, keys, base_distance, base_bias, bias_query, bias_key, DISTANCE, BIAS
    )
    keep = bits_of(words, pattern, i, j0, j, TILE) & (j[None, :] < keys) & (i[:, None] < queries)
    power = powers_of(s, sums_of[:, None], rest_of[:, None], DISTANCE or BIAS)
    a = tl.where(keep, tl.exp2(power), 0.0)
    of_mass += tl.sum(a, 1)
    of_entropy -= tl.sum(tl.where(a == 0.0, 0.0, a * power), 1) / LOG2E
    of_squares += tl.sum(a * a, 1)
    above = tl.max(a, 1)
    at = tl.min(tl.where(a == above[:, None], j[None, :], keys), 1)
    of_key = tl.where(above > of_top, at, tl.where((above == of_top) & (above > 0.0), tl.minimum(at, of_key), of_key))
    of_top = tl.maximum(of_top, above)
    far = tl.abs(i[:, None] + offset - j[None, :])
    of_pair = tl.where(far == 0, 0, (far.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126)
    of_pair = tl.minimum(of_pair, BINS - 1)
    for one in tl.range(tl.min(of_pair), tl.max(of_pair) + 1, num_stages=1):
        share = tl.sum(tl.where(of_pair == one, a, 0.0), 1)
        of_bins += tl.where((tl.arange(0, 32) == one)[None, :], share[:, None], 0.0)
    tl.atomic_add(into_columns + j, tl.sum(a, 0).to(tl.float64), mask=j < keys, sem="relaxed")
    if PICTURE:
        of_cell = i[:, None] // cell * cells_across + j[None, :] // cell
        seen = keep & (a > 0.0)
        first, last = tl.min(of_cell), tl.max(of_cell)
        if first == last:
            tl.atomic_add(into_mean + first, tl.sum(a).to(tl.float64), sem="relaxed")
            tl.atomic_max(into_largest + first, tl.max(a).to(tl.int32, bitcast=True), sem="relaxed")
        else:
            tl.atomic_add(into_mean + of_cell, a.to(tl.float64), mask=seen, sem="relaxed")
            tl.atomic_max(into_largest + of_cell, a.to(tl.int32, bitcast=True), mask=seen, sem="relaxed")
    return of_mass, of_entropy, of_squares, of_top, of_key, of_bins
