"""Attention along user-defined relations between tokens, such as from a verb to its subject."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.describe.not_a_spec import received
from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.blocks import rows_at_once, whole_rows
from regard.inspect.measures.means import check_positions
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.lazy import Weights

MARGIN = 0.1
"""The margin of accuracy over the best fixed distance that a head must have; Voita et al. 2019, §5.2."""


@brief
@dataclass(frozen=True, eq=False)
class Syntactic:
    """How well each head follows a relation; see `syntactic`.

    Attributes:
        accuracy: the share of pairs whose row has its largest weight on the key.
        mass: the mean weight of the pairs.
        baseline: the share of pairs at their most frequent distance: what looking there would score.
        offset: that distance, query position - key position.

    >>> even, both = torch.full((1, 2), 0.2), torch.tensor([[0.9, 0.6]])
    >>> Syntactic(HeadScores(both, even), HeadScores(both, even), baseline=0.7, offset=1).follows  # needs 0.8
    tensor([ True, False])
    """

    accuracy: HeadScores
    mass: HeadScores
    baseline: float
    offset: int

    @property
    def follows(self) -> Tensor:
        """Which heads follow the relation: accuracy at least 0.1 above the baseline; bool [heads]."""
        return self.accuracy.mean() >= self.baseline + MARGIN


@checked
def syntactic(weights: Weights, pairs: Tensor | Sequence[tuple[int, int, int]]) -> Syntactic:
    """How often each head attends along the pairs of a relation, such as from a verb to its subject.

        accuracy = mean over pairs (i, j) of 1[ j = argmax_j' A[i, j'] ]        mass = mean over pairs of A[i, j]

    Voita et al. 2019, arXiv:1905.09418, §5.2: a head is syntactic if its accuracy is 10 % above the baseline. They
    count a relation in both directions and leave out the end-of-sentence token; here the pairs are what you give, one
    relation and one direction at a time; there is no parser here. A row that sees no key, or whose mass a sink takes,
    misses. O(rows named x keys).

    Chance: of both the mean of 1 / visible keys (of accuracy with ties broken at random), 0 for pairs that are hidden.

    Args:
        pairs: int64 [pairs, 3]: sequence of the batch, position of the query, position of the key.

    Raises:
        ProblemError: no pairs, another shape, a position that the call does not have, or a cache dropped tokens.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 0, 0, 2]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> found = syntactic(weights, torch.tensor([[0, 2, 0], [0, 3, 1]]))  # from 2 to 0 and from 3 to 1: row 3 misses
    >>> found.accuracy.value, found.baseline, found.offset
    (tensor([[0.5000]]), 1.0, 2)
    """
    check_positions(weights, "syntactic")
    pairs = _checked(weights, pairs)
    batch, heads, _, _ = weights.shape
    shape = batch, heads, len(pairs)
    mass, hit, even = (torch.zeros(shape, dtype=weights.dtype, device=weights.q.device) for _ in range(3))
    for b in range(batch):
        one, own = weights.only(b), (pairs[:, 0] == b).nonzero()[:, 0]
        for at in own.split(rows_at_once(weights)):
            rows, keys = pairs[at, 1] - one.first_position, pairs[at, 2]
            found = whole_rows(one, rows)
            here = torch.arange(len(at), device=at.device)
            mass[b][:, at] = found.weights[0][:, here, keys]
            hit[b][:, at] = ((found.top_key == keys) & found.attends).to(mass.dtype)
            visible = found.visible[0].expand(-1, len(at), weights.shape[3])
            even[b][:, at] = visible[:, here, keys] / visible.sum(-1).clamp(min=1).to(mass.dtype)
    counted = (pairs[:, 0] == torch.arange(batch, device=pairs.device)[:, None])[:, None]
    offsets, counts = (pairs[:, 1] - pairs[:, 2]).unique(return_counts=True)
    most = int(counts.argmax())
    accuracy, mean = HeadScores.of_rows(hit, even, counted), HeadScores.of_rows(mass, even, counted)
    return Syntactic(accuracy, mean, int(counts[most]) / len(pairs), int(offsets[most]))


def _checked(weights: Weights, given: Tensor | Sequence[tuple[int, int, int]]) -> Tensor:
    """The pairs as a tensor, on the device of the call."""
    try:
        pairs = torch.as_tensor(given, device=weights.q.device)
    except (TypeError, ValueError, RuntimeError) as unlike:
        raise ProblemError(
            f"pairs is {received(given)} ({unlike}): expected the sequence, the query and the key of each pair, int64 "
            "[pairs, 3]."
        ) from None
    _check(weights, pairs)
    return pairs


def _check(weights: Weights, pairs: Tensor) -> None:
    batch, _, queries, keys = weights.shape
    if pairs.ndim != 2 or pairs.shape[1] != 3 or not len(pairs) or pairs.is_floating_point():
        raise ProblemError(
            f"pairs is {list(pairs.shape)} {pairs.dtype}: expected int64 [pairs, 3]: the sequence of each pair, the "
            "position of its query and the position of its key."
        )
    firsts = weights.first_positions
    first = torch.tensor(firsts, device=pairs.device)[pairs[:, 0].clamp(0, len(firsts) - 1)]
    rows = pairs - torch.stack([torch.zeros_like(first), first, torch.zeros_like(first)], dim=1)
    sizes = torch.tensor([batch, queries, keys], device=pairs.device)
    if bool(outside := ((rows < 0) | (rows >= sizes)).any(-1).sum()):
        each = "" if len(firsts) == 1 else ", each sequence from its own,"
        raise ProblemError(
            f"{int(outside)} of {len(pairs)} pairs are not in the call, which has {batch} sequences, queries at "
            f"positions {min(firsts)} to {max(firsts) + queries - 1}{each} and keys at 0 to {keys - 1}."
        )
