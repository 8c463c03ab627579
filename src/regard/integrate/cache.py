"""`regard_cache`: the keys and values of a transformers model in regard's caches.

```python
use_regard(model)
cache = regard_cache(model, codec=Int8())                     # or layout=Rolling(1024), Paged(), evict=SnapKV(1024) ...
model.generate(**inputs, past_key_values=cache)
print(cache.explain())                                        # which layers keep what, bytes per token, and why
```

It is a transformers `Cache`, for every way to generate that transformers has. Each layer gets what its kind of
attention allows: layers with a sliding window keep that window, exactly, and the others what was asked for. What is
quantised or paged travels through the model as a handle, from `update` to regard's attention, and is read where it
lies; a model that computes with its keys in between, or whose attention is not regard's, gets tensors.
"""

import functools
import os
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    StaticLayer,
    get_layer_types_and_kwargs,
)

from regard.cache.expected_attention import ExpectedAttention
from regard.cache.kv_cache import KVCache
from regard.errors import ProblemError, RefusalError
from regard.integrate.cache_bytes import sizes_of, token_bytes
from regard.integrate.cache_file import ids_of, write_cache
from regard.integrate.cache_forgetting import ForgettingLayer
from regard.integrate.cache_layer import FixedLayer, KeptLayer, WindowLayer, check_form
from regard.integrate.cache_rope import rope_for
from regard.integrate.cache_subject import Subject, subject_of
from regard.integrate.latent import FixedLatentLayer, ForgettingLatentLayer, LatentLayer, let_expand
from regard.integrate.touches import attention_classes
from regard.integrate.transformers import NAME
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling

SLIDING = {"sliding_attention", "chunked_attention"}
"""Kinds of layers whose attention looks back over a window."""


class Words(NamedTuple):
    """What was asked for."""

    layout: Layout
    codec: Codec | torch.dtype | None
    evict: Any
    """A policy for all layers, or a tuple of one for each, None where nothing is forgotten; None: nowhere."""

    @property
    def policies(self) -> tuple[Any, ...]:
        """All that there are."""
        each = cast("tuple[Any, ...]", self.evict) if isinstance(self.evict, tuple) else (self.evict,)
        return tuple(policy for policy in each if policy is not None)

    def policy(self, layer: int) -> Any:
        """That of a layer."""
        return self.evict[layer] if isinstance(self.evict, tuple) else self.evict

    def __deepcopy__(self, memo: dict[int, Any]) -> "Words":
        """Itself: words are values, and copies of a cache share the pool in them."""
        return self

    @property
    def forgets(self) -> bool:
        """Whether tokens go before the end of the text."""
        return isinstance(self.layout, Rolling) or bool(self.policies)

    @property
    def is_fixed(self) -> bool:
        """Whether shapes never change, so that a model may be compiled around it."""
        is_plain = self.codec is None and not self.policies
        return is_plain and isinstance(self.layout, Contiguous) and self.layout.capacity is not None


def regard_cache(
    model: Any,
    *,
    layout: Layout | None = None,
    codec: Codec | torch.dtype | None = None,
    evict: Any = None,
    offload: bool = False,
) -> Any:
    """A cache for a transformers model, to be given as `past_key_values`; for one sequence, or `reset()` between them.

    Args:
        model: the model, or its config. With the config the layers and sizes are the same; give the one that the model
            holds (`model.config`), which says whose attention is set.
        layout: how tokens lie: `Contiguous` (None), `Rolling`, `Paged`. `Contiguous(capacity=n)` without a codec has
            fixed shapes, as `torch.compile` needs them. `Rolling(window)` is given the model's `Rope`.
        codec: how numbers are written: `Int8`, `Int4`, `Fp8` or a float type; None: as they come.
        evict: a policy of forgetting (`regard.cache.evict`). Each layer forgets as soon as its attention has read a
            prompt, or a chunk of one, so that one layer at a time holds it whole. `ExpectedAttention` is given the
            model's `Rope`, if there is one. A list has one for each layer, None where nothing is forgotten, as in
            layers with a sliding window, which keep that.
        offload: whether layers wait in the memory of the CPU while others are at work on a GPU.

    Returns:
        A `RegardCache`; for encoder-decoder models a `PairedCache` of two, whose cross-attention is kept as it comes.

    Raises:
        ProblemError: no model or config of transformers, or one without keys and values in a cache; words that do not
            go together, or not with this model: `Rolling` where positions are learned, `Latent` of another rank, a list
            of more or fewer policies than it has layers.

    ```
    >>> import torch
    >>> from regard.integrate.transformers import use_regard
    >>> from regard.storage.codec import Int8
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> use_regard(model)
    >>> cache = regard_cache(model)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> out = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
    >>> print(cache.explain())
    LlamaForCausalLM, 2 layers: 6 tokens, 1,536 bytes
      0-1  full attention  Contiguous(capacity=None), 128 bytes a token: tensors, views of what is kept

    ```
    """
    subject = subject_of(model)
    given = tuple(cast("list[Any]", evict)) if isinstance(evict, list) else evict
    words = Words(Contiguous() if layout is None else layout, codec, given)
    for policy in (None, *words.policies):
        KVCache(words.layout, words.codec, policy)  # raises for words that cannot be combined
    cache = RegardCache(subject, words, offload=offload)
    cache.model = weakref.ref(model) if isinstance(model, nn.Module) else None
    return PairedCache(cache, DynamicCache()) if subject.source.is_encoder_decoder else cache


class RegardCache(DynamicCache):
    """A transformers cache whose layers are regard's; made by `regard_cache`.

    Copies and pickles go on with the same bits. A pickle brings the model's config along, and with it whether regard
    computed its attention then.

    Attributes:
        subject: the model that it is for.
        words: what was asked for.
        ids: int64 [batch, tokens], the ids of what was loaded by `load_cache`; None: it was not loaded.
        model: a weak reference to the model, where it is known.
    """

    ids: Tensor | None = None
    model: "weakref.ref[nn.Module] | None" = None

    def __init__(self, subject: Subject, words: Words, *, offload: bool = False) -> None:
        self.subject, self.words = subject, words
        self._is_offloaded, self._at_work = offload, -1
        self.kinds, options = get_layer_types_and_kwargs(subject.config)
        self._check_kinds()
        self._check_policies()
        if subject.is_latent:
            for kind in attention_classes(subject.source):
                let_expand(kind, NAME)
        made = [
            self._layer(index, kind, said) for index, (kind, said) in enumerate(zip(self.kinds, options, strict=True))
        ]
        for layer in [x for x in made if isinstance(x, ForgettingLayer) and x.kv.evict is not None][-1:]:
            layer.is_last = True
        Cache.__init__(self, layers=made)  # DynamicCache's own would make its layers

    def __reduce__(self) -> tuple[Any, ...]:
        return RegardCache, (self.subject, self.words), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        """What its layers keep, without what refers to the model."""
        layers = [{name: x for name, x in vars(layer).items() if not callable(x)} for layer in self.layers]
        return {"offload": self._is_offloaded, "at_work": self._at_work, "ids": self.ids, "layers": layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._is_offloaded, self._at_work, self.ids = state["offload"], state["at_work"], state["ids"]
        for layer, kept in zip(self.layers, state["layers"], strict=True):
            vars(layer).update(kept)

    def save(self, path: str | os.PathLike[str], tokens: Tensor) -> None:
        """Write what is kept to a safetensors file, whole or not at all, for `load_cache`.

        Args:
            path: of the file; a saved cache that is there is replaced, and no other file.
            tokens: the ids of the text, [batch, tokens] or [tokens]. As many as were seen are written; what `generate`
                returns has one more.

        Raises:
            ProblemError: nothing was seen yet, other tokens than were seen, a file that cannot be written, or one that
                is there and is no saved cache.
            RefusalError: a policy that is not one of regard's.
        """
        seen, batch, ids = int(self.get_seq_length()), getattr(self.layers[0], "batch_size", None), ids_of(tokens)
        if not seen:
            raise ProblemError(f"{self!r} has seen no tokens: there is nothing to save.")
        if ids.shape[1] < seen or (batch is not None and len(ids) != batch):
            raise ProblemError(
                f"tokens are {list(ids.shape)}, and the cache has seen {seen} tokens of {batch} rows: expected the ids "
                f"of these, [{batch}, {seen}]."
            )
        model = None if self.model is None else self.model()
        write_cache(path, (tuple(self.words), self.__getstate__()), self.subject.config, model, ids[:, :seen])

    @property
    def bytes(self) -> int:
        """Bytes of what is stored, in all layers."""
        return sum(_bytes(layer) for layer in self.layers)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Keep keys and values of a layer; what its attention reads comes back. See `KeptLayer.update`."""
        if self._is_offloaded and layer_idx != self._at_work:
            if self._at_work >= 0:
                self.layers[self._at_work].offload()
            self.layers[layer_idx].prefetch()
            self._at_work = layer_idx
        layer = cast(Any, self.layers[layer_idx])
        if isinstance(layer, StaticLayer) and not isinstance(layer, FixedLayer):  # which look themselves
            check_form(layer, key_states, value_states)
        return layer.update(key_states, value_states, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens in all layers; their count is given as a negative number.

        Raises:
            ProblemError: a layer has forgotten what the next token would look back on; then no layer is changed.
        """
        for layer in self.layers:
            if isinstance(layer, KeptLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Be ready to take drafts back, as assisted decoding does.

        Raises:
            RefusalError: layers that forget, or windows of a fixed size, which are written over.
        """
        stuck = [i for i, layer in enumerate(self.layers) if isinstance(layer, StaticLayer) and not layer.is_croppable]
        if stuck:
            raise RefusalError(
                f"{self!r} cannot serve assisted or prompt-lookup decoding: its layers {_range(stuck)} keep a window "
                "in memory of a fixed size, where drafts write over what they may not replace. Take Contiguous()."
            )
        super().activate_past_recording()

    def explain(self) -> str:
        """Which layers keep what, how, and how many bytes that takes."""
        seen = self.get_seq_length() if any(isinstance(x, KeptLayer | FixedLayer) for x in self.layers) else 0
        lines = [f"{self.subject.name}, {len(self.layers)} layers: {int(seen):,} tokens, {self.bytes:,} bytes"]
        alike: dict[str, list[int]] = {}
        for index in range(len(self.layers)):
            alike.setdefault(self._said(index), []).append(index)
        lines += [f"  {_range(indices)}  {what}" for what, indices in alike.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        words = [repr(self.words.layout)]
        words += [] if self.words.codec is None else [str(self.words.codec).removeprefix("torch.")]
        words += [self._said_policies()] if self.words.policies else []
        return f"RegardCache({self.subject.name}, {', '.join(words)}: {len(self.layers)} layers, {self.bytes:,} bytes)"

    __str__ = __repr__

    # ---- layers -----------------------------------------------------------------------------------------------------

    def _layer(self, index: int, kind: str, options: dict[str, Any]) -> Any:
        """The cache of a layer of a kind, as transformers names it.

        If one layer has a policy, all layers of full attention are `ForgettingLayer`s: they share one mask, and
        a padded batch is then stored row by row in all of them.
        """
        subject, words, make = self.subject, self.words, functools.partial(self._make, index)
        capacity = words.layout.capacity if isinstance(words.layout, Contiguous) and words.is_fixed else None
        handles, watched = (lambda: subject.takes_handles), (lambda: subject.is_watched)
        if capacity is not None:
            if kind == "full_attention":
                return FixedLatentLayer(capacity, handles) if subject.is_latent else FixedLayer(capacity)
            return STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=capacity, **options)
        if kind == "full_attention" and words.forgets:
            return (ForgettingLatentLayer if subject.is_latent else ForgettingLayer)(make, handles, watched)
        if kind == "full_attention":
            return (LatentLayer if subject.is_latent else KeptLayer)(make, handles)
        if kind in SLIDING:
            codec = None if "full_attention" in self.kinds else words.codec
            return WindowLayer(options["sliding_window"], lambda layout: KVCache(layout, codec), handles)
        return DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)

    def _make(self, layer: int) -> KVCache:
        return KVCache(self._layout, self.words.codec, self._policy(layer))

    @property
    def _layout(self) -> Layout:
        """The layout of full layers: latents for models that have them, a rotation for `Rolling`."""
        layout, config = self.words.layout, self.subject.config
        if self.subject.is_latent:
            return Latent(config.kv_lora_rank)
        if isinstance(layout, Rolling) and layout.rope is None:
            return replace(layout, rope=self._rope)
        return layout

    def _policy(self, layer: int) -> Any:
        """The policy of a full layer: `ExpectedAttention` is given the model's rotation, if that is known."""
        evict = self.words.policy(layer)
        if not isinstance(evict, ExpectedAttention) or evict.rope is not None or self.subject.is_latent:
            return evict
        try:
            return replace(evict, rope=self._rope)
        except ProblemError:  # positions of another kind: queries count as they came
            return evict

    @functools.cached_property
    def _rope(self) -> Any:
        return rope_for(self.subject.config, attention_classes(self.subject.source))

    def _check_policies(self) -> None:
        """Raise `ProblemError` unless a list of policies fits the layers."""
        evict = self.words.evict
        if not isinstance(evict, tuple):
            return
        if len(evict) != len(self.kinds):
            raise ProblemError(
                f"evict lists {len(evict)} policies and {self.subject.name} has {len(self.kinds)} layers: give one for "
                "each layer, and None where nothing is to be forgotten."
            )
        full = [i for i, kind in enumerate(self.kinds) if kind == "full_attention"]
        wrong = [i for i, policy in enumerate(evict) if policy is not None and i not in full]
        if wrong:
            raise ProblemError(
                f"evict lists {evict[wrong[0]]!r} for layer {wrong[0]} of {self.subject.name}, whose kind is "
                f"{self.kinds[wrong[0]]}: policies are for layers of full attention, "
                f"{_range(full) or 'of which there is none'}. Give None for the others."
            )

    def _check_kinds(self) -> None:
        ours = {"full_attention", *SLIDING} & set(self.kinds)
        layout, rank = self.words.layout, getattr(self.subject.config, "kv_lora_rank", None)
        if not ours:
            raise ProblemError(
                f"{self.subject.name} has no layers of attention whose keys regard can keep (its layers are "
                f"{', '.join(sorted(set(self.kinds)))}): leave past_key_values out."
            )
        if isinstance(layout, Latent) and not (self.subject.is_latent and layout.rank == rank):
            has = f"latents of rank {rank}" if self.subject.is_latent else "no latents"
            raise ProblemError(
                f"{layout!r} for {self.subject.name}, which has {has}: leave layout out, regard chooses."
            )
        if self.subject.is_latent and not isinstance(layout, Contiguous | Latent):
            raise ProblemError(
                f"{layout!r} for {self.subject.name}, whose keys and values are made of latents: these are kept "
                "side by side. Leave layout out, or give Contiguous(capacity=n)."
            )
        asked = bool(self.words.policies) or not isinstance(layout, Contiguous | Latent)
        if asked and "full_attention" not in ours:
            raise ProblemError(
                f"every layer of {self.subject.name} looks back over a window, which is kept exactly: nothing is left "
                f"for {self.words.evict or layout!r} to do. Leave it out; a codec may stay."
            )
        if self.subject.is_latent:
            for index in range(len(self.kinds)):  # raises for words that cannot be combined
                KVCache(Latent(cast(int, rank)), self.words.codec, self.words.policy(index))

    def _said_policies(self) -> str:
        """`Knorm(...)`, or `Knorm(...) in layers 2-5` where there is one for each layer."""
        if not isinstance(self.words.evict, tuple):
            return repr(self.words.evict)
        found: dict[str, list[int]] = {}
        for index, policy in enumerate(self.words.evict):
            if policy is not None:
                found.setdefault(repr(policy), []).append(index)
        return ", ".join(f"{policy} in layers {_range(indices)}" for policy, indices in found.items())

    # ---- what is said of them ---------------------------------------------------------------------------------------

    def _said(self, index: int) -> str:
        """A layer in a line."""
        layer, kind = self.layers[index], self.kinds[index].replace("_", " ")
        if not isinstance(layer, KeptLayer):
            how = "fixed in size" if isinstance(layer, FixedLayer) else "as transformers keeps it"
            read = self._latents_read_as() if isinstance(layer, FixedLatentLayer) else "tensors"
            return f"{kind}  {how}{self._per_token(layer)}: {read}"
        words = [repr(layer.kv.layout)] + [str(layer.kv.codec).removeprefix("torch.")] * (layer.kv.codec is not None)
        words += [] if layer.kv.evict is None else [repr(layer.kv.evict)]
        if isinstance(layer, WindowLayer):
            words[0] = f"the last {layer.window:,} tokens, exactly"
        return f"{kind}  {', '.join(words)}{self._per_token(layer)}: {self._read_as(layer)}"

    def _per_token(self, layer: Any) -> str:
        if isinstance(layer, FixedLayer) or (isinstance(layer, KeptLayer) and not layer.is_initialized):
            return self._to_be(layer)
        if not isinstance(layer, KeptLayer):
            return ""
        tokens = sum(kv.tokens for kv in layer.caches) * layer.batch_size // len(layer.caches)  # of all rows
        return f", {_bytes(layer) / tokens:,.0f} bytes a token"

    def _to_be(self, layer: KeptLayer | FixedLayer) -> str:
        """The bytes of a token by the config, where it has the sizes."""
        is_latent = isinstance(layer, LatentLayer | ForgettingLatentLayer | FixedLatentLayer)
        sizes = sizes_of(self.subject.config, is_latent)
        codec = layer.kv.codec if isinstance(layer, KeptLayer) else None
        if isinstance(codec, Codec) and codec.keys is None and isinstance(layer, KeptLayer) and layer.kv.evict:
            codec = replace(codec, keys="token")
        dtype = getattr(self.subject.config, "dtype", None) or torch.float32
        return "" if sizes is None else f", {token_bytes(*sizes, dtype, codec):,.0f} bytes a token"

    def _read_as(self, layer: KeptLayer) -> str:
        is_plain = not isinstance(layer.kv.codec, Codec | torch.dtype) and not isinstance(layer.kv.layout, Paged)
        if isinstance(layer, LatentLayer | ForgettingLatentLayer):
            return self._latents_read_as()
        if is_plain:
            return "tensors, views of what is kept"
        if self.subject.takes_handles:
            return "handles, read where they lie"
        if self.subject.touched is not None:
            return f"tensors, made anew at each step, for the model computes with them: {self.subject.touched}"
        return (
            "tensors, made anew at each step, for the model's attention is "
            f"{self.subject.source._attn_implementation}: use_regard(model)"
        )

    def _latents_read_as(self) -> str:
        why = self.subject.why_expanded
        if why is None:
            return "latents, which queries go to without expanding them"
        return f"latents, which the model expands at every step: {why}"


class PairedCache(EncoderDecoderCache):
    """The cache of an encoder-decoder model: regard's for what is written, transformers' own for what was read.

    Cross-attention computes its keys once and reads them whole at every step, so they stay as they are.
    """

    def save(self, path: str | os.PathLike[str], tokens: Tensor) -> None:
        """Refused: what was read belongs to it as well.

        Raises:
            RefusalError: always.
        """
        raise RefusalError(
            f"{self!r} cannot be saved to a file, for what its encoder read is no part of the tokens: torch.save, or "
            "pickle, takes both."
        )

    @property
    def bytes(self) -> int:
        """Bytes of what is stored, of both."""
        return cast(RegardCache, self.self_attention_cache).bytes + sum(
            _bytes(layer) for layer in self.cross_attention_cache.layers
        )

    def explain(self) -> str:
        """Which layers keep what, how, and how many bytes that takes."""
        cross = sum(_bytes(layer) for layer in self.cross_attention_cache.layers)
        own = cast(RegardCache, self.self_attention_cache).explain()
        return f"{own}\n  cross-attention, as transformers keeps it: {cross:,} bytes"

    def __repr__(self) -> str:
        return f"PairedCache({self.self_attention_cache!r})"

    __str__ = __repr__


def _bytes(layer: Any) -> int:
    """Bytes of what a layer stores; of transformers' own layers, of all that they hold."""
    if isinstance(layer, KeptLayer):
        return sum(kv.bytes for kv in layer.caches)
    held = [x for value in vars(layer).values() for x in (value.values() if isinstance(value, dict) else (value,))]
    return sum(t.nbytes for t in held if isinstance(t, torch.Tensor) and t.ndim > 1)


def _range(numbers: Iterable[int]) -> str:
    """0-3, 5 for 0 1 2 3 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
