"""How widely a head spreads its mass: entropy, effective tokens, the largest weight, the key that receives most."""

from dataclasses import replace

import torch
from torch import Tensor

from regard.inspect.measures.means import check_positions, mean_over_rows, one_in, selected_rows, uniform
from regard.inspect.measures.measure import Inputs
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.lazy import Weights


@checked
def entropy(inputs: Inputs) -> HeadScores:
    """The mean over rows of H_i = -sum_j A[i, j] ln A[i, j], nats.

    A learned sink is an outcome like any token here, so that H_i is the entropy of a distribution. Clark et al. 2019,
    arXiv:1906.04341, §3.3. Chance: ln n for a row that sees n keys.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> entropy(Inputs(weights))  # the mean of 0, ln 2 and ln 3
    HeadScores(value=tensor([[0.5973]]), chance=tensor([[0.5973]]))
    """
    values = inputs.swept.entropy
    return mean_over_rows(inputs.weights, values, _visible(inputs, values).clamp(min=1).log(), inputs.rows)


@checked
def effective_tokens(inputs: Inputs) -> HeadScores:
    """The mean over rows of exp(H_i), the perplexity: the number of tokens in a uniform row of the same entropy.

    Clark et al. 2019, arXiv:1906.04341, §3.3, who average the entropy only. Chance: n for a row that sees n keys.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> effective_tokens(Inputs(weights))  # the mean of 1, 2 and 3
    HeadScores(value=tensor([[2.]]), chance=tensor([[2.]]))
    """
    values = inputs.swept.entropy
    return mean_over_rows(inputs.weights, values.exp(), _visible(inputs, values), inputs.rows)


@checked
def inverse_squares(inputs: Inputs) -> HeadScores:
    """The inverse participation ratio: the mean of 1 / sum_j A[i, j]^2, with a learned sink as one of the outcomes.

    Never above `effective_tokens`; large weights count more. Chance: the mean number of keys that a row sees.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(3)[[0, 0, 1]], torch.eye(3)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 3), 50.0), Causal())
    >>> inverse_squares(Inputs(weights))  # one token each, of 1, 2 and 3
    HeadScores(value=tensor([[1.]]), chance=tensor([[2.]]))
    """
    squares = inputs.swept.squares
    values = squares.clamp(min=torch.finfo(squares.dtype).tiny).reciprocal()
    return mean_over_rows(inputs.weights, values, _visible(inputs, squares), inputs.rows)


@checked
def evenness(inputs: Inputs) -> HeadScores:
    """Entropy as a share of its maximum: the mean of H_i / ln n_i over rows that see n_i >= 2 keys.

    0 is attention to one token, 1 uniform attention, for any length of the text. With a learned sink there is one
    outcome more than keys, so it may exceed 1. Chance: 1.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> evenness(Inputs(weights))
    HeadScores(value=tensor([[1.]]), chance=tensor([[1.]]))
    """
    weights, values = inputs.weights, inputs.swept.entropy
    most = weights.visible.clamp(min=2).to(values.dtype).log()
    counted = selected_rows(weights, inputs.rows) & (weights.visible >= 2)
    return HeadScores.of_rows(values / most, torch.ones_like(most), counted)


@checked
def largest_weight(inputs: Inputs) -> HeadScores:
    """The confidence of a head: the mean over rows of max_j A[i, j].

    Voita et al. 2019, arXiv:1905.09418, §4, who leave out the end-of-sentence token: here every token counts, so a head
    with a sink is confident; compare with `sink`. Chance: mean of 1 / visible keys.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> largest_weight(Inputs(weights))  # the mean of 1, 1/2 and 1/3
    HeadScores(value=tensor([[0.6111]]), chance=tensor([[0.6111]]))
    """
    return mean_over_rows(inputs.weights, inputs.swept.top, one_in(inputs.weights), inputs.rows)


@checked
def positional(inputs: Inputs) -> HeadScores:
    """The share of rows whose largest weight is at the most frequent distance, which is `at`.

        d_i = p_i - argmax_j A[i, j]        share = max_o mean over rows of 1[d_i = o]        at: that o

    Voita et al. 2019, arXiv:1905.09418, §5.1, call a head positional from 0.9 on; there the offset is -1 or 1 and the
    end-of-sentence token is left out. Ties: the least of equally frequent distances, and the first key of
    equal weights. The interval treats the offset as fixed.

    Chance: the probability that the largest of equal weights, with ties broken at random, is at this offset: the mean
    of 1 / visible keys over rows, 0 for rows that cannot see that far.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 0, 1, 0]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> found = positional(Inputs(weights))
    >>> found.value, found.at  # rows 1 and 2 of 4 look at the token before
    (tensor([[0.5000]]), tensor([[1]]))
    """
    check_positions(inputs.weights, "positional")
    weights, swept = inputs.weights, inputs.swept
    counted = selected_rows(weights, inputs.rows)
    distance = weights.positions - swept.top_key  # [batch, heads, queries]
    modes = _modes(distance.cpu(), counted.cpu())  # read once, and not once for each head
    offset = modes.to(distance.device)
    key = weights.positions - offset[..., None]
    in_text = (key >= 0) & (key < weights.shape[3])
    chance = one_in(weights) * (in_text & _visible_at(weights, offset, modes.unique().tolist()))
    share = HeadScores.of_rows((distance == offset[..., None]).to(swept.top.dtype), chance, counted)
    return replace(share, at=offset)


@checked
def largest_column(inputs: Inputs) -> HeadScores:
    """The share of all mass that one key receives: max_j c_j / sum_j c_j with c_j = sum_i A[i, j]; `at` is that key.

    Zhang et al. 2023, arXiv:2306.14048, §3.2 (the accumulated attention of heavy hitters). No mean over rows: it has an
    interval over sequences only. Chance: the same of uniform attention, where keys that more rows see receive more.
    Where `Inputs.rows` chooses rows, c_j is the sum over these, which takes a pass over the weights of its own.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 1, 1, 1]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> found = largest_column(Inputs(weights))  # columns of 1, 3, 0 and 0
    >>> found.value, found.at
    (tensor([[0.7500]]), tensor([[1]]))
    """
    if inputs.rows is None:
        columns, even = inputs.swept.columns, inputs.even.columns
    else:
        columns, even = (_columns(w, inputs.rows) for w in (inputs.weights, uniform(inputs.weights, whole_batch=True)))
    even = even.expand_as(columns)
    top, key = columns.max(-1)
    return HeadScores(top / columns.sum(-1), even.amax(-1) / even.sum(-1), at=key)


def _columns(weights: Weights, rows: Tensor) -> Tensor:
    """sum_i A[i, j] over the rows that count, [batch, heads, keys]."""
    batch, heads, _, keys = weights.shape
    counted = selected_rows(weights, rows)
    columns = torch.zeros((batch, heads, keys), dtype=torch.float64, device=weights.q.device)
    for tile in weights.tiles():
        own = torch.where(counted[:, :, tile.rows, None], tile.weights, 0.0)
        columns[:, :, tile.keys] += own.sum(-2, dtype=torch.float64)
    return columns.to(weights.dtype)


def _visible(inputs: Inputs, like: Tensor) -> Tensor:
    return inputs.weights.visible.to(like.dtype)


def _modes(distance: Tensor, counted: Tensor) -> Tensor:
    """The most frequent distance of the counted rows, in a tie the nearest to 0; [batch, heads], all on the host."""
    found: list[Tensor] = []
    for row, counts_here in zip(distance.flatten(0, 1), counted.flatten(0, 1), strict=True):
        values, counts = row[counts_here].unique(return_counts=True)
        order = torch.argsort(values.abs(), stable=True)
        found.append(values[order][counts[order].argmax()] if len(values) else row.new_zeros(()))
    return torch.stack(found).view(distance.shape[:2])


def _visible_at(weights: Weights, offset: Tensor, values: list[int]) -> Tensor:
    """Whether the mask keeps the pair at a head's offset, one of `values`: bool [batch, heads, queries]."""
    found = torch.zeros(weights.shape[:3], dtype=torch.bool, device=offset.device)
    for one in values:
        found = torch.where((offset == one)[..., None], weights.keep_at(one), found)
    return found
