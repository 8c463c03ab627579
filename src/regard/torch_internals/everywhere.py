"""What `regard.everywhere` replaces in torch, and torch's own functions behind it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.errors import RefusalError
from regard.torch_internals.missing import MISSING, Absent, find

NO_EVERYWHERE = "regard.everywhere() raises RefusalError"

attention_of_torch: Callable[..., Tensor] = partial(
    find("torch.ops.aten.scaled_dot_product_attention.default._op_dk", Absent, NO_EVERYWHERE),
    find("torch._C.DispatchKey.CompositeImplicitAutograd", None, NO_EVERYWHERE),
)
"""torch's own attention, also while another kernel is registered for it (`OpOverload._op_dk`; torch 2.0)."""

kernels_of_attention: dict[Any, Any] = find(
    "torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache",
    {},
    "torch.compile keeps torch's attention inside regard.everywhere(), in a process that traced attention before",
)
"""Which kernel the tracer of aot_autograd calls for torch's attention, by dispatch key. It is looked up once, and torch
forgets it only for kernels that were registered in Python by `py_impl` (`OpOverload._dispatch_cache`; torch 1.13)."""

fused_attention_of_torch: Callable[..., tuple[Tensor, ...]] = find(
    "torch._scaled_dot_product_flash_attention_for_cpu",
    lambda q, k, v, dropout, causal, *, scale: (attention_of_torch(q, k, v, None, dropout, causal, scale=scale),),
    "small calls inside regard.everywhere() take some 20 us more",
)
"""The fused kernel by the function that Python code calls, some us faster than by `torch.ops`; torch 2.2."""

choice_of_torch: Callable[..., int] = find(
    "torch._fused_sdp_choice", lambda *_: -1, "small calls inside regard.everywhere() take some 20 us more"
)
"""Which kernel torch's attention would choose: 1 for the fused one; torch 2.0."""

is_flash_enabled: Callable[[], bool] = find(
    "torch._C._get_flash_sdp_enabled",
    torch.backends.cuda.flash_sdp_enabled,
    "small calls inside regard.everywhere() take 1 us more",
)
"""`torch.backends.cuda.flash_sdp_enabled` as one function of C++; torch 2.0."""

attention_of_functional: Callable[..., Tensor] = find("torch._C._nn.scaled_dot_product_attention", None, NO_EVERYWHERE)
"""`torch.nn.functional.scaled_dot_product_attention`, also where a program put another there; torch 2.0."""

encoder_layer_of_torch: Callable[..., Tensor] = find("torch._transformer_encoder_layer_fwd", None, NO_EVERYWHERE)
"""`torch.nn.TransformerEncoderLayer` in one C++ function, for inference; torch 1.12."""

packed_attention_of_torch: Callable[..., tuple[Tensor, Tensor | None]] = find(
    "torch._native_multi_head_attention", None, NO_EVERYWHERE
)
"""`torch.nn.MultiheadAttention` in one C++ function, for inference; torch 1.12."""

_register_builtin: Any = find("torch.jit._builtins._register_builtin", None, NO_EVERYWHERE)


def check_replaceable() -> None:
    """Raise `RefusalError` if this torch lacks a name that `replace_in_torch` or torch's own kernels need."""
    if lost := [name for name, consequence in MISSING.items() if consequence == NO_EVERYWHERE]:
        raise RefusalError(
            f"regard.everywhere needs {', '.join(lost)} of torch, and torch {torch.__version__} has no such name: "
            "call regard.attend instead, or install a torch that `regard doctor` lists as tested."
        )


def replace_in_torch(function: Any, own: Any, on: bool, module: Any = torch) -> None:
    """Let `module.NAME`, where NAME is that of a builtin function, be `own`, or the builtin again.

    What a program put there stays. TorchScript compiles the builtin still (`torch.jit._builtins._register_builtin`;
    torch 1.6).
    """
    name = function.__name__
    _register_builtin(own, f"aten::{name}")
    present = getattr(module, name)
    if present is function or present is own:
        setattr(module, name, own if on else function)
