"""The layout, codec and policies of a model's cache, and whether they go with the model."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, cast

from regard.cache.expected_attention import ExpectedAttention
from regard.cache.kv_cache import KVCache
from regard.describe.position import Rope
from regard.errors import ProblemError
from regard.integrate.cache_argument import usual_name
from regard.integrate.cache_rope import rope_for
from regard.integrate.decoder import Decoder, cache_writers, config_of_layer
from regard.integrate.implementation import INTERFACE, names_in_forward
from regard.integrate.projections import has_matrix
from regard.storage.stored import Contiguous, Latent, Layout, Rolling

SLIDING = {"sliding_attention", "chunked_attention"}
"""Kinds of layers whose attention looks back over a window."""


class CacheOptions(NamedTuple):
    """The layout, codec and policies of a cache.

    Attributes:
        layout, codec: as for `KVCache`.
        evict: a policy for all layers, or a tuple of one for each, None where nothing is dropped; None: nowhere.
    """

    layout: Layout
    codec: Any  # Codec | torch.dtype | None
    evict: Any

    @property
    def policies(self) -> tuple[Any, ...]:
        """All policies."""
        each = cast("tuple[Any, ...]", self.evict) if isinstance(self.evict, tuple) else (self.evict,)
        return tuple(policy for policy in each if policy is not None)

    def policy(self, layer: int) -> Any:
        """The policy of a layer."""
        return self.evict[layer] if isinstance(self.evict, tuple) else self.evict

    @property
    def evicts(self) -> bool:
        """Whether tokens are dropped before the end of the text."""
        return isinstance(self.layout, Rolling) or bool(self.policies)

    @property
    def capacity(self) -> int | None:
        """The fixed number of slots, where shapes never change, so that a model can be compiled around the cache."""
        is_plain = self.codec is None and not self.policies
        return self.layout.capacity if is_plain and isinstance(self.layout, Contiguous) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CacheOptions":
        """Itself: copies of a cache share the pool in it."""
        return self

    def __str__(self) -> str:
        options = [repr(self.layout)]
        options += [] if self.codec is None else [str(self.codec).removeprefix("torch.")]
        options += [_policies(self.evict)] if self.policies else []
        return ", ".join(options)


def _policies(evict: Any) -> str:
    """`Knorm(...)`, or `Knorm(...) in layers 2-5` where there is one for each layer."""
    if not isinstance(evict, tuple):
        return repr(evict)
    layers: dict[str, list[int]] = {}
    for index, policy in enumerate(cast("tuple[Any, ...]", evict)):
        if policy is not None:
            layers.setdefault(repr(policy), []).append(index)
    return ", ".join(f"{policy} in layers {ranges(indices)}" for policy, indices in layers.items())


def ranges(indices: Iterable[int]) -> str:
    """Indices in order, with runs in short.

    >>> ranges([0, 1, 2, 3, 5])
    '0-3, 5'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def options_for(decoder: Decoder, options: CacheOptions, kinds: list[str]) -> CacheOptions:
    """The options completed for the layers of full attention of a model: with latents, or the model's rotation.

    Args:
        decoder: of the model.
        options: as passed to `regard_cache`.
        kinds: of its layers, as transformers names them.

    Raises:
        ProblemError: options that do not go with each other, or not with the model.
    """
    for policy in (None, *options.policies):
        KVCache(options.layout, options.codec, policy)  # raises for options that cannot be combined
    _check_kinds(decoder, options, kinds)
    _check_policies(decoder, options, kinds)
    _check_attention(decoder, options)
    if decoder.is_latent:
        _check_weights(decoder, options)
        layout = Latent(_rank(decoder, kinds))
        for policy in options.evict if isinstance(options.evict, tuple) else (options.evict,):
            KVCache(layout, options.codec, policy)
        return options._replace(layout=layout)
    rope = functools.cache(functools.partial(rope_for, decoder.config, source=decoder.source))
    layout, evict = options.layout, options.evict
    if isinstance(layout, Rolling) and layout.rope is None:
        layout = replace(layout, rope=rope())
    evict = tuple(_with_rope(x, rope) for x in evict) if isinstance(evict, tuple) else _with_rope(evict, rope)
    return options._replace(layout=layout, evict=evict)


def _with_rope(policy: Any, rope: Callable[[], Rope]) -> Any:
    """`ExpectedAttention` with the model's rotation, if there is one."""
    if not isinstance(policy, ExpectedAttention) or policy.rope is not None:
        return policy
    try:
        return replace(policy, rope=rope())
    except ProblemError:  # positions of another kind: queries are averaged as they are
        return policy


def _check_policies(decoder: Decoder, options: CacheOptions, kinds: list[str]) -> None:
    """Raise `ProblemError` unless a list of policies fits the layers."""
    evict = options.evict
    if not isinstance(evict, tuple):
        return
    if len(evict) != len(kinds):
        raise ProblemError(
            f"evict lists {len(evict)} policies and {decoder.name} has {len(kinds)} layers: give one for "
            "each layer, and None where nothing is to be dropped."
        )
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    wrong = [i for i, policy in enumerate(evict) if policy is not None and i not in full]
    if wrong:
        raise ProblemError(
            f"evict lists {evict[wrong[0]]!r} for layer {wrong[0]} of {decoder.name}, whose kind is "
            f"{kinds[wrong[0]]}: policies are for layers of full attention, "
            f"{ranges(full) or 'of which there is none'}. Give None for the others."
        )


def _check_attention(decoder: Decoder, options: CacheOptions) -> None:
    """Raise `ProblemError` if the cache drops tokens and the model cannot attend to only the remaining ones."""
    writers = list(cache_writers(decoder.source)) if options.evicts else []
    uses = [names_in_forward(kind) for kind in writers]
    what = f"{(*options.policies, options.layout)[0]!r}, which drops tokens, for {decoder.name}"
    if uses and not any(INTERFACE in names for names, _ in uses):
        raise ProblemError(
            f"{what}: its attention ({writers[0].__name__}) never asks transformers' AttentionInterface, so regard "
            "cannot compute it, and its mask would not fit the remaining tokens. Use a cache that keeps all tokens."
        )
    if any("position_bias" in keywords for _, keywords in uses):
        raise ProblemError(
            f"{what}: it adds a bias by position to the scores of all tokens, and the entries of the remaining tokens "
            "are unknown. Use a cache that keeps all tokens."
        )


def _check_kinds(decoder: Decoder, options: CacheOptions, kinds: list[str]) -> None:
    """Raise `ProblemError` unless the layout fits the layers."""
    layout = options.layout
    ours = {"full_attention", *(() if decoder.is_latent else SLIDING)} & set(kinds)
    if not ours:
        raise ProblemError(
            f"{decoder.name} has no layers of attention whose keys regard can keep (its layers are "
            f"{', '.join(sorted(set(kinds)))}): leave {usual_name()} out."
        )
    rank = _rank(decoder, kinds) if decoder.is_latent else None
    if isinstance(layout, Latent) and layout.rank != rank:
        has = f"latents of rank {rank}" if decoder.is_latent else "no latents"
        raise ProblemError(f"{layout!r} for {decoder.name}, which has {has}: leave layout out, regard chooses.")
    if decoder.is_latent and not isinstance(layout, Contiguous | Latent):
        raise ProblemError(
            f"{layout!r} for {decoder.name}, whose keys and values are made of latents, which are kept contiguous. "
            "Leave layout out, or give Contiguous(capacity=n)."
        )
    has_work = bool(options.policies) or not isinstance(layout, Contiguous | Latent)
    if has_work and "full_attention" not in ours:
        raise ProblemError(
            f"every layer of {decoder.name} looks back over a window, which is kept exactly: nothing is left "
            f"for {options.evict or layout!r} to do. Leave it out; a codec may stay."
        )


def _check_weights(decoder: Decoder, options: CacheOptions) -> None:
    """Raise `ProblemError` if policies are to see queries that meet latents, and the weights for that are quantised."""
    if not options.policies:
        return
    for module in filter(None, (module() for module in decoder.expanding)):
        if not has_matrix(module.kv_b_proj):
            raise ProblemError(
                f"{options.policies[0]!r} for {decoder.name}: policies see queries that meet latents, made with the "
                "weight of kv_b_proj, which is no matrix of floats: load the model without quantisation, or use a "
                "cache that keeps all tokens."
            )


def _rank(decoder: Decoder, kinds: list[str]) -> int:
    """The elements of a latent in layers of full attention; those of a window may have others (Dots3-Note)."""
    layers = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    ranks: set[int] = {config_of_layer(decoder.config, i).kv_lora_rank for i in layers}
    if len(ranks) > 1:
        raise ProblemError(
            f"{decoder.name} has latents of ranks {', '.join(map(str, sorted(ranks)))} in layers of full attention: "
            f"expected one rank. Leave {usual_name()} out."
        )
    return ranks.pop()
