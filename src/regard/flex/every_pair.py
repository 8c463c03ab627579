"""What is computed from the score of every pair: the greatest scores, and calls that no kernel can run."""

import torch
from torch import Tensor

from regard.describe.mask import CallSizes, Mask, kept_pairs
from regard.describe.mask_by_table import TensorMask
from regard.flex.trace import Mod, element_by_element
from regard.state import State
from regard.wide import wide_of

SCORES = 1 << 22
"""Scores computed at once."""

Places = tuple[Tensor, Tensor, Tensor, Tensor]
"""Batch row, head, query and key of pairs, as tensors that broadcast."""


@torch.no_grad()
def max_scores(q: Tensor, k: Tensor, score_mod: Mod | None, mask: Mask | None, scale: float) -> Tensor:
    """The greatest score of each query, after `score_mod` and under the mask. It has no gradient, as in torch.

    Returns:
        [batch, heads, queries], -inf for a query that sees no key; float32, or float64 for float64.
    """
    rows = max(1, SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    found = [q.new_empty((*q.shape[:2], 0), dtype=wide_of(q.dtype))]
    for start in range(0, q.shape[2], rows):
        at = _places(q, k, start, min(start + rows, q.shape[2]))
        found.append(_scores(q[:, :, start : start + rows], k, score_mod, mask, scale, at).amax(dim=3))
    return torch.cat(found, dim=2)


def attend_every_pair(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod, mask: Mask | None, scale: float) -> State:
    """The state of a call by torch's own operators, all scores in memory; differentiable."""
    scores = _scores(q, k, score_mod, mask, scale, _places(q, k, 0, q.shape[2]))
    most = scores.detach().amax(dim=3, keepdim=True)
    weights = torch.exp(scores - torch.where(most > -torch.inf, most, 0.0))
    total = weights.sum(dim=3, keepdim=True)
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    v = v.to(scores.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    lse = torch.where(seen, most + total.log(), -torch.inf)
    return State(weights @ v / total, lse[..., 0])


def tabulated(mask: Mask, sizes: CallSizes) -> Mask:
    """The mask as a table of its pairs."""
    b, h, q, k = (torch.arange(size, device="cpu") for size in sizes[:4])
    batch, heads = mask.broadcast_shape()
    return TensorMask(kept_pairs(mask, b[:batch, None, None, None], h[:heads, None, None], q[:, None], k))


def _places(q: Tensor, k: Tensor, start: int, stop: int) -> Places:
    batch, heads, keys = (torch.arange(size, device="cpu") for size in (*q.shape[:2], k.shape[2]))
    queries = torch.arange(start, stop, device="cpu")
    return batch[:, None, None, None], heads[:, None, None], queries[:, None], keys


def _scores(q: Tensor, k: Tensor, score_mod: Mod | None, mask: Mask | None, scale: float, at: Places) -> Tensor:
    """[batch, heads, queries, keys], -inf for pairs that are hidden; float32, or float64 for float64."""
    wide = wide_of(q.dtype)
    scores = scale * q.to(wide) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    if score_mod is not None:
        scores = element_by_element(score_mod, scores, *at).to(wide)
    return scores if mask is None else torch.where(kept_pairs(mask, *at), scores, -torch.inf)
