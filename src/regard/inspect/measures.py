"""Measures of heads: what each head looks at, as numbers with their chance value.

Every measure is exact. Those that ask about O(n) pairs (a fixed offset, token 0, the matches of induction) compute just
these pairs; entropy takes one sweep over tiles. Every score comes with its *chance* value: what uniform attention over
the same mask would score, without which no score means anything (on 5 tokens, uniform causal attention gives token 0 a
mass of 0.32).

Means are over the rows that see any key, and over those in `rows` where the caller names them (padding is no text).
Heads are query heads; A[i, j] is the weight of key j in row i, p_i the position of row i.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.weights import Tile, Weights


class Score(NamedTuple):
    """A measure of each head, and what uniform attention over the same mask would score; both [batch, heads]."""

    value: Tensor
    chance: Tensor


class Breadth(NamedTuple):
    """How widely each head spreads, in tokens and in nats; see `breadth`."""

    effective_tokens: Score
    entropy: Score


def offset_score(weights: Weights, offset: int = 1, rows: Tensor | None = None) -> Score:
    """The mean weight that a token gives to the one `offset` before it: A[i, p_i - offset], over rows that have one.

    Offset 1 is the previous-token score; 0 is attention to oneself, negative offsets look ahead. Olsson et al. 2022,
    *In-context learning and induction heads*. O(queries).

    Args:
        rows: bool [batch, queries], the rows to count; None counts all.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> offset_score(Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal()))  # the mean of 1/2 and 1/3
    Score(value=tensor([[0.4167]]), chance=tensor([[0.4167]]))
    """
    target = weights.positions - offset
    has_one = ((target >= 0) & (target < weights.shape[3])).nonzero()[:, 0]
    return _mean_over_rows(weights, has_one, target[has_one], rows)


def previous_token(weights: Weights, rows: Tensor | None = None) -> Score:
    """The mean of A[i, i - 1]: `offset_score` at offset 1."""
    return offset_score(weights, 1, rows)


def sink(weights: Weights, token: int = 0, rows: Tensor | None = None) -> Score:
    """The mean mass that later rows put on one token: mean of A[i, token] over rows with p_i > token.

    Gu et al. 2024, arXiv:2410.10781, §3 (their alpha; their metric is the share of heads whose alpha exceeds 0.3);
    Xiao et al. 2024, arXiv:2309.17453. Rows that the mask hides the token from count with 0. O(queries).
    """
    later = (weights.positions > token).nonzero()[:, 0]
    return _mean_over_rows(weights, later, torch.full_like(later, token), rows)


def induction(weights: Weights, tokens: Tensor, shift: int = 1) -> Score:
    """Prefix matching: the mass on tokens that followed an earlier occurrence of the current one.

        mean over rows i with M_i not empty of  sum_{j in M_i} A[i, j],     M_i = {j <= i : x[j-1] = x[i], j-1 < i}

    Olsson et al. 2022, *In-context learning and induction heads*, appendix on head scores. It is defined on repeated
    random tokens (`regard.inspect.stimulus`): on plain text it also counts what is merely frequent, and with a fixed
    period a purely positional head scores as well. Circuits may be shifted: scan `shift` (x[j-shift] = x[i]; 0 finds
    duplicate-token heads) before concluding that a model has none. O(matches).

    Args:
        tokens: integer [batch, keys], the token at each key position.

    Returns:
        NaN for a sequence in which nothing repeats.

    Raises:
        ProblemError: the tokens are not [batch, keys].
    """
    batch, _, _, keys = weights.shape
    if tuple(tokens.shape) != (batch, keys):
        came, expected = list(tokens.shape), [batch, keys]
        raise ProblemError(f"tokens is {came}: expected the token at each key, [batch, keys] = {expected}.")
    scores = [_matched_mass(weights.only(b), tokens[b], shift) for b in range(batch)]
    return Score(torch.cat([s.value for s in scores]), torch.cat([s.chance for s in scores]))


def breadth(weights: Weights, rows: Tensor | None = None) -> Breadth:
    """How widely a head spreads: entropy, and the number of tokens that it amounts to. One sweep over tiles.

        H_i = -sum_j A[i, j] ln A[i, j]     entropy = mean of H_i, nats     effective_tokens = mean of exp(H_i)

    A learned sink is an outcome like any token here, so that H_i is the entropy of a distribution. Chance: ln n and n
    for a row that sees n keys. Clark et al. 2019, arXiv:1906.04341, §3.2.
    """
    sweep = Entropies(weights)
    for tile in weights.tiles():
        sweep.add(tile)
    return sweep.breadth(rows)


class Entropies:
    """Tiles of weights gathered into the entropy of each row; see `breadth`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.of_rows = torch.zeros(weights.shape[:3], dtype=weights.dtype, device=weights.q.device)  # nats
        if weights.sink is not None:
            column = (weights.sink.to(weights.dtype)[None, :, None] - weights.total).exp()
            self.of_rows += torch.special.entr(column)

    def add(self, tile: Tile) -> None:
        """Add a tile's share of the entropy of its rows."""
        self.of_rows[:, :, tile.rows] += torch.special.entr(tile.weights).sum(-1)

    def breadth(self, rows: Tensor | None = None) -> Breadth:
        """The means over rows, once every tile was added."""
        seen = self._weights.visible.to(self.of_rows.dtype).expand_as(self.of_rows)
        counted = _counted(self._weights, rows)
        entropy = Score(_mean(self.of_rows, counted), _mean(seen.clamp(min=1).log(), counted))
        return Breadth(Score(_mean(self.of_rows.exp(), counted), _mean(seen, counted)), entropy)


def matches(tokens: Tensor, shift: int = 1) -> tuple[Tensor, Tensor]:
    """All pairs (i, j) with j in M_i, as two int64 tensors; see `induction`.

    >>> [pair.tolist() for pair in matches(torch.tensor([7, 8, 9, 7, 8]))]
    [[3, 4], [1, 2]]
    """
    where: dict[int, list[int]] = {}
    pairs: list[tuple[int, int]] = []
    for i, token in enumerate(tokens.tolist()):
        earlier = where.setdefault(token, [])
        pairs.extend((i, before + shift) for before in earlier if before + shift <= i)
        earlier.append(i)
    both = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return both[:, 0].to(tokens.device), both[:, 1].to(tokens.device)


def _matched_mass(weights: Weights, tokens: Tensor, shift: int) -> Score:
    positions, keys = matches(tokens, shift)
    here = (positions >= weights.offset) & (positions < weights.offset + weights.shape[2])
    rows, keys = positions[here] - weights.offset, keys[here]
    mass, chance = weights.pairs(rows, keys), _chance(weights, rows, keys)  # [1, heads, pairs]
    having = rows.unique().numel()  # NaN where it is 0, as it should
    return Score(mass.sum(-1) / having, chance.sum(-1) / having)


def _mean_over_rows(weights: Weights, rows: Tensor, keys: Tensor, wanted: Tensor | None) -> Score:
    counted = _counted(weights, wanted)[..., rows]
    return Score(_mean(weights.pairs(rows, keys), counted), _mean(_chance(weights, rows, keys), counted))


def _chance(weights: Weights, rows: Tensor, keys: Tensor) -> Tensor:
    """Uniform attention at the pairs: 1 / visible keys where the mask keeps the pair; [batch, heads, pairs]."""
    kept = weights.keep(rows, keys).to(weights.dtype)
    uniform = kept / weights.visible[..., rows].clamp(min=1)
    return uniform.expand(*weights.shape[:2], len(rows))


def _counted(weights: Weights, rows: Tensor | None) -> Tensor:
    """The rows that a mean counts: they see a key, and the caller did not leave them out; [batch, heads, queries]."""
    counted = weights.visible > 0 if rows is None else (weights.visible > 0) & rows[:, None]
    return counted.expand(weights.shape[:3])


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, values, 0).sum(-1) / counted.sum(-1)
