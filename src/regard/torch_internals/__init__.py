"""Every name that torch keeps private and regard needs: what it is for, and what happens where it is missing.

```
missing.py        how a private name is looked up, and the names that this torch lacks
transforms.py     torch.func and forward-mode differentiation: what is at work, and what it wraps
tensors.py        tensors of sizes alone, subclasses, lazy zeros, counts of writes, a guard of sizes
modes.py          dispatch modes, autocast and hooks: what changes operators in a thread
dispatch_keys.py  how operators record gradients, and read lazy tensors, inside an operator
kernels.py        torch's fused kernels of attention
compiler.py       torch.compile: what it traces, and the operators that it calls with graphs
everywhere.py     what `regard.everywhere` replaces, and torch's own functions behind it
```

No other package uses a private name of torch (`tests/architecture` checks this), so a new torch is checked here. A name
that a torch lacks gets a substitute: results stay right, or torch raises its own error. `MISSING` says which;
`regard doctor` and the warning of a torch that is newer than the tested ones (`torch_versions.py`) repeat it.

What is wrapped in a function is looked up when it is called, as its value changes or its module is heavy.
"""

from regard.torch_internals.compiler import (
    DYNAMO_LISTS_ATTRIBUTES,
    HigherOrder,
    compiling_for_any_length,
    constant_in_graphs,
    has_sizes_of_data,
    is_compiling,
    is_higher_order,
    leave_out_of_graphs,
    or_true,
    skip_frames,
)
from regard.torch_internals.dispatch_keys import recording_gradients, resolving_lazy_tensors
from regard.torch_internals.everywhere import (
    attention_of_functional,
    attention_of_torch,
    check_replaceable,
    choice_of_torch,
    encoder_layer_of_torch,
    fused_attention_of_torch,
    is_flash_enabled,
    kernels_of_attention,
    packed_attention_of_torch,
    replace_in_torch,
)
from regard.torch_internals.kernels import (
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_attention_for_cpu,
)
from regard.torch_internals.missing import MISSING, VERSION
from regard.torch_internals.modes import (
    DispatchMode,
    dispatch_modes,
    in_checkpoint,
    is_any_autocast_enabled,
    is_ordinary,
)
from regard.torch_internals.tensors import (
    DisabledTorchFunction,
    FakeTensor,
    FunctionalTensor,
    guard_of,
    ignore_torch_function,
    is_lazy_zero,
    resolve_lazy,
    version,
)
from regard.torch_internals.transforms import (
    current_func_transform,
    ignore_func_transforms,
    in_forward_mode,
    in_func_derivative,
    in_func_grad,
    in_func_vmap,
    in_transform,
    is_batched,
    is_func_wrapper,
    is_legacy_batched,
    is_mapped,
    is_mapped_at,
    transform_depth,
    without_gradient_wrappers,
)

__all__ = [
    "DYNAMO_LISTS_ATTRIBUTES",
    "MISSING",
    "VERSION",
    "DisabledTorchFunction",
    "DispatchMode",
    "FakeTensor",
    "FunctionalTensor",
    "HigherOrder",
    "attention_of_functional",
    "attention_of_torch",
    "check_replaceable",
    "choice_of_torch",
    "compiling_for_any_length",
    "constant_in_graphs",
    "cudnn_attention",
    "cudnn_attention_backward",
    "current_func_transform",
    "dispatch_modes",
    "encoder_layer_of_torch",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_for_cpu",
    "fused_attention_of_torch",
    "guard_of",
    "has_sizes_of_data",
    "ignore_func_transforms",
    "ignore_torch_function",
    "in_checkpoint",
    "in_forward_mode",
    "in_func_derivative",
    "in_func_grad",
    "in_func_vmap",
    "in_transform",
    "is_any_autocast_enabled",
    "is_batched",
    "is_compiling",
    "is_flash_enabled",
    "is_func_wrapper",
    "is_higher_order",
    "is_lazy_zero",
    "is_legacy_batched",
    "is_mapped",
    "is_mapped_at",
    "is_ordinary",
    "kernels_of_attention",
    "leave_out_of_graphs",
    "or_true",
    "packed_attention_of_torch",
    "recording_gradients",
    "replace_in_torch",
    "resolve_lazy",
    "resolving_lazy_tensors",
    "skip_frames",
    "transform_depth",
    "version",
    "without_gradient_wrappers",
]
