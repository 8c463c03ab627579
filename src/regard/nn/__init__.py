"""Modules: they hold weights and call `attend`, nothing more."""

from regard.nn.held import Held
from regard.nn.latent import LatentAttention
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.torch_modules import from_torch, from_torch_masks, to_torch
from regard.nn.transformer import Block, Caches, Decoder, Encoder, Transformer

__all__ = [
    "Block",
    "Caches",
    "Decoder",
    "Encoder",
    "Held",
    "LatentAttention",
    "MultiHeadAttention",
    "Transformer",
    "from_torch",
    "from_torch_masks",
    "to_torch",
]
