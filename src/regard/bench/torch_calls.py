"""The same call with torch's `scaled_dot_product_attention`, in all equivalent forms; the fastest one is compared."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.case import Case
from regard.bench.limits import MEMORY
from regard.describe.mask import CallSizes, Mask
from regard.describe.mask_by_rule import Causal

TorchCall = Callable[[Tensor, Tensor, Tensor], Tensor]

LARGEST = MEMORY // 16
"""Bytes of the largest mask that is built for torch; building takes several times as much."""


def torch_calls(case: Case, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, TorchCall]:
    """The equivalent calls of torch, by name. Masks and biases are made here, outside of the timed call.

    Empty where torch cannot compute the case (`refusal` says why).
    """
    if refusal(case, dtype, options) is not None:
        return {}
    mask, bias = options.get("mask"), options.get("bias")
    if case.queries == 1 and mask == Causal():
        mask = None  # the last token sees all keys
    if mask is None and bias is None:
        return _without_mask(case)
    if bias is None and mask == Causal() and case.queries == case.keys:
        return {"is_causal": lambda q, k, v: _sdpa(q, k, v, is_causal=True)}
    tensors = dense(case, dtype, mask, bias)
    return {name: lambda q, k, v, m=m: _sdpa(q, k, v, attn_mask=m) for name, m in tensors.items()}


def refusal(case: Case, dtype: torch.dtype, options: dict[str, Any]) -> str | None:
    """Why torch is not measured; None where it is."""
    if case.softcap is not None:
        return "torch's fused attention has no softcap"
    mask, bias = options.get("mask"), options.get("bias")
    if (mask is None or mask == Causal()) and bias is None:
        return None
    batches, heads = _broadcast_shape(case, mask, bias)
    size = batches * heads * case.queries * case.keys * dtype.itemsize
    return f"its mask alone would take {size / 2**30:,.0f} GiB" if size > LARGEST else None


def dense(case: Case, dtype: torch.dtype, mask: Mask | None, bias: Any) -> dict[str, Tensor]:
    """Mask and bias as tensors that broadcast to [batch, heads, queries, keys]: additive, and bool without a bias."""
    offset = case.keys - case.queries
    batches, heads = _broadcast_shape(case, mask, bias)
    b, h = torch.arange(batches)[:, None, None, None], torch.arange(heads)[:, None, None]
    q, k = torch.arange(case.queries)[:, None] + offset, torch.arange(case.keys)
    sizes = CallSizes(case.batch, case.heads, case.queries, case.keys, offset)
    keep = torch.ones(1, 1, dtype=torch.bool) if mask is None else mask.bind(sizes).keep(b, h, q, k)
    values = torch.zeros(1, 1, dtype=dtype) if bias is None else bias.bind(sizes).value(b, h, q, k).to(dtype)
    added = torch.where(keep, values, -torch.inf)
    return {"additive mask": added} if bias is not None else {"bool mask": keep, "additive mask": added}


def _without_mask(case: Case) -> dict[str, TorchCall]:
    calls: dict[str, TorchCall] = {"no mask": _sdpa}
    if case.queries == 1 and case.kv_heads < case.heads:
        group = case.heads // case.kv_heads

        def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """The heads of a group as the queries of one head."""
            out = _sdpa(q.view(case.batch, case.kv_heads, group, case.dim), k, v)
            return out.view(case.batch, case.heads, 1, -1)

        calls["heads as queries"] = grouped
    return calls


def _sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=shared)


def _broadcast_shape(case: Case, mask: Mask | None, bias: Any) -> tuple[int, int]:
    """The batch rows and heads over which mask and bias differ: (1 or batch, 1 or heads)."""
    shape = (1, 1) if mask is None else mask.broadcast_shape()
    heads = case.heads if bias is not None else shape[1]
    return (case.batch if shape[0] > 1 else 1), (case.heads if heads > 1 else 1)
