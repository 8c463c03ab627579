"""Tensors, and a program, of the calls that torch traces."""

from typing import Any

import torch
from torch import Tensor

from regard import Causal, attend

Q, K, V = torch.randn(2, 4, 11, 8), torch.randn(2, 2, 23, 8), torch.randn(2, 2, 23, 8)
IDS = torch.arange(23) // 9
SINK = torch.linspace(-1, 1, 4)


def compiled(function: Any, **how: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **how)


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal())
