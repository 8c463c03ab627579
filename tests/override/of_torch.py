"""Calls of torch's attention, and who ran them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard

OF_TORCH = F.scaled_dot_product_attention
"""torch's own, from before regard is turned on."""


def of_size(*sizes: int, **options: Any) -> Tensor:
    return torch.randn(*sizes, **options)


def qkv(*sizes: int, **options: Any) -> list[Tensor]:
    return [of_size(*(sizes or (2, 8, 256, 64)), **options) for _ in range(3)]


def reasons(run: Callable[[], object]) -> list[str | None]:
    """For each attention call in `run`: why torch computed it, or None where regard did."""
    with regard.everywhere() as caught:
        run()
    return [row.form.why for row in caught.rows for _ in range(row.calls)]


def with_math(*inputs: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*inputs)
