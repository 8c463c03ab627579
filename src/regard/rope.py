"""Rotary embeddings: `Rope`, and the ways to scale its frequencies for contexts longer than those of training."""

from regard.describe.position import Rope
from regard.describe.rope_scaling import NTK, DynamicNTK, Linear, Llama3, LongRope, Proportional, Scaling, Yarn

__all__ = ["NTK", "DynamicNTK", "Linear", "Llama3", "LongRope", "Proportional", "Rope", "Scaling", "Yarn"]
