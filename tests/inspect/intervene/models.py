"""Tiny models: a stack whose attention can be computed in full beside `attend`, and how its matrices are kept."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AlbertConfig, AlbertModel

from regard import Causal, KeyLengths, attend
from regard.nn import Decoder

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 3, 8


class Layer(nn.Module):
    def __init__(self, sink):
        super().__init__()
        self.q, self.o_proj = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KV_HEADS * DIM), nn.Linear(WIDTH, KV_HEADS * DIM)
        self.sink = nn.Parameter(torch.randn(HEADS)) if sink else None
        self.in_full, self.matrix = False, None

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = self.full(q, k, v) if self.in_full else attend(q, k, v, mask=Causal(), sink=self.sink)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def full(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        s = q @ k.mT * DIM**-0.5
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        if self.sink is not None:
            s = torch.cat([s, self.sink[None, :, None, None].expand(*s.shape[:3], 1)], dim=-1)
        self.matrix = s.softmax(-1)[..., : k.shape[2]]
        self.matrix.retain_grad()
        return self.matrix @ v


class Stack(nn.Module):
    """Layers with skip connections in float64; `in_full` makes every matrix of weights, to be looked at."""

    def __init__(self, layers=3, sink=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(sink) for _ in range(layers))
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

    def in_full(self, x) -> tuple[Tensor, list[Any]]:
        """(the output, each layer's weights [batch, heads, tokens, tokens])."""
        for layer in self.layers:
            layer.in_full = True
        try:
            return self(x), [layer.matrix for layer in self.layers]
        finally:
            for layer in self.layers:
                layer.in_full = False


class Checkpointed(Stack):
    """Its layers run again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def stack_input(tokens=11, batch=2):
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64)


def decoder(sharp=2, **words) -> Any:
    """A language model of 2 layers x 4 heads over 19 tokens, in float64; the sharper, the less even its attention."""
    model = Decoder(19, 32, layers=2, heads=4, kv_heads=2, **words).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharp)
    return model


DRAWN = r"Decoder is in training mode, and its run drew random numbers, .* Call model\.eval\(\) first"


def dropping() -> Any:
    """A language model in training mode that drops elements by a function, as OPT does, without a module for it."""
    model = decoder().train()
    model.body.register_forward_hook(lambda module, arguments, out: F.dropout(out, 0.25, module.training))
    return model


def albert(layers=3) -> Any:
    """An encoder whose layers are one module, which runs once for each."""
    sizes: dict[str, Any] = {"vocab_size": 19, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 48}
    config = AlbertConfig(**sizes, num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=32)
    model = AlbertModel(config, add_pooling_layer=False).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


def texts(batch=5, tokens=11):
    return torch.randint(19, (batch, tokens))


class HidingLayer(nn.Module):
    """Queries see `keys` tokens, and the values of the others are `value`."""

    def __init__(self, keys):
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys = keys

    def forward(self, x, value):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.q(x), x, self.v(x)))
        v = torch.cat([v[:, :, : self.keys], torch.full_like(v[:, :, self.keys :], value)], 2)
        out = attend(q, k, v, mask=KeyLengths(torch.tensor([self.keys])))
        return out.transpose(1, 2).flatten(2)


class Hiding(nn.Module):
    """Two layers that hide the last tokens."""

    def __init__(self, keys):
        super().__init__()
        self.layers = nn.ModuleList([HidingLayer(keys), HidingLayer(keys)])

    def forward(self, x, value):
        for layer in self.layers:
            x = layer(x, value)
        return x
