"""The type in which attention is computed and summed, and in which log-sum-exps are returned."""

import torch


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32.

    >>> wide_of(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
