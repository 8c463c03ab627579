"""Latent attention (MLA) of transformers models in the absorbed form: queries go to the latents as they are cached.

transformers caches one latent and one rotated key per token, and at every step expands all of them into keys and values
of every head:

    update -> c [tokens, 512], k_rot [tokens, 64] -> expand_kv: kv_b_proj(c) [tokens, heads * (128 + 128)] -> attention

Here `expand_kv` hands the latents on as they are: those of regard's caches (`Latents`), and those of transformers'
own, which keep the two parts apart (`Apart`). The attention function absorbs the two halves of kv_b_proj into the
queries and into the output: `q . (W_uk c) = (W_uk^T q) . c`. For DeepSeek-V3 and one query on 4,096 keys that is 1/117
of the operations. A prompt has fewer in the expanded form, and is computed so.

DeepSeek-AI 2024, arXiv:2405.04434, §2.1.2; the arithmetic stands in `regard.nn.latent`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.attention import attend
from regard.cache.kv_cache import KVCache
from regard.cache.store import CachedTensor
from regard.integrate.cache_forgetting import ForgettingLayer, Pending
from regard.integrate.cache_layer import FixedLayer, KeptLayer, dense
from regard.integrate.touches import touch


class Latents(NamedTuple):
    """What a cache of latents hands to the attention function, in place of keys and of values.

    Attributes:
        keys: the latents with the rotated keys behind them, [batch, 1, tokens, rank + rope_dim].
        values: the latents, [batch, 1, tokens, rank], in the same memory.
    """

    keys: CachedTensor
    values: CachedTensor

    @property
    def shape(self) -> torch.Size:
        """That of the keys."""
        return self.keys.shape

    def joined(self) -> "Latents":
        """Itself."""
        return self

    def expanded(self, module: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of all heads, as transformers makes them."""
        entries = dense(self.keys)
        rank = self.values.shape[3]
        return type(module).expand_kv.__wrapped__(module, entries[..., :rank], entries[..., rank:])


class Apart(NamedTuple):
    """What a cache of transformers keeps of latent attention, on its way to the attention function.

    Attributes:
        latents: [batch, 1, tokens, rank].
        rotated: the rotated keys, [batch, 1, tokens, rope_dim].
    """

    latents: Tensor
    rotated: Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the keys as `joined` makes them."""
        return torch.Size((*self.latents.shape[:3], self.latents.shape[3] + self.rotated.shape[3]))

    def joined(self) -> Latents:
        """One entry per token, in new memory: 576 numbers of DeepSeek-V3's are copied, where expanding makes 40,960."""
        entries = torch.cat([self.latents, self.rotated.to(self.latents.dtype)], -1)
        return Latents(entries, entries[..., : self.latents.shape[3]])

    def expanded(self, module: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of all heads, as transformers makes them."""
        return type(module).expand_kv.__wrapped__(module, *self)


class _OfLatents(KeptLayer):
    """One entry per token, `kv_lora_rank + qk_rope_head_dim` numbers, for all heads."""

    def _stored(self, kv: KVCache, k: Tensor, v: Tensor) -> tuple[CachedTensor, CachedTensor]:
        return kv.append(torch.cat([k, v], -1))

    def _handles(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        return Latents(*found), Latents(*found)

    def _tensors(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        return _split(dense(found[0]), found[1].shape[3])


class LatentLayer(_OfLatents, KeptLayer):
    """A layer of latents."""


class ForgettingLatentLayer(_OfLatents, ForgettingLayer):
    """A layer of latents some of which a policy forgets."""


class FixedLatentLayer(FixedLayer):
    """A layer of latents in memory of a fixed size, as `torch.compile` needs it.

    Args:
        max_cache_len: tokens that there is room for.
        takes_handles: asked at each update: whether regard's attention reads it.
    """

    def __init__(self, max_cache_len: int, takes_handles: Callable[[], bool], **kwargs: Any) -> None:
        super().__init__(max_cache_len)
        self._takes_handles, self._rank = takes_handles, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the memory for entries [batch, 1, tokens, rank + rope_dim], and none for values."""
        super().lazy_initialization(key_states, key_states[..., :0])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Write latents and rotated keys of new tokens in place; all come back."""
        self._rank = key_states.shape[3]
        entries = torch.cat([key_states, value_states], -1)
        keys, _ = super().update(entries, entries[..., :0])
        if self._takes_handles():
            return Latents(keys, keys[..., : self._rank]), Latents(keys, keys[..., : self._rank])
        return _split(keys, self._rank)


def let_expand(module: type[nn.Module], implementation: str) -> None:
    """Have the `expand_kv` of an attention class hand latents on to the attention `implementation`. Twice is once.

    Tensors are expanded as before for other implementations, and in a class that computes with what it expanded.
    """
    expand: Callable[..., Any] = cast(Any, module).expand_kv
    if hasattr(expand, "__wrapped__"):
        return
    hands_on = touch(module) is None

    @functools.wraps(expand)
    def expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
        if isinstance(kv_nope, Latents | Pending):
            return kv_nope, k_rot
        if hands_on and self.config._attn_implementation == implementation:
            return Apart(kv_nope, k_rot), Apart(kv_nope, k_rot)
        return expand(self, kv_nope, k_rot)

    cast(Any, module).expand_kv = expand_kv


def attend_latents(module: Any, query: Tensor, latents: Latents | Apart, **words: Any) -> Tensor:
    """Attention of queries to latents, in the form of fewer operations.

    Args:
        module: with `kv_b_proj`, and the sizes of DeepSeek's attention.
        query: [batch, heads, queries, nope_dim + rope_dim].
        words: as for `attend`.

    Returns:
        [batch, heads, queries, v_dim].
    """
    if words.get("scale") is None:
        words["scale"] = query.shape[3] ** -0.5  # of the keys as they would be, not of the entries
    if not is_absorbed(module, query.shape[2], latents.shape[2]):
        return attend(query, *latents.expanded(module), **words)
    out = attend(absorbed(module, query), *latents.joined(), **words)
    return _by_head(out, _ups(module)[1].transpose(1, 2))


def absorbed(module: Any, query: Tensor) -> Tensor:
    """Queries as they go to latents: [batch, heads, queries, rank + rope_dim]."""
    k_up = _ups(module)[0]
    q_nope, q_rot = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([_by_head(q_nope, k_up), q_rot], -1)


def is_absorbed(module: Any, queries: int, keys: int) -> bool:
    """Whether the absorbed form can be taken, and has fewer operations."""
    if why_expanded(module) is not None:
        return False
    expanding, absorbing = flops(module, queries, keys)
    return absorbing < expanding


def why_expanded(module: Any) -> str | None:
    """Why a module's latents are expanded at every step; None: they need not be.

    Absorbing reads the weights of kv_b_proj: adapters around it, quantised weights, hooks on it and a forward put in
    the place of its own (as accelerate does to move weights to where they are needed) need it called.
    """
    up = module.kv_b_proj
    if type(up) is not nn.Linear:
        return f"its kv_b_proj is a {type(up).__name__}, which must be called"
    if "forward" in vars(up) or any(vars(up)[name] for name in ("_forward_hooks", "_forward_pre_hooks")):
        return "hooks on its kv_b_proj must be called"
    return None if cast(Any, up).bias is None else "its kv_b_proj has a bias"


def flops(module: Any, queries: int, keys: int) -> tuple[int, int]:
    """(expanded, absorbed): floating-point operations per row of the batch, if every query sees every key."""
    rank, nope, rope, v = (
        getattr(module, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    heads = module.kv_b_proj.weight.shape[0] // (nope + v)
    up, pairs = 2 * rank * heads * (nope + v), 2 * heads * queries * keys
    return up * keys + pairs * (nope + rope + v), up * queries + pairs * (rank + rope + rank)


def _ups(module: Any) -> tuple[Tensor, Tensor]:
    """(W_uk [heads, nope_dim, rank], W_uv [heads, v_dim, rank])."""
    nope, v = module.qk_nope_head_dim, module.v_head_dim
    k_up, v_up = module.kv_b_proj.weight.unflatten(0, (-1, nope + v)).split([nope, v], 1)
    return k_up, v_up


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [batch, heads, queries, a] times each head's weight [heads, a, b]."""
    batch, heads, queries, _ = x.shape
    rows = x.transpose(0, 1).reshape(heads, batch * queries, -1)
    return torch.bmm(rows, weight).view(heads, batch, queries, -1).transpose(0, 1)


def _split(entries: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return entries[..., :rank], entries[..., rank:]
