"""Weights at the pairs of many small blocks of rows and keys, for measures over O(n) pairs.

A block is a small matrix product: it costs less than its dot products taken one by one as soon as rows share keys, and
the query heads that share a key head share its gathered keys. Nothing is copied per head but the rows asked for.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.scores import biased_scores, cap_and_bias

AT_ONCE = 2**19
"""Weights computed at a time: 2 MiB of float32, which fit into the CPU cache."""

MOST = 80.0
"""The limit of a score minus its row's lse; only hidden pairs exceed it. exp(80) is finite in float32."""


def chunks(weights: Weights, blocks: int, pairs: int) -> Iterator[slice]:
    """Ranges of blocks, each of `pairs` pairs, that together are about `AT_ONCE` weights of all heads."""
    batch, heads = weights.shape[:2]
    step = max(1, AT_ONCE // max(1, batch * heads * pairs))
    return (slice(start, start + step) for start in range(0, blocks, step))


def scaled_queries(weights: Weights, rows: Tensor) -> Tensor:
    """scale * q at `rows`, int64 [blocks, r], in the order of `dots`: [batch, kv_heads, blocks, group, r, qk_dim]."""
    q = weights.q.unflatten(1, (weights.k.shape[1], -1))
    return _gather(q, rows[:, None]).to(weights.dtype) * weights.scale  # q is smaller than its products


def dots(weights: Weights, q: Tensor, keys: Tensor) -> Tensor:
    """scale * q . k of blocks: of queries from `scaled_queries`, and keys at `keys`, int64 [blocks, c].

    Returns:
        [batch, kv_heads, blocks, group, r, c].
    """
    k = _gather(weights.k[:, :, None], keys[:, None])[:, :, :, 0].to(weights.dtype)
    return (q.flatten(3, 4) @ k.mT).unflatten(3, q.shape[3:5])


def weighed(weights: Weights, dots: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The weights at pairs with these dot products [batch, kv_heads, blocks, group, ...], which are overwritten.

    The caller applies the mask: weights of hidden pairs are any value up to exp(`MOST`), or NaN.

    Args:
        rows, keys: int64, of the axes after the group, [blocks, ...] each; they broadcast.
    """
    if weights.bias is None:
        scores = cap_and_bias(dots, weights.softcap, None)
    else:
        scores = biased_scores(dots, weights.softcap, weights.bias, coordinates(weights, rows, keys))
    heads = weights.k.shape[1], -1
    of_rows = weights.totals.at(lambda t: _gather(t.unflatten(1, heads)[..., None], rows[:, None])[..., 0])
    return of_rows.logs(scores).clamp_(max=MOST).exp_()


def kept(weights: Weights, rows: Tensor, keys: Tensor) -> Tensor:
    """Whether the mask keeps pairs: bool, which broadcasts to [batch, kv_heads, blocks, group, ...] of as many axes."""
    axes = rows.ndim + 3
    if weights.mask is None:
        return torch.ones((1,) * axes, dtype=torch.bool, device=rows.device)
    found = weights.mask.keep(*coordinates(weights, rows, keys))
    return found[(None,) * (axes - found.ndim)]


def coordinates(weights: Weights, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(b, h, q, k) as masks and biases take them, in the order of `dots`."""
    batch, heads = weights.shape[:2]
    kv_heads, device, axes = weights.k.shape[1], rows.device, (1,) * (rows.ndim - 1)
    b = torch.arange(weights.sequence, weights.sequence + batch, device=device).view(-1, 1, 1, 1, *axes)
    h = torch.arange(heads, device=device).view(kv_heads, 1, -1, *axes)
    return b, h, (rows + weights.offset)[:, None], keys[:, None]


def summed(weights: Tensor, visible: Tensor) -> Tensor:
    """The sum of the visible weights over the last axis; `visible` is 1 or 0 in their type, and broadcasts.

    A product with 0 and 1 takes a small part of the time of filling by a mask; it is filled where the product fails,
    because hidden keys are NaN. On a GPU it is filled always, as the host would wait to know.
    """
    if not weights.is_cpu:
        return weights.where(visible > 0, 0.0).sum(-1)
    found = (weights * visible).sum(-1)
    return weights.where(visible > 0, 0.0).sum(-1) if bool(found.isnan().any()) else found


def by_head(found: Tensor) -> Tensor:
    """[batch, kv_heads, blocks, group, ...] as [batch, heads, blocks, ...]."""
    return found.movedim(3, 2).flatten(1, 2)


class WholeRows(NamedTuple):
    """The weights of some rows of one sequence, and which keys are visible; see `whole_rows`."""

    weights: Tensor  # [1, heads, rows, keys], 0 where hidden
    visible: Tensor  # bool, broadcasts to [1, heads, rows, keys]

    @property
    def top_key(self) -> Tensor:
        """The first key with the largest weight, int64 [heads, rows]; 0 for a row without weights."""
        return self.weights[0].argmax(-1)

    @property
    def attends(self) -> Tensor:
        """Whether a row has weights, bool [heads, rows]: not if it is fully masked, or a sink takes all."""
        return self.weights[0].amax(-1) > 0


def whole_rows(weights: Weights, rows: Tensor) -> WholeRows:
    """The weights of rows of a batch of one, int64 [rows], for a few rows: they are built in full."""
    keys = torch.arange(weights.shape[3], device=rows.device)[None]
    i, j = rows[None, :, None], keys[:, None]
    visible = kept(weights, i, j)
    a = weighed(weights, dots(weights, scaled_queries(weights, rows[None]), keys), i, j)
    return WholeRows(by_head(a.where(visible, 0.0))[:, :, 0], by_head(visible)[:, :, 0])


def rows_at_once(weights: Weights) -> int:
    """The number of rows whose weights, of all heads, are about `AT_ONCE`."""
    return max(1, AT_ONCE // max(1, weights.shape[1] * weights.shape[3]))


def _gather(t: Tensor, index: Tensor) -> Tensor:
    """Tokens of [batch, kv_heads, group, tokens, dim] at [blocks, 1, ...]: [batch, kv_heads, blocks, group, ..., dim].

    As whole rows of memory, whether heads or tokens come first there; other layouts are copied once.
    """
    batch, kv_heads, group, tokens, dim = t.shape
    heads = kv_heads * group
    tokens_first = t.permute(0, 3, 1, 2, 4)
    swapped = tokens_first.is_contiguous()
    flat = (tokens_first if swapped else t).reshape(-1, dim)
    of_head, of_token = (1, heads) if swapped else (tokens, 1)
    axes = (1,) * (index.ndim - 2)
    start = torch.arange(batch, device=t.device)[:, None] * heads * tokens
    start = start + torch.arange(heads, device=t.device) * of_head
    at = start.view(batch, kv_heads, 1, group, *axes) + index * of_token
    return flat.index_select(0, at.flatten()).view(*at.shape, dim)
