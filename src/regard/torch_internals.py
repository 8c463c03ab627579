"""Every name that torch keeps private and regard needs: one line each on what it is, and since which torch it exists.

No other file uses a private name of torch (`tests/architecture` checks this), so a new torch is checked here. What is
wrapped in a function is looked up when it is called, as its value changes or its module is heavy.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor  # a tensor of sizes alone, while torch traces; torch 1.13
from torch._subclasses.functional_tensor import FunctionalTensor  # how aot_autograd wraps tensors; torch 2.1
from torch.autograd import forward_ad

__all__ = ["FakeTensor", "FunctionalTensor"]

_C: Any = getattr(torch, "_C")  # noqa: B009
_functorch: Any = _C._functorch
_forward_ad: Any = forward_ad

is_any_autocast_enabled: Callable[[], bool] = _C._is_any_autocast_enabled
"""Whether `torch.autocast` is on for any device, in 50 ns; torch 1.13."""

DisabledTorchFunction: Any = _C._disabled_torch_function_impl
"""What a subclass has as its `__torch_function__` where it changes nothing; torch 1.7."""

ignore_torch_function: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunctionSubclass
"""Inside, the `__torch_function__` of subclasses is not called; torch 2.0."""

ignore_func_transforms: Callable[[], AbstractContextManager[None]] = _C._DisableFuncTorch
"""Inside, `torch.func` (vmap, grad ...) does not see operators; torch 2.0."""

current_func_transform: Callable[[], object | None] = _functorch.peek_interpreter_stack
"""The innermost transform of `torch.func` at work, None outside of all; torch 2.0."""

is_func_wrapper: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor is a wrapper that `torch.func` made around another; torch 2.0."""

is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor
"""Whether `torch.vmap` maps over the tensor; torch 2.0."""

is_legacy_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""The same inside `autograd.grad(is_grads_batched=True)`; torch 2.1."""

flash_attention_for_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""torch's fused kernel on the CPU, (out, lse); torch 2.2."""

dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
"""How many dispatch modes are on, as torch's FLOP counter is one; torch 2.0."""


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is at work (`forward_ad._current_level`; torch 1.10)."""
    return _forward_ad._current_level >= 0


def version(tensor: Tensor) -> int:
    """How often a tensor was written to in place (`Tensor._version`; torch 0.4)."""
    return cast(Any, tensor)._version


def recompile_limit(variants: int) -> AbstractContextManager[None]:
    """Inside, dynamo compiles at most this number of variants of a function (`torch._dynamo.config`; torch 2.6)."""
    return cast(Any, torch)._dynamo.config.patch(recompile_limit=variants)
