"""The definition of attention: what every backend computes, as one formula over all pairs of queries and keys.

    s = softcap * tanh(scale * compare(q, k) / softcap) + bias       scores [batch, heads, queries, keys]
    w = exp(s) / (exp(sink) + sum of exp(s) over the kept keys)      weights; 0 for a key that is not kept
    out = (dropout * w) @ v                                          dropout: 0 or 1 / (1 - p) for each pair
    lse = log(sum of exp(s) over the kept keys)                      without the sink

A query that keeps no key has out 0 and lse -inf. Read this file first; the tests hold every backend to it, in float64.
Nothing at run time uses it, since it needs memory for queries x keys: `reference.py` is the backend that runs
everything.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.mask import CallSizes, Mask, kept_pairs


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    compare: Callable[[Tensor, Tensor], Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: Tensor | None = None,
    offset: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention by the formula, differentiable, with all scores in memory at once.

    Args:
        q: [batch, heads, queries, qk_dim].
        k: [batch, kv_heads, keys, qk_dim]; heads is a whole multiple of kv_heads (grouped-query attention).
        v: [batch, kv_heads, keys, v_dim].
        mask: which query may look at which key; None for all.
        bias: what is added to scores.
        compare: scores [batch, heads, queries, keys] of q and k, which has `heads` heads then; None for dot products.
        scale: factor of the scores; None for `qk_dim ** -0.5`, or 1 with `compare`.
        softcap: c of c * tanh(s / c).
        sink: [heads], the logit of one more column, which takes weight and has no value.
        dropout: the factor of each weight, broadcastable to [batch, heads, queries, keys].
        offset: position of the first query; None puts the last query at the last key.
        dtype: precision of the computation.

    Returns:
        (out [batch, heads, queries, v_dim], lse [batch, heads, queries]), both in `dtype`.

    >>> from regard import Causal
    >>> q, k, v = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), torch.tensor([[[[1.0], [3.0]]]])
    >>> out, lse = attention(q, k, v, mask=Causal())
    >>> out.flatten().tolist(), lse.exp().flatten().tolist()  # the first token sees itself, the second sees both
    ([1.0, 2.0], [1.0, 2.0])
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    b, h, i, j = positions(*sizes, offset)

    if compare is None:
        s = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    else:
        s = compare(q, k) * (1.0 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    bound = None if bias is None else bias.bind(CallSizes(*sizes, sizes[3] - sizes[2] if offset is None else offset))
    for term in [] if bound is None else bound.terms():
        s = s + term.value(b, h, i, j).to(dtype)
    keep = kept(mask, *sizes, offset) & (s > -torch.inf)
    s = s.masked_fill(~keep, -torch.inf)
    sees = keep.any(dim=3, keepdim=True)
    column = [] if sink is None else [sink.to(dtype)[:, None, None].expand(*sizes[:3], 1)]
    w = torch.softmax(torch.cat([s, *column], dim=3), dim=3)[..., : sizes[3]]
    w = torch.where(keep & sees, w, 0.0)
    lse = torch.logsumexp(torch.where(sees, s, 0.0), dim=3).masked_fill(~sees[..., 0], -torch.inf)
    return (w if dropout is None else w * dropout) @ v, lse


def positions(
    batch: int, heads: int, queries: int, keys: int, offset: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch rows, heads, and positions of queries and keys, which broadcast to [batch, heads, queries, keys]."""
    first = keys - queries if offset is None else offset
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    return b, h, torch.arange(first, first + queries)[:, None], torch.arange(keys)


def kept(mask: Mask | None, batch: int, heads: int, queries: int, keys: int, offset: int | None = None) -> Tensor:
    """Every pair of the mask, bool [batch, heads, queries, keys]."""
    sizes = (batch, heads, queries, keys)
    if mask is None:
        return torch.ones(sizes, dtype=torch.bool)
    bound = mask.bind(CallSizes(*sizes, keys - queries if offset is None else offset))
    return kept_pairs(bound, *positions(*sizes, offset)).expand(sizes)
