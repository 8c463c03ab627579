"""What `RegardCache.explain` prints: which layers keep what, in how many bytes, and how attention reads it.

The bytes of a token, per layer and row of a batch, are known before there are any, from the sizes in the config:

    plain     kv_heads * (qk_dim + v_dim) * bytes of an element
    codes     kv_heads * (bytes of the codes + scales): a channel of keys has one scale per `group` tokens, a value one
              per `group` channels or one; in bf16, with a zero point as well for Int4

Tokens that a codec keeps in full precision (sinks, residual) take as much as plain ones; a long text has few of them.
"""

from dataclasses import replace
from typing import Any, cast

import torch

from regard.integrate.cache_fixed import FixedLayer
from regard.integrate.cache_latent import FixedLatentLayer, LatentLayer
from regard.integrate.cache_layers import StoredLayer, WindowLayer
from regard.integrate.cache_options import ranges
from regard.integrate.decoder import Decoder, config_of_layer
from regard.integrate.implementation import implementation_of
from regard.storage.codec import Codec, code_bytes
from regard.storage.stored import Paged

LATENT = (LatentLayer, FixedLatentLayer)


def explanation(decoder: Decoder, layers: list[Any], kinds: list[str], tokens: int) -> str:
    """The model in a line, and a line for each group of layers that are alike."""
    size = sum(bytes_of(layer) for layer in layers)
    lines = [f"{decoder.name}, {len(layers)} layers: {tokens:,} tokens, {size:,} bytes"]
    alike: dict[str, list[int]] = {}
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        alike.setdefault(f"{kind.replace('_', ' ')}  {_layer(decoder, layer)}", []).append(index)
    return "\n".join([*lines, *(f"  {ranges(indices)}  {text}" for text, indices in alike.items())])


def bytes_of(layer: Any) -> int:
    """Bytes that a layer stores; of transformers' own layers, of all their tensors."""
    if isinstance(layer, StoredLayer):
        return sum(kv.bytes for kv in layer.caches)
    members = [x for value in vars(layer).values() for x in (value.values() if isinstance(value, dict) else (value,))]
    return sum(t.nbytes for t in members if isinstance(t, torch.Tensor) and t.ndim > 1)


def _layer(decoder: Decoder, layer: Any) -> str:
    size = _per_token(decoder, layer)
    if not isinstance(layer, StoredLayer):
        how = "fixed in size" if isinstance(layer, FixedLayer) else "as transformers keeps it"
        return f"{how}{size}: {_latents(decoder, layer) if isinstance(layer, FixedLatentLayer) else 'tensors'}"
    kv = layer.kv
    options = [f"the last {layer.window:,} tokens, exactly" if isinstance(layer, WindowLayer) else repr(kv.layout)]
    options += [] if kv.codec is None else [str(kv.codec).removeprefix("torch.")]
    options += [] if kv.evict is None else [repr(kv.evict)]
    return f"{', '.join(options)}{size}: {_read_as(decoder, layer)}"


def _read_as(decoder: Decoder, layer: StoredLayer) -> str:
    """How attention reads a layer."""
    if isinstance(layer, LATENT):
        return _latents(decoder, layer)
    if not isinstance(layer.kv.codec, Codec | torch.dtype) and not isinstance(layer.kv.layout, Paged):
        return "tensors, views of the cache"
    if not decoder.is_read_by_regard:
        name = implementation_of(decoder.source)
        return f"a dense copy at each step, for the model's attention is {name}: use_regard(model)"
    if layer.first_use is not None:
        return f"a dense copy at each step, for the model computes with keys or values: {layer.first_use}"
    return "stored tensors, read in place"


def _latents(decoder: Decoder, layer: Any) -> str:
    why = decoder.why_expanded
    if why is None and layer.first_use is not None:
        why = f"it computes with keys or values: {layer.first_use}"
    if why is None:
        return "latents, which queries meet without expanding them"
    return f"latents, which the model expands at every step: {why}"


def _per_token(decoder: Decoder, layer: Any) -> str:
    if isinstance(layer, FixedLayer) or (isinstance(layer, StoredLayer) and not layer.is_initialized):
        return _expected_bytes(decoder, layer)
    if not isinstance(layer, StoredLayer):
        return ""
    tokens = sum(kv.tokens for kv in layer.caches) * layer.batch_size // len(layer.caches)  # of all rows
    return f", {bytes_of(layer) / tokens:,.0f} bytes a token"


def _expected_bytes(decoder: Decoder, layer: StoredLayer | FixedLayer) -> str:
    """The bytes of a token by the config, where it has the sizes."""
    config = config_of_layer(decoder.config, cast(Any, layer).made_for)
    sizes = sizes_of(config, decoder.is_latent)
    codec = layer.kv.codec if isinstance(layer, StoredLayer) else None
    if isinstance(codec, Codec) and codec.keys is None and isinstance(layer, StoredLayer) and layer.kv.evict:
        codec = replace(codec, keys="token")
    dtype = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # `save_pretrained` leaves its name there
    return "" if sizes is None else f", {token_bytes(*sizes, dtype, codec):,.0f} bytes a token"


def token_bytes(kv_heads: int, dims: tuple[int, int], dtype: torch.dtype, codec: Codec | torch.dtype | None) -> float:
    """Bytes of one token, in one layer and row.

    Args:
        kv_heads: key and value heads; 1 for latents.
        dims: elements of a key, and of a value; of an entry with a latent, and 0.
        dtype: of the model's keys.
        codec: None: as they come. A codec without `keys` has one scale per channel of keys.

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
