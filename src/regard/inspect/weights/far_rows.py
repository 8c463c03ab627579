"""The log of the softmax denominator in two numbers, where one does not tell how many keys share the weight of a row.

A finite number in place of -inf (-1e9, or the least one of a type) that hides every key of a row lowers all its scores
alike: the denominator's log is -1e9 plus the logarithm of n, which in float32 is -1e9, and each of n weights would be
1 in place of 1 / n. So the scores of these few rows are computed once more, and their weights are

    A[i, j] = exp((s[i, j] - top[i]) - rest[i])      top = max_j s[i, j],  rest = ln sum_j exp(s[i, j] - top[i])
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from regard.inspect.weights.scores import CallScores
from regard.plan.far_lse import FAR_LSE

SCORES = 1 << 20
"""Scores computed at once."""


@dataclass(frozen=True, eq=False)
class Totals:
    """The log of the softmax denominator of each row as top + rest, the sink included; 0 for a row without weights.

    Args:
        top: [batch, heads, queries].
        rest: of the same shape; None where one number suffices for every row.
    """

    top: Tensor
    rest: Tensor | None = None

    def at(self, index: Callable[[Tensor], Tensor]) -> Self:
        """Those of some rows, which `index` takes from a tensor [batch, heads, queries]."""
        return type(self)(index(self.top), None if self.rest is None else index(self.rest))

    def logs(self, scores: Tensor) -> Tensor:
        """The logarithms of the weights with these scores, which are overwritten."""
        scores = scores.sub_(self.top)
        return scores if self.rest is None else scores.sub_(self.rest).clamp_(max=0.0)


def totals(call: CallScores, total: Tensor) -> Totals:
    """The two numbers of each row.

    On a GPU, the rows of a call without a bias are not looked at, as the host would wait to know.

    Args:
        total: one number for each row, [batch, heads, queries].
    """
    top = total.expand(call.shape[:3]).masked_fill(total == -torch.inf, 0.0)
    if call.bias is None and not top.is_cpu:
        return Totals(top)
    far = (top.abs() > FAR_LSE[top.dtype]) & ~top.isinf()
    rows = far.any(0).any(0).nonzero()[:, 0]
    if not len(rows):
        return Totals(top)
    rest, (batch, heads, _, keys) = torch.zeros_like(top), call.shape
    for some in rows.split(max(1, SCORES // max(1, batch * heads * keys))):
        columns = _columns(call, some)
        largest, own = columns.amax(-1), far[:, :, some]
        sums = columns.sub_(largest[..., None]).exp_().sum(-1)
        top[:, :, some] = torch.where(own, largest, top[:, :, some])
        rest[:, :, some] = torch.where(own, sums.log(), 0.0)
    return Totals(top, rest)


def _columns(call: CallScores, rows: Tensor) -> Tensor:
    """The scores of rows, -inf where the mask hides a key, with the sink as one more: [batch, heads, rows, columns]."""
    scores, i, j = call.score_rows(rows, slice(0, call.shape[3]))
    scores = scores.masked_fill_(~call.keep(i, j), -torch.inf)
    if call.sink is None:
        return scores
    return torch.cat([scores, call.sink.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], -1)
