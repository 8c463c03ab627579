"""Checks of what traces pass in place of tensors and numbers: a Proxy of `torch.fx`, a symbol of `torch.export`."""

import torch
from torch.fx import Proxy

from regard.errors import RefusalError


def refuse_proxy(name: str, given: object) -> None:
    """Raise `RefusalError` if it is a Proxy, which `torch.fx.symbolic_trace` passes in place of what it traces."""
    if isinstance(given, Proxy):
        raise RefusalError(
            f"torch.fx.symbolic_trace cannot record attention: {name} is a Proxy, without the sizes and numbers that "
            "regard reads: use torch.export, or make the module that calls regard a leaf "
            "(torch.fx.Tracer.is_leaf_module)."
        )


def refuse_symbol(name: str, given: object, remedy: str) -> None:
    """Raise `RefusalError`, with what to do instead, if the number is computed from a dynamic length."""
    if isinstance(given, torch.SymInt | torch.SymFloat):
        raise RefusalError(
            f"{name} is computed from a dynamic length, and an exported graph has it as a constant: {remedy}."
        )
