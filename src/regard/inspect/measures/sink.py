"""The mass that goes to one token, mostly the first: sinks, by both published thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.inspect.brief import brief
from regard.inspect.measures.means import counted, key_of, one_in
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.lazy import Weights

THRESHOLDS = (0.3, 0.8)
"""From which alpha on a head has a sink: by Gu et al. 2024, and by Barbero et al. 2025."""


def sink(weights: Weights, token: int = 0, rows: Tensor | None = None) -> HeadScores:
    """The mean mass that later rows put on one token: mean of A[i, token] over rows with p_i > token.

    Xiao et al. 2023, arXiv:2309.17453; Gu et al. 2024, arXiv:2410.10781, §3, whose alpha (`sinks`) also counts the row
    of the token itself: row 0 can look nowhere else and gives token 0 all of its mass. Rows that the mask hides the
    token from count with 0. O(queries).

    Chance: the mean over the same rows of 1 / visible keys, 0 where the mask hides the token.

    Raises:
        ProblemError: there is no such token.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> sink(weights)  # the mean of 1/2 and 1/3
    HeadScores(value=tensor([[0.4167]]), chance=tensor([[0.4167]]))
    """
    return _column(weights, token, weights.positions > token, rows)


@brief
@dataclass(frozen=True, eq=False)
class Sinks:
    """How many heads have a sink at a token; see `sinks`.

    Attributes:
        alpha: of each head, [batch, heads].
        shares: by threshold, the share of heads whose alpha exceeds it; [batch] each.
    """

    alpha: HeadScores
    shares: dict[float, Tensor]


def sinks(
    weights: Weights, thresholds: Sequence[float] = THRESHOLDS, token: int = 0, rows: Tensor | None = None
) -> Sinks:
    """The sink metric of a layer: the share of heads that put more than a threshold on one token.

        alpha_k = 1 / (n - k) sum_{i >= k} A[i, k]        share = mean over heads of 1[alpha_k > threshold]

    Gu et al. 2024, arXiv:2410.10781, §3, with 0.3 on texts of 64 tokens; Barbero et al. 2025, arXiv:2504.02732, with
    0.8. A model's is the mean over its layers. It is a share of heads, not of mass, and it shrinks with the length of
    the text. O(queries). For every k at once: `sink_profile`.

    Chance: uniform attention has alpha_0 = (1 + 1/2 + ... + 1/n) / n, 0.07 for 64 tokens; from 10
    tokens on a share of 0 for 0.3.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> found = sinks(weights)  # alpha is the mean of 1, 1/2 and 1/3: above 0.3 and not above 0.8
    >>> found.alpha.value, found.shares[0.3], found.shares[0.8]
    (tensor([[0.6111]]), tensor([1.], dtype=torch.float64), tensor([0.], dtype=torch.float64))
    """
    alpha = _column(weights, token, weights.positions >= token, rows)
    return Sinks(alpha, {bound: (alpha.value > bound).double().mean(-1) for bound in thresholds})


def _column(weights: Weights, token: int, later: Tensor, rows: Tensor | None) -> HeadScores:
    token = key_of(weights, token)
    row = torch.arange(weights.shape[2], device=weights.q.device)
    chance = one_in(weights) * weights.keep(row, torch.full_like(row, token))
    return HeadScores.of_rows(weights.columns(token, token + 1)[..., 0], chance, counted(weights, rows) & later)
