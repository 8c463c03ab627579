"""The dispatch keys by which operators record gradients, and compute what lazy tensors mean, inside an operator."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from regard.errors import RefusalError
from regard.torch_internals.missing import MISSING, find

NO_GRADIENTS = "gradients of calls that torch.compile traces, or shows to a dispatch mode, raise RefusalError"

_force_keys: Any = find("torch._C._ForceDispatchKeyGuard", None, NO_GRADIENTS)
_included_keys: Any = find("torch._C._dispatch_tls_local_include_set", None, NO_GRADIENTS)
_excluded_keys: Any = find("torch._C._dispatch_tls_local_exclude_set", None, NO_GRADIENTS)
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")
_LAZY = ("Conjugate", "Negative", "ZeroTensor")
_lazy_keys: tuple[Any, ...] = tuple(find(f"torch._C.DispatchKey.{name}", None, NO_GRADIENTS) for name in _LAZY)
_autograd_keys: tuple[Any, ...] = tuple(find(f"torch._C.DispatchKey.{name}", None, NO_GRADIENTS) for name in _AUTOGRAD)
_is_excluded: Callable[[Any], bool] = find(
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    lambda _: False,
    "a user's bias or score that calls conj() is computed without it in a call that is shown to a dispatch mode",
)


def recording_gradients() -> AbstractContextManager[None]:
    """Inside, operators record how they are differentiated, also in an operator, which torch runs below autograd.

    `torch.enable_grad` alone does not do so there: no operator would have a gradient (`_ForceDispatchKeyGuard`,
    `_dispatch_tls_local_include_set`, `_dispatch_tls_local_exclude_set`; torch 2.0). Their gradients may be lazy, as in
    `resolving_lazy_tensors`.
    """
    if lost := [name for name, consequence in MISSING.items() if consequence == NO_GRADIENTS]:
        raise RefusalError(
            f"the gradients of a call that torch traces need {', '.join(lost)} of torch, and torch {torch.__version__} "
            "has no such name: leave torch.compile or the dispatch mode out, or install a torch that `regard doctor` "
            "lists as tested."
        )
    return _including(_autograd_keys + _lazy_keys)


def resolving_lazy_tensors() -> AbstractContextManager[None]:
    """Inside, operators compute with what `conj()` and `.imag` of it mean, also in an operator below a dispatch mode.

    torch does not conjugate or negate the elements of such a tensor: other operators do when they read it. Below a mode
    they would read the elements as they are stored (`_dispatch_tls_is_dispatch_key_excluded`; torch 1.13).
    """
    if not _is_excluded(_lazy_keys[0]):
        return nullcontext()
    return _including(_lazy_keys)


def _including(keys: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Inside, torch does not leave these dispatch keys out."""
    excluded = _excluded_keys()
    for key in keys:
        excluded = excluded.remove(key)
    return _force_keys(_included_keys(), excluded)
