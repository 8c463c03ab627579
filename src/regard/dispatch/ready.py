"""Ready calls: from what the arguments of a repeated call are straight to what runs it, without a request or a plan.

A tiny call, one query of 8 heads against 64 keys, takes less time to compute than to be understood. So what a call
that a kernel can repeat (`RepeatableKernel`) depends on is one key: sizes, types and flags of the tensors, the mask if
it is constant, and the numbers. What is not in the key forces the long way: tracing, autocast, `torch.func`,
dispatch modes and classes of tensors. Elements, strides, the number of keys and the offset are no part of the key, so
each step of decoding finds the call of the step before. Calls with a bias, a sink, a mask with tensors or rows of
different lengths have a key of their own (`ready_tensors.py`). Where gradients are needed, such calls and those over
stored keys go the long way.

To build a key takes 2 us, as each attribute of a tensor that Python reads takes 0.1. So the last calls of tensors are
known by a guard of torch.compile, which compares all of that in one function of C++.

Stored keys and values have the encodings of their parts in the key, as in the key of a plan: addresses, tables and
counts of tokens are read in each call. Rotated keys and rings go the long way.
"""

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import ref

from torch import Tensor, is_grad_enabled

from regard.backend.contract import Bound, RepeatableKernel, Repeated
from regard.describe.bias import Bias
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import Mask
from regard.dispatch import ready_tensors
from regard.dispatch.choose import Plan
from regard.dispatch.ready_tensors import TensorsKey, key_of, parted
from regard.plan.problem import MAX_OFFSET, Operands
from regard.storage.stored import StoredTensor
from regard.torch_internals import guard_of, is_ordinary

KEPT = 256
"""Calls that are kept, with their kernels; none keeps a tensor of a call."""

LAST = 2
"""The most calls that are known by a guard at once: layers with two masks, or self-attention and cross-attention. A
guard that does not fit costs 0.3 us, to make one 20."""

Key: TypeAlias = tuple[Any, ...]

_LEARNS = -5
"""Where a key says whether autograd will differentiate the call, counted from its end."""

AnyKey: TypeAlias = Key | TensorsKey
"""The key of a call, and of one that has more tensors; no call has both."""


class _Ready:
    """A call that is ready.

    Attributes:
        key: what it depends on; `scale`, `softcap` and `backend` are parts of it.
        plan: a call whose plan is gone is ready no more.
        fingerprint: of the mask; kept alive, as its address is in the key.
        run: runs calls with any strides.
        bind: makes what runs calls with the strides of three tensors.
        strides: of the last call that was known by its key.
        guard: what accepts tensors with these strides, and what runs such calls; None until they come again.
    """

    __slots__ = ("backend", "bind", "fingerprint", "guard", "key", "plan", "run", "scale", "softcap", "strides")

    def __init__(self, key: Key, plan: Plan, again: Repeated, fingerprint: Fingerprint | None) -> None:
        self.key, self.plan, self.fingerprint = key, ref(plan), fingerprint
        self.run, self.bind = again
        self.scale, self.softcap, self.backend = key[-3:]
        self.strides: object = None
        self.guard: tuple[Callable[..., bool], Bound] | None = None


_ready: dict[Key, _Ready] = {}

_last: tuple[tuple[_Ready, Callable[..., bool], Bound], ...] = ()
"""The last calls that have a guard, the last one first, each with its guard: that accepts tensors which differ from
those of the call only in elements and the number of keys. Replaced as a whole, as other threads read it."""

_LONG = None, None


def run(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    scale: Any,
    softcap: Any,
    offset: Any,
    backend: Any,
    bias: Any = None,
    sink: Any = None,
) -> tuple[AnyKey | None, Tensor | None]:
    """The key of a call that torch does not trace, None if it must go the long way; and its output if it is ready."""
    kind = type(k)
    if not (type(q) is Tensor and type(v) is kind and (kind is Tensor or kind is StoredTensor) and is_ordinary()):
        return _LONG
    if not (
        (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (offset is None or (type(offset) is int and -MAX_OFFSET < offset < MAX_OFFSET))
        and (backend is None or type(backend) is str)
        and (mask is None or isinstance(mask, Mask))
    ):
        return _LONG
    constant = None if mask is None else mask.constant()
    has_rows = kind is StoredTensor and (k.lengths is not None or v.lengths is not None)
    if has_rows and offset is not None:  # an error
        return _LONG
    if bias is not None or sink is not None or has_rows or (mask is not None and constant is None):
        table, content = None, mask if constant is None else None
        if content is not None and (found := parted(content, q, k)) is not None:
            rest, table = found
            constant = None if rest is None else rest.constant()
        call = _key(q, k, v, constant, scale, softcap, backend) if q.is_cpu else None
        key = None if call is None or call[_LEARNS] else key_of(call, q, k.shape[2], has_rows, table, bias, sink)
        if key is None:
            return _LONG
        return key, ready_tensors.run(key, q, k, v, content, offset, table, bias, sink)
    # A nested tensor would end the process in torch's guard.
    if kind is Tensor and not (q.is_nested or k.is_nested or v.is_nested):
        for call, is_like, bound in _last:
            if (
                call.fingerprint is constant
                and call.scale == scale
                and call.softcap == softcap
                and call.backend == backend
                and is_like(q, k, v)
                and 0 < (keys := k.shape[2]) < MAX_OFFSET
                and v.shape[2] == keys
                and call.plan() is not None
            ):
                return call.key, bound(q, k, v, keys, offset)
    key = _key(q, k, v, constant, scale, softcap, backend)
    if key is None or (found := _ready.get(key)) is None or found.plan() is None:
        return key, None
    out = found.run(q, k, v, k.shape[2], offset)
    if kind is Tensor and out is not None:
        _guard(found, q, k, v)
    return key, out


def _key(q: Tensor, k: Any, v: Any, mask: Fingerprint | None, scale: Any, softcap: Any, backend: Any) -> Key | None:
    """What a call over tensors, or over stored keys and values, depends on; None if it must go the long way."""
    kind = type(k)
    learns = is_grad_enabled() and (q.requires_grad or (kind is Tensor and (k.requires_grad or v.requires_grad)))
    try:
        sizes, (k_batch, k_heads, keys, k_dim), (v_batch, v_heads, values, v_dim) = q.shape, k.shape, v.shape
    except (RuntimeError, ValueError):  # of nested tensors, and of others than four axes
        return None
    if type(keys) is not int or keys != values or not 0 < keys < MAX_OFFSET:  # torch.jit traces sizes as tensors
        return None
    if kind is Tensor:
        return (
            sizes, k_batch, k_heads, k_dim, v_batch, v_heads, v_dim, q.dtype, k.dtype, v.dtype, q.is_cpu, k.is_cpu,
            v.is_cpu, q.is_neg(), k.is_neg(), v.is_neg(), learns, id(mask), scale, softcap, backend,
        )  # fmt: skip
    if not learns and _is_simple(k) and _is_simple(v):
        return (
            sizes, k_batch, k_heads, k_dim, v_batch, v_heads, v_dim, q.dtype, k.dtype, v.dtype, q.is_cpu, q.is_neg(),
            k.encodings, v.encodings, learns, id(mask), scale, softcap, backend,
        )  # fmt: skip
    return None


def _guard(call: _Ready, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Know calls like this one by a guard from now on, if its strides are those of the one before.

    Where strides differ from call to call, as after `torch.cat`, a guard would fit none of them. One of tensors that
    require gradients would fit in any grad mode.
    """
    global _last  # noqa: PLW0603
    strides = q.stride(), k.stride(), v.stride()
    if strides != call.strides:
        call.strides, call.guard = strides, None
        return
    if call.guard is None and not (q is k or q is v or k is v or q.requires_grad or k.requires_grad or v.requires_grad):
        is_like = guard_of(q, k, v, free=(None, 2, 2))
        if is_like is not None and (bound := call.bind(q, k, v, False)) is not None:
            call.guard = is_like, bound
    if (guard := call.guard) is not None:
        _last = ((call, *guard), *(each for each in _last if each[0] is not call))[:LAST]


def _is_simple(stored: StoredTensor) -> bool:
    """Whether a call over them needs no step before or after it, and no mask but its own; on the CPU."""
    if stored.rotated or stored.is_ring or not stored.parts:
        return False
    return stored.parts[0].data.is_cpu


def bind(key: AnyKey, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, offset: int | None) -> Bound | None:
    """What runs calls with the strides of a ready one, and a mask that stays as it is; the output is by token."""
    if isinstance(key, TensorsKey):
        return ready_tensors.bind(key, k.shape[2], mask, offset)
    found = _ready.get(key)
    return None if found is None else found.bind(q, k, v, True)


def keep(key: AnyKey, mask: Mask | None, offset: int | None, bias: Bias | None, plan: Plan, operands: Operands) -> None:
    """Keep a call that was run, if its kernel can repeat it."""
    call = key.call if isinstance(key, TensorsKey) else key
    if plan.run is not plan.kernel or plan.is_careful or not plan.is_for_any_mask or operands.key is None:
        return
    if any(type(size) is not int for size in (*call[0], *call[1:7])):  # while torch.jit traces they are tensors
        return
    has_rows = isinstance(key, TensorsKey) and key.has_rows  # their lengths are a mask
    if not plan.is_repeatable or (operands.mask is None) != (mask is None and not has_rows):
        return
    if isinstance(key, TensorsKey):
        ready_tensors.keep(key, mask, offset, bias, plan, operands)
    else:
        _keep(key, mask, plan, operands)


def _keep(key: Key, mask: Mask | None, plan: Plan, operands: Operands) -> None:
    kernel, found = plan.kernel, _ready.get(key)
    if found is not None and found.plan() is plan:  # its strides need another way
        return
    fingerprint = None if mask is None else mask.constant()
    if not isinstance(kernel, RepeatableKernel) or (fingerprint is not None and not fingerprint.is_registered):
        return
    if (again := kernel.repeated(operands)) is not None:
        if len(_ready) >= KEPT:
            forget()
        _ready[key] = _Ready(key, plan, again, fingerprint)


def forget() -> None:
    """Forget every ready call."""
    ready_tensors.forget()
    global _last  # noqa: PLW0603
    _last = ()
    _ready.clear()
