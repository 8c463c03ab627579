"""Attention sinks of modules: a learned logit for each head, which takes part in the softmax and has no value."""

import torch
from torch import nn


class SinkModule(nn.Module):
    """A module with a parameter `sinks` [heads], or without: then it is None."""

    sinks: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Set the sinks to 0, as after `to_empty`; projections and norms have a `reset_parameters` of their own.

        >>> from regard.nn import MultiHeadAttention
        >>> made = MultiHeadAttention(8, 2, sink=True, device="meta").to_empty(device="cpu")
        >>> for part in made.modules():
        ...     getattr(part, "reset_parameters", lambda: None)()
        >>> made.sinks
        Parameter containing:
        tensor([0., 0.], requires_grad=True)
        """
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)


def make_sinks(heads: int, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
    """Logits of 0, one for each head."""
    return nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))
