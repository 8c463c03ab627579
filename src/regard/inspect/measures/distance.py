"""Attention by distance: the profile of a head, its local mass, its mean distance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.means import check_distances, looks_ahead, mean_over_rows, selected_rows
from regard.inspect.measures.measure import Inputs
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.index import count_of

NEAR = 8
"""Tokens that count as near: the row's own and the seven before it, and after it where the mask allows."""


@brief
@dataclass(frozen=True, eq=False)
class Profile:
    """The mass of each head by distance; see `distance_profile`.

    Attributes:
        edges: the first distance of each bin: 0, 1, 2, 4, 8 ...; a bin ends where the next begins.
        value, chance: the mean mass in each bin, float64 [batch, heads, bins].
    """

    edges: tuple[int, ...]
    value: Tensor
    chance: Tensor


@checked
def distance_profile(inputs: Inputs) -> Profile:
    """The mean mass by distance d = |p_i - j|, in bins 0, 1, 2-3, 4-7, 8-15 ...

        P(bin) = mean over rows of  sum_{j : |p_i - j| in bin} A[i, j]

    Clark et al. 2019, arXiv:1906.04341, §3.1, and Vig and Belinkov 2019, arXiv:1906.04284, look at distances one by one
    or at their mean; bins of doubling width keep a long text readable. The bins of a head sum to 1, less what a
    learned sink takes.

    Chance: the profile of uniform attention.

    Raises:
        ProblemError: a cache dropped tokens between the keys.

    >>> from regard import Causal
    >>> from regard.inspect.weights.lazy import Weights
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> found = distance_profile(Inputs(weights))
    >>> found.edges, found.value  # distance 0: the mean of 1, 1/2 and 1/3; 1: of 0, 1/2, 1/3; 2 and more: of 0, 0, 1/3
    ((0, 1, 2), tensor([[[0.6111, 0.2778, 0.1111]]], dtype=torch.float64))
    """
    check_distances(inputs.weights, "distance_profile")
    weights, swept, even = inputs.weights, inputs.swept, inputs.even
    firsts, (queries, keys) = weights.first_positions, weights.shape[2:]
    furthest = max(max(firsts) + queries - 1, keys - 1 - min(firsts), 0)
    bins = min(furthest.bit_length() + 1, swept.bins.shape[-1])
    counted = selected_rows(weights, inputs.rows)[..., None]
    total = counted.sum(2)
    value, chance = ((one.bins[..., :bins].double() * counted).sum(2) / total for one in (swept, even))
    return Profile((0, *(2**b for b in range(bins - 1))), value, chance)


@checked
def local_mass(inputs: Inputs, width: int = NEAR) -> HeadScores:
    """The mean mass on keys nearer than `width` tokens: mean over rows of sum_{j : |p_i - j| < width} A[i, j].

    A sum of the first bins of `distance_profile`. Chance: that of uniform attention.

    Args:
        width: a power of two, as the bins are.

    Raises:
        ProblemError: the width is no power of two, or a cache dropped tokens between the keys.

    >>> from regard import Causal
    >>> from regard.inspect.weights.lazy import Weights
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> local_mass(Inputs(weights), width=2)  # the mean of 1, 1 and 2/3
    HeadScores(value=tensor([[0.8889]]), chance=tensor([[0.8889]]))
    """
    width = count_of("width", width, "a power of two, like the bins of distances")
    if width & (width - 1):
        raise ProblemError(f"width is {width}: expected a power of two, like the bins of distances.")
    check_distances(inputs.weights, "local_mass")
    bins = width.bit_length()
    value, chance = (one.bins[..., :bins].sum(-1) for one in (inputs.swept, inputs.even))
    return mean_over_rows(inputs.weights, value, chance, inputs.rows)


@checked
def mean_distance(inputs: Inputs) -> HeadScores:
    """The mean distance of a head's attention, in tokens: mean over rows of  sum_j A[i, j] (p_i - j) / sum_j A[i, j].

    Vig and Belinkov 2019, arXiv:1906.04284, divide the sums over all rows, which is the same where rows sum to 1;
    they do unless a learned sink takes a share. Of masks that hide what is later, for the distance is not signed.
    Chance: the same of uniform attention.

    Raises:
        ProblemError: some row sees a later key, or a cache dropped tokens between the keys.

    >>> from regard import Causal
    >>> from regard.inspect.weights.lazy import Weights
    >>> q, k = 50 * torch.eye(3)[[0, 0, 0]], torch.eye(3)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 3), 50.0), Causal())
    >>> mean_distance(Inputs(weights))  # the mean of 0, 1 and 2; chance: of 0, 1/2 and 1
    HeadScores(value=tensor([[1.]]), chance=tensor([[0.5000]]))
    """
    weights = inputs.weights
    check_distances(weights, "mean_distance")
    if looks_ahead(weights):
        raise ProblemError("some row sees later keys: mean_distance needs causal attention; use distance_profile.")
    value, chance = (
        weights.positions - inputs.mean_position(swept) / swept.mass.clamp(min=torch.finfo(swept.mass.dtype).tiny)
        for swept in (inputs.swept, inputs.even)
    )
    return mean_over_rows(weights, value, chance, inputs.rows)
