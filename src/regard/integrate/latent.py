"""Latent attention (MLA) of transformers models in the absorbed form: queries meet the latents as they are cached.

transformers caches one latent and one rotated key per token, and at every step expands all of them into keys and values
of every head:

    update -> c [tokens, 512], k_rot [tokens, 64] -> expand_kv: kv_b_proj(c) [tokens, heads * (128 + 128)] -> attention

`pass_latents` lets `expand_kv` of a model return lazy tensors instead, whose source is the latents (`Latents`); they
expand only where the model computes with them. The attention function absorbs the two halves of kv_b_proj into the
queries and into the output: `q . (W_uk c) = (W_uk^T q) . c`. For DeepSeek-V3 and one query on 4,096 keys that is 1/117
of the operations. A prompt takes fewer operations in the expanded form, and is computed so.

DeepSeek-AI 2024, arXiv:2405.04434, §2.1.2; the arithmetic is derived in `regard.nn.latent`.
"""

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.attention import attend
from regard.cache.store import CachedTensor
from regard.calls import are_outputs_replaced
from regard.integrate.implementation import is_regard
from regard.integrate.lazy import LazyTensor
from regard.nn.projections import opaque_weight


class Latents(NamedTuple):
    """The entries of a cache of latents.

    Attributes:
        keys: the latents with the rotated keys behind them, [batch, 1, tokens, rank + rope_dim].
        values: the latents, [batch, 1, tokens, rank], in the same memory.
    """

    keys: CachedTensor
    values: CachedTensor

    def joined(self) -> "Latents":
        """Itself."""
        return self

    def split(self) -> tuple[Tensor, Tensor]:
        """(latents, rotated keys) as tensors."""
        entries = self.keys if isinstance(self.keys, Tensor) else self.keys.dense()
        rank = self.values.shape[3]
        return entries[..., :rank], entries[..., rank:]


class SplitLatents(NamedTuple):
    """The entries of a cache of transformers, which keeps the two parts apart.

    Attributes:
        latents: [batch, 1, tokens, rank].
        rotated: the rotated keys, [batch, 1, tokens, rope_dim].
    """

    latents: Tensor
    rotated: Tensor

    def joined(self) -> Latents:
        """One entry per token, in new memory: a copy of 576 elements for DeepSeek-V3, where expanding makes 40,960."""
        entries = torch.cat([self.latents, self.rotated.to(self.latents.dtype)], -1)
        return Latents(entries, entries[..., : self.latents.shape[3]])

    def split(self) -> tuple[Tensor, Tensor]:
        """(latents, rotated keys) as tensors."""
        return self.latents, self.rotated


class _Expanded:
    """The keys and values of all heads that latents expand to, made once."""

    def __init__(self, module: Any, latents: Latents | SplitLatents) -> None:
        self.module, self.latents = module, latents
        self.pair: tuple[Tensor, Tensor] | None = None

    def side(self, index: int) -> Tensor:
        """Keys (0) or values (1), [batch, heads, tokens, dim]."""
        if self.pair is None:
            self.pair = expanded(self.module, self.latents)
        return self.pair[index]


def pass_latents(model: nn.Module) -> None:
    """Let the latents of a model reach its attention function unexpanded, where regard is that function.

    The method `expand_kv` of each attention module is replaced in the module itself, not in its class. With another
    attention implementation it does what it did before. Calling this twice changes nothing more.
    """
    for module in latent_modules(model):
        module.expand_kv = functools.partial(_expand_kv, module)


def latent_modules(model: nn.Module) -> list[Any]:
    """The modules that expand latents."""
    return [module for module in model.modules() if hasattr(type(module), "expand_kv")]


def _expand_kv(module: Any, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
    """What takes the place of `module.expand_kv`."""
    latents, report = SplitLatents(kv_nope, k_rot), None
    if isinstance(kv_nope, LazyTensor):
        if not isinstance(kv_nope.source, Latents):
            return kv_nope, k_rot  # new tokens of a padded batch, which the attention function appends to a cache
        latents, report = kv_nope.source, kv_nope.report
    elif not is_regard(module.config):
        return type(module).expand_kv(module, kv_nope, k_rot)
    heads, (batch, _, tokens, _) = module.num_heads, kv_nope.shape  # a config may have other numbers for other layers
    both = _Expanded(module, latents)
    k, v = (
        LazyTensor(latents, (batch, heads, tokens, dim), kv_nope, functools.partial(both.side, side), report)
        for side, dim in enumerate((module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim))
    )
    return k, v


def expanded(module: Any, latents: Latents | SplitLatents) -> tuple[Tensor, Tensor]:
    """The keys and values of all heads, as transformers makes them."""
    return type(module).expand_kv(module, *latents.split())


def attend_latents(module: Any, query: Tensor, latents: Latents | SplitLatents, **options: Any) -> Tensor:
    """Attention of queries to latents, in the form that takes fewer operations; expanded where outputs are replaced.

    Args:
        module: with `kv_b_proj`, and the sizes of DeepSeek's attention.
        query: [batch, heads, queries, nope_dim + rope_dim].
        options: those of `attend`.

    Returns:
        [batch, heads, queries, v_dim].
    """
    if options.get("scale") is None:
        options["scale"] = query.shape[3] ** -0.5  # of expanded keys, not of the entries
    if are_outputs_replaced() or not is_absorbed(module, query.shape[2], sizes_of(latents)[1]):
        return attend(query, *expanded(module, latents), **options)
    out = attend(absorbed(module, query), *latents.joined(), **options)
    return _by_head(out, _ups(module)[1].transpose(1, 2))


def sizes_of(stored: Any) -> tuple[int, int]:
    """(batch, tokens) of keys, or of latents."""
    entries = stored[0] if isinstance(stored, Latents | SplitLatents) else stored
    return entries.shape[0], entries.shape[2]


def absorbed(module: Any, query: Tensor) -> Tensor:
    """Queries that meet latents: [batch, heads, queries, rank + rope_dim]."""
    k_up = _ups(module)[0]
    q_nope, q_rot = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([_by_head(q_nope, k_up), q_rot], -1)


def is_absorbed(module: Any, queries: int, keys: int) -> bool:
    """Whether the absorbed form is possible, and takes fewer operations."""
    if why_expanded(module) is not None:
        return False
    expanding, absorbing = flops(module, queries, keys)
    return absorbing < expanding


def why_expanded(module: Any) -> str | None:
    """Why a module's latents are expanded at every step; None: they are not.

    Absorbing reads the weights of kv_b_proj. Adapters, quantised weights, hooks and a replaced forward (accelerate's,
    which moves weights to the device) only work where kv_b_proj is called.
    """
    up = module.kv_b_proj
    if type(up) is not nn.Linear:
        return f"its kv_b_proj is a {type(up).__name__}, which must be called"
    if (kind := opaque_weight(up)) is not None:
        return f"the weight of its kv_b_proj is a {kind}, so the module must be called"
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
