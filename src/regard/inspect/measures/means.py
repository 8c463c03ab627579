"""Which rows a mean counts, and what uniform attention gives at pairs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.index import index_of
from regard.inspect.weights.lazy import Weights

Tokens = Tensor | Sequence[int] | Sequence[Sequence[int]]
"""Token ids: integer [batch, keys], a list for each sequence, or one list where there is one sequence."""


def selected_rows(weights: Weights, rows: Tensor | None) -> Tensor:
    """The rows that a mean counts: rows that see a key, and that the caller selected; [batch, heads, queries].

    Raises:
        ProblemError: `rows` is not bool [batch, queries].
    """
    seeing = weights.visible > 0
    if rows is None:
        return seeing.expand(weights.shape[:3])
    batch, _, queries, _ = weights.shape
    rows = torch.as_tensor(rows, device=weights.q.device)
    if rows.dtype != torch.bool or tuple(rows.shape) not in ((batch, queries), (1, queries)):
        raise ProblemError(
            f"rows is {list(rows.shape)} {rows.dtype}: expected which rows to count, bool [batch, queries] = "
            f"{[batch, queries]}."
        )
    return (seeing & rows[:, None]).expand(weights.shape[:3])


def mean_over_rows(weights: Weights, values: Tensor, chance: Tensor, rows: Tensor | None) -> HeadScores:
    """The mean of [batch, heads, queries] over the rows that count."""
    return HeadScores.of_rows(values, chance.to(values.dtype), selected_rows(weights, rows))


def one_in(weights: Weights) -> Tensor:
    """What uniform attention gives each key that a row sees, 1 / visible; broadcasts to [batch, heads, queries]."""
    return weights.visible.clamp(min=1).to(weights.dtype).reciprocal()


def tokens_of(weights: Weights, tokens: Tokens) -> Tensor:
    """The tokens at the keys of a call, each sequence of the batch its own: integer [batch, keys].

    Raises:
        ProblemError: they are not integers, or not [batch, keys].
    """
    ids = token_ids(tokens)
    if ids.ndim == 1 and weights.shape[0] == 1:
        ids = ids[None]
    return per_key(weights, ids, "tokens")


def token_ids(tokens: Tokens) -> Tensor:
    """Token ids as a tensor of integers of any shape. Raises `ProblemError` if they are not integers."""
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as unlike:
        raise ProblemError(f"tokens are no ids [batch, keys] ({unlike}): expected lists of one length.") from None
    if not ids.numel() and not isinstance(tokens, Tensor):
        return ids.long()  # torch takes an empty list for floats
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ProblemError(f"tokens is {ids.dtype}: expected token ids, integers.")
    return ids


def per_key(weights: Weights, values: Tensor, what: str) -> Tensor:
    """Values of the keys of a call, [batch, keys].

    Raises:
        ProblemError: they are not [batch, keys].
    """
    batch, _, _, keys = weights.shape
    if tuple(values.shape) != (batch, keys):
        received, expected = list(values.shape), [batch, keys]
        raise ProblemError(f"{what} is {received}: expected one at each key, [batch, keys] = {expected}.")
    return values.to(weights.q.device)


def key_of(weights: Weights, token: int) -> int:
    """The position of a key of the call. Raises `ProblemError` if there is none."""
    number = index_of(token)
    if number is None or not 0 <= number < weights.shape[3]:
        raise ProblemError(f"token is {token}: expected the position of one of the {weights.shape[3]} keys.")
    return number
