"""Tensors: fake and functional ones, subclasses, lazy zeros, version counters, and guards of sizes and types."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from regard.torch_internals.missing import VERSION, Absent, find

__all__ = ["FakeTensor", "FunctionalTensor"]

if TYPE_CHECKING:
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
else:
    FakeTensor = find(
        "torch._subclasses.FakeTensor",
        Absent,
        "a call that torch traces may fail with torch's own error, where a mask has a tensor",
    )
    """A tensor of sizes alone, while torch traces; torch 1.13."""

    FunctionalTensor = find(
        "torch._subclasses.functional_tensor.FunctionalTensor",
        Absent,
        "a call that torch.export or aot_autograd traces raises ProblemError where a mask has a tensor",
    )
    """How aot_autograd wraps tensors; torch 2.1."""

DisabledTorchFunction: Any = find(
    "torch._C._disabled_torch_function_impl",
    object(),
    "tensors of a class whose __torch_function__ changes nothing raise ProblemError",
)
"""What a subclass has as its `__torch_function__` where it changes nothing; torch 1.7."""

ignore_torch_function: Callable[[], AbstractContextManager[None]] = find(
    "torch._C.DisableTorchFunctionSubclass",
    nullcontext,
    "tensors of a class of their own in a mask are read by the functions of that class",
)
"""Inside, the `__torch_function__` of subclasses is not called; torch 2.0."""

_is_lazy_zero: Callable[[Tensor], bool] = find(
    "torch.Tensor._is_zerotensor",
    lambda _: False,
    "a tensor of zeros without memory, such as forward mode makes, is refused as an error in regard",
)
"""Whether all elements are 0 and none has memory; torch 1.11."""


def is_lazy_zero(t: object) -> bool:
    """Whether it is a tensor of zeros without memory, as forward-mode differentiation makes them."""
    return (type(t) is Tensor or type(t) is Parameter) and _is_lazy_zero(t)  # other classes may not know the question


def resolve_lazy(t: Tensor) -> Tensor:
    """The tensor with its elements in memory: without a lazy negation, and no lazy zero."""
    return t.clone() if is_lazy_zero(t) else t.resolve_neg()


find("torch.Tensor._version", None, "calls whose mask or bias has a tensor on a GPU are planned each time")

_counter = itertools.count()


def version(tensor: Tensor) -> int:
    """How often a tensor was written to in place (`Tensor._version`; torch 0.4), or a new number each time."""
    found = getattr(tensor, "_version", None)
    return next(_counter) if found is None else found


_tensor_guards: Any = (
    find("torch._C._dynamo.guards.TensorGuards", None, "small calls take 1 to 3 us more")
    if VERSION <= (2, 15)
    else None
)
"""What torch.compile compares tensors with; torch 2.0. Called otherwise than it expects, it ends the process: so it is
used by versions that were tried."""


def guard_of(*tensors: Tensor, free: Sequence[int | None] = ()) -> Callable[..., bool] | None:
    """A function that says whether tensors are like these, where all that matters to an operator is the same.

    Class, dtype, device, layout, sizes, strides, `requires_grad`, and of the thread: inference mode, autocast of that
    device, `torch.func` and dispatch modes, but not grad mode. None for tensors of which two are one object.

    Args:
        free: for each tensor, the dimension whose size may differ, or None; empty where all sizes are the same.
    """
    if _tensor_guards is None:
        return None
    sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
    for of, axis in zip(sizes, free, strict=False):
        if axis is not None:
            of[axis] = None
    strides = [list(t.stride()) for t in tensors]
    check = _tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check if check(*tensors) else None
