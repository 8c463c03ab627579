"""What `LatentAttention` refuses: sizes, caches and projections that do not fit."""

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from regard.cache import KVCache
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.nn.checks import check_cache, check_flags
from regard.nn.projections import opaque_weight, why_not_linear
from regard.storage.stored import Latent, Rolling

LEAST = {
    "d_model": 1, "heads": 1, "kv_heads": 1, "rope_heads": 1, "kv_rank": 1, "v_dim": 1, "nope_dim": 0, "rope_dim": 0,
    "q_rank": 1,
}  # fmt: skip
"""The sizes of a module, and the least number of each; `q_rank` may be None."""


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Raise `ProblemError` unless the sizes, those of `LEAST`, make a module."""
    for name, least in LEAST.items():
        if name != "q_rank" or sizes[name] is not None:
            whole(sizes[name], name, "heads" if name.endswith("heads") else "dimensions", least=least)
    if sizes["nope_dim"] + sizes["rope_dim"] == 0:
        raise ProblemError("nope_dim and rope_dim are both 0: queries and keys need dimensions of either kind.")
    heads, kv_heads, rope_heads = sizes["heads"], sizes["kv_heads"], sizes["rope_heads"]
    if heads % kv_heads or kv_heads % rope_heads:
        raise ProblemError(
            f"heads={heads}, kv_heads={kv_heads}, rope_heads={rope_heads}: each must be a whole multiple of the next."
        )


def check_latent_cache(cache: KVCache | None, kv_rank: int, has_position: bool) -> None:
    """Raise `ProblemError` unless the cache can store entries of `kv_rank` dimensions and a key with position."""
    check_cache(cache)
    layout = None if cache is None else cache.layout
    if isinstance(layout, Latent) and layout.rank != kv_rank:
        raise ProblemError(f"the cache is {layout!r}, and the module's latents have {kv_rank} dimensions.")
    if isinstance(layout, Rolling) and (has_position or layout.rope is not None):
        raise ProblemError(
            f"the cache is {layout!r}: a Rope rotates the first dimensions of a key, and in these entries the last "
            "ones carry the position. Use Latent or Contiguous with a policy of regard.cache.evict."
        )


def check_absorbed(absorbed: object, cache: KVCache | None, k_up: nn.Linear | None, v_up: nn.Linear) -> None:
    """Raise `ProblemError` if the weights of k_up and v_up are asked for, and do not say what these compute."""
    if absorbed is not None:
        check_flags(absorbed=absorbed)
    observed = cache is not None and cache.evict is not None
    if (absorbed or observed) and (reason := beyond_weights(k_up, v_up)) is not None:
        given, option = ("absorbed=True", "absorbed=") if absorbed else ("a cache with evict=", "evict=")
        raise ProblemError(f"{given} reads the weights of k_up and v_up, and {reason}; or leave {option} out.")


def beyond_weights(k_up: nn.Linear | None, v_up: nn.Linear, *, with_hooks: bool = False) -> str | None:
    """Why the weights of k_up and v_up do not say what these compute; None if they do."""
    for name, up in (("k_up", k_up), ("v_up", v_up)):
        if up is None:
            continue
        if (reason := why_not_linear(up, with_hooks=with_hooks)) is not None:
            return f"{name} {reason}"
        if (kind := opaque_weight(up)) is not None:
            return f"{name} has a weight of the class {kind}, which computes by itself: make it a plain one first"
        if cast(object, up.bias) is not None:
            return f"{name} has a bias, which its weight does not contain: set the bias to None first"
    return None
