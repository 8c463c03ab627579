"""FlexAttention as its documentation defines it: every score, changed one by one, in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.flex.trace import element_by_element

Mod = Callable[..., Tensor]


def attended(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, mask_mod: Mod | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, differentiable; 0 and -inf for a query that sees no key."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, dim=1), v.double().repeat_interleave(group, dim=1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = element_by_element(score_mod, scores, *at).double()
    if mask_mod is not None:
        scores = torch.where(element_by_element(mask_mod, *at), scores, -torch.inf)
    lse = scores.logsumexp(dim=3)
    seen = lse > -torch.inf
    weights = torch.exp(scores - torch.where(seen, lse, 0.0)[..., None])
    return torch.where(seen[..., None], weights, 0.0) @ v, lse


def visible(lse: Tensor) -> Tensor:
    """The log-sum-exp with 0 for queries that see no key."""
    return torch.where(lse > -torch.inf, lse, 0.0)
