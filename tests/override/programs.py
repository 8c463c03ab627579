"""Programs that do not know regard, as people write them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_early


class GPT(nn.Module):
    """A decoder as in nanoGPT: one linear layer for q, k and v, `is_causal`, `.transpose(1, 2).contiguous().view`."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2, tokens: int = 160) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.position = nn.Embedding(97, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                "norm2": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width),
            })
            for _ in range(layers)
        )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        batch, tokens, width = x.shape
        for block in self.blocks:
            parts: Any = block
            q, k, v = parts["qkv"](parts["norm1"](x)).split(width, dim=2)
            q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in (q, k, v))
            y = self.attend(q, k, v).transpose(1, 2).contiguous().view(batch, tokens, width)
            x = x + parts["out"](y)
            x = x + parts["down"](F.gelu(parts["up"](parts["norm2"](x))))
        return x


class EarlyGPT(GPT):
    """The same with a reference to torch's function that is older than any change of the attribute."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return imported_early(q, k, v, is_causal=True)


class Cross(nn.Module):
    """`nn.MultiheadAttention` on another sequence, some of whose keys are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(160) > torch.tensor([[159], [100]])
        return self.attention(x[:, :150], x, x, key_padding_mask=padding, need_weights=False)[0]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Masked(nn.Module):
    """An encoder with a causal mask of floats and with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).isinf()
        return self.encoder(x, mask=causal, src_key_padding_mask=torch.arange(160) > torch.tensor([[159], [100]]))


def tokens() -> Tensor:
    return torch.randint(97, (2, 160))


def states() -> Tensor:
    return torch.randn(2, 160, 128)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "a decoder": (GPT, tokens),
    "a decoder with an early import": (EarlyGPT, tokens),
    "cross-attention with padding": (Cross, states),
    "an encoder": (encoder, states),
    "an encoder with masks": (Masked, states),
}
