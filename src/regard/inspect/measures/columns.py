"""What keys receive: the mass of each column, and the sink metric at every position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.score import HeadScores
from regard.inspect.measures.uniform import looks_ahead
from regard.inspect.sweep import Sweep
from regard.inspect.weights.lazy import Weights


@brief
@dataclass(frozen=True, eq=False)
class ColumnMass:
    """What each key receives from each head; see `column_mass`.

    Attributes:
        mass: sum_i A[i, j] over all rows, [batch, heads, keys].
        chance: the same of uniform attention, which keys that many rows see have more of.
        largest: the share of all mass that the key with the most receives, and of uniform attention that its own has.
        key: that key, int64 [batch, heads].
    """

    mass: Tensor
    chance: Tensor
    largest: HeadScores
    key: Tensor


def column_mass(weights: Weights, swept: Sweep, even: Sweep) -> ColumnMass:
    """The mass that each key receives: c_j = sum_i A[i, j]; largest = max_j c_j / sum_j c_j.

    Zhang et al. 2023, arXiv:2306.14048, §3.2 (the accumulated attention of heavy hitters). `largest` is no mean over
    rows and has an interval over sequences only.

    >>> from regard.inspect.measures import even_sweep
    >>> from regard.inspect.sweep import sweep
    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 1, 1, 1]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> found = column_mass(weights, sweep(weights), even_sweep(weights))
    >>> found.mass, found.key, found.largest.value
    (tensor([[[1., 3., 0., 0.]]]), tensor([[1]]), tensor([[0.7500]]))
    """
    chance = even.columns.expand_as(swept.columns)
    top, key = swept.columns.max(-1)
    shares = (top / swept.columns.sum(-1), chance.amax(-1) / chance.sum(-1))
    return ColumnMass(swept.columns, chance, HeadScores(*shares, at=key), key)


def sink_profile(weights: Weights, swept: Sweep, even: Sweep) -> ColumnMass:
    """alpha_k of every position k, as `sinks` has it of one: delimiters may be sinks as well as the first token.

        alpha_k = 1 / (rows i with p_i >= k) sum_{p_i >= k} A[i, k]

    Gu et al. 2024, arXiv:2410.10781, §3. The share of heads with a sink at k is the mean over heads of
    1[alpha_k > 0.3], or 0.8. Late positions are means over few rows: the last token's is its attention to itself.

    Returns:
        alpha as `mass`, that of uniform attention as `chance`; `largest` is the greatest alpha of the first half of the
        keys, `key` where it is.

    Raises:
        ProblemError: some row sees what stands after it, so that columns are not of later rows alone.

    >>> from regard.inspect.measures import even_sweep
    >>> from regard.inspect.sweep import sweep
    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 1, 1, 1]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> sink_profile(weights, sweep(weights), even_sweep(weights)).mass  # of 4, 3, 2 and 1 rows
    tensor([[[0.2500, 1.0000, 0.0000, 0.0000]]])
    """
    if looks_ahead(weights):
        raise ProblemError("some row sees keys after it: alpha counts later rows; for all rows use column_mass.")
    key = torch.arange(weights.shape[3], device=swept.columns.device)
    later = (weights.offset + weights.shape[2] - key.clamp(min=weights.offset)).clamp(min=0)
    alpha, chance = (one.columns / later for one in (swept, even))
    chance = chance.expand_as(alpha)
    half = slice(0, max(1, (weights.shape[3] + 1) // 2))
    top, at = alpha[..., half].max(-1)
    return ColumnMass(alpha, chance, HeadScores(top, chance.gather(-1, at[..., None])[..., 0], at=at), at)
