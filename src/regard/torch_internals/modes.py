"""What is on for a thread and changes what operators do: dispatch modes, autocast, hooks on what is saved."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from regard.torch_internals.missing import Absent, find
from regard.torch_internals.transforms import current_func_transform, forward_mode

__all__ = ["DispatchMode"]

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
else:
    DispatchMode = find(
        "torch.utils._python_dispatch.TorchDispatchMode",
        Absent,
        "regard.flex calls each mask_mod and score_mod for every pair",
    )
    """A context that is shown each operator; torch 1.12."""

dispatch_modes: Callable[[], int] = find(
    "torch._C._len_torch_dispatch_stack",
    lambda: 1,
    "every call runs as an operator, which costs some 30 us more, and fails inside torch.func with torch's own error; "
    "regard.everywhere() skips nothing that masks of numbers hide, and its report has no times",
)
"""How many dispatch modes are on, as torch's FLOP counter is one; torch 2.0."""

is_any_autocast_enabled: Callable[[], bool] = find(
    "torch._C._is_any_autocast_enabled",
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    "torch.autocast is seen for the CPU and for CUDA only",
)
"""Whether `torch.autocast` is on for any device, in 50 ns; torch 1.13."""

_saving_hooks: Callable[[bool], object | None] = find(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    lambda _: None,
    "a checkpoint inside regard.everywhere() may raise CheckpointError where attention has a mask",
)


def in_checkpoint() -> bool:
    """Whether hooks see what is saved for the backward pass, as those of `torch.utils.checkpoint` do.

    It compares the tensors that a function saves with those of its second run (`_top_saved_tensors_default_hooks`).
    """
    return _saving_hooks(False) is not None


def is_ordinary() -> bool:
    """Whether nothing changes what operators do: no dispatch mode, autocast, `torch.func` or forward mode.

    One function, as code that a model has driven out of the caches takes 2 us for each function and each name.
    """
    return not (
        dispatch_modes()
        or is_any_autocast_enabled()
        or current_func_transform() is not None
        or getattr(forward_mode, "_current_level", 0) >= 0
    )
