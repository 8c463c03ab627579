"""Decoding on a GPU: starts the kernels of `decode.py`, one for each part of the storage and one that merges."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.gpu import decode as kernels
from regard.gpu.call import Call, Inputs
from regard.gpu.launch import (
    Blocks,
    biases,
    empty_output,
    fitting,
    padded,
    precision,
    shared_memory,
    started,
    warps_and_stages,
)
from regard.gpu.tables import by_tile
from regard.storage.stored import Part, StoredTensor

SPAN = 1024
"""Keys of a program."""

CHUNK = 128
"""See `chunk_of`."""

LARGEST_DIM = 1024
"""Dimensions of a head that the kernel reads: a latent and its rotated key have 576."""


def span_blocks(item: int, dim: int, rest: int, rows: int, shared: int, *, coded: bool) -> Blocks:
    """For the kernel of spans, whose programs have rows of the queries and heads that share a key head.

    Args:
        item: bytes of an element of q.
        dim: padded dimensions of a head, the larger of keys and values.
        rest: padded dimensions that keys have and values lack, where values are the first channels of keys.
        rows: queries of the heads of a key head.
        shared: bytes of shared memory that a program may have.
        coded: whether keys and values are codes, which need registers to be decoded in.
    """
    tokens = 16 if coded or (item == 4 and dim > 256) else 32
    if dim <= 256:
        blocks = Blocks(min(64, padded(rows)), tokens, tokens, warps=4, stages=3)
        return fitting(blocks, (dim + rest) * item, (2 * dim + rest) * item, 0, shared)
    most = 16 if coded or item == 4 or shared <= 64 << 10 else 32  # 64 rows would spill 600 bytes of registers
    blocks = Blocks(min(most, padded(rows)), tokens, tokens, warps=8, stages=2)
    return fitting(blocks, (dim + rest) * item, (dim + rest) * item, 0, shared)


def chunk_of(dim: int, *, coded: bool) -> int:
    """Dimensions of latents that scores are summed over at once, which is a loop in the kernel; 0 for all.

    All of q in registers leave too few for decoding large latents.
    """
    return CHUNK if coded and dim > CHUNK else 0


_SPAN: Any = kernels.span
_MERGE: Any = kernels.merge


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
"""Of a call whose keys are those of its schedule."""


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
    """Whether two parts have the same tokens, keys 16 tokens side by side where they are codes, values by token."""
    same = k.tokens == v.tokens and (k.row_ends is None) == (v.row_ends is None)
    layout = k.tiled == (k.kind != "plain") and (not v.tiled or is_in_keys(k, v))
    return same and layout and all(map(_is_contiguous, (k, v)))


def _is_contiguous(part: Part) -> bool:
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
    largest = padded(max(dim - rest, v_dim))
    blocks = _blocks(i, largest, padded(rest) if rest else 0, group * queries, coded=k.kind != "plain")
    chunk = chunk_of(dim - rest, coded=k.kind != "plain") if in_keys else 0
    programs = spans * kv_heads * -(-group * queries // blocks.rows) * batch
    flagged = tiles.masked and v.kind == "plain"  # codes are finite
    flags = torch.empty(programs, dtype=torch.int32, device=i.q.device) if flagged else tiles.kinds
    for careful in (False, True) if flagged else (False,):
        with started(i.q.device):
            _SPAN[(programs,)](
                i.q, *into, flags, *_keys(k, nothing), *_values(v, nothing), *i.q.stride()[:3], *biases(i, nothing),
                nothing if pair.begins is None else pair.begins, nothing if pair.ends is None else pair.ends,
                pair.begin, k.tokens, nothing if union is None else union, *_shown(seen.shown, nothing),
                tiles.kinds, tiles.kinds.shape[1], tiles.words,
                batch, heads, kv_heads, queries, keys, spans, first, call.scale, call.softcap or 0.0,
                k.first_slot, k.page, k.group or 1, v.first_slot, v.page, v.group or 1,
                GROUP=group, ROWS=blocks.rows, KEYS=blocks.tokens, SPAN=SPAN, TILE=call.schedule.tile,
                DIM=dim - rest, DIM_PADDED=padded(dim - rest), V_DIM=v_dim, V_DIM_PADDED=padded(v_dim),
                REST=rest, REST_PADDED=padded(rest), IN_KEYS=in_keys,
                K_KIND=k.kind, V_KIND=v.kind, K_TABLE=k.table is not None, V_TABLE=v.table is not None,
                K_PER_TOKEN=k.per_token, RAGGED=pair.ends is not None, MASKED=tiles.masked,
                MAPS_BATCH=call.schedule.maps[0] > 1, MAPS_HEADS=call.schedule.maps[1] > 1,
                SOFTCAP=call.softcap is not None, DISTANCE=i.distance is not None, BIAS=i.bias is not None,
                WIDE=i.q.dtype == torch.float32 or i.q.device.type == "cpu", PRECISION=precision(i.q),
                FLAGS=flagged and not careful, CAREFUL=careful, CHUNK=chunk, UNION=0 if union is None else len(union),
                SHOWN=seen.shown is not None,
                **warps_and_stages(blocks, i.q.device),
            )  # fmt: skip


def _blocks(i: Inputs, dim: int, rest: int, rows: int, *, coded: bool) -> Blocks:
    if i.q.device.type == "cpu":
        return Blocks(min(64, padded(rows)), 32, 32, warps=1, stages=1)
    return span_blocks(i.q.element_size(), dim, rest, rows, shared_memory(i.q.device), coded=coded)


def _keys(part: Part, nothing: Tensor) -> tuple[Any, ...]:
    """Addresses and strides of keys: tokens of plain ones, 16 tokens and units of codes."""
    data, scale = part.data, part.scale
    unit = data.stride(3) if part.tiled else 1
    steps = (0, 0, 0) if scale is None else scale.stride()[:3]
    scales = (nothing if scale is None else scale, nothing if part.zero_point is None else part.zero_point)
    return data, *data.stride()[:3], unit, *scales, *steps, *_table(part, nothing)


def _values(part: Part, nothing: Tensor) -> tuple[Any, ...]:
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
