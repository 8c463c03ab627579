"""Named problems with real shapes: what models and their users ask of attention."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard import Alibi, Bias, Causal, Documents, Lengths, Mask, Prefix, Window


@dataclass(frozen=True)
class Case:
    """A call of attention: sizes and words.

    Attributes:
        heads, kv_heads, dim: of the model that is named.
        queries, keys: tokens; the queries are the last.
        mask, bias: made when the case is, as some carry tensors.
    """

    heads: int
    kv_heads: int
    dim: int
    queries: int
    keys: int
    mask: Callable[[], Mask] | None = None
    bias: Callable[[], Bias] | None = None
    batch: int = 1
    dtype: torch.dtype = field(default=torch.float32)

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with random numbers."""

        def made(heads: int, tokens: int) -> Tensor:
            return torch.randn(self.batch, heads, tokens, self.dim, dtype=self.dtype, device=device)

        return made(self.heads, self.queries), made(self.kv_heads, self.keys), made(self.kv_heads, self.keys)


PROBLEMS: dict[str, Case] = {
    "SmolLM2-135M, a paragraph": Case(9, 3, 64, 192, 192, Causal),
    "SmolLM2-135M, its whole context": Case(9, 3, 64, 8192, 8192, Causal),
    "Llama-3-8B, prompt of 2,048": Case(32, 8, 128, 2048, 2048, Causal),
    "Llama-3-8B, one token after 8,192": Case(32, 8, 128, 1, 8192, Causal),
    "Mistral-7B, window 4,096 of 8,192": Case(32, 8, 128, 8192, 8192, lambda: Causal() & Window(4096)),
    "gpt-oss-20B, window 128 of 4,096": Case(64, 8, 64, 4096, 4096, lambda: Causal() & Window(128)),
    "StreamingLLM, 4 sinks + 1,020 of 8,192": Case(
        8, 8, 128, 8192, 8192, lambda: Causal() & (Window(1020) | Prefix(4))
    ),
    "8 packed documents of 512": Case(8, 8, 64, 4096, 4096, lambda: Causal() & Documents(torch.arange(4096) // 512)),
    "8 ragged rows up to 1,024": Case(8, 8, 64, 1024, 1024, lambda: Lengths(torch.arange(128, 1025, 128)), batch=8),
    "MPT-7B, ALiBi at 2,048": Case(32, 32, 128, 2048, 2048, Causal, lambda: Alibi(32)),
}
