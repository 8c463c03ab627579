"""What a token takes in a model's cache, from the sizes in its config: bytes per layer and row of a batch.

    plain     kv_heads * (qk_dim + v_dim) * bytes of a number
    codes     kv_heads * (their bytes + the scales): a key's channel has one per `group` tokens, a value one per `group`
              channels or one; in bf16, twice where codes count from a lowest number (Int4)

Tokens that a codec leaves as they came (sinks, residual) take what plain ones do; there are few of them in a long text.
"""

from typing import Any

import torch

from regard.storage.codec import Codec, code_bytes


def token_bytes(kv_heads: int, dims: tuple[int, int], dtype: torch.dtype, codec: Codec | torch.dtype | None) -> float:
    """Bytes of one token, in one layer and row.

    Args:
        kv_heads: key and value heads; 1 for latents.
        dims: numbers of a key, and of a value; of a latent's entry, and 0.
        dtype: of the model's keys.
        codec: how they are written; where it leaves open what shares the scales of keys, channels do.

    >>> from regard.storage.codec import Int4, Int8
    >>> [token_bytes(8, (128, 128), torch.bfloat16, codec) for codec in (None, Int8(), Int4())]
    [4096.0, 2128.0, 1280.0]
    """
    if not isinstance(codec, Codec):
        return float(kv_heads * sum(dims) * (codec or dtype).itemsize)
    qk_dim, v_dim = dims
    scale = 4 if codec.kind == "int4" else 2
    keys = code_bytes(codec.kind, qk_dim, tiled=True) + scale * (1 if codec.keys == "token" else qk_dim / codec.group)
    values = code_bytes(codec.kind, v_dim, tiled=False) + scale * -(-v_dim // codec.channels(v_dim)) if v_dim else 0
    return kv_heads * (keys + values)


def sizes_of(config: Any, is_latent: bool) -> tuple[int, tuple[int, int]] | None:
    """(kv_heads, (qk_dim, v_dim)) of a decoder's layers by its config; None where it does not say."""
    if is_latent:
        return 1, (config.kv_lora_rank + config.qk_rope_head_dim, 0)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "hidden_size", None)
    dim = (
        getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or (width // heads if width and heads else 0)
    )
    return (kv_heads, (dim, dim)) if kv_heads and dim else None
