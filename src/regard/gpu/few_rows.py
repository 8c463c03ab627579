"""Decoding on a GPU: starts `span.py`'s kernel for each part of the storage, and `merge.py`'s, which merges them."""

from collections.abc import Iterator
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import RefusalError
from regard.gpu.call import Call, Inputs
from regard.gpu.launch import (
    IS_INTERPRETED,
    Blocks,
    biases,
    empty_output,
    fitting,
    is_wide,
    padded,
    precision,
    shared_memory,
    softcap_form,
    warps_and_stages,
)
from regard.gpu.merge import merge
from regard.gpu.span import span
from regard.gpu.starts import started
from regard.gpu.tables import by_tile
from regard.storage.codec import CHUNK as BYTE_CHUNK
from regard.storage.codec import TILE
from regard.storage.stored import Part, StoredTensor

SPAN = 1024
"""Keys of a program."""

CHUNK = 128
"""Dimensions that scores are summed over at once where all of them are too many; see `span_blocks`."""

AMD = 64 << 10
"""Bytes of shared memory of AMD's chips; those of NVIDIA have more."""


class Tokens(NamedTuple):
    """Keys and values as a program reads them; dimensions are padded."""

    k_dim: int  # without the rest
    v_dim: int
    kind: str  # plain, or codes, which need registers to be decoded in
    in_keys: bool = False  # whether values are the first channels of keys
    rest: int = 0  # dimensions that keys have and values lack, if they are


class SpanBlocks(NamedTuple):
    """How the kernel of spans is cut."""

    blocks: Blocks
    chunk: int  # dimensions that scores are summed over at once, in a loop of the kernel, or negative: without; 0: all


def span_blocks(item: int, t: Tokens, rows: int, shared: int) -> SpanBlocks | None:
    """The blocks of the kernel of spans, whose programs have rows of the queries and heads that share a key head.

    Args:
        item: bytes of an element of q.
        rows: queries of the heads of a key head.
        shared: bytes of shared memory that a program may have.

    Returns:
        None if the smallest program needs more.
    """
    blocks, dim = preferred_blocks(item, t, rows, shared), max(t.k_dim, t.v_dim)
    # all of q in registers leave too few for decoding large latents
    chunk = CHUNK if t.in_keys and t.kind != "plain" and t.k_dim > CHUNK else -32 if blocks.warps == 1 else 0
    if shared <= AMD:  # which needs no second part of float32: all of these fit
        return SpanBlocks(blocks, chunk)
    fewer_stages = [blocks._replace(stages=n) for n in range(blocks.stages, 0, -1)]
    fewer_rows = [blocks._replace(rows=n, stages=1) for n in (32, 16) if n < blocks.rows]
    cuts = [SpanBlocks(one, chunk) for one in (*fewer_stages, *fewer_rows)]
    if dim > 256:
        cuts.append(SpanBlocks(Blocks(16, 16, 16, warps=8, stages=1), min(CHUNK, t.k_dim)))
    return next((cut for cut in cuts if span_memory(cut, item, t) <= shared), None)


def preferred_blocks(item: int, t: Tokens, rows: int, shared: int) -> Blocks:
    """The blocks for keys and values that fit in shared memory with few stages."""
    coded, dim = t.kind != "plain", max(t.k_dim, t.v_dim)
    tokens = 16 if coded or (item == 4 and dim > 256) else 32
    if coded and not t.in_keys and item == 2 and dim <= 128 and rows <= 16:
        # one warp, so that codes are decoded by the thread that has their place in the product
        return Blocks(16, 64, 64, warps=1, stages=2)
    if dim <= 256:
        # 64 rows of 256 float32 would spill 1,500 to 11,800 bytes
        most = 32 if item == 4 and dim > 128 and not coded and shared > AMD else 64
        blocks = Blocks(min(most, padded(rows)), tokens, tokens, warps=4, stages=3)
        return fitting(blocks, (dim + t.rest) * item, (2 * dim + t.rest) * item, 0, shared)
    most = 16 if coded or item == 4 or shared <= AMD else 32  # 64 rows would spill 600 bytes of registers
    blocks = Blocks(min(most, padded(rows)), tokens, tokens, warps=8, stages=2)
    return fitting(blocks, (dim + t.rest) * item, (dim + t.rest) * item, 0, shared)


def span_memory(cut: SpanBlocks, item: int, t: Tokens) -> int:
    """Bytes of shared memory that Triton 3.7 gives a program, or a few more, as measured by `./bench gpu-kernels`.

    Products of float32 are of two parts, so queries are there twice. Blocks of tokens that are loaded ahead are there
    beside what the product of the block before needs, and codes beside what is decoded of them.
    """
    (rows, tokens, _, _, stages, _), chunk = cut.blocks, cut.chunk
    wide, k_dim = item == 4, (max(chunk, 0) or t.k_dim) + t.rest
    queries, keys, values = ((2 if wide else 1) * rows * k_dim * item, tokens * k_dim * item, tokens * t.v_dim * item)
    k_codes, v_codes = tokens * k_dim, tokens * t.v_dim
    if chunk < 0:
        ahead = tokens * (t.k_dim + t.v_dim) // (2 if t.kind == "int4" else 1) + 32 * t.k_dim
        return queries + (stages - 1) * ahead + 10 * rows * tokens
    if chunk:
        return max(queries + keys, 4 * v_codes * (2 if wide and t.kind == "int4" else 1))
    if t.in_keys:
        return queries + keys + 16 * t.v_dim * item
    if stages == 1:
        largest = max(keys, values)
        of_kind = {"plain": largest, "int4": 2 * largest + 128 * rows}.get(t.kind, largest // 2)
        return queries + of_kind + (0 if wide else 4 * rows * tokens)
    rest = (16 if wide else 10) * rows * tokens + (rows * k_dim * item // 2 if stages > 2 else 0)
    if t.kind == "plain":
        return queries + (stages - 1) * (keys + values) + rest
    codes = 4 * k_codes + v_codes + (values if wide else 0) if t.kind == "int4" else 2 * k_codes + v_codes
    return queries + keys + codes + rest


_SPAN: Any = span
_MERGE: Any = merge


class _Pair(NamedTuple):
    """A part of the keys and the same tokens of the values."""

    k: Part
    v: Part
    begin: int  # of its first key
    begins: Tensor | None  # int64 [batch], where rows differ
    ends: Tensor | None


class Seen(NamedTuple):
    """The keys that one query for each row sees, in tensors on the device: those in an interval that are shown."""

    intervals: Tensor | None = None  # int64 [intervals, 2, batch]; None: all keys of the schedule
    shown: Tensor | None = None  # bool [batch or 1, keys]; None: all


ALL = Seen()
"""What a call sees whose keys are those of its schedule."""


def decode(
    call: Call, i: Inputs, stored: tuple[StoredTensor, StoredTensor] | None, seen: Seen = ALL
) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call of few query rows; None if keys and values are stored in different parts."""
    k, v = stored or (StoredTensor.of(i.k), StoredTensor.of(i.v))
    pairs = _pairs(k, v)
    if pairs is None:
        return None
    (batch, heads, queries, _), v_dim = i.q.shape, v.shape[3]
    spans = [max(1, -(-pair.k.tokens // SPAN)) for pair in pairs]
    device = i.q.device
    parts = torch.empty(sum(spans), batch, heads, queries, v_dim, dtype=torch.float32, device=device)
    tops, totals = torch.empty(2, sum(spans), batch, heads, queries, dtype=torch.float32, device=device)
    first = 0
    for pair, count in zip(pairs, spans, strict=True):
        _run(call, i, pair, (k.shape, v.shape), (parts, tops, totals), count, first, seen)
        first += count
    out = empty_output(i.q, v_dim)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
    rows = batch * heads * queries
    with started(device):
        _MERGE[(rows,)](
            parts, tops, totals, out, lse, lse if i.sink is None else i.sink, rows, heads, queries, sum(spans),
            *out.stride()[:3], V_DIM=v_dim, V_DIM_PADDED=padded(v_dim), SINK=i.sink is not None,
        )  # fmt: skip
    return out.to(i.q.dtype), lse


def _pairs(k: StoredTensor, v: StoredTensor) -> list[_Pair] | None:
    """The parts, without empty ones; None if the kernels do not read them."""
    if len(k.parts) != len(v.parts) or not all(map(_is_readable, k.parts, v.parts)):
        return None
    return list(_listed(k, v))


def _is_readable(k: Part, v: Part) -> bool:
    """Whether two parts have the same tokens, keys 16 tokens side by side where they are codes, values by token.

    Codes are of keys and values both, with the same tokens in a tile.
    """
    same = k.tokens == v.tokens and (k.row_ends is None) == (v.row_ends is None)
    same &= (k.kind == "plain") == (v.kind == "plain")
    same &= k.kind == "plain" or (k.first_slot - v.first_slot) % TILE == v.page % TILE == 0
    layout = k.tiled == (k.kind != "plain") and (not v.tiled or is_in_keys(k, v))
    return same and layout and all(map(_is_contiguous, (k, v)))


def _is_contiguous(part: Part) -> bool:
    if part.tiled and (_alignment(part.data) < TILE or (part.data.shape[3] > 1 and part.data.stride(3) != TILE)):
        return False
    tables = [t for t in (part.data, part.scale, part.zero_point, part.table) if t is not None]
    alike = part.zero_point is None or part.scale is None or part.zero_point.stride() == part.scale.stride()
    return alike and all(t.stride(-1) == 1 or t.shape[-1] < 2 for t in tables)


def _listed(k: StoredTensor, v: StoredTensor) -> Iterator[_Pair]:
    begin, begins = 0, None
    for a, b in zip(k.parts, v.parts, strict=True):
        ends = a.row_ends if a.row_ends is not None else None if begins is None else begins + a.tokens
        if ends is not None and begins is None:
            begins = torch.full_like(ends, begin)
        if a.tokens:
            yield _Pair(a, b, begin, begins, ends)
        begin, begins = begin + a.tokens, ends


def is_in_keys(k: Part, v: Part) -> bool:
    """Whether values are the first channels of keys: at the same addresses, in the same form."""
    memories = ((p.data, p.scale, p.zero_point, p.table) for p in (k, v))
    alike = [(p.kind, p.tiled, p.page, p.first_slot, p.group, p.per_token) for p in (k, v)]
    return alike[0] == alike[1] and all(map(_is_same_memory, *memories))


def _is_same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _run(
    call: Call, i: Inputs, pair: _Pair, shapes: tuple[Any, Any], into: tuple[Tensor, Tensor, Tensor], spans: int,
    first: int, seen: Seen,
) -> None:  # fmt: skip
    """One part."""
    (batch, heads, queries, dim), (_, kv_heads, keys, _), v_dim = i.q.shape, shapes[0], shapes[1][3]
    k, v, tiles = pair.k, pair.v, by_tile(call.schedule, i.q.device)
    nothing, group, union = into[1], heads // kv_heads, seen.intervals
    in_keys = is_in_keys(k, v) and v_dim <= dim
    rest = dim - v_dim if in_keys else 0
    k_padded, v_padded, rest_padded = _padded_dims(dim, v_dim, rest, k.kind, v.kind)
    tokens = Tokens(k_padded, v_padded, k.kind, in_keys, rest_padded)
    blocks, chunk = _blocks(i, tokens, group * queries)
    programs = spans * kv_heads * -(-group * queries // blocks.rows) * batch
    flagged = tiles.masked and v.kind == "plain"  # codes are finite
    v_aligned = 1 if v.scale is None else _alignment(v.data, v.data.shape[3] if v.kind == "int4" else v_dim)
    flags = torch.empty(programs, dtype=torch.int32, device=i.q.device) if flagged else tiles.kinds
    for careful in (False, True) if flagged else (False,):
        with started(i.q.device):
            _SPAN[(programs,)](
                i.q, *into, flags, *_addresses(k, nothing), *_addresses(v, nothing), *i.q.stride()[:3],
                *biases(i, nothing),
                nothing if pair.begins is None else pair.begins, nothing if pair.ends is None else pair.ends,
                pair.begin, k.tokens, nothing if union is None else union, *_shown(seen.shown, nothing),
                tiles.kinds, tiles.kinds.shape[1], tiles.words,
                batch, heads, kv_heads, queries, keys, spans, first, call.scale, call.softcap or 0.0,
                k.first_slot, k.page, k.group or 1, v.first_slot, v.page, v.group or 1,
                GROUP=group, ROWS=blocks.rows, KEYS=blocks.tokens, SPAN=SPAN, TILE=call.schedule.tile,
                DIM=dim - rest, DIM_PADDED=k_padded, V_DIM=v_dim, V_DIM_PADDED=v_padded,
                REST=rest, REST_PADDED=rest_padded, IN_KEYS=in_keys,
                K_KIND=k.kind, V_KIND=v.kind, K_TABLE=k.table is not None, V_TABLE=v.table is not None,
                K_PER_TOKEN=k.per_token, RAGGED=pair.ends is not None, MASKED=tiles.masked,
                MAPS_BATCH=call.schedule.maps[0] > 1, MAPS_HEADS=call.schedule.maps[1] > 1,
                SOFTCAP=softcap_form(call.softcap, i.q), DISTANCE=i.distance is not None, BIAS=i.bias is not None,
                WIDE=is_wide(i.q), PRECISION=precision(i.q),
                FLAGS=flagged and not careful, CAREFUL=careful, CHUNK=chunk, UNION=0 if union is None else len(union),
                SHOWN=seen.shown is not None, V_ALIGNED=v_aligned,
                WORDS=blocks.warps == 1 and v_aligned % 4 == 0 and has_whole_pieces(v.kind, v_dim),
                K_PAIRED=k.scale is not None and _alignment(k.scale, dim - rest, dim) % 4 == 0,
                V_PAIRED=v.group % BYTE_CHUNK == 0 or v_dim <= v.group,
                V_TOKEN=v.data.stride(2) if v.scale is not None else 0, PTX=_ptx(i.q.device, in_keys),
                **warps_and_stages(blocks, i.q.device),
            )  # fmt: skip


def has_whole_pieces(kind: str, v_dim: int) -> bool:
    """Whether the codes of a value are whole pieces (`pieces.piece_size`), so that words are loaded."""
    size, real = (padded(v_dim) // 2, -(-v_dim // 32) * 16) if kind == "int4" else (padded(v_dim), v_dim)
    return real % max(4, min(16, size // 8)) == 0


def _alignment(t: Tensor, *others: int) -> int:
    """Bytes, at most 16, that all rows of a tensor begin at a multiple of."""
    item = t.element_size()
    return gcd(16, t.data_ptr(), *(n * item for n in (*t.stride()[:3], *others)))


def _ptx(device: torch.device, in_keys: bool) -> int:
    """Which instructions of NVIDIA's GPUs decode codes: of compute capability 8.0, or of 8.9; 0: those of any GPU.

    The ones of 8.9 make NaN of some bytes, which may be in memory that was never written and is hidden. Keys may be NaN
    there, but not if they are values, too.
    """
    if IS_INTERPRETED or torch.version.hip is not None or device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 89 if (major, minor) >= (8, 9) and not in_keys else 80


def _padded_dims(dim: int, v_dim: int, rest: int, kind: str, v_kind: str) -> tuple[int, int, int]:
    """The padded dimensions of keys without the rest, of values, and of the rest, 0 where there is none.

    Two channels are in a byte of int4, for values channels c and 16 + c: 32 have 16 bytes.
    """
    split = (dim - rest) % 2 if kind == "int4" else 0
    v_padded = max(BYTE_CHUNK, padded(v_dim)) if v_kind == "int4" and not rest else padded(v_dim)
    return padded(dim - rest), v_padded, padded(rest + split) if rest else 0


def _blocks(i: Inputs, t: Tokens, rows: int) -> SpanBlocks:
    item, cpu = i.q.element_size(), i.q.device.type == "cpu"
    cut = span_blocks(item, t, rows, 227 << 10 if cpu else shared_memory(i.q.device))
    if cut is None:
        raise RefusalError(
            f"triton cannot decode {t.kind} values of {t.v_dim} dimensions in {i.q.dtype} on this GPU: its smallest "
            f"program needs 128 KiB of shared memory, and there are {shared_memory(i.q.device) >> 10}. Call in "
            "bfloat16, or pass backend='reference'."
        )
    return cut._replace(blocks=Blocks(min(64, padded(rows)), 32, 32, warps=cut.blocks.warps, stages=1)) if cpu else cut


def _addresses(part: Part, nothing: Tensor) -> tuple[Any, ...]:
    """Addresses and strides of keys, or of values: tokens of plain ones; of codes, rows of a token or of 16 tokens."""
    data, scale = part.data, part.scale
    steps = (0, 0, 0) if scale is None else scale.stride()[:3]
    scales = (nothing if scale is None else scale, nothing if part.zero_point is None else part.zero_point)
    return data, *data.stride()[:3], *scales, *steps, *_table(part, nothing)


def _table(part: Part, nothing: Tensor) -> tuple[Tensor, int]:
    return (nothing, 0) if part.table is None else (part.table, part.table.stride(0))


def _shown(shown: Tensor | None, nothing: Tensor) -> tuple[Tensor, int]:
    """The address and the step from row to row, 0 where all rows have one."""
    if shown is None:
        return nothing, 0
    shown = shown.contiguous().view(torch.uint8)
    return shown, shown.stride(0) if len(shown) > 1 else 0
