"""The largest weight of each row, and where it is: how sure a head is, and whether by position alone."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspect.measures.means import counted, mean_over_rows, one_in
from regard.inspect.measures.score import HeadScores
from regard.inspect.sweep import Sweep
from regard.inspect.weights.lazy import Weights


class Positional(NamedTuple):
    """How often each head looks at the same distance, and which one that is; see `positional`."""

    share: HeadScores
    offset: Tensor  # int64 [batch, heads]


def confidence(weights: Weights, swept: Sweep, rows: Tensor | None = None) -> HeadScores:
    """The mean of the largest weight of a row: mean over rows of max_j A[i, j].

    Voita et al. 2019, arXiv:1905.09418, §4, who leave out the end-of-sentence token: here every token counts, so that a
    head with a sink is confident; read it beside `sink`. Chance: mean of 1 / visible keys.

    >>> from regard.inspect.sweep import sweep
    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> confidence(weights, sweep(weights))  # the mean of 1, 1/2 and 1/3
    HeadScores(value=tensor([[0.6111]]), chance=tensor([[0.6111]]))
    """
    return mean_over_rows(weights, swept.top, one_in(weights), rows)


def positional(weights: Weights, swept: Sweep, rows: Tensor | None = None) -> Positional:
    """The share of rows whose largest weight is at the distance where most rows have theirs.

        d_i = p_i - argmax_j A[i, j]        share = max_o mean over rows of 1[d_i = o]        offset: that o

    Voita et al. 2019, arXiv:1905.09418, §5.1, call a head positional from 0.9 on; there the offset is -1 or 1 and the
    end-of-sentence token is left out. Of several distances that are as frequent the least counts, and of equal weights
    the first key. The interval takes the offset as given.

    Chance: that the largest weight stands at this offset where all are equal and ties are broken at random, the mean of
    1 / visible keys over rows, 0 for rows that cannot see that far.

    >>> from regard.inspect.sweep import sweep
    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 0, 1, 0]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> found = positional(weights, sweep(weights))
    >>> found.share.value, found.offset  # rows 1 and 2 of 4 look at the token before
    (tensor([[0.5000]]), tensor([[1]]))
    """
    counting = counted(weights, rows)
    distance = weights.positions - swept.top_key  # [batch, heads, queries]
    offset = _modes(distance, counting)
    key = weights.positions - offset[..., None]
    there = (key >= 0) & (key < weights.shape[3])
    chance = one_in(weights) * (there & _kept(weights, offset))
    share = HeadScores.of_rows((distance == offset[..., None]).to(swept.top.dtype), chance, counting)
    return Positional(replace(share, at=offset), offset)


def _modes(distance: Tensor, counting: Tensor) -> Tensor:
    """The most frequent distance of the rows that count, the nearest to 0 of those; [batch, heads]."""
    flat, found = distance.flatten(0, 1), []
    for row, counted_row in zip(flat, counting.flatten(0, 1), strict=True):
        values, counts = row[counted_row].unique(return_counts=True)
        order = torch.argsort(values.abs(), stable=True)
        found.append(values[order][counts[order].argmax()] if len(values) else row.new_zeros(()))
    return torch.stack(found).view(distance.shape[:2])


def _kept(weights: Weights, offset: Tensor) -> Tensor:
    """Whether the mask keeps the pair at a head's offset: bool [batch, heads, queries]."""
    row, kept = torch.arange(weights.shape[2], device=offset.device), torch.zeros(weights.shape[:3], dtype=torch.bool)
    kept = kept.to(offset.device)
    for one in offset.unique():
        visible = weights.keep(row, (weights.positions - one).clamp(0, weights.shape[3] - 1)).expand(kept.shape)
        kept = torch.where((offset == one)[..., None], visible, kept)
    return kept
