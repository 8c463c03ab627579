"""Modules: they own weights and call `attend`, nothing more."""

from regard.nn.caches import Caches
from regard.nn.latent import LatentAttention
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.rope_pairs import RopePairs
from regard.nn.share_heads import share_heads
from regard.nn.spec_module import SpecModule
from regard.nn.to_latent import LatentConversion, to_latent
from regard.nn.torch_modules import from_torch, from_torch_masks, to_torch
from regard.nn.transformer import Block, Decoder, Encoder, Transformer

__all__ = [
    "Block",
    "Caches",
    "Decoder",
    "Encoder",
    "LatentAttention",
    "LatentConversion",
    "MultiHeadAttention",
    "RopePairs",
    "SpecModule",
    "Transformer",
    "from_torch",
    "from_torch_masks",
    "share_heads",
    "to_latent",
    "to_torch",
]
