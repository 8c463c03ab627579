# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
"""The kernels of decoding on GPUs: few query rows, many keys, which are read where they are stored.

A program computes one span of 1,024 keys for query heads that share a key head, so that a long cache keeps all
multiprocessors busy with a single sequence (flash-decoding). Spans are counted from where a part of the storage begins,
whatever the batch and the chip, and `merge` adds them in order: a row has the same bits in every batch.

Keys and values are plain or codes (`storage/codec.py`), contiguous or in pages. A decoded element is
`code * scale + zero_point` in float32, rounded to the type of the call, as on a CPU.

Codes are loaded as they lie: a thread has a piece of a tile of keys, up to 16 tokens of a channel side by side, and a
piece of a value, up to 16 channels. The tensor cores take tokens and channels in any order that is the same in both
operands, so blocks of codes have the order in which a warp's threads hold the pieces of 8 rows already: nothing is
moved between threads. `_tokens` and `_channels` say which token or channel that is.

Where values are the first channels of the keys (the latents of MLA, DeepSeek-AI 2024, arXiv:2405.04434, §2.1), both are
read once: the scores are a product of those channels and one of the channels behind them, the rotated part.

A hidden value that is not finite would reach every row, as 0 * NaN = NaN. So a span under a mask whose sums are not
finite is computed a second time, value by value: such values are added to the rows that see them alone. That is
another start of the kernel, whose programs mostly return at once: in one program, both would need too many registers.
"""

import triton
import triton.language as tl

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
    c = _channels(tl.arange(0, DIM_PADDED), K_KIND)
    cv = c if IN_KEYS else _value_channels(tl.arange(0, V_DIM_PADDED), V_DIM_PADDED, V_KIND, WORDS)
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), g.to(tl.int64)
    q_at = q + b64 * q_batch + h64[:, None] * q_head + i[:, None].to(tl.int64) * q_token
    dtype: tl.constexpr = q.dtype.element_ty
    if CHUNK == 0:
        rows = _rows(q_at, c, real, 0, DIM, WIDE)
    if REST > 0:
        rest_from: tl.constexpr = DIM - DIM % 2 if K_KIND == "int4" else DIM  # two channels are in one byte
        cr = rest_from + _channels(tl.arange(0, REST_PADDED), K_KIND)
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
        t = t0 + _tokens(tl.arange(0, KEYS), KEYS, K_KIND)
        j = start + t
        there = _is_there(t, j, first, end, low, high, low_2, high_2, shown + b64 * shown_row, UNION, SHOWN)
        if coded:
            tile, piece_there = _pieces(t0, k_first, there, first, end, low - start, high - start,
                low_2 - start, high_2 - start, KEYS, UNION, SHOWN)  # fmt: skip
            k_at, tile_in_page = _placed(tile, k_page_tokens // 16, k_table, b64, k_row, K_TABLE, piece_there)
            at_keys = k + k_at * k_page + g64 * k_head + tile_in_page * k_token
            at_scales = k_scale + k_at * k_scale_page + g64 * k_scale_head
            at_zeros = k_zero + k_at * k_scale_page + g64 * k_scale_head
            if not IN_KEYS:
                place, piece = _held(KEYS)
                t_held = t0 + piece * _piece(KEYS) + place
                there_held = _is_there(
                    t_held, start + t_held, first, end, low, high, low_2, high_2, shown + b64 * shown_row, UNION, SHOWN
                )
                at_piece = t0 + piece * _piece(KEYS)
                v_at, v_tile = _placed(
                    (t0 + v_first) // 16 + piece // (16 // _piece(KEYS)), v_page_tokens // 16, v_table, b64, v_row,
                    V_TABLE, (at_piece + _piece(KEYS) > first) & (at_piece < end),
                )  # fmt: skip
                value_places = v_tile * 16 + piece % (16 // _piece(KEYS)) * _piece(KEYS)
                at_values = v_at * v_page + g64 * v_head + value_places * V_TOKEN + place * V_TOKEN
                at_v_scales = v_at * v_scale_page + g64 * v_scale_head + (value_places + place) * v_scale_token
                # none of them is copied ahead, so that their way is as long as that of the keys
                v_scales = _value_scales(
                    v_scale + at_v_scales, v_zero + at_v_scales, there_held, v_group, V_DIM, V_DIM_PADDED, KEYS, V_KIND,
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
            of_v = _coded_values(
                v + at_values, v_scales, there_held, V_DIM, V_DIM_PADDED, KEYS, V_KIND, dtype,
                WIDE, V_ALIGNED, WORDS, PTX,
            )  # fmt: skip
        else:
            values_at, value_places = _placed(t + v_first, v_page_tokens, v_table, b64, v_row, V_TABLE, there)
            at_values = v + values_at * v_page + g64 * v_head + value_places * v_token
            mask = there[:, None] & (cv[None, :] < V_DIM)
            of_v = _rounded(tl.load(at_values[:, None] + cv[None, :], mask=mask, other=0.0), dtype, WIDE)
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
                weights = _as_held(weights, ROWS, KEYS)
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
    of_q = _rows(q_at, c0 + _channels(tl.arange(0, CHUNK), K_KIND), real, 0, DIM, WIDE)
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
def _pieces(
    t0, k_first, there, first, end, low, high, low_2, high_2, KEYS: tl.constexpr, UNION: tl.constexpr,
    SHOWN: tl.constexpr,
):  # fmt: skip
    """(tile, whether one of its tokens is read) of each piece of a block of codes."""
    piece: tl.constexpr = _piece(KEYS)
    count: tl.constexpr = KEYS // piece
    t = t0 + tl.arange(0, count) * piece
    found = (t + piece > first) & (t < end)
    if UNION > 0:
        found = found & (((t + piece > low) & (t < high)) | ((t + piece > low_2) & (t < high_2)))
    if SHOWN:
        found = found & (tl.max(tl.reshape(there.to(tl.int32), [piece, count]), 0) > 0)
    return (t0 + k_first) // 16 + tl.arange(0, count) // (16 // piece), found


@triton.constexpr_function
def _piece(count):
    """Tokens, or bytes of a value, that a thread has side by side: a block has 8 pieces or more, unless it is small."""
    return max(4, min(16, count // 8))


@triton.jit
def _tokens(n, KEYS: tl.constexpr, KIND: tl.constexpr):
    """Which token of a block its n-th column of scores is: the first ones of all pieces, then the second ones."""
    if KIND == "plain":
        return n
    count: tl.constexpr = KEYS // _piece(KEYS)
    return n % count * _piece(KEYS) + n // count


@triton.jit
def _channels(n, KIND: tl.constexpr):
    """Which channel the n-th of a product is: each of 4 threads has two of the first 8, and two of the next."""
    if KIND == "plain":
        return n
    return n // 16 * 16 + n // 2 % 2 * 8 + n // 4 % 4 * 2 + n % 2


@triton.jit
def _value_channels(n, V_DIM_PADDED: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr):
    """Which channel of values the n-th column is; codes of int4 have channels c (low half) and 16 + c in one byte."""
    if KIND == "plain":
        return n
    size: tl.constexpr = _value_bytes(V_DIM_PADDED, KIND, WORDS)
    piece: tl.constexpr = _piece(size)
    count: tl.constexpr = size // piece
    if KIND == "int4" and WORDS:
        unit = n % count * piece + n // count // 2
        return unit // 16 * 32 + n // count % 2 * 16 + unit % 16
    return n % count * piece + n // count


@triton.constexpr_function
def _value_bytes(dim, kind, words):
    """Bytes that are decoded for a value with these dimensions, those of int4 twice if not in words."""
    return dim // 2 if kind == "int4" and words else dim


@triton.jit
def _held(KEYS: tl.constexpr):
    """(place in the piece, piece) of the tokens whose values a thread has, [keys / 8, 2, 1, 4, 1]."""
    count: tl.constexpr = KEYS // _piece(KEYS)
    place = tl.arange(0, KEYS // 8)[:, None, None, None, None]
    piece = tl.arange(0, 4)[None, None, None, :, None] * 2 + tl.arange(0, 2)[None, :, None, None, None]
    if count < 8:
        n = place * 8 + piece
        place, piece = n // count, n % count
    return place, piece


@triton.jit
def _as_held(weights, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Weights in the order of the tokens of `_coded_values`."""
    weights = tl.permute(tl.reshape(weights, [ROWS, KEYS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(weights, [ROWS, KEYS])


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
        found = _rounded(tl.load(base[None, :] + c[:, None], mask=mask, other=0.0), dtype, WIDE)
    else:
        found = _coded_keys(
            base, tile, c0, piece_there, there, scale, zero, scale_token, group,
            DIM, COUNT, KEYS, KIND, PER_TOKEN, IN_KEYS, dtype, WIDE, K_PAIRED, WORDS, PTX,
        )  # fmt: skip
    return found


@triton.jit
def _coded_keys(
    base, tile, c0, piece_there, there, scale, zero, scale_token, group,
    DIM: tl.constexpr, COUNT: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, PER_TOKEN: tl.constexpr,
    IN_KEYS: tl.constexpr, dtype: tl.constexpr, WIDE: tl.constexpr, K_PAIRED: tl.constexpr, WORDS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Those of codes.

    Channels of int4 are two in a byte. In words both are decoded from one load; else, as Triton (3.6) compiles what
    joins them for several warps to wrong numbers, each loads its byte, as a code of 8 bits.
    """
    piece: tl.constexpr = _piece(KEYS)
    count: tl.constexpr = KEYS // piece
    each: tl.constexpr = 2 if KIND == "int4" and WORDS else 1  # channels of a byte that are decoded together
    # by 8 channels, the bytes of two, pieces, the pairs of 4 threads, and words of 4 tokens
    r = tl.arange(0, COUNT // 8)[:, None, None, None, None]
    byte = tl.arange(0, 2 // each)[None, :, None, None, None]
    h = tl.arange(0, count)[None, None, :, None, None]
    x = tl.arange(0, 4)[None, None, None, :, None]
    n = c0 // each + (r * 4 + x) * (2 // each) + byte
    inside = piece_there[None, None, :, None, None]
    shape: tl.constexpr = [COUNT // 8, 2 // each, count, 4, piece]
    unit = n // 2 if KIND == "int4" and not WORDS else n
    at = base[None, None, :, None, None] + (unit * 16 + h % (16 // piece) * piece)
    codes = _codes(at, inside & (n * each < DIM), shape, piece, piece, WORDS)
    if KIND == "int4" and not WORDS:
        codes = (codes >> (n % 2 * 4).to(tl.uint8)) & 15
    if PER_TOKEN:
        y = h % (16 // piece) * piece + tl.arange(0, piece)[None, None, None, None, :]
        at = (tile[None, None, :, None, None] * 16 + y) * scale_token
        if IN_KEYS:
            inside = tl.permute(tl.reshape(there, [1, 1, 1, piece, count]), [0, 1, 4, 2, 3])
        scale_low = _loaded(scale[None, None, :, None, None] + at, inside)
        scale_high = scale_low
        if KIND == "int4":
            zero_low = _loaded(zero[None, None, :, None, None] + at, inside)
            zero_high = zero_low
    else:
        c = c0 + tl.arange(0, COUNT // 8)[:, None, None] * 8 + tl.arange(0, 4)[None, None, :] * 2
        at = (tile // (group // 16) * scale_token)[None, :, None] + c
        there = piece_there[None, :, None]
        scales = _pairs(scale[None, :, None] + at, c, there, DIM, COUNT // 8, count, K_PAIRED)
        if KIND == "int4":
            zeros = _pairs(zero[None, :, None] + at, c, there, DIM, COUNT // 8, count, K_PAIRED)
        if each == 2:
            scale_low, scale_high = tl.split(scales)
            scale_low, scale_high = scale_low[:, None, :, :, None], scale_high[:, None, :, :, None]
            zero_low, zero_high = tl.split(zeros)
            zero_low, zero_high = zero_low[:, None, :, :, None], zero_high[:, None, :, :, None]
        else:
            scale_low = tl.permute(scales, [0, 3, 1, 2])[:, :, :, :, None]
            if KIND == "int4":
                zero_low = tl.permute(zeros, [0, 3, 1, 2])[:, :, :, :, None]
    if each == 2:
        low, high = _halves_of_bytes(codes, shape, PTX)
        low = _rounded(low * scale_low + zero_low, dtype, WIDE)
        high = _rounded(high * scale_high + zero_high, dtype, WIDE)
        found = tl.permute(tl.reshape(tl.join(low, high), [COUNT // 16, 2, count, 4, piece, 2]), [0, 3, 1, 5, 4, 2])
    else:
        if KIND == "int4":
            found = _rounded(codes.to(tl.float32) * scale_low + zero_low, dtype, WIDE)
        else:
            found = _rounded(_scaled(codes, scale_low, KIND, shape, WORDS, PTX), dtype, WIDE)
        found = tl.permute(tl.reshape(found, [COUNT // 16, 2, 2, count, 4, piece]), [0, 4, 1, 2, 5, 3])
    return tl.reshape(found, [COUNT, KEYS])


@triton.jit
def _codes(
    at, there, shape: tl.constexpr, PIECE: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Codes, or words of four, of pieces at these addresses [shape without its last axis, 1].

    They are loaded along one axis of pieces, of which Triton gives each 32 to a warp, in their order.

    Args:
        ALIGNED: bytes that the first of the addresses in a row are a multiple of.
    """
    rows: tl.constexpr = shape[0] * shape[1] * shape[2] * shape[3]
    multiple: tl.constexpr = ALIGNED if ALIGNED < PIECE else PIECE
    at, there = tl.reshape(at, [rows])[:, None], tl.reshape(there, [rows])[:, None]
    if WORDS:
        at = tl.multiple_of(at.to(tl.pointer_type(tl.uint32), bitcast=True), [multiple, multiple])
        found = tl.load(at + tl.arange(0, PIECE // 4)[None, :], mask=there, other=0)
        found = tl.reshape(found, [shape[0], shape[1], shape[2], shape[3], PIECE // 4])
    else:
        at = tl.multiple_of(at, [multiple, multiple])
        found = tl.reshape(tl.load(at + tl.arange(0, PIECE)[None, :], mask=there, other=0), shape)
    return found


@triton.jit
def _pairs(
    at, c, there, DIM: tl.constexpr, EIGHTHS: tl.constexpr, PIECES: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    """Scales or zero points of channels c and c + 1, float32 [by 8 channels, pieces, 4, 2]."""
    rows: tl.constexpr = EIGHTHS * PIECES * 4
    at, both = tl.reshape(at, [rows])[:, None], tl.arange(0, 2)[None, :]
    if PAIRED:
        there = tl.reshape(there & (c < DIM), [rows])[:, None]
        found = tl.load(tl.multiple_of(at, [4, 4]) + both, mask=there, other=0.0)
    else:
        c = tl.reshape(tl.where(there, c, DIM), [rows])[:, None]
        found = tl.load(at + both, mask=c + both < DIM, other=0.0)
    return tl.reshape(found.to(tl.float32), [EIGHTHS, PIECES, 4, 2])


@triton.jit
def _value_scales(
    scale, zero, there, group,
    V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, PAIRED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Scales of values, and for int4 zero points and both of the high halves of bytes, for each piece of a value.

    Args:
        PAIRED: whether both halves of a byte have the same scale.
    """
    size: tl.constexpr = _value_bytes(V_DIM_PADDED, KIND, WORDS)
    piece: tl.constexpr = _piece(size)
    shape: tl.constexpr = [KEYS // 8, 2, size // piece, 4, 1]
    if KIND == "int4" and not WORDS:
        c = tl.arange(0, size // piece)[None, None, :, None, None] * piece
        inside = there & (c < V_DIM)
        one, of_zero = _of_pieces(scale + c // group, inside, shape), _of_pieces(zero + c // group, inside, shape)
        found = one, of_zero, one, of_zero
    elif KIND == "int4":
        c = tl.arange(0, size // piece)[None, None, :, None, None] * piece // 16 * 32  # the first of 16 with a scale
        inside = there & (c < V_DIM)
        scale_low = _of_pieces(scale + c // group, inside, shape)
        zero_low = _of_pieces(zero + c // group, inside, shape)
        if PAIRED:
            found = scale_low, zero_low, scale_low, zero_low
        else:
            c += 16
            inside = there & (c < V_DIM)
            scale_high = _of_pieces(scale + c // group, inside, shape)
            found = scale_low, zero_low, scale_high, _of_pieces(zero + c // group, inside, shape)
    else:
        # loaded once for each thread: with one load per token, Triton would move the codes between threads
        one = _of_pieces(scale, there, shape)
        found = one, one, one, one
    return found


@triton.jit
def _of_pieces(at, there, shape: tl.constexpr):
    """The scale or zero point of each piece of a value, in the thread that has the piece."""
    rows: tl.constexpr = shape[0] * shape[1] * shape[2] * shape[3]
    at, there = tl.broadcast_to(at, shape), tl.broadcast_to(there, shape)
    return tl.reshape(tl.load(tl.reshape(at, [rows]), mask=tl.reshape(there, [rows]), other=0.0), shape)


@triton.jit
def _coded_values(
    base, scales, there,
    V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Values [keys, dim] in the type of the call; addresses are those of the tokens that `_held` names."""
    halves: tl.constexpr = KIND == "int4" and not WORDS  # each channel loads its byte, see `_coded_keys`
    size: tl.constexpr = _value_bytes(V_DIM_PADDED, KIND, WORDS)
    real_size: tl.constexpr = V_DIM if halves or KIND != "int4" else (V_DIM + 31) // 32 * 16
    piece: tl.constexpr = _piece(size)
    count: tl.constexpr = size // piece
    shape: tl.constexpr = [KEYS // 8, 2, count, 4, piece]
    begin = tl.arange(0, count)[None, None, :, None, None] * piece
    if halves:
        n = begin + tl.arange(0, piece)[None, None, None, None, :]
        codes = tl.load(base + (n // 32 * 16 + n % 16), mask=there & (n < real_size), other=0)
        codes = (codes >> (n // 16 % 2 * 4).to(tl.uint8)) & 15
    elif real_size % piece == 0:
        codes = _codes(base + begin, there & (begin < real_size), shape, piece, ALIGNED, WORDS)
    else:  # the rest of a piece is in another value, or in none
        n = begin + tl.arange(0, piece)[None, None, None, None, :]
        codes = tl.load(base + n, mask=there & (n < real_size), other=0)
    scale_low, zero_low, scale_high, zero_high = scales
    if KIND == "int4" and WORDS:
        low, high = _halves_of_bytes(codes, shape, PTX)
        low = _rounded(low * scale_low.to(tl.float32) + zero_low.to(tl.float32), dtype, WIDE)
        high = _rounded(high * scale_high.to(tl.float32) + zero_high.to(tl.float32), dtype, WIDE)
        found = tl.reshape(tl.join(low, high), [KEYS // 16, 2, 2, count, 4, piece, 2])
        found = tl.permute(found, [0, 4, 1, 2, 5, 6, 3])
    else:
        if halves:
            found = _rounded(codes.to(tl.float32) * scale_low.to(tl.float32) + zero_low.to(tl.float32), dtype, WIDE)
        else:
            found = _rounded(_scaled(codes, scale_low.to(tl.float32), KIND, shape, WORDS, PTX), dtype, WIDE)
        found = tl.permute(tl.reshape(found, [KEYS // 16, 2, 2, count, 4, piece]), [0, 4, 1, 2, 5, 3])
    return tl.reshape(found, [KEYS, V_DIM_PADDED])


@triton.jit
def _scaled(codes, scale, KIND: tl.constexpr, shape: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr):
    """Codes of 8 bits, alone or four in a word, times their scales, float32.

    The bits of e4m3 numbers, moved, are those of float16 that are 256 times smaller; two of them are moved at once.
    """
    if not WORDS:
        if KIND == "int8":
            found = codes.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            found, _ = _halves(((codes & 0x80).to(tl.uint32) << 8) | ((codes & 0x7F).to(tl.uint32) << 7))
            scale *= 256.0
    elif KIND == "int8":
        found = _bytes(codes ^ 0x80808080, 8388736.0, PTX)
    elif PTX >= 89:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [codes], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
        a, b = _halves(low)
        c, d = _halves(high)
        found = _in_order(a, b, c, d)
    else:
        a, c = _halves((codes << 8 & 0x80008000) | (codes << 7 & 0x3F803F80))
        b, d = _halves((codes & 0x80008000) | (codes >> 1 & 0x3F803F80))
        found = _in_order(a, b, c, d)
        scale *= 256.0
    return tl.reshape(found, shape) * scale


@triton.jit
def _halves_of_bytes(codes, shape: tl.constexpr, PTX: tl.constexpr):
    """The low and the high halves of bytes, four in a word, float32."""
    low = tl.reshape(_bytes(codes & 0x0F0F0F0F, 8388608.0, PTX), shape)
    return low, tl.reshape(_bytes(codes >> 4 & 0x0F0F0F0F, 8388608.0, PTX), shape)


@triton.jit
def _halves(words):
    """Two float16 in a word, as float32."""
    low = words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bytes(words, zero: tl.constexpr, PTX: tl.constexpr):
    """The four bytes of words less a number, float32 [..., 2, 2]; `zero` is that number and 2^23.

    Bytes become the last bits of floats from 2^23 on: GPUs convert integers at an eighth of the speed of additions.
    """
    if PTX > 0:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ prmt.b32 $0, $4, 0x4B000000, 0x7650; prmt.b32 $1, $4, 0x4B000000, 0x7651; "
            "prmt.b32 $2, $4, 0x4B000000, 0x7652; prmt.b32 $3, $4, 0x4B000000, 0x7653; }",
            "=r,=r,=r,=r,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a = ((words & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        b = ((words >> 8 & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        c = ((words >> 16 & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        d = ((words >> 24) | 0x4B000000).to(tl.float32, bitcast=True)
    return _in_order(a - zero, b - zero, c - zero, d - zero)


@triton.jit
def _in_order(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _loaded(at, mask):
    """Scales or zero points, float32."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


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


@triton.jit
def _rounded(x, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Elements in the type of the call; WIDE: as float32 then."""
    x = x.to(dtype)
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit(do_not_specialize=("rows", "heads", "spans"))
def merge(
    parts, tops, totals, out, lse, sink, rows, heads, queries, spans, out_batch, out_head, out_token,
    V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """out and lse (natural logarithm) of a row from its spans, in their order; a sink takes its share of out."""
    row = tl.program_id(0).to(tl.int64)
    cv = tl.arange(0, V_DIM_PADDED)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sums = tl.zeros([V_DIM_PADDED], tl.float32)
    for n in range(spans):
        at = tl.cast(n, tl.int64) * rows + row
        one = tl.load(tops + at)
        of_one = tl.load(totals + at)
        if of_one != 0.0:  # also NaN
            above = tl.maximum(top, one)
            shrink = tl.exp2((top - above) * LOG2E)
            weight = of_one * tl.exp2((one - above) * LOG2E)
            total = total * shrink + weight
            values = tl.load(parts + at * V_DIM + cv, mask=cv < V_DIM, other=0.0)
            sums = sums * shrink + weight * values
            top = above
    h = row // queries % heads
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + row, tl.where(empty, float("-inf"), top + tl.log2(total) / LOG2E))
    if SINK:
        total += tl.where(empty, 0.0, tl.exp2((tl.load(sink + h).to(tl.float32) - top) * LOG2E))
    into = out + row // queries // heads * out_batch + h * out_head + row % queries * out_token
    tl.store(into + cv, (sums / total).to(out.dtype.element_ty), mask=cv < V_DIM)
