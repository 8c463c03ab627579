"""The independent judge: attention in float64 from the formula, dense, with nothing of regard's engines."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard import Bias, Mask
from regard.describe.mask import CallSizes
from regard.scores import Additive, Bilinear, Cosine, Dot, Epanechnikov, Gaussian, Laplacian, Score


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
    return mask.bind(CallSizes(*sizes, int(q[0]) if len(q) else 0)).keep(b, h, q, k).expand(sizes)


def dense(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(out, lse) computed in `dtype` with all scores at once: float64 is the judge, a call's type "naive"."""
    q, k, v = (t.to(dtype) for t in (case.q, case.k, case.v))
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    words = case.words
    scores = compared(words.get("score"), q, k) * scale_of(case)
    if (cap := words.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    bias: Bias | None = words.get("bias")
    if bias is not None:
        for term in bias.terms():
            scores = scores + term.value(*positions(case)).to(dtype)
    keep = kept(case) & (scores > -torch.inf)
    scores = scores.masked_fill(~keep, -torch.inf)
    seen = keep.any(dim=3, keepdim=True)
    sink: Tensor | None = words.get("sink")
    column = [] if sink is None else [sink.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)]
    weights = torch.softmax(torch.cat([scores, *column], dim=3), dim=3)[..., : scores.shape[3]]
    weights = torch.where(seen & keep, weights, 0.0)
    safe = torch.where(seen, scores, 0.0)
    lse = torch.where(seen[..., 0], torch.logsumexp(safe, dim=3), -torch.inf)
    return weights @ v, lse


def compared(score: Score | None, q: Tensor, k: Tensor) -> Tensor:
    """The score of every pair from its formula, in the type of q; k has a head for each of q's."""

    def per_head(w: Tensor, heads: int) -> Tensor:
        return w.to(q.dtype).repeat_interleave(heads // w.shape[0], dim=0) if w.ndim == 3 else w.to(q.dtype)

    match score:
        case None | Dot():
            return q @ k.mT
        case Cosine():
            norms = q.norm(dim=3)[..., :, None] * k.norm(dim=3)[..., None, :]
            return torch.where(norms > 0, q @ k.mT / norms, 0.0)
        case Bilinear(w):
            return q @ w.to(q.dtype) @ k.mT
        case Additive(w_q, w_k, v):
            hidden_q, hidden_k = q @ per_head(w_q, q.shape[1]).mT, k @ per_head(w_k, q.shape[1]).mT
            v = v.to(q.dtype) if v.ndim == 1 else v.to(q.dtype)[:, None, None]
            return (torch.tanh(hidden_q[..., :, None, :] + hidden_k[..., None, :, :]) * v).sum(-1)
        case Gaussian(h):
            return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / (2 * h * h)
        case Laplacian(h):
            return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1) / h
        case Epanechnikov(h):
            kernel = 1 - (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / (h * h)
            return torch.where(kernel > 0, kernel.clamp(min=0), 0.0).log()
        case _:
            raise AssertionError(score)


def scale_of(case: Case) -> float:
    """What the call multiplies its scores with."""
    scale: float | None = case.words.get("scale")
    if scale is not None:
        return scale
    return case.q.shape[3] ** -0.5 if isinstance(case.words.get("score"), Dot | None) else 1.0


def worst(found: Tensor, truth: Tensor) -> float:
    """The largest absolute difference, where both are infinite in the same places."""
    same = torch.equal(torch.isinf(found), torch.isinf(truth)) and torch.equal(torch.isnan(found), torch.isnan(truth))
    if not same:
        return float("inf")
    finite = torch.isfinite(truth)
    return float((found.double() - truth.double())[finite].abs().max()) if bool(finite.any()) else 0.0
