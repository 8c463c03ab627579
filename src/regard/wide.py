"""The type in which attention is computed and summed, and in which log-sum-exps are returned; that of autocast."""

import torch


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32.

    >>> wide_of(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


HAS_AUTOCAST = {"cpu": True, "cuda": True, "meta": False}
"""Whether a device type supports autocast; for other types torch is called, which torch 2.11 cannot compile."""


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The type to which `torch.autocast` casts products on this kind of device; None where it is off.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast_dtype("cpu")
    torch.bfloat16
    """
    known = HAS_AUTOCAST.get(kind)
    if not (torch.amp.is_autocast_available(kind) if known is None else known) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
