"""Attention to rare tokens."""

from typing import cast

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import shown
from regard.inspect.measures.means import Tokens, mean_over_rows, per_key, selected_rows, token_ids, uniform
from regard.inspect.measures.measure import Inputs, required
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.index import count_of
from regard.inspect.weights.lazy import Weights


def rarity(tokens: Tokens, frequency: Tensor | None = None) -> Tensor:
    """How rare tokens are: -ln of their share of a corpus, in nats; like `tokens`, float32.

    Args:
        tokens: int64 ids.
        frequency: how often each id of the vocabulary occurs, [vocabulary]; what never occurs counts as once. None
            takes the id for the rank and ln(1 + id) for the rarity (Zipf's law): byte-pair vocabularies list frequent
            pieces first. That is an approximation, up to a constant that no measure here depends on; count a corpus
            where it matters.

    Raises:
        ProblemError: ids that are not integers, or that frequency does not count.

    >>> rarity(torch.tensor([0, 1]), torch.tensor([3, 1]))
    tensor([0.2877, 1.3863])
    """
    ids = token_ids(tokens)
    if frequency is None:
        return (ids + 1.0).log()
    if not isinstance(cast(object, frequency), Tensor) or frequency.ndim != 1:
        raise ProblemError(f"frequency is {shown(frequency)}: expected a tensor of counts, [vocabulary].")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(frequency):
        raise ProblemError(
            f"tokens has ids from {int(ids.min())} to {int(ids.max())}, and frequency counts {len(frequency)}: "
            "expected a count for every id of the vocabulary."
        )
    counts = frequency.to(ids.device).clamp(min=1).double()
    return (counts.sum() / counts).log()[ids].float()


@checked
def rare_word(inputs: Inputs) -> HeadScores:
    """The mean surprisal of the attended tokens, less that of the visible ones, in nats.

        mean over rows of  sum_j A[i, j] r_j / sum_j A[i, j]  -  mean of r_j over the keys that row i sees

    with r_j = -ln p(x_j), see `rarity`. A soft form, ours, of Voita et al. 2019, arXiv:1905.09418, §5.3; theirs is
    `rarest_hits`. Chance: 0.

    >>> from regard import Causal
    >>> from regard.inspect.weights.lazy import Weights
    >>> q, k = 50 * torch.eye(3)[[0, 1, 1]], torch.eye(3)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 3), 50.0), Causal())
    >>> rare_word(Inputs(weights, rarity=torch.tensor([[1.0, 3.0, 2.0]])))  # the mean of 1 - 1, 3 - 2 and 3 - 2
    HeadScores(value=tensor([[0.6667]]), chance=tensor([[0.]]))
    """
    rare, even = inputs.mean_rarity(inputs.swept), inputs.mean_rarity(inputs.even)
    value = rare / inputs.swept.mass.clamp(min=torch.finfo(rare.dtype).tiny) - even
    return mean_over_rows(inputs.weights, value, torch.zeros_like(even), inputs.rows)


@checked
def rarest_hits(inputs: Inputs, among: int = 1) -> HeadScores:
    """The share of rows whose largest weight is on one of the rarest tokens that they see.

        mean over rows of 1[ r_t >= the among-th largest r_j of visible j ],    t = argmax_j A[i, j]

    Voita et al. 2019, arXiv:1905.09418, §5.3: 66 % for the rarest and 83 % for the two rarest of a sentence on
    OpenSubtitles, counting sentences whose rarest token is not among the 500 most frequent; choose such rows with
    `Inputs.rows`. It is made for sentences: in a long text hardly any row looks at the one rarest token.
    O(queries x keys). Tokens that are equally rare count all or not at all.

    Chance: the mean share of such tokens among those that a row sees.

    Raises:
        ProblemError: the rarities are not [batch, keys], or `among` is below 1.

    >>> from regard import Causal
    >>> from regard.inspect.weights.lazy import Weights
    >>> q, k = 50 * torch.eye(3)[[0, 1, 0]], torch.eye(3)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 3), 50.0), Causal())
    >>> rarest_hits(Inputs(weights, rarity=torch.tensor([[1.0, 3.0, 2.0]])))  # rows 0 and 1; chance of 1, 1/2 and 1/3
    HeadScores(value=tensor([[0.6667]]), chance=tensor([[0.6111]]))
    """
    weights = inputs.weights
    rare = per_key(weights, required(inputs.rarity, "rarity"), "rarity")
    among = count_of("among", among, "the number of rarest tokens that count")
    least, share = _rarest(uniform(weights), rare, among)
    swept = inputs.swept
    at_top = rare[:, None].expand(*swept.top_key.shape[:2], -1).gather(-1, swept.top_key)
    return HeadScores.of_rows((at_top >= least).to(swept.top.dtype), share, selected_rows(weights, inputs.rows))


def _rarest(even: Weights, rare: Tensor, among: int) -> tuple[Tensor, Tensor]:
    """For each row, the least rarity of a visible token that counts, and the share of visible tokens that count."""
    keys, queries = even.shape[3], even.shape[2]
    key, least, share = torch.arange(keys, device=rare.device), [], []
    for row in torch.arange(queries, device=rare.device).split(max(1, 2**20 // max(1, keys))):
        kept = even.keep(row[:, None], key[None])  # [batch or 1, heads or 1, rows or 1, keys]
        seen = rare[:, None, None].where(kept, -torch.inf)
        seen = seen.expand(-1, -1, len(row), -1)
        least.append(_last(seen, among))
        share.append(((seen >= least[-1][..., None]) & kept).sum(-1) / kept.expand_as(seen).sum(-1).clamp(min=1))
    return torch.cat(least, dim=-1), torch.cat(share, dim=-1).to(even.dtype)


def _last(seen: Tensor, among: int) -> Tensor:
    """The among-th largest of each row, or the smallest finite one where there are fewer."""
    best = seen.topk(min(among, seen.shape[-1]), dim=-1).values
    return best.where(best > -torch.inf, torch.inf).amin(-1)
