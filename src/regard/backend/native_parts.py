"""Stored keys and values for the library: an array of the struct `regard_part` (native/abi.h).

Each decode step makes two such arrays, so a part is one row of integers and no attribute is read twice.
"""

from array import array
from typing import NamedTuple, cast

import torch
from torch import Tensor

from regard import native_calls
from regard.storage.codec import TILE
from regard.storage.stored import FixedParts, Part, StoredTensor

_FIELDS = len(native_calls.PART)


class Listed(NamedTuple):
    """The array of a `StoredTensor`'s parts; the library may read its address while this object lives."""

    address: int
    number: int  # of parts
    memory: "array[int]"
    kept: list[Tensor]  # contiguous copies of tensors that the library cannot read in place


class _Known(NamedTuple):
    """What is known of the parts that handles of many steps begin with (`FixedParts`)."""

    memory: "array[int]"  # of structs, to be copied
    end: int  # tokens
    tensors: list[Tensor]  # that it has addresses of
    addresses: list[int]  # that they had


def listed(stored: StoredTensor) -> Listed:
    """The parts as an array of structs, without empty parts."""
    kept: list[Tensor] = []
    known = None if stored.fixed is None else _known(stored.fixed)
    if known is None:
        memory = _structs(stored.parts, array("q"), 0, kept)
    else:
        memory = _structs(stored.parts[len(cast(FixedParts, stored.fixed).parts) :], known[0][:], known[1], kept)
    if not memory:  # one empty part, so that the library reads no tensor instead
        memory.extend((native_calls.DTYPES[stored.dtype], 0, 0, 0, 1, *(0 for _ in native_calls.PART[5:])))
    return Listed(memory.buffer_info()[0], len(memory) // _FIELDS, memory, kept)


def _known(fixed: FixedParts) -> _Known | None:
    """What is known of fixed parts; None where rows differ, or where the library reads copies of tensors."""
    known: _Known | None = fixed.known
    if known is not None and [t.data_ptr() for t in known[2]] == known[3]:
        return known
    kept: list[Tensor] = []
    if any(part.row_ends is not None for part in fixed.parts):
        return None
    memory = _structs(fixed.parts, array("q"), 0, kept)
    if kept:
        return None
    tensors = [t for part in fixed.parts for t in (part.data, part.scale, part.zero_point, part.table) if t is not None]
    end, addresses = sum(part.tokens for part in fixed.parts), [t.data_ptr() for t in tensors]
    fixed.known = known = _Known(memory, end, tensors, addresses)
    return known


def _structs(parts: tuple[Part, ...], memory: "array[int]", end: int, kept: list[Tensor]) -> "array[int]":
    """The array, with the structs of these parts after those of earlier parts of `end` tokens."""
    ends = None
    for part in parts:
        tokens, row_ends = part.tokens, part.row_ends
        if row_ends is not None:
            ends = _as_int64(row_ends, kept)
        elif ends is not None:  # after a part with different ends per row, all parts have them
            ends = ends + tokens
            kept.append(ends)
        end += tokens
        if tokens:
            memory.extend(_fields(part, end, ends, kept))
    return memory


def _fields(part: Part, end: int, ends: Tensor | None, kept: list[Tensor]) -> tuple[int, ...]:
    """The fields of a part, in the order of `native_calls.PART`."""
    _, data, kind, first_slot, table, _, scale, _, tiled, per_token, group = part
    strides, (pages, _, page, *_) = data.stride(), data.shape
    if kind == "plain":
        form = native_calls.DTYPES.get(data.dtype)
        if form is None or (strides[3] != 1 and data.shape[3] > 1):
            data = data.to(data.dtype if form is not None else torch.float32).contiguous()
            form, strides = native_calls.DTYPES[data.dtype], data.stride()
            kept.append(data)
    else:
        form, page = native_calls.FORMS[kind], page * (TILE if tiled else 1)
        if not (strides[4] == 1 and strides[3] == TILE if tiled else strides[3] == 1):
            data = data.contiguous()
            strides = data.stride()
            kept.append(data)
    if table is None:
        of_table = 0, 0, 0
    else:
        table = _as_int64(table, kept)
        of_table = table.data_ptr(), table.shape[1], table.stride(0)
    return (
        form, end, 0 if ends is None else ends.data_ptr(), first_slot, page, pages, *of_table,
        data.data_ptr(), strides[0], strides[1], strides[2], tiled, per_token, group or 1,
        *(_NO_SCALES if scale is None else _scales(part, scale, kept)),
    )  # fmt: skip


_NO_SCALES = 0, 0, 0, 0, 0


def _scales(part: Part, scale: Tensor, kept: list[Tensor]) -> tuple[int, ...]:
    """Addresses of the scales and zero points, and their strides."""
    zero_point = part.zero_point
    same_layout = zero_point is None or zero_point.stride() == scale.stride()
    if scale.stride(-1) != 1 or not same_layout or scale.dtype != torch.bfloat16:
        scale = scale.bfloat16().contiguous()
        zero_point = None if zero_point is None else zero_point.bfloat16().contiguous()
        kept += [scale] if zero_point is None else [scale, zero_point]
    strides = scale.stride()
    step = 0 if part.per_token else strides[2]
    return scale.data_ptr(), 0 if zero_point is None else zero_point.data_ptr(), strides[0], strides[1], step


def _as_int64(t: Tensor, kept: list[Tensor]) -> Tensor:
    """Integers [..., n] as int64, last dimension contiguous."""
    if t.dtype == torch.int64 and t.stride(-1) == 1:
        return t
    kept.append(t.to(torch.int64).contiguous())
    return kept[-1]
