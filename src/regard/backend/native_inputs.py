"""The operands of a call as the library reads them, and their places in its struct."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard import native_calls
from regard.backend.native_parts import listed
from regard.describe.bias import Bias, TensorBias
from regard.errors import ProblemError
from regard.plan.distance import kept_by_distance, split_by_distance, table, vectors
from regard.plan.problem import Operands, Problem
from regard.storage.stored import StoredTensor
from regard.torch_internals import resolve_lazy
from regard.wide import wide_of

_AT = {name: number for number, name in enumerate(native_calls.GRADIENT)}
SEED, SINK, LSE, THREADS = _AT["seed"], _AT["sink"], _AT["lse"], _AT["threads"]
WORKSPACE = slice(_AT["workspace"], _AT["workspace_bytes"] + 1)
SIZES = slice(_AT["queries"], _AT["keys"] + 1)
TENSORS, PARTS = slice(_AT["q.data"], _AT["k_parts"]), slice(_AT["k_parts"], LSE)
DISTANCE, BIAS = slice(_AT["distance"], _AT["bias"]), slice(_AT["bias"], _AT["maps_batch"])
TILES, GRADIENTS = slice(_AT["maps_batch"], _AT["workspace"]), slice(len(native_calls.CALL), len(native_calls.GRADIENT))
"""Indexes of the fields of `GRADIENT`, and of `CALL` at its beginning, that differ from call to call."""


class Inputs(NamedTuple):
    """The operands as the library reads them; "wide" is float64 for float64, else float32."""

    q: Tensor  # [batch, heads, queries, qk_dim]
    k: Tensor  # [batch, kv_heads, keys, qk_dim]
    v: Tensor  # [batch, kv_heads, keys, v_dim]
    sink: Tensor | None  # wide [heads]
    distance: Tensor | None  # wide [heads, queries + keys - 1]
    bias: Tensor | None  # [batch or 1, heads or 1, queries or 1, keys or 1], of any type and strides
    stored: tuple[StoredTensor, StoredTensor] | None = None  # keys and values; then k and v hold nothing


def inputs_of(p: Problem, o: Operands) -> Inputs:
    """The operands of a problem as the library reads them."""
    if o.bias is None and o.sink is None:
        return Inputs(o.q, o.k, o.v, None, None, None, o.stored)
    wide = wide_of(p.dtype)
    sink = None if o.sink is None else o.sink.to(wide).contiguous()
    of_distance, others = split_by_distance(o.bias)
    bias = table(others, o)
    bias = None if bias is None else in_place(resolve_lazy(bias), p.grad, wide)
    return Inputs(o.q, o.k, o.v, sink, vectors(of_distance, p, o, wide), bias, o.stored)


def write_inputs(struct: Any, i: Inputs, seed: int) -> object:
    """Write into an opened struct what differs from call to call and is in few calls.

    Returns:
        What must stay in memory until the struct was run.
    """
    if seed:
        struct[SEED] = seed
    if i.sink is not None:
        _write_sink(struct, i.sink)
    if i.distance is not None:
        _write_distance(struct, i.distance)
    if i.bias is not None:
        struct[BIAS] = (i.bias.data_ptr(), native_calls.DTYPES[i.bias.dtype], *_strides(i.bias))
    return None if i.stored is None else write_parts(struct, *i.stored)


def write_bias_and_sink(
    struct: Any, bias: Bias | None, sink: Tensor | None, heads: int, wide: torch.dtype, first: int, count: int
) -> tuple[object, object] | None:
    """Write a bias and a sink into an opened struct of a call that learns nothing.

    Args:
        bias: by distance, or a `TensorBias`, or a sum that has at most one of these.
        heads: of the call.
        first: the smallest distance of a query from a key; there are `count`.

    Returns:
        What must stay in memory until the struct was run; None where the bias has no memory.
    """
    of_distance, others = split_by_distance(bias)
    for term in others:
        t = cast(TensorBias, term).tensor
        if not (address := t.data_ptr()):
            return None
        struct[BIAS] = (address, native_calls.DTYPES[t.dtype], *(0,) * (4 - t.ndim), *_strides(t))
    kept = None if of_distance is None else kept_by_distance(of_distance, heads, wide, first, count)
    if kept is not None:
        _write_distance(struct, kept)
    if sink is not None:
        sink = sink.to(wide).contiguous()
        _write_sink(struct, sink)
    return kept, sink


def _write_distance(struct: Any, distance: Tensor) -> None:
    struct[DISTANCE] = (distance.data_ptr(), _strides(distance)[0])


def _write_sink(struct: Any, sink: Tensor) -> None:
    """Write the address of the sinks; at address 0 the library would take them for none."""
    if not (address := sink.data_ptr()) and sink.numel():
        raise ProblemError(
            f"sink {list(sink.shape)} has no memory: its storage was freed, as FSDP does outside of a module's forward "
            "pass. Expected a tensor with elements."
        )
    struct[SINK] = address


def write_parts(struct: Any, k: StoredTensor, v: StoredTensor) -> object:
    """Write stored keys and values into an opened struct; returns what must stay in memory until it was run."""
    keys, values = listed(k), listed(v)
    struct[PARTS] = (keys[0], values[0], keys[1], values[1])
    return keys, values


def opened_over(entry: native_calls.Entry, packed: bytes, k: StoredTensor, v: StoredTensor) -> tuple[Any, object]:
    """A struct opened for one call over stored keys and values, and what must stay in memory until it was run."""
    struct = entry.opened(packed)
    return struct, write_parts(struct, k, v)


def tensor_fields(t: Tensor) -> tuple[int, int, int, int]:
    """A tensor [.., .., tokens, dim] as fields."""
    batch, head, token, _ = t.stride()
    return t.data_ptr(), batch, head, token


def _strides(t: Tensor) -> tuple[int, ...]:
    """The strides, 0 along the axes that have one element."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))


def in_place(t: Tensor, grad: bool, wide: torch.dtype) -> Tensor:
    """A bias tensor of four axes in a type that the library reads, with stride 0 for axes of one element only."""
    if t.dtype not in native_calls.DTYPES:
        t = t.to(wide)
    repeated = [axis for axis in range(4) if t.stride(axis) == 0 and t.shape[axis] > 1]
    if repeated and grad and t.requires_grad:  # each of its elements has a gradient of its own
        return t.contiguous()
    for axis in repeated:
        t = t.narrow(axis, 0, 1)
    return t
