"""The independent judge: attention in float64 from the formula, dense, with nothing of regard's engines."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard import Bias, Mask
from regard.describe.mask import Frame


@dataclass(repr=False)
class Case:
    """A call, as the tensors and words that are handed to `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    words: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Case(q {list(self.q.shape)}, k {list(self.k.shape)}, v {list(self.v.shape)}, {self.words})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every number

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.words)


def positions(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q and k positions, broadcasting to [batch, heads, queries, keys]."""
    batch, heads, queries, _ = case.q.shape
    keys = case.k.shape[2]
    offset = case.words.get("offset")
    start = keys - queries if offset is None else offset
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    return b, h, torch.arange(queries)[:, None] + start, torch.arange(keys)


def kept(case: Case) -> Tensor:
    """The mask, dense: bool [batch, heads, queries, keys]."""
    sizes = (*case.q.shape[:3], case.k.shape[2])
    mask: Mask | None = case.words.get("mask")
    if mask is None:
        return torch.ones(sizes, dtype=torch.bool)
    b, h, q, k = positions(case)
    return mask.at(Frame(*sizes, int(q[0]) if len(q) else 0)).keep(b, h, q, k).expand(sizes)


def dense(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(out, lse) computed in `dtype` with all scores at once: float64 is the judge, a call's type "naive"."""
    q, k, v = (t.to(dtype) for t in (case.q, case.k, case.v))
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    words = case.words
    scale = words.get("scale")
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if (cap := words.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    bias: Bias | None = words.get("bias")
    if bias is not None:
        for term in bias.terms():
            scores = scores + term.value(*positions(case)).to(dtype)
    keep = kept(case)
    scores = scores.masked_fill(~keep, -torch.inf)
    seen = keep.any(dim=3, keepdim=True)
    sink: Tensor | None = words.get("sink")
    column = [] if sink is None else [sink.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)]
    weights = torch.softmax(torch.cat([scores, *column], dim=3), dim=3)[..., : scores.shape[3]]
    weights = torch.where(seen & keep, weights, 0.0)
    safe = torch.where(seen, scores, 0.0)
    lse = torch.where(seen[..., 0], torch.logsumexp(safe, dim=3), -torch.inf)
    return weights @ v, lse


def worst(found: Tensor, truth: Tensor) -> float:
    """The largest absolute difference, where both are infinite in the same places."""
    same = torch.equal(torch.isinf(found), torch.isinf(truth)) and torch.equal(torch.isnan(found), torch.isnan(truth))
    if not same:
        return float("inf")
    finite = torch.isfinite(truth)
    return float((found.double() - truth.double())[finite].abs().max()) if bool(finite.any()) else 0.0
