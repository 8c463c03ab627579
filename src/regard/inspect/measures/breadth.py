"""How widely a head spreads: entropy, and the number of tokens that it amounts to."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspect.measures.means import counted, mean_over_rows
from regard.inspect.measures.score import HeadScores
from regard.inspect.sweep import Sweep, sweep
from regard.inspect.weights.lazy import Weights


class Breadth(NamedTuple):
    """How widely each head spreads, in tokens and in nats; see `breadth`."""

    effective_tokens: HeadScores
    entropy: HeadScores


def breadth(weights: Weights, rows: Tensor | None = None, swept: Sweep | None = None) -> Breadth:
    """Entropy, and the number of tokens of an even spread of the same entropy (its perplexity).

        H_i = -sum_j A[i, j] ln A[i, j]     entropy = mean of H_i, nats     effective_tokens = mean of exp(H_i)

    A learned sink is an outcome like any token here, so that H_i is the entropy of a distribution. Clark et al. 2019,
    arXiv:1906.04341, §3.3, who average the entropy only. Chance: ln n and n for a row that sees n keys.

    Args:
        rows: bool [batch, queries], the rows to count; None counts all that see a key.
        swept: of these weights; None sweeps them.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> breadth(weights).effective_tokens  # the mean of 1, 2 and 3
    HeadScores(value=tensor([[2.]]), chance=tensor([[2.]]))
    """
    entropies, seen = (swept or sweep(weights)).entropy, weights.visible.to(weights.dtype)
    entropy = mean_over_rows(weights, entropies, seen.clamp(min=1).log(), rows)
    return Breadth(mean_over_rows(weights, entropies.exp(), seen, rows), entropy)


def evenness(weights: Weights, swept: Sweep, rows: Tensor | None = None) -> HeadScores:
    """Entropy as a share of what it could be: the mean of H_i / ln n_i over rows that see n_i >= 2 keys.

    0 looks at one token, 1 at all alike, whatever the length of the text. With a learned sink there is one outcome more
    than keys, and it may exceed 1. Chance: 1.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> evenness(weights, sweep(weights))
    HeadScores(value=tensor([[1.]]), chance=tensor([[1.]]))
    """
    most = weights.visible.clamp(min=2).to(swept.entropy.dtype).log()
    value, chance = swept.entropy / most, torch.ones_like(most)
    return HeadScores.of_rows(value, chance, counted(weights, rows) & (weights.visible >= 2))


def inverse_squares(weights: Weights, swept: Sweep, rows: Tensor | None = None) -> HeadScores:
    """The number of tokens by the other count: the mean of 1 / sum_j A[i, j]^2, a learned sink among the outcomes.

    Never above `effective_tokens`; large weights count more in it. Chance: the mean number of keys that a row sees.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(3)[[0, 0, 1]], torch.eye(3)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 3), 50.0), Causal())
    >>> inverse_squares(weights, sweep(weights))  # one token each, of 1, 2 and 3
    HeadScores(value=tensor([[1.]]), chance=tensor([[2.]]))
    """
    seen = weights.visible.to(swept.squares.dtype)
    return mean_over_rows(weights, swept.squares.clamp(min=torch.finfo(seen.dtype).tiny).reciprocal(), seen, rows)
