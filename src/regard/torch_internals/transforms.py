"""`torch.func` (vmap, grad, jvp ...) and forward-mode differentiation: which are at work, and what they wrap."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.torch_internals.missing import find

ignore_func_transforms: Callable[[], AbstractContextManager[None]] = find(
    "torch._C._DisableFuncTorch",
    nullcontext,
    "a call inside torch.func may fail with torch's own error",
)
"""Inside, `torch.func` (vmap, grad ...) does not see operators; torch 2.0."""

current_func_transform: Callable[[], object | None] = find(
    "torch._C._functorch.peek_interpreter_stack",
    lambda: "unknown",
    'every call is computed as inside torch.func, by backend "reference": slowly, and refused by attention over ranks',
)
"""The innermost transform of `torch.func` at work, None outside of all; torch 2.0."""

_func_transforms: Callable[[], list[Any] | None] = find(
    "torch._C._functorch.get_interpreter_stack",
    lambda: None,
    "torch.func.grad of a call that torch traces fails with torch's own error",
)

_gradient_transform: object = find(
    "torch._C._functorch.TransformType.Grad",
    None,
    "torch.func.grad of a call that torch traces fails with torch's own error",
)

_tangent_transform: object = find(
    "torch._C._functorch.TransformType.Jvp",
    None,
    "inside torch.func.jvp an append to a cache fails with torch's own error, and flex_attention misreads masks",
)

_map_transform: object = find(
    "torch._C._functorch.TransformType.Vmap",
    None,
    "torch.vmap of a compiled flex_attention fails with torch's own error",
)


def in_func_grad() -> bool:
    """Whether `torch.func.grad`, `vjp` or `jacrev` is at work, at any level."""
    return any(each.key() == _gradient_transform for each in _func_transforms() or ())


# as `torch.compiler.assume_constant_result` does, which loads torch's compiler (torch 2.0); dynamo guards on the levels
in_func_grad._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def in_func_vmap() -> bool:
    """Whether `torch.vmap` is at work, at any level."""
    return any(each.key() == _map_transform for each in _func_transforms() or ())


in_func_vmap._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def in_func_derivative() -> bool:
    """Whether `torch.func.grad`, `jvp` or any other derivative of `torch.func` is at work, at any level."""
    return any(each.key() in (_gradient_transform, _tangent_transform) for each in _func_transforms() or ())


def transform_depth() -> int:
    """How many transforms of `torch.func` are at work, one inside of the other."""
    return len(_func_transforms() or ())


is_func_wrapper: Callable[[Tensor], bool] = find(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    lambda _: current_func_transform() is not None,
    "inside torch.func, the tensors of masks and biases are not compared, so calls are planned each time",
)
"""Whether a tensor is a wrapper that `torch.func` made around another; torch 2.0."""

is_batched: Callable[[Tensor], bool] = find(
    "torch._C._functorch.is_batchedtensor",
    lambda _: False,
    "a mask that torch.vmap maps over fails with torch's own error",
)
"""Whether `torch.vmap` maps over the tensor; torch 2.0."""

is_legacy_batched: Callable[[Tensor], bool] = find(
    "torch._C._functorch.is_legacy_batchedtensor",
    lambda _: False,
    "autograd.grad(is_grads_batched=True) fails with torch's own error",
)
"""The same inside `autograd.grad(is_grads_batched=True)`; torch 2.1."""

_is_gradient_wrapper: Callable[[Tensor], bool] = find(
    "torch._C._functorch.is_gradtrackingtensor",
    lambda _: False,
    "a mask that is made inside torch.func.grad fails with torch's own error",
)
"""Whether a tensor is the wrapper of `torch.func.grad`, `jvp` and the like; torch 2.0."""

_unwrapped_once: Callable[[Tensor], Tensor] = find(
    "torch._C._functorch.get_unwrapped",
    lambda t: t,
    "a mask that is made inside torch.func.grad fails with torch's own error",
)
"""The tensor in a wrapper of `torch.func`; torch 2.0."""


def without_gradient_wrappers(t: Tensor) -> Tensor:
    """The tensor whose derivatives `torch.func.grad`, `jvp` and the like follow, with the same elements.

    Every operator inside such a transform returns a wrapper, also of tensors that have no derivative. While
    `torch.compile` traces, the tensor is returned as it is: its tracer cannot ask for wrappers.
    """
    while not torch.compiler.is_compiling() and _is_gradient_wrapper(t):
        t = _unwrapped_once(t)
    return t


def is_mapped(t: Tensor) -> bool:
    """Whether `torch.vmap` maps over the tensor, also where a derivative of `torch.func` follows it."""
    return is_batched(without_gradient_wrappers(t))


_level_of: Callable[[Tensor], int] = find(
    "torch._C._functorch.maybe_get_level",
    lambda _: sys.maxsize,
    "a function of a mask that reads what torch.vmap maps over, inside of a derivative, fails with torch's own error, "
    "or ends the process",
)
"""The depth of the transform that made this wrapper of `torch.func`; torch 2.0."""


def is_mapped_at(depth: int, t: Tensor) -> bool:
    """Whether a `torch.vmap` of at most this depth maps over the tensor, also where other transforms follow it."""
    while is_batched(t) or _is_gradient_wrapper(t):
        if is_batched(t) and _level_of(t) <= depth:
            return True
        t = _unwrapped_once(t)
    return False


find("torch.autograd.forward_ad._current_level", None, "calls that torch.compile traces raise RefusalError")

forward_mode: Any = forward_ad
"""torch's module of forward mode, whose `_current_level` is below 0 where none is at work."""


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is at work (`forward_ad._current_level`; torch 1.10)."""
    return getattr(forward_mode, "_current_level", 0) >= 0


def in_transform() -> bool:
    """Whether `torch.func` (vmap, grad, jvp ...) or forward-mode differentiation is active."""
    return current_func_transform() is not None or getattr(forward_mode, "_current_level", 0) >= 0
