"""Layers of a cache of latents (MLA): one entry per token for all heads, the latent with the rotated key behind it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.cache.kv_cache import KVCache
from regard.cache.store import CachedTensor
from regard.integrate.cache_evicting import EvictingLayer
from regard.integrate.cache_fixed import FixedLayer
from regard.integrate.cache_layers import StoredLayer, dense
from regard.integrate.latent import Latents
from regard.integrate.lazy import LazyTensor


class LatentLayer(StoredLayer):
    """A layer of latents: entries of `kv_lora_rank + qk_rope_head_dim` elements in place of keys, and no values."""

    def _append_to(self, kv: KVCache, k: Tensor, v: Tensor) -> tuple[CachedTensor, CachedTensor]:
        return kv.append(torch.cat([k, v], -1))

    def _sources(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        return Latents(*found), Latents(*found)

    def _as_read(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        if self._is_read_by_regard():
            return _lazy_halves(Latents(*found), self._note_use)
        return self._dense(found)

    def _dense(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        return _halves(dense(found[0]), found[1].shape[3])


class EvictingLatentLayer(LatentLayer, EvictingLayer):
    """A layer of latents under an eviction policy."""


class FixedLatentLayer(FixedLayer):
    """A layer of latents in memory of a fixed size, as `torch.compile` needs it.

    Args:
        max_cache_len: the capacity in tokens.
        is_read_by_regard: is called at each update: whether regard computes the model's attention.
    """

    first_use: str | None = None

    def __init__(self, max_cache_len: int, is_read_by_regard: Callable[[], bool], **kwargs: Any) -> None:
        super().__init__(max_cache_len)
        self._is_read_by_regard, self._rank = is_read_by_regard, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate entries [batch, 1, tokens, rank + rope_dim], and no values."""
        super().lazy_initialization(key_states, key_states[..., :0])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Write latents and rotated keys of new tokens in place, and return those of all tokens."""
        self._rank = key_states.shape[3]
        entries = torch.cat([key_states, value_states], -1)
        keys, _ = super().update(entries, entries[..., :0])
        if not self._is_read_by_regard():
            return _halves(keys, self._rank)
        return _lazy_halves(Latents(keys, keys[..., : self._rank]), self._note_use)

    def _note_use(self, line: str) -> None:
        self.first_use = self.first_use or line


def _lazy_halves(latents: Latents, report: Callable[[str], None]) -> tuple[Any, Any]:
    """Latents and rotated keys, as a model expects them from `update`, with the entries as their source."""
    *sizes, width = latents.keys.shape
    rank = latents.values.shape[3]
    first, second = (
        LazyTensor(latents, (*sizes, dim), latents.keys, functools.partial(_half, latents, side), report)
        for side, dim in enumerate((rank, width - rank))
    )
    return first, second


def _half(latents: Latents, side: int) -> Tensor:
    return latents.split()[side]


def _halves(entries: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return entries[..., :rank], entries[..., rank:]
