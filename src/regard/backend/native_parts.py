"""Stored keys and values for the library: an array of the struct `regard_part` (native/abi.h).

Each decode step makes two such arrays, so a part is one row of integers and no attribute is read twice.
"""

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from regard import native_calls
from regard.storage.codec import TILE
from regard.storage.stored import Part, StoredTensor


class Listed(NamedTuple):
    """The array of a `StoredTensor`'s parts; the library may read its address while this object lives."""

    address: int
    number: int  # of parts
    memory: "array[int]"
    kept: list[Tensor]  # contiguous copies of tensors that the library cannot read in place


def listed(stored: StoredTensor) -> Listed:
    """The parts as an array of structs, without empty parts."""
    memory = array("q")
    kept: list[Tensor] = []
    end, ends, count = 0, None, 0
    for part in stored.parts:
        if part.row_ends is not None:
            ends = _as_int64(part.row_ends, kept)
        elif ends is not None:  # after a part with different ends per row, all parts have them
            ends = ends + part.tokens
            kept.append(ends)
        end += part.tokens
        if part.tokens:
            memory.extend(_fields(part, end, ends, kept))
            count += 1
    if not count:  # one empty part, so that the library reads no tensor instead
        memory.extend((native_calls.DTYPES[stored.dtype], 0, 0, 0, 1, *(0 for _ in native_calls.PART[5:])))
    return Listed(memory.buffer_info()[0], count or 1, memory, kept)


def _fields(part: Part, end: int, ends: Tensor | None, kept: list[Tensor]) -> tuple[int, ...]:
    """The fields of a part, in the order of `native_calls.PART`."""
    table = None if part.table is None else _as_int64(part.table, kept)
    data = part.data
    if part.kind == "plain":
        if data.dtype not in native_calls.DTYPES or (data.stride(3) != 1 and data.shape[3] > 1):
            data = data.to(data.dtype if data.dtype in native_calls.DTYPES else torch.float32).contiguous()
            kept.append(data)
        form, tokens = native_calls.DTYPES[data.dtype], data.shape[2]
    else:
        form, tokens = native_calls.FORMS[part.kind], data.shape[2] * (TILE if part.tiled else 1)
        is_contiguous = data.stride(4) == 1 and data.stride(3) == TILE if part.tiled else data.stride(3) == 1
        if not is_contiguous:
            data = data.contiguous()
            kept.append(data)
    strides = data.stride()
    return (
        form, end, 0 if ends is None else ends.data_ptr(), part.first_slot, tokens, data.shape[0],
        *((0, 0, 0) if table is None else (table.data_ptr(), table.shape[1], table.stride(0))),
        data.data_ptr(), strides[0], strides[1], strides[2], part.tiled, part.per_token, part.group or 1,
        *_scales(part, kept),
    )  # fmt: skip


def _scales(part: Part, kept: list[Tensor]) -> tuple[int, ...]:
    """Addresses of the scales and zero points, and their strides."""
    scale, zero_point = part.scale, part.zero_point
    if scale is None:
        return 0, 0, 0, 0, 0
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
