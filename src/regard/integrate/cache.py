"""`regard_cache`: the keys and values of a transformers model in regard's KV caches.

```python
use_regard(model)
cache = regard_cache(model, codec=Int8())                     # or layout=Rolling(1024), Paged(), evict=SnapKV(1024) ...
model.generate(**inputs, cache=cache)
print(cache.explain())                                        # which layers keep what, bytes per token, and why
```

It is a transformers `Cache`, for every way to generate that transformers has. Each layer gets what its kind of
attention allows: layers with a sliding window keep that window, exactly, cross-attention keeps its keys and values as
they come, and the others follow the options. Quantised or paged keys and values pass through the model as lazy tensors,
from `update` to regard's attention, which reads them in place. A model that computes with them in between gets a dense
copy, as does one whose attention is not regard's.
"""

import copy
import functools
import math
import os
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    StaticLayer,
)

from regard.cache.kv_cache import KVCache
from regard.errors import ProblemError
from regard.integrate.cache_crop import CroppableCache
from regard.integrate.cache_evicting import EvictingLayer
from regard.integrate.cache_explain import bytes_of, explanation
from regard.integrate.cache_file import ids_of, write_cache
from regard.integrate.cache_fixed import FixedLayer, FixedWindowLayer, check_form
from regard.integrate.cache_latent import EvictingLatentLayer, FixedLatentLayer, LatentLayer
from regard.integrate.cache_layers import CrossLayer, StoredLayer, WindowLayer, of_one_type
from regard.integrate.cache_options import SLIDING, CacheOptions, options_for
from regard.integrate.cache_paired import PairedCache
from regard.integrate.decoder import CROSS, Decoder, decoder_of, layers_of
from regard.integrate.heap import trim_heap
from regard.integrate.latent import pass_latents
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous, Layout

PROMPT = 256
"""The fewest tokens of a pass, in all rows, that frees enough memory to spend milliseconds on returning it."""


def regard_cache(
    model: Any,
    *,
    layout: Layout | None = None,
    codec: Codec | torch.dtype | None = None,
    evict: Any = None,
    offload: bool = False,
) -> Any:
    """A KV cache for a transformers model, for one text, or `reset()` between two.

    A model takes it as `cache`, before transformers 5.24 as `past_key_values`.

    Args:
        model: the model, or its config. With the config the layers and sizes are the same; it must be the model's own
            (`model.config`), which names the attention implementation. The latents of DeepSeek-like models are passed
            on unexpanded only where the model itself is given here or to `use_regard`.
        layout: how tokens are stored: `Contiguous` (None), `Rolling`, `Paged`. `Contiguous(capacity=n)` without a codec
            has fixed shapes, as `torch.compile` needs them. `Rolling(window)` uses the model's `Rope`.
        codec: how elements are stored: `Int8`, `Int4`, `Fp8` or a float dtype; None: as they come.
        evict: an eviction policy (`regard.cache.evict`). H2O, TOVA, SnapKV and ExpectedAttention ignore a softcap
            and a learned sink: they count how the keys share the weight that it leaves. Each layer evicts as soon as
            its attention has read a prompt, or a chunk of one, so that one layer at a time holds it whole.
            `ExpectedAttention` uses the model's `Rope`, if there is one.
            A list has one policy for each layer, None for layers that keep all, for layers with a
            sliding window, which keep that, and for cross-attention.
        offload: whether layers wait in the memory of the CPU while others compute on a GPU.

    Returns:
        A `RegardCache`; for encoder-decoder models a `PairedCache` of two, whose cross-attention is kept as it comes,
        like that of a decoder with images (Mllama).

    Raises:
        ProblemError: no model or config of transformers, or one without keys and values in a cache; options that do not
            go together, or not with this model: `Rolling` where positions are learned, `Latent` of another rank, a list
            of more or fewer policies than it has layers.

    ```
    >>> import torch
    >>> from regard.integrate.transformers import use_regard
    >>> from regard.storage.codec import Int8
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> model = use_regard(model)
    >>> cache = regard_cache(model)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> out = model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
    >>> print(cache.explain())
    LlamaForCausalLM, 2 layers: 6 tokens, 1,536 bytes
      0-1  full attention  Contiguous(capacity=None), 128 bytes a token: tensors, views of the cache

    ```
    """
    decoder = decoder_of(model)
    policies = tuple(cast("list[Any]", evict)) if isinstance(evict, list) else evict
    options = CacheOptions(Contiguous() if layout is None else layout, codec, policies)
    cache = RegardCache(decoder, options, offload=offload)
    cache.attach(model)
    return PairedCache(cache, DynamicCache()) if decoder.is_paired else cache


class RegardCache(CroppableCache):
    """A transformers cache whose layers are regard's; made by `regard_cache`.

    Copies and pickles continue with the same bits. A pickle contains the model's config, and with it whether regard
    computed its attention.

    Attributes:
        decoder: of the model that it is for.
        options: the layout, codec and policies, as passed to `regard_cache`.
        ids: int64 [batch, tokens], the ids of the tokens in a cache that `load_cache` read; None: it was not read.
        model: a weak reference to the model, where it is known.
    """

    ids: Tensor | None = None
    model: "weakref.ref[nn.Module] | None" = None

    def __init__(self, decoder: Decoder, options: CacheOptions, *, offload: bool = False) -> None:
        self.decoder, self.options = decoder, options
        self._is_offloaded, self._active = offload, -1
        self._last_layer: float = math.inf  # of the last update
        self._passes = 2  # since the last prompt
        self.kinds, details = layers_of(decoder.config)
        resolved = options_for(decoder, options, self.kinds)
        layers = [self._new(i, resolved, self.kinds[i], details[i]) for i in range(len(self.kinds))]
        for layer in [x for x in layers if isinstance(x, EvictingLayer) and x.kv.evict is not None][-1:]:
            layer.is_last = True
        Cache.__init__(self, layers=layers)  # DynamicCache's own would make its layers

    def attach(self, model: Any) -> None:
        """Know the model: its weights are compared with those of a file, and its latents are passed on unexpanded."""
        if isinstance(model, nn.Module):
            self.model = weakref.ref(model)
            pass_latents(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return RegardCache, (self.decoder, self.options), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        """The state of its layers, without references to the model."""
        layers = [{name: x for name, x in vars(layer).items() if not callable(x)} for layer in self.layers]
        return {"offload": self._is_offloaded, "active": self._active, "ids": self.ids, "layers": layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._is_offloaded, self._active, self.ids = state["offload"], state["active"], state["ids"]
        for members in state["layers"][len(self.layers) :]:
            self.layers.append(copy.deepcopy(self.layers[members["made_for"]]))
        for layer, members in zip(self.layers, state["layers"], strict=True):
            vars(layer).update(members)

    def save(self, path: str | os.PathLike[str], tokens: Tensor) -> None:
        """Write the cache to a safetensors file, whole or not at all, for `load_cache`.

        Args:
            path: of the file; a saved cache that is there is replaced, and no other file.
            tokens: the ids of the text, [batch, tokens] or [tokens]. Those of the tokens in the cache are written;
                `generate` returns one more.

        Raises:
            ProblemError: the cache is empty, the tokens are others than those in it, the file cannot be written, or one
                is there that is no saved cache.
            RefusalError: a policy that is not one of regard's.
        """
        count, batch, ids = int(self.get_seq_length()), getattr(self.layers[0], "batch_size", None), ids_of(tokens)
        if not count:
            raise ProblemError(f"{self!r} is empty: there is nothing to save.")
        if ids.shape[1] < count or (batch is not None and len(ids) != batch):
            raise ProblemError(
                f"tokens are {list(ids.shape)}, and the cache has read {count} tokens of {batch} rows: expected the "
                f"ids of these, [{batch}, {count}]."
            )
        model = None if self.model is None else self.model()
        write_cache(path, (tuple(self.options), self.__getstate__()), self.decoder.config, model, ids[:, :count])

    @property
    def bytes(self) -> int:
        """Bytes that all layers store."""
        return sum(bytes_of(layer) for layer in self.layers)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append keys and values of new tokens to a layer, and return all of the layer. See `StoredLayer.update`."""
        if not torch.compiler.is_compiling():
            self._return_memory(layer_idx, key_states)
        if self._is_offloaded and layer_idx != self._active:
            if self._active >= 0:
                self.layers[self._active].offload()
            self.layers[layer_idx].prefetch()
            self._active = layer_idx
        layer = cast(Any, self.layers[layer_idx])
        if isinstance(layer, StoredLayer):
            key_states, value_states = of_one_type(key_states, value_states)
        if isinstance(layer, StaticLayer) and not isinstance(layer, FixedLayer):  # which check by themselves
            check_form(layer, key_states, value_states)
        found = layer.update(key_states, value_states, *args, **kwargs)
        cast(Any, layer).is_reached = True
        return found

    def _return_memory(self, layer: int, key_states: Any) -> None:
        """Return to the system what a prompt has freed: in the second pass after it, as layers grow in the first.

        Between a prompt's activations each layer allocates what stays, so the gaps are too small for the next ones.
        """
        if layer <= self._last_layer:  # another pass
            tokens = key_states.shape[0] * key_states.shape[2]
            self._passes = 0 if tokens >= PROMPT else self._passes + 1
            if self._passes == 2 and key_states.device.type == "cpu":
                trim_heap()
        self._last_layer = layer

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """The state of a convolution, into which a step of one token is written in place."""
        cast(Any, self.layers[layer_idx]).is_reached = True
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """The state of linear attention, into which a step of one token is written in place."""
        cast(Any, self.layers[layer_idx]).is_reached = True
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state of a convolution."""
        state = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        cast(Any, self.layers[layer_idx]).is_reached = True
        return state

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state of linear attention."""
        state = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        cast(Any, self.layers[layer_idx]).is_reached = True
        return state

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys that the next update of a layer returns, position of the first of them)."""
        for layer in self.layers:
            if isinstance(layer, EvictingLayer):
                layer.prepare_pass()
        if not torch.compiler.is_compiling():
            self._check_lengths()
            self._check_reached()
            for layer in self._hybrid_layers().values():
                layer.is_reached = False  # a pass begins
        return super().get_mask_sizes(query_length, layer_idx)

    def reset(self) -> None:
        """Forget all tokens. The next text may be a batch of another size, unless memory has a fixed size."""
        details = layers_of(self.decoder.config)[1]
        for index, layer in enumerate(cast("list[Any]", self.layers)):
            layer.is_reached = False
            if isinstance(layer, StoredLayer) or self.options.capacity is not None:
                layer.reset()
                continue
            # one of transformers, whose own reset keeps the shapes of its states; no option is about it
            number = layer.made_for
            self.layers[index] = new = self._new(number, self.options, self.kinds[number], details[number])
            if getattr(layer, "record_past", False):
                new.activate_past_recording()
        self.ids = None

    def explain(self) -> str:
        """Which layers keep what, how attention reads it, and how many bytes it takes.

        Whether the model computes with its keys before attention does is known after the first step.
        """
        kinds = [self.kinds[cast(Any, layer).made_for] for layer in self.layers]
        return explanation(self.decoder, self.layers, kinds, int(self.get_seq_length()) if self._attending() else 0)

    def __repr__(self) -> str:
        return f"RegardCache({self.decoder.name}, {self.options}: {len(self.layers)} layers, {self.bytes:,} bytes)"

    __str__ = __repr__

    def _new(self, index: int, options: CacheOptions, kind: str, details: dict[str, Any]) -> Any:
        """The cache of a layer, marked as that layer's."""
        layer = self._layer(index, options, kind, details)
        layer.is_reached = False  # by the current pass
        layer.made_for = index  # a model that runs layers again appends copies of theirs (Dory)
        layer.is_shared = bool(getattr(self.decoder.config, "num_kv_shared_layers", None))
        return layer

    def _layer(self, index: int, options: CacheOptions, kind: str, details: dict[str, Any]) -> Any:
        """The cache of a layer of a kind, as transformers names it.

        If one layer has a policy, all layers of full attention are `EvictingLayer`s: they share one mask, and a padded
        batch is then stored row by row in all of them.
        """
        if kind == CROSS:
            return CrossLayer()
        is_latent, read = self.decoder.is_latent, functools.partial(getattr, self.decoder, "is_read_by_regard")
        make = functools.partial(KVCache, options.layout, options.codec, options.policy(index))
        if (capacity := self.options.capacity) is not None:
            if kind == "full_attention":
                return FixedLatentLayer(capacity, read) if is_latent else FixedLayer(capacity)
            static = FixedWindowLayer if kind in SLIDING else STATIC_LAYER_TYPE_MAPPING[kind]
            return static(max_cache_len=capacity, **details)
        if kind == "full_attention" and self.options.evicts:
            return (EvictingLatentLayer if is_latent else EvictingLayer)(make, read)
        if kind == "full_attention":
            return (LatentLayer if is_latent else StoredLayer)(make, read)
        if kind in SLIDING:
            codec = None if "full_attention" in self.kinds else options.codec
            return WindowLayer(details["sliding_window"], lambda layout: KVCache(layout, codec), read)
        return DYNAMIC_LAYER_TYPE_MAPPING[kind](**details)
