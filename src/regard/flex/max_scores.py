"""The greatest score of each query, after `score_mod` and under the mask.

Kernels do not return it, so it is computed apart. It has no gradient, as in torch.
"""

import torch
from torch import Tensor

from regard.describe.mask import Mask, kept_pairs
from regard.flex.trace import Mod, element_by_element

SCORES = 1 << 22
"""Scores computed at once."""


@torch.no_grad()
def max_scores(q: Tensor, k: Tensor, score_mod: Mod | None, mask: Mask | None, scale: float) -> Tensor:
    """[batch, heads, queries], -inf for a query that sees no key; float32, or float64 for float64."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    k = k.to(wide).repeat_interleave(heads // k.shape[1], dim=1)
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    step = max(1, SCORES // max(1, batch * heads * keys))
    found = [q.new_empty((batch, heads, 0), dtype=wide)]
    for start in range(0, queries, step):
        rows = torch.arange(start, min(start + step, queries))
        scores = scale * q[:, :, rows].to(wide) @ k.mT
        at = b, h, rows[:, None], torch.arange(keys)
        if score_mod is not None:
            scores = element_by_element(score_mod, scores, *at)
        if mask is not None:
            scores = torch.where(kept_pairs(mask, *at), scores, -torch.inf)
        found.append(scores.amax(dim=3))
    return torch.cat(found, dim=2)
