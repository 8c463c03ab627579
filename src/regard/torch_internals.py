"""Every name that torch keeps private and regard needs: one line each on what it is, and since which torch it exists.

No other file uses a private name of torch (`tests/architecture` checks this), so a new torch is checked here. What is
wrapped in a function is looked up when it is called, as its value changes or its module is heavy.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
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

_attention = torch.ops.aten.scaled_dot_product_attention.default

attention_of_torch: Callable[..., Tensor] = partial(
    cast(Any, _attention)._op_dk, _C.DispatchKey.CompositeImplicitAutograd
)
"""torch's own attention, also while another kernel is registered for it (`OpOverload._op_dk`; torch 2.0)."""

encoder_layer_of_torch: Callable[..., Tensor] = cast(Any, torch)._transformer_encoder_layer_fwd
"""`torch.nn.TransformerEncoderLayer` in one C++ function, for inference; torch 1.12."""

packed_attention_of_torch: Callable[..., tuple[Tensor, Tensor | None]] = cast(Any, torch)._native_multi_head_attention
"""`torch.nn.MultiheadAttention` in one C++ function, for inference; torch 1.12."""

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


def skip_frames(function: Any) -> None:
    """Let dynamo compile neither this function nor what it calls (`eval_frame.set_code_exec_strategy`; torch 2.7).

    torch's dispatcher calls it, also inside of what torch.compile runs: dynamo would take its frame for a program's.
    """
    frames = _C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def replace_in_torch(function: Any, replacement: Any) -> None:
    """Let `torch.NAME`, where NAME is that of a builtin function, be another; TorchScript compiles the builtin still.

    (`torch.jit._builtins._register_builtin`; torch 1.6.)
    """
    name = function.__name__
    setattr(torch, name, replacement)
    cast(Any, torch).jit._builtins._register_builtin(replacement, f"aten::{name}")
