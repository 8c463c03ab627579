"""How far away a head looks: its profile by distance, what stays near, the mean distance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.means import counted, mean_over_rows
from regard.inspect.measures.score import HeadScores
from regard.inspect.measures.uniform import looks_ahead
from regard.inspect.sweep import Sweep
from regard.inspect.weights.lazy import Weights

NEAR = 8
"""Tokens that count as near: the row's own and the seven before it, and after it where the mask allows."""


@brief
@dataclass(frozen=True, eq=False)
class Profile:
    """The mass of each head by distance; see `distance_profile`.

    Attributes:
        edges: the first distance of each bin: 0, 1, 2, 4, 8 ...; a bin ends where the next begins.
        value, chance: the mean mass in each bin, [batch, heads, bins].
    """

    edges: tuple[int, ...]
    value: Tensor
    chance: Tensor


def distance_profile(weights: Weights, swept: Sweep, even: Sweep, rows: Tensor | None = None) -> Profile:
    """The mean mass by distance d = |p_i - j|, in bins 0, 1, 2-3, 4-7, 8-15 ...

        P(bin) = mean over rows of  sum_{j : |p_i - j| in bin} A[i, j]

    Clark et al. 2019, arXiv:1906.04341, §3.1, and Vig and Belinkov 2019, arXiv:1906.04284, look at distances one by one
    or at their mean; bins of doubling width keep a long text readable. The bins of a head sum to 1, less what a
    learned sink takes.

    Args:
        even: the sweep of `uniform(weights)`, whose profile is the chance value.

    >>> from regard.inspect.measures import even_sweep
    >>> from regard.inspect.sweep import sweep
    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> found = distance_profile(weights, sweep(weights), even_sweep(weights))
    >>> found.edges, found.value  # distance 0: the mean of 1, 1/2 and 1/3; 1: of 0, 1/2, 1/3; 2 and more: of 0, 0, 1/3
    ((0, 1, 2), tensor([[[0.6111, 0.2778, 0.1111]]]))
    """
    furthest = max(weights.offset + weights.shape[2] - 1, weights.shape[3] - 1 - weights.offset, 0)
    bins = min(furthest.bit_length() + 1, swept.bins.shape[-1])
    counting = counted(weights, rows)[..., None]
    total = counting.sum(2)
    value, chance = ((one.bins[..., :bins] * counting).sum(2) / total for one in (swept, even))
    return Profile((0, *(2**b for b in range(bins - 1))), value, chance)


def local_mass(
    weights: Weights, swept: Sweep, even: Sweep, width: int = NEAR, rows: Tensor | None = None
) -> HeadScores:
    """The mean mass on what is nearer than `width` tokens: mean over rows of sum_{j : |p_i - j| < width} A[i, j].

    A sum of the first bins of `distance_profile`. Chance: that of uniform attention.

    Args:
        width: a power of two, as the bins are.

    Raises:
        ProblemError: it is none.

    >>> from regard.inspect.measures import even_sweep
    >>> from regard.inspect.sweep import sweep
    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> local_mass(weights, sweep(weights), even_sweep(weights), width=2)  # the mean of 1, 1 and 2/3
    HeadScores(value=tensor([[0.8889]]), chance=tensor([[0.8889]]))
    """
    if width < 1 or width & (width - 1):
        raise ProblemError(f"width is {width}: expected a power of two, since distances are counted in such bins.")
    bins = width.bit_length()
    value, chance = (one.bins[..., :bins].sum(-1) for one in (swept, even))
    return mean_over_rows(weights, value, chance, rows)


def mean_distance(
    weights: Weights, swept: Sweep, even: Sweep, where: Tensor, where_even: Tensor, rows: Tensor | None = None
) -> HeadScores:
    """How many tokens back a head looks in the mean: mean over rows of  sum_j A[i, j] (p_i - j) / sum_j A[i, j].

    Vig and Belinkov 2019, arXiv:1906.04284, divide the sums over all rows, which is the same where rows sum to 1;
    they do unless a learned sink takes a share. Of masks that hide what is later, for the distance is not signed.

    Args:
        where, where_even: the mean positions that rows look at, sum_j A[i, j] j, [batch, heads, queries]: a vector of
            `along`, see `Vectors`.

    Raises:
        ProblemError: some row sees what stands after it.

    >>> from regard.inspect.measures import Vectors, even_sweep
    >>> from regard.inspect.sweep import sweep
    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(3)[[0, 0, 0]], torch.eye(3)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 3), 50.0), Causal())
    >>> vectors = Vectors()  # positions are always among them
    >>> swept, even = sweep(weights, along=vectors.stacked(weights)), even_sweep(weights, vectors)
    >>> where = vectors.positions(swept), vectors.positions(even)
    >>> mean_distance(weights, swept, even, *where)  # the mean of 0, 1 and 2; chance: of 0, 1/2 and 1
    HeadScores(value=tensor([[1.]]), chance=tensor([[0.5000]]))
    """
    if looks_ahead(weights):
        raise ProblemError("some row sees keys after it: a mean distance is of causal attention; use distance_profile.")
    at = weights.positions.to(where.dtype)
    value, chance = (
        at - mean / one.mass.clamp(min=torch.finfo(mean.dtype).tiny)
        for mean, one in ((where, swept), (where_even, even))
    )
    return mean_over_rows(weights, value, chance, rows)
