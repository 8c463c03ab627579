# pyright: basic
"""The kernel of decoding on GPUs: few query rows, many keys, which are read where they are stored.

A program computes one span of 1,024 keys for query heads that share a key head, so that a long cache keeps all
multiprocessors busy with a single sequence (flash-decoding). Spans are counted from where a part of the storage begins,
whatever the batch and the chip, and `merge.py` adds them in order: a row has the same bits in every batch.

Keys and values are plain or codes (`codes.py`), contiguous or in pages.

Where values are the first channels of the keys (the latents of MLA, DeepSeek-AI 2024, arXiv:2405.04434, §2.1), both are
read once: the scores are a product of those channels and one of the channels behind them, the rotated part.

A hidden value that is not finite would reach every row, as 0 * NaN = NaN. So a span under a mask whose sums are not
finite is computed a second time, value by value: such values are added to the rows that see them alone. That is
another start of the kernel, whose programs mostly return at once: in one program, both would need too many registers.
"""

import triton
import triton.language as tl

from regard.gpu.codes import coded_keys, coded_values, value_scales
from regard.gpu.codes_to_float import rounded
from regard.gpu.pieces import (
    channel_of,
    in_value_order,
    piece_size,
    pieces_of,
    token_of,
    value_channel_of,
    value_tokens,
)
from regard.gpu.scores import LOG2E, capped, is_non_finite, with_biases

OF_ANY_LENGTH = (
    "batch", "keys", "begin", "tokens", "spans", "first_span", "key_tiles", "shown_row", "k_row", "v_row", "distance_head",
    "bias_batch", "bias_head", "bias_query",
)  # fmt: skip
"""Arguments that change as keys are added: Triton would compile another kernel where one is 1, or a multiple of 16."""


@triton.jit(do_not_specialize=(*OF_ANY_LENGTH, "v_scale_token"))  # of which 1 would suggest to load several at once
def span(
    q, out, tops, totals, flags,
    k, k_page, k_head, k_token, k_scale, k_zero, k_scale_page, k_scale_head, k_scale_token, k_table, k_row,
    v, v_page, v_head, v_token, v_scale, v_zero, v_scale_page, v_scale_head, v_scale_token, v_table, v_row,
    q_batch, q_head, q_token, distance, distance_head, bias, bias_batch, bias_head, bias_query, bias_key,
    begins, ends, begin, tokens, seen, shown, shown_row, tiles, key_tiles, words,
    batch, heads, kv_heads, queries, keys, spans, first_span, scale, softcap,
    k_first, k_page_tokens, k_group, v_first, v_page_tokens, v_group,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr, IN_KEYS: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_TABLE: tl.constexpr, V_TABLE: tl.constexpr,
    K_PER_TOKEN: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr, MAPS_BATCH: tl.constexpr,
    MAPS_HEADS: tl.constexpr, SOFTCAP: tl.constexpr, DISTANCE: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, FLAGS: tl.constexpr, CAREFUL: tl.constexpr, CHUNK: tl.constexpr, UNION: tl.constexpr,
    SHOWN: tl.constexpr, WORDS: tl.constexpr, K_PAIRED: tl.constexpr,
    V_PAIRED: tl.constexpr, V_ALIGNED: tl.constexpr, V_TOKEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out [spans, batch, heads, queries, v_dim], and tops and totals [spans, batch, heads, queries] of one part, float32.

    The top is the largest score of a row, and the total the sum of exp(score - top): the logarithm of their sum would
    not tell how many keys a finite bias of -1e9 hides. The total is 0 where a row sees nothing.

    Args:
        begins, ends: per batch row the index of the part's first key and one past its last; if not RAGGED, all are
            `begin` and `begin + tokens`.
        tiles: for each map and key tile -2 if hidden, -1 if all is kept, else its pattern.
        DIM, DIM_PADDED: dimensions of queries and keys; if IN_KEYS, without the last REST.
        REST: dimensions of keys that values lack, the last ones; 0 if not IN_KEYS.
        IN_KEYS: whether values are the first DIM channels of keys; those of `v` are then not read.
        flags: int32 for each program, whether its sums are not finite: set if FLAGS.
        CAREFUL: whether to compute the programs whose flag is set.
        CHUNK: dimensions that scores are summed over at once, so that all of q need not be in registers; 0: all. If
            negative, of as many at once, in code without a loop, so that all keys are copied ahead.
        V_TOKEN: what `v_token` is if values are codes, so that addresses are constants apart.
        WORDS: whether codes are loaded in words of four.
        K_PAIRED: whether the scales of two channels of keys begin at a multiple of 4 bytes.
        V_ALIGNED: bytes, at most 16, that the addresses of values are a multiple of.
        V_PAIRED: whether the two channels of values that are in a byte of int4 have the same scale.
        PTX: which instructions of NVIDIA's GPUs decode codes, those of compute capability 8.0 or 8.9; 0: none.
        UNION: the intervals of keys that each batch row sees, 1 or 2, if they are in `seen`, int64 [UNION, 2, batch] with the
            first key and one past the last; 0 if `tiles` has the mask. There is one query, and no hidden key is read.
    """
    program = tl.program_id(0)  # of one axis: CUDA takes 65,535 blocks along the others
    if CAREFUL:  # noqa: SIM102 - the outer condition is decided when the kernel is compiled
        if tl.load(flags + program) == 0:
            return
    of = program % spans
    g = program // spans % kv_heads
    part = program // spans // kv_heads
    parts = tl.cdiv(GROUP * queries, ROWS)
    b = part // parts
    r = part % parts * ROWS + tl.arange(0, ROWS)
    h = g * GROUP + tl.minimum(r // queries, GROUP - 1)  # rows that are not real read biases of a head that exists
    i = r % queries
    real = r < GROUP * queries
    c = channel_of(tl.arange(0, DIM_PADDED), K_KIND)
    cv = c if IN_KEYS else value_channel_of(tl.arange(0, V_DIM_PADDED), V_DIM_PADDED, V_KIND, WORDS)
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), g.to(tl.int64)
    q_at = q + b64 * q_batch + h64[:, None] * q_head + i[:, None].to(tl.int64) * q_token
    dtype: tl.constexpr = q.dtype.element_ty
    if CHUNK == 0:
        rows = _rows(q_at, c, real, 0, DIM, WIDE)
    if REST > 0:
        rest_from: tl.constexpr = DIM - DIM % 2 if K_KIND == "int4" else DIM  # two channels are in one byte
        cr = rest_from + channel_of(tl.arange(0, REST_PADDED), K_KIND)
        rest = _rows(q_at, cr, real, DIM, DIM + REST, WIDE)
    start = begin
    stop = begin + tokens
    if RAGGED:
        start = tl.load(begins + b).to(tl.int32)
        stop = tl.load(ends + b).to(tl.int32)
    base_distance = distance + h64[:, None] * distance_head if DISTANCE else distance
    base_bias = bias + b64 * bias_batch + h64[:, None] * bias_head if BIAS else bias
    coded: tl.constexpr = K_KIND != "plain"
    first = of * SPAN
    end = tl.minimum(first + SPAN, stop - start)
    if UNION > 0:
        low, high = _interval(seen, b, batch, 0)  # pyright: ignore[reportGeneralTypeIssues]
        low_2, high_2 = _interval(seen, b, batch, UNION - 1)
        near = (low < start + end) & (high > start + first)
        near_2 = (low_2 < start + end) & (high_2 > start + first)
        end = tl.where(near | near_2, end, first)
    else:
        low, high, low_2, high_2 = start, stop, start, stop
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_DIM_PADDED], tl.float32)
    begin_at = first - k_first % 16 if coded else first  # blocks of codes begin with a tile
    for t0 in range(begin_at, end, KEYS):
        t = t0 + token_of(tl.arange(0, KEYS), KEYS, K_KIND)
        j = start + t
        there = _is_there(t, j, first, end, low, high, low_2, high_2, shown + b64 * shown_row, UNION, SHOWN)
        if coded:
            tile, piece_there = pieces_of(t0, k_first, there, first, end, low - start, high - start,
                low_2 - start, high_2 - start, KEYS, UNION, SHOWN)  # fmt: skip
            k_at, tile_in_page = _placed(tile, k_page_tokens // 16, k_table, b64, k_row, K_TABLE, piece_there)
            at_keys = k + k_at * k_page + g64 * k_head + tile_in_page * k_token
            at_scales = k_scale + k_at * k_scale_page + g64 * k_scale_head
            at_zeros = k_zero + k_at * k_scale_page + g64 * k_scale_head
            if not IN_KEYS:
                place, piece = value_tokens(KEYS)
                t_v = t0 + piece * piece_size(KEYS) + place
                v_there = _is_there(
                    t_v, start + t_v, first, end, low, high, low_2, high_2, shown + b64 * shown_row, UNION, SHOWN
                )
                at_piece = t0 + piece * piece_size(KEYS)
                v_at, v_tile = _placed(
                    (t0 + v_first) // 16 + piece // (16 // piece_size(KEYS)), v_page_tokens // 16, v_table, b64, v_row,
                    V_TABLE, (at_piece + piece_size(KEYS) > first) & (at_piece < end),
                )  # fmt: skip
                value_places = v_tile * 16 + piece % (16 // piece_size(KEYS)) * piece_size(KEYS)
                at_values = v_at * v_page + g64 * v_head + value_places * V_TOKEN + place * V_TOKEN
                at_v_scales = v_at * v_scale_page + g64 * v_scale_head + (value_places + place) * v_scale_token
                # none of them is copied ahead, so that their way is as long as that of the keys
                v_scales = value_scales(
                    v_scale + at_v_scales, v_zero + at_v_scales, v_there, v_group, V_DIM, V_DIM_PADDED, KEYS, V_KIND,
                    V_PAIRED, WORDS,
                )  # fmt: skip
        else:
            keys_at, key_places = _placed(t + k_first, k_page_tokens, k_table, b64, k_row, K_TABLE, there)
            at_keys = k + keys_at * k_page + g64 * k_head + key_places * k_token
            tile_in_page, at_scales, at_zeros, piece_there = key_places, at_keys, at_keys, there
        if CHUNK > 0:
            s = tl.zeros([ROWS, KEYS], tl.float32)
            for c0 in range(0, DIM, CHUNK):
                s = _with_chunk(
                    s, q_at, c0, real, at_keys, tile_in_page, piece_there, there, at_scales, at_zeros,
                    k_scale_token, k_group, DIM, CHUNK, KEYS, K_KIND, K_PER_TOKEN, IN_KEYS, dtype, WIDE, PRECISION,
                    K_PAIRED, WORDS, PTX,
                )  # fmt: skip
        elif CHUNK < 0:
            s = tl.zeros([ROWS, KEYS], tl.float32)
            for c0 in tl.static_range(0, DIM, -CHUNK):
                s = _with_chunk(
                    s, q_at, c0, real, at_keys, tile_in_page, piece_there, there, at_scales, at_zeros,
                    k_scale_token, k_group, DIM, -CHUNK, KEYS, K_KIND, K_PER_TOKEN, IN_KEYS, dtype, WIDE, PRECISION,
                    K_PAIRED, WORDS, PTX,
                )  # fmt: skip
        else:
            of_k = _keys(
                at_keys, tile_in_page, 0, piece_there, there, at_scales, at_zeros, k_scale_token, k_group,
                DIM, DIM_PADDED, KEYS, K_KIND, K_PER_TOKEN, IN_KEYS, dtype, WIDE, K_PAIRED, WORDS, PTX,
            )  # fmt: skip
            s = tl.dot(rows, of_k, input_precision=PRECISION)
        if REST > 0:
            of_rest = _keys(
                at_keys, tile_in_page, rest_from, piece_there, there, at_scales, at_zeros, k_scale_token,
                k_group, DIM + REST, REST_PADDED, KEYS, K_KIND, K_PER_TOKEN, IN_KEYS, dtype, WIDE, K_PAIRED, WORDS, PTX,
            )  # fmt: skip
            s = tl.dot(rest, of_rest, s, input_precision=PRECISION)
        if IN_KEYS:
            if CHUNK > 0:
                of_v = tl.trans(_keys(
                    at_keys, tile_in_page, 0, piece_there, there, at_scales, at_zeros, k_scale_token, k_group,
                    DIM, DIM_PADDED, KEYS, K_KIND, K_PER_TOKEN, IN_KEYS, dtype, WIDE, K_PAIRED, WORDS, PTX,
                ))  # fmt: skip
            else:
                of_v = tl.trans(of_k)
        elif coded:
            of_v = coded_values(
                v + at_values, v_scales, v_there, V_DIM, V_DIM_PADDED, KEYS, V_KIND, dtype,
                WIDE, V_ALIGNED, WORDS, PTX,
            )  # fmt: skip
        else:
            values_at, value_places = _placed(t + v_first, v_page_tokens, v_table, b64, v_row, V_TABLE, there)
            at_values = v + values_at * v_page + g64 * v_head + value_places * v_token
            mask = there[:, None] & (cv[None, :] < V_DIM)
            of_v = rounded(tl.load(at_values[:, None] + cv[None, :], mask=mask, other=0.0), dtype, WIDE)
        s = with_biases(
            capped(s, scale, softcap, SOFTCAP), i[:, None], j[None, :], queries, keys,
            base_distance, base_bias, bias_query, bias_key, DISTANCE, BIAS,
        )  # fmt: skip
        keep = there[None, :] & real[:, None]
        if MASKED:
            row_map = (b if MAPS_BATCH else 0) * (heads if MAPS_HEADS else 1) + (h[:, None] if MAPS_HEADS else 0)
            inside = keep if MAPS_HEADS else there[None, :]
            keep = keep & _is_kept(tiles + row_map * key_tiles, words, i[:, None], j[None, :], inside, keep, TILE)
        s = tl.where(keep, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2((s - safe[:, None]) * LOG2E)
        shrink = tl.exp2((top - safe) * LOG2E)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        if CAREFUL:
            sums = _add_one_by_one(
                sums, weights.to(dtype).to(tl.float32), keep, t0, end, v + g64 * v_head, v_page, v_token, v_first,
                v_page_tokens, v_table, b64, v_row, cv, KEYS, V_DIM, V_TABLE, dtype,
            )  # fmt: skip
        else:
            if coded and not IN_KEYS:
                weights = in_value_order(weights, ROWS, KEYS)
            sums = tl.dot(weights.to(of_v.dtype), of_v, sums, input_precision=PRECISION)
        top = above
    at = (((first_span + of).to(tl.int64) * batch + b) * heads + h) * queries + i
    tl.store(tops + at, top, mask=real)
    tl.store(totals + at, total, mask=real)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + at[:, None] * V_DIM + cv[None, :], sums / total[:, None], mask=real[:, None] & (cv[None, :] < V_DIM))
    if FLAGS:
        tl.store(flags + program, tl.max(is_non_finite(sums).to(tl.int32)))


@triton.jit
def _with_chunk(
    s, q_at, c0, real, at_keys, tile, piece_there, there, at_scales, at_zeros, k_scale_token, k_group,
    DIM: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, K_KIND: tl.constexpr, K_PER_TOKEN: tl.constexpr,
    IN_KEYS: tl.constexpr, dtype: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, K_PAIRED: tl.constexpr,
    WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Scores and the product of CHUNK channels from c0 on."""
    of_k = _keys(
        at_keys, tile, c0, piece_there, there, at_scales, at_zeros, k_scale_token, k_group,
        DIM, CHUNK, KEYS, K_KIND, K_PER_TOKEN, IN_KEYS, dtype, WIDE, K_PAIRED, WORDS, PTX,
    )  # fmt: skip
    of_q = _rows(q_at, c0 + channel_of(tl.arange(0, CHUNK), K_KIND), real, 0, DIM, WIDE)
    return tl.dot(of_q, of_k, s, input_precision=PRECISION)


@triton.jit
def _interval(seen, b, batch, number: tl.constexpr):
    """The first key of one of a row's intervals, and one past the last."""
    at = seen + 2 * number * batch + b
    return tl.load(at).to(tl.int32), tl.load(at + batch).to(tl.int32)


@triton.jit
def _rows(at, c, real, FROM: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Channels c of the queries, those from FROM to DIM."""
    found = tl.load(at + c[None, :], mask=real[:, None] & ((c >= FROM) & (c < DIM))[None, :], other=0.0)
    if WIDE:
        found = found.to(tl.float32)
    return found


@triton.jit
def _is_there(
    t, j, first, end, low, high, low_2, high_2, shown, UNION: tl.constexpr, SHOWN: tl.constexpr,
):  # fmt: skip
    """Whether tokens t of the part, keys j, are read by the span that has the tokens from first to end."""
    there = (t >= first) & (t < end)
    if UNION > 0:
        there = there & (((j >= low) & (j < high)) | ((j >= low_2) & (j < high_2)))
    if SHOWN:
        there = there & (tl.load(shown + j, mask=there, other=0) != 0)
    return there


@triton.jit
def _is_kept(tiles, words, i, j, inside, there, TILE: tl.constexpr):
    """Whether the mask keeps queries i [rows, 1] and keys j [1, keys], both `there`; `inside`: whose tiles exist."""
    kind = tl.load(tiles + j // TILE, mask=inside, other=-2)
    at = words + (tl.maximum(kind, 0) * TILE + i) * (TILE // 64) + j % TILE // 64
    word = tl.load(at, mask=(kind >= 0) & there, other=-1)
    return (kind > -2) & ((word >> (j % 64)) & 1 != 0)


@triton.jit
def _placed(slot, page_tokens, table, b, row, TABLE: tl.constexpr, there):
    """(page, place in the page) of slots."""
    if TABLE:
        page = slot // page_tokens
        found = tl.load(table + b * row + page, mask=there, other=0).to(tl.int64)
        return found, (slot - page * page_tokens).to(tl.int64)
    return b + 0 * slot, slot.to(tl.int64)


@triton.jit
def _keys(
    base, tile, c0, piece_there, there, scale, zero, scale_token, group,
    DIM: tl.constexpr, COUNT: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, PER_TOKEN: tl.constexpr,
    IN_KEYS: tl.constexpr, dtype: tl.constexpr, WIDE: tl.constexpr, K_PAIRED: tl.constexpr, WORDS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """COUNT channels of keys from c0 on, [dim, keys], in the type of the call, those before DIM.

    Args:
        base: of plain keys the address of each token, of codes that of the tile of each piece.
        tile: of each piece, in its page.
        there: the tokens to load; the keys of other tokens are undefined, unless IN_KEYS.
    """
    if KIND == "plain":
        c = c0 + tl.arange(0, COUNT)
        mask = there[None, :] & (c[:, None] < DIM)
        found = rounded(tl.load(base[None, :] + c[:, None], mask=mask, other=0.0), dtype, WIDE)
    else:
        found = coded_keys(
            base, tile, c0, piece_there, there, scale, zero, scale_token, group,
            DIM, COUNT, KEYS, KIND, PER_TOKEN, IN_KEYS, dtype, WIDE, K_PAIRED, WORDS, PTX,
        )  # fmt: skip
    return found


@triton.jit
def _add_one_by_one(
    sums, weights, keep, t0, end, v, v_page, v_token, v_first, v_page_tokens, v_table, b, v_row, cv,
    KEYS: tl.constexpr, V_DIM: tl.constexpr, V_TABLE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Sums with the weighted values of keys from t0 on, of which NaN and inf reach those rows alone that keep the key."""
    nth = tl.arange(0, KEYS)
    for n in range(KEYS):
        one = t0 + n
        page, place = _placed(  # pyright: ignore[reportGeneralTypeIssues]
            one + v_first, v_page_tokens, v_table, b, v_row, V_TABLE, one < end
        )
        at = v + page * v_page + place * v_token + cv
        value = tl.load(at, mask=(cv < V_DIM) & (one < end), other=0.0).to(dtype).to(tl.float32)[None, :]
        weight = tl.sum(tl.where((nth == n)[None, :], weights, 0.0), 1)[:, None]
        seen = tl.max((keep & (nth == n)[None, :]).to(tl.int32), 1)[:, None] > 0
        sums += tl.where(is_non_finite(value), tl.where(seen, value, 0.0), weight * value)
    return sums
