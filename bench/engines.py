"""What `attend` takes on real problems, beside torch's `scaled_dot_product_attention` given the same mask."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import interleaved, table
from bench.problems import PROBLEMS, Case
from regard import Causal, attend, explain
from regard.describe.mask import Frame


def run() -> str:
    """The table, in Markdown."""
    rows = [_row(name, case) for name, case in PROBLEMS.items()]
    return table(
        ("problem", "engine", "regard ms", "torch ms", "torch / regard", "GFLOP of kept pairs", "GFLOP/s"), rows
    )


def _row(name: str, case: Case) -> tuple[str, ...]:
    q, k, v = case.tensors()
    words: dict[str, Any] = {"mask": case.mask and case.mask(), "bias": case.bias and case.bias()}
    plan = explain(q, k, v, **words)
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: attend(q, k, v, **words),
        "torch": _torch(case, q, k, v, words),
    }
    seconds = interleaved(runs)
    gflop = plan.flops / 1e9
    return (
        name,
        plan.backend,
        f"{1e3 * seconds['ours']:.2f}",
        f"{1e3 * seconds['torch']:.2f}",
        f"{seconds['torch'] / seconds['ours']:.2f}x",
        f"{gflop:.3g}",
        f"{gflop / seconds['ours']:.0f}",
    )


def _torch(case: Case, q: Tensor, k: Tensor, v: Tensor, words: dict[str, Any]) -> Callable[[], object]:
    """The same call by torch: `is_causal` where that says it, else the mask (and bias) as a tensor, made beforehand."""
    square = case.queries == case.keys
    if words["bias"] is None and (words["mask"] == Causal() and (square or case.queries == 1)):
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=square, enable_gqa=True)
    mask = _dense(case, words)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _dense(case: Case, words: dict[str, Any]) -> Tensor:
    offset = case.keys - case.queries
    b, h = torch.arange(case.batch)[:, None, None, None], torch.arange(case.heads)[:, None, None]
    q, k = torch.arange(case.queries)[:, None] + offset, torch.arange(case.keys)
    keep = words["mask"].at(Frame(case.batch, case.heads, case.queries, case.keys, offset)).keep(b, h, q, k)
    if words["bias"] is None:
        return keep
    return words["bias"].value(b, h, q, k).float().masked_fill(~keep, -torch.inf)
