"""Ready calls: from what the arguments of a repeated call are straight to what runs it, without a request or a plan.

A tiny call, one query of 8 heads against 64 keys, takes less time to compute than to be understood. So what a call
that a kernel can repeat (`RepeatableKernel`) depends on is one key: sizes, types and flags of the tensors, the mask if
it is constant, and the numbers. What is not in the key forces the long way: gradients, tracing, autocast, `torch.func`,
dispatch modes, classes of tensors, and masks with tensors or functions. Elements, strides, the number of keys and the
offset are no part of the key, so each step of decoding finds the call of the step before.

Stored keys and values have the encodings of their parts in the key, as in the key of a plan: addresses, tables and
counts of tokens are read in each call. Rows of different lengths, rotated keys and rings go the long way.
"""

from typing import Any
from weakref import ref

from torch import Tensor, is_grad_enabled

from regard.backend.contract import Bind, Bound, RepeatableKernel, Run
from regard.describe.mask import Mask
from regard.describe.spec import Fingerprint
from regard.dispatch.choose import Plan
from regard.plan.problem import Operands
from regard.storage.stored import StoredTensor
from regard.torch_internals import is_ordinary

KEPT = 256
"""Calls that are kept, with their kernels; none keeps a tensor of a call."""

FARTHEST = 1 << 40
"""Of an offset."""

Key = tuple[Any, ...]

_ready: dict[Key, tuple[ref[Plan], Run, Fingerprint | None, Bind]] = {}
"""A call whose plan is gone is ready no more. The fingerprint is kept alive, as its address is in the key."""

_LONG = None, None


def run(
    q: Any, k: Any, v: Any, mask: Any, scale: Any, softcap: Any, offset: Any, backend: Any
) -> tuple[Key | None, Tensor | None]:
    """The key of a call that torch does not trace, None if it must go the long way; and its output if it is ready."""
    kind = type(k)
    if not (type(q) is Tensor and type(v) is kind and (kind is Tensor or kind is StoredTensor) and is_ordinary()):
        return _LONG
    if is_grad_enabled() and (q.requires_grad or (kind is Tensor and (k.requires_grad or v.requires_grad))):
        return _LONG
    if not (
        (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (offset is None or (type(offset) is int and -FARTHEST < offset < FARTHEST))
        and (backend is None or type(backend) is str)
        and (mask is None or (isinstance(mask, Mask) and (mask := mask.constant()) is not None))
    ):
        return _LONG
    try:
        sizes, (k_batch, k_heads, keys, k_dim), (v_batch, v_heads, values, v_dim) = q.shape, k.shape, v.shape
    except (RuntimeError, ValueError):  # of nested tensors, and of others than four axes
        return _LONG
    if type(keys) is not int or keys != values or not 0 < keys < FARTHEST:  # torch.jit traces sizes as tensors
        return _LONG
    key: Key
    if kind is Tensor:
        key = (
            sizes, k_batch, k_heads, k_dim, v_batch, v_heads, v_dim, q.dtype, k.dtype, v.dtype, q.is_cpu, k.is_cpu,
            v.is_cpu, q.is_neg(), k.is_neg(), v.is_neg(), id(mask), scale, softcap, backend,
        )  # fmt: skip
    elif _is_simple(k) and _is_simple(v):
        key = (
            sizes, k_batch, k_heads, k_dim, v_batch, v_heads, v_dim, q.dtype, k.dtype, v.dtype, q.is_cpu, q.is_neg(),
            k.encodings, v.encodings, id(mask), scale, softcap, backend,
        )  # fmt: skip
    else:
        return _LONG
    found = _ready.get(key)
    return key, None if found is None or found[0]() is None else found[1](q, k, v, keys, offset)


def _is_simple(stored: StoredTensor) -> bool:
    """Whether a call over them needs no step before or after it, and no mask but its own; on the CPU."""
    if stored.lengths is not None or stored.rotated or stored.is_ring or not stored.parts:
        return False
    return stored.parts[0].data.is_cpu


def bind(key: Key, q: Tensor, k: Tensor, v: Tensor, offset: int | None) -> Bound | None:
    """What runs calls that differ from a ready one in elements alone."""
    found = _ready.get(key)
    return None if found is None else found[3](q, k, v, k.shape[2], offset)


def keep(key: Key, mask: Mask | None, plan: Plan, operands: Operands) -> None:
    """Keep a call that was run, if its kernel can repeat it."""
    kernel, found = plan.kernel, _ready.get(key)
    if found is not None and found[0]() is plan:  # its strides need another way
        return
    if plan.run is not kernel or plan.is_careful or not plan.is_for_any_mask or operands.key is None:
        return
    if any(type(size) is not int for size in (*key[0], *key[1:7])):  # while torch.jit traces they are tensors
        return
    if not (plan.is_repeatable and isinstance(kernel, RepeatableKernel)) or (operands.mask is None) != (mask is None):
        return
    fingerprint = None if mask is None else mask.constant()
    if fingerprint is not None and not fingerprint.is_registered:
        return
    if (again := kernel.repeated(operands)) is not None:
        if len(_ready) >= KEPT:
            _ready.clear()
        _ready[key] = ref(plan), again.run, fingerprint, again.bind


def forget() -> None:
    """Forget every ready call."""
    _ready.clear()
