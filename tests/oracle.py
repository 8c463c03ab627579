"""The independent judge: `regard.backend.definition` in float64, with the formula of every score beside it."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.backend import definition
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


def kept(case: Case) -> Tensor:
    """The mask, dense: bool [batch, heads, queries, keys]."""
    return definition.kept(case.words.get("mask"), *case.q.shape[:3], case.k.shape[2], case.words.get("offset"))


def dense(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition, computed in `dtype`: float64 is the judge, a call's type "naive"."""
    names = ("mask", "bias", "scale", "softcap", "sink", "offset")
    options: dict[str, Any] = {name: case.words[name] for name in names if name in case.words}
    score: Score | None = case.words.get("score")
    compare = None if score is None or isinstance(score, Dot) else partial(compared, score)
    return definition.attention(case.q, case.k, case.v, compare=compare, dtype=dtype, **options)


def compared(score: Score, q: Tensor, k: Tensor) -> Tensor:
    """The score of every pair from its formula, in the type of q; k has a head for each of q's."""

    def per_head(w: Tensor, heads: int) -> Tensor:
        return w.to(q.dtype).repeat_interleave(heads // w.shape[0], dim=0) if w.ndim == 3 else w.to(q.dtype)

    match score:
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


def worst(found: Tensor, truth: Tensor) -> float:
    """The largest absolute difference, where both are infinite in the same places."""
    same = torch.equal(torch.isinf(found), torch.isinf(truth)) and torch.equal(torch.isnan(found), torch.isnan(truth))
    if not same:
        return float("inf")
    finite = torch.isfinite(truth)
    return float((found.double() - truth.double())[finite].abs().max()) if bool(finite.any()) else 0.0
