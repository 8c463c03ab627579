"""The mass on one token, usually the first: sinks, by both published thresholds."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.measures.means import check_positions, key_of, one_in, selected_rows
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.lazy import Weights

THRESHOLDS = (0.3, 0.8)
"""The thresholds of alpha above which a head has a sink: Gu et al. 2024, and Barbero et al. 2025."""


Token = int | Tensor | None
"""The position of a token, of all sequences or int64 [batch]; None: the first token of each, `first_tokens`."""


@checked
def sink(weights: Weights, token: Token = None, rows: Tensor | None = None) -> HeadScores:
    """The mean mass that later rows put on one token: mean of A[i, token] over rows with p_i > token.

    Xiao et al. 2023, arXiv:2309.17453; Gu et al. 2024, arXiv:2410.10781, §3, whose `alpha` also counts the row
    of the token itself: row 0 can look nowhere else and gives token 0 all of its mass. Rows that the mask hides the
    token from count with 0. O(queries).

    Chance: the mean over the same rows of 1 / visible keys, 0 where the mask hides the token.

    Args:
        token: its position among the keys, or int64 [batch], one for each sequence. None: the first of each sequence,
            also behind padding, see `first_tokens`.
        rows: bool [batch, queries], the rows to count; None counts all that see a key.

    Raises:
        ProblemError: there is no such token, or a cache dropped tokens of the text.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> sink(weights)  # the mean of 1/2 and 1/3
    HeadScores(value=tensor([[0.4167]]), chance=tensor([[0.4167]]))
    """
    column = column_of(weights, token, "sink")
    return HeadScores.of_rows(column.mass, column.even, selected_rows(weights, rows) & column.later)


@checked
def alpha(weights: Weights, token: Token = None, rows: Tensor | None = None) -> HeadScores:
    """The sink score of each head: alpha_k = 1 / (n - k) sum_{i >= k} A[i, k], the row of token k with them.

    Token and rows as in `sink`.

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
    column = column_of(weights, token, "alpha")
    itself = weights.positions == column.key[:, None, None]
    return HeadScores.of_rows(column.mass, column.even, selected_rows(weights, rows) & (column.later | itself))


class Column(NamedTuple):
    """The weights on one token of each sequence; see `column_of`."""

    key: Tensor  # int64 [batch]
    mass: Tensor  # [batch, heads, queries]
    even: Tensor  # the same in uniform attention
    later: Tensor  # bool, rows after the token; broadcasts to [batch, heads, queries]


def column_of(weights: Weights, token: Token, measure: str) -> Column:
    """The weights on a token, for a measure of that name.

    Raises:
        ProblemError: there is no such token, or a cache dropped tokens of the text.
    """
    check_positions(weights, measure)
    keys = _keys(weights, token)
    row = torch.arange(weights.shape[2], device=weights.q.device)
    parts = [weights] if len(set(keys)) == 1 else [weights.only(b) for b in range(weights.shape[0])]
    mass, seen = list[Tensor](), list[Tensor]()
    for part, key in zip(parts, keys, strict=False):
        mass.append(part.columns(key, key + 1)[..., 0])
        seen.append(part.keep(row, torch.full_like(row, key)).expand(part.shape[:3]))
    key = torch.tensor(keys, device=row.device)
    return Column(key, torch.cat(mass), one_in(weights) * torch.cat(seen), weights.positions > key[:, None, None])


def first_tokens(weights: Weights) -> list[int]:
    """The position of the first token of each sequence: 0, or behind padding the first key that one of its rows sees.

    A call that begins later in the text does not tell padding from keys that its rows cannot see, as behind a window:
    there it is 0. In the decode steps of a batch with padding pass the positions, `attention_mask.int().argmax(1)`.

    >>> from regard import Causal, TensorMask
    >>> q = torch.zeros(2, 1, 3, 2)
    >>> real = TensorMask(torch.tensor([[True, True, True], [False, True, True]])[:, None, None])
    >>> first_tokens(Weights(q, q, torch.zeros(2, 1, 3), Causal() & real))
    [0, 1]
    """
    batch, heads, queries, keys = weights.shape
    if weights.mask is None or 0 not in weights.first_positions:
        return [0] * batch
    row = torch.arange(queries, device=weights.q.device)
    seen = weights.keep(row, torch.zeros_like(row)).flatten(1).any(1).expand(batch).tolist()
    step = max(1, 2**20 // max(1, heads * queries))
    return [0 if sees else _first_seen(weights.only(b), row, keys, step) for b, sees in enumerate(seen)]


def _first_seen(weights: Weights, row: Tensor, keys: int, step: int) -> int:
    """The same of a batch of one, whose rows do not see key 0."""
    if weights.first_position != 0:
        return 0
    for some in torch.arange(keys, device=row.device).split(step):
        seen = weights.keep(row[:, None], some[None]).flatten(0, 2).any(0)
        if bool(seen.any()):
            return int(some[0]) + int(seen.int().argmax())
    return 0


def text_keys(weights: Weights) -> Tensor:
    """Which keys are tokens and not padding, bool [batch, keys]: at least one query row of the sequence sees them.

    Where the first query is not at position 0, padding cannot be told from keys outside a window: all keys count.

    >>> from regard import Causal, TensorMask
    >>> q = torch.zeros(2, 1, 3, 2)
    >>> real = TensorMask(torch.tensor([[True, True, True], [False, True, True]])[:, None, None])
    >>> text_keys(Weights(q, q, torch.zeros(2, 1, 3), Causal() & real)).tolist()
    [[True, True, True], [False, True, True]]
    """
    batch, keys = weights.shape[0], weights.shape[3]
    parts = [weights.only(b) for b in range(batch if _differs_by_row(weights) else 1)]
    return torch.stack([_seen_keys(part) for part in parts]).expand(batch, keys)


def _differs_by_row(weights: Weights) -> bool:
    return len(weights.first_positions) > 1 or (weights.mask is not None and weights.mask.broadcast_shape()[0] > 1)


def _seen_keys(weights: Weights) -> Tensor:
    """The same of a batch of one, [keys]. Most keys are seen by the row at their own position, which comes first."""
    _, heads, queries, keys = weights.shape
    key, row = (torch.arange(n, device=weights.q.device) for n in (keys, queries))
    if weights.mask is None or weights.first_position != 0 or not queries:
        return torch.ones_like(key, dtype=torch.bool)
    seen = weights.keep(key.clamp(max=queries - 1), key).flatten(0, 1).any(0).expand(keys).clone()
    for some in (~seen).nonzero()[:, 0].split(max(1, 2**20 // max(1, heads * queries))):
        seen[some] = weights.keep(row[:, None], some[None]).flatten(0, 2).any(0)
    return seen


def _keys(weights: Weights, token: Token) -> list[int]:
    """The position of the token in each sequence, checked."""
    batch = weights.shape[0]
    if token is None:
        return first_tokens(weights)
    if not isinstance(token, Tensor) or token.numel() == 1:
        return [key_of(weights, token)] * batch
    if tuple(token.shape) != (batch,):
        raise ProblemError(
            f"token is {list(token.shape)}: expected the position of a key, or one for each sequence, int64 [batch] = "
            f"[{batch}]."
        )
    return [key_of(weights, each) for each in token.tolist()]
