"""`RMSNorm`: scale each token, or each head, to mean square 1. Zhang & Sennrich 2019, arXiv:1910.07467, §4."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's `RMSNorm` that also accepts x of another dtype than its weight, as under `torch.autocast`.

    `x / sqrt(mean(x²) + eps) * weight`, computed in the wider of the two dtypes; the result has the dtype of x.

    >>> RMSNorm(3)(torch.tensor([1.0, 1.0, 2.0], dtype=torch.bfloat16))
    tensor([0.7070, 0.7070, 1.4141], dtype=torch.bfloat16, grad_fn=<ToCopyBackward0>)
    """

    weight: nn.Parameter

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(size, eps, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """[..., size], in the dtype of x."""
        if x.dtype == self.weight.dtype:  # autocast on CUDA may make the result float32
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps).to(x.dtype)
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)
