"""Ropes of users: one with frequencies of its own, one with a rotate of its own."""

from typing import Any

import torch
from torch import Tensor

from regard import Rope
from regard.extend import spec


@spec
class Halving(Rope):
    """Each pair rotates half as fast as the one before it, from 1 radian per token on."""

    def frequencies(self, tokens: int | None = None) -> Tensor:
        return 0.5 ** torch.arange(self.rotated // 2, dtype=torch.float64, device="cpu")


@spec
class Mirrored(Rope):
    """Rotates in the other direction."""

    def rotate(self, x: Tensor, positions: Any = None, tokens: int | None = None) -> Tensor:
        return super().rotate(x.flip(-1), positions, tokens).flip(-1)
