"""The gradients of rows whose log-sum-exp is too far from 0 to tell how many keys share the weight of a row.

A finite number in place of -inf (-1e9, or the least one of a type) that hides every key of a row lowers all its scores
alike: the softmax of such a row is that of what is left of the scores, as torch's definition computes it. The library
takes weights from `exp(score - lse)`, and in float32 -1e9 plus the logarithm of n is -1e9: each of n keys would get
weight 1 in place of 1 / n, and the gradients would be n times too large, as those of torch's fused kernel are. Large
queries, keys or scales do the same without a bias. So these few rows are computed here, by the softmax itself. Rows
whose gradient is 0, as in padding, need nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.backend.native_inputs import Inputs
from regard.plan.far_lse import FAR_LSE
from regard.plan.problem import Problem
from regard.seeds import dropout_threshold
from regard.state import State

SCORES = 1 << 22
"""Scores computed at once."""


def far_rows(state: State, dout: Tensor, dlse: Tensor | None) -> Tensor | None:
    """The far rows that have a gradient, bool [batch, heads, queries]; None if there are none.

    Without rows whose output is not finite: the kernel gives what they see gradients that are not finite either.
    """
    if not state.lse.numel():
        return None
    limit, (low, high) = FAR_LSE[state.lse.dtype], torch.aminmax(state.lse)
    if -limit <= low.item() and high.item() <= limit:  # most often; not with an empty row, nor with NaN
        return None
    size = state.lse.abs()
    far = (size > limit) & (size < torch.inf)
    if not far.any():
        return None
    far &= torch.isfinite(state.out).all(-1)
    moves = (dout != 0).any(-1)
    far &= moves if dlse is None else moves | (dlse != 0)
    return far if far.any() else None


class Rows(NamedTuple):
    """The rows of a call."""

    problem: Problem
    inputs: Inputs
    keep: Callable[[Tensor], Tensor]  # queries, int64 [rows], to bool [batch or 1, heads or 1, rows, keys]
    seed: int  # of dropout

    def gradients(self, far: Tensor, dout: Tensor, dlse: Tensor | None) -> list[Tensor | None]:
        """The gradients of the far rows for the first six inputs, float32 or float64; None where there is no input.

        Keys and values that are not finite are left out: 0 * NaN would reach the rows that do not see them.

        Args:
            far: bool [batch, heads, queries].
        """
        dtype = torch.promote_types(self.inputs.q.dtype, torch.float32)
        parts = [None if t is None else t.detach().to(dtype) for t in self.inputs[:6]]
        parts[1:3] = [None if t is None else t.nan_to_num(0.0, 0.0, 0.0) for t in parts[1:3]]
        leaves = [t.requires_grad_() for t in parts if t is not None]
        sums = [torch.zeros_like(t) for t in leaves]
        batch, heads, keys = far.shape[0], far.shape[1], self.inputs.k.shape[2]
        at_once = max(SCORES // max(batch * heads * keys, 1), 1)
        group = self.problem.heads // self.problem.kv_heads
        finite = torch.isfinite(self.inputs.k).all(3).repeat_interleave(group, dim=1)[:, :, None]
        for rows in torch.split(far.any(0).any(0).nonzero()[:, 0], at_once):
            here = far[:, :, rows]
            with torch.enable_grad():
                out, lse = self._attend(Inputs(*parts), rows, here, finite)  # pyright: ignore[reportArgumentType]
            outputs, moves = [out], [dout[:, :, rows].to(dtype).where(here[..., None], 0)]
            if dlse is not None:
                outputs, moves = [out, lse], [*moves, dlse[:, :, rows].where(here, 0)]
            found = torch.autograd.grad(outputs, leaves, moves, allow_unused=True, materialize_grads=True)
            for total, grad in zip(sums, found, strict=True):
                total.add_(grad)
        each = iter(sums)
        return [None if t is None else next(each) for t in parts]

    def _attend(self, i: Inputs, rows: Tensor, far: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of the far rows of these queries, by the definition of attention; those of others are not used.

        Args:
            far: bool [batch, heads, rows].
            finite: whether keys are finite, bool [batch, heads, 1, keys].
        """
        p, keys = self.problem, torch.arange(i.k.shape[2])
        of_heads = p.batch, p.heads, len(rows)
        of_groups = p.batch, p.kv_heads, p.heads // p.kv_heads * len(rows)  # heads that share keys are one matrix
        q = i.q[:, :, rows].where(far[..., None], 0)
        scores = p.scale * (q.reshape(*of_groups, i.q.shape[3]) @ i.k.mT).view(*of_heads, len(keys))
        keep = self.keep(rows) & finite
        if p.softcap is not None:
            scores = p.softcap * torch.tanh(scores.where(keep, 0) / p.softcap)  # a hidden product may be inf - inf
        if i.distance is not None:
            scores = scores + i.distance[:, rows[:, None] - keys + (len(keys) - 1)]
        if i.bias is not None:
            scores = scores + (i.bias if i.bias.shape[2] == 1 else i.bias[:, :, rows])
        scores = scores.where(keep, -torch.inf).where(far[..., None], 0)
        top = scores.detach().amax(-1, keepdim=True)  # of logsumexp itself, each key would have the gradient 1
        rest, weights = (scores - top).logsumexp(-1, keepdim=True), scores.softmax(-1)
        if i.sink is not None:
            weights = weights * torch.sigmoid(rest + (top - i.sink[:, None, None]))  # a column of +inf would give NaN
        if p.dropout:
            gone = dropped(self.seed, p.dropout, torch.arange(p.batch * p.heads).view(p.batch, p.heads), rows, keys)
            weights = weights.masked_fill(gone, 0) / (1 - p.dropout)
        weights = weights.where(keep, 0)  # a hidden value times the gradient of out may be inf
        out = (weights.reshape(*of_groups, len(keys)) @ i.v).view(*of_heads, i.v.shape[3])
        return out, (rest + top)[..., 0]


def dropped(seed: int, dropout: float, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The weights that dropout drops, bool [*head, queries, keys]: the hash of native/dropout.h.

    Args:
        head: int64, batch row * heads + head.
        query, key: int64 [queries] and [keys], their places in the call.
    """
    low = 0xFFFFFFFF
    of_head = _mixed(_mixed(torch.tensor(seed & low)) ^ ((seed >> 32) + 0x9E3779B9 * head & low))
    of_row = _mixed(of_head[..., None] + 0x85EBCA6B * query & low)
    bits = _mixed(of_row[..., None] ^ _mixed(0xC2B2AE35 * key + 0x27D4EB2F & low))
    return bits < dropout_threshold(dropout)


def _mixed(x: Tensor) -> Tensor:
    """32 bits mixed, in int64."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
