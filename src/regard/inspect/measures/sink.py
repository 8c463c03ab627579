"""The mass on one token, usually the first: sinks, by both published thresholds."""

import torch
from torch import Tensor

from regard.inspect.measures.means import key_of, one_in, selected_rows
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.lazy import Weights

THRESHOLDS = (0.3, 0.8)
"""The thresholds of alpha above which a head has a sink: Gu et al. 2024, and Barbero et al. 2025."""


def sink(weights: Weights, token: int = 0, rows: Tensor | None = None) -> HeadScores:
    """The mean mass that later rows put on one token: mean of A[i, token] over rows with p_i > token.

    Xiao et al. 2023, arXiv:2309.17453; Gu et al. 2024, arXiv:2410.10781, §3, whose `alpha` also counts the row
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


def alpha(weights: Weights, token: int = 0, rows: Tensor | None = None) -> HeadScores:
    """The sink score of each head: alpha_k = 1 / (n - k) sum_{i >= k} A[i, k], the row of token k with them.

    Gu et al. 2024, arXiv:2410.10781, §3, who count the heads with alpha above 0.3 on texts of 64 tokens; Barbero et al.
    2025, arXiv:2504.02732, above 0.8. A model's is the mean over its layers. It is a share of heads, not of mass, and
    it shrinks with the length of the text. O(queries).

    Chance: uniform attention has alpha_0 = (1 + 1/2 + ... + 1/n) / n, 0.07 for 64 tokens.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> alpha(weights)  # the mean of 1, 1/2 and 1/3
    HeadScores(value=tensor([[0.6111]]), chance=tensor([[0.6111]]))
    """
    return _column(weights, token, weights.positions >= token, rows)


def _column(weights: Weights, token: int, later: Tensor, rows: Tensor | None) -> HeadScores:
    token = key_of(weights, token)
    row = torch.arange(weights.shape[2], device=weights.q.device)
    chance = one_in(weights) * weights.keep(row, torch.full_like(row, token))
    return HeadScores.of_rows(weights.columns(token, token + 1)[..., 0], chance, selected_rows(weights, rows) & later)
