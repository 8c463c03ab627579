"""The products of a tile: scores and outputs of grouped heads, and the guards of what is masked.

A masked key or value may be NaN or infinite, and must not reach a result. Since 0 * NaN is NaN, elements that are not
finite are left out of the products, and added again for the pairs that the mask keeps.
"""

import torch
from torch import Tensor


def products(q: Tensor, k: Tensor) -> Tensor:
    """The dot product of each query with the keys of its group, [batch, heads, queries, keys]."""
    return _ungrouped(_grouped(q, k) @ k.mT, q)


def weighted_values(weights: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """weights @ v, [batch, heads, queries, v_dim].

    Args:
        keep: the mask; elements of v that are not finite then count for the pairs that it keeps alone.
    """
    if keep is None:
        return _ungrouped(_grouped(weights, v) @ v, weights)
    out = weighted_values(weights, torch.where(torch.isfinite(v), v, 0.0), None)
    seen = keep.to(v.dtype)
    nan, up, down = (seen @ kind.to(v.dtype) > 0 for kind in (v.isnan(), v == torch.inf, v == -torch.inf))
    special = torch.where(up, torch.inf, torch.where(down, -torch.inf, 0.0))
    special = torch.where(nan | (up & down), torch.nan, special)
    special = special.repeat_interleave(out.shape[1] // v.shape[1], dim=1)
    return torch.where(special == 0, out, out + special)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[batch, heads, rows, n] as [batch, kv_heads, group * rows, n]: a group's queries, one after another."""
    return x.unflatten(1, (like.shape[1], -1)).flatten(2, 3)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_grouped`, to the heads and rows of `like`."""
    return x.unflatten(2, (-1, like.shape[2])).flatten(1, 2)
