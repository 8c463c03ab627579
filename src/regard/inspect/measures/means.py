"""Which rows a mean counts, and uniform attention over the mask of a call, from which chance values are computed."""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.mask import Bools, Ints, Mask, Rectangles
from regard.errors import ProblemError
from regard.inspect.brief import shown
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
    try:
        chosen = torch.as_tensor(rows, device=weights.q.device)
    except (TypeError, ValueError, RuntimeError):
        chosen = torch.zeros(0)
    if chosen.dtype != torch.bool or tuple(chosen.shape) not in ((batch, queries), (1, queries)):
        came = f"{list(rows.shape)} {rows.dtype}" if isinstance(cast(object, rows), Tensor) else shown(rows)
        raise ProblemError(f"rows is {came}: expected which rows to count, bool [batch, queries] = {[batch, queries]}.")
    return (seeing & chosen[:, None]).expand(weights.shape[:3])


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
    if isinstance(tokens, Mapping):
        raise ProblemError("tokens is a mapping, as a tokenizer returns: pass its ids, tokens['input_ids'].")
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


def key_of(weights: Weights, token: int | Tensor) -> int:
    """The position of a key of the call. Raises `ProblemError` if there is none."""
    number = index_of(token)
    if number is None or not 0 <= number < weights.shape[3]:
        raise ProblemError(f"token is {token}: expected the position of one of the {weights.shape[3]} keys.")
    return number


def check_distances(weights: Weights, measure: str) -> None:
    """Raise `ProblemError` where a cache dropped tokens between the keys: their distances in the text are unknown."""
    if weights.has_gaps:
        check_positions(weights, measure)


def check_positions(weights: Weights, measure: str) -> None:
    """Raise `ProblemError` where a cache dropped tokens: the positions of the keys in the text are then unknown."""
    if weights.dropped:
        raise ProblemError(
            f"{measure} reads positions, and a cache dropped {weights.dropped:,} tokens before this call: which tokens "
            "of the text its keys are is unknown. Measure a whole text in one pass, or use a cache that keeps all "
            "tokens. Entropy, largest weights and columns need no positions. Distances are known behind a sliding "
            "window, whose keys have no gaps."
        )


def uniform(weights: Weights, *, whole_batch: bool = False) -> Weights:
    """Attention that gives each key that a row may see the same weight, over the same mask.

    No bias, softcap or learned sink; a single head where the mask is the same for all, and a single batch row likewise,
    so that a sweep of it costs a fraction of a sweep of the call. Layers with the same mask share it.

    Args:
        whole_batch: whether to keep all batch rows, to average vectors that differ between them.

    >>> from regard import Causal
    >>> q = k = torch.randn(1, 2, 3, 4)
    >>> uniform(Weights(q, k, torch.zeros(1, 2, 3), Causal())).dense()[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    queries, keys = weights.shape[2:]
    batch, heads = _mask_sizes(weights)
    batch = weights.shape[0] if whole_batch else batch
    seen = weights.visible[:batch, :heads].expand(batch, heads, queries)
    q = torch.zeros((batch, heads, queries, 1), dtype=weights.dtype, device=weights.q.device)
    lse = seen.to(weights.dtype).log()
    return Weights(q, q.new_zeros((batch, heads, keys, 1)), lse, weights.mask, offset=weights.offset,
                   sequence=weights.sequence, starts=weights.starts, dropped=weights.dropped,
                   has_gaps=weights.has_gaps)  # fmt: skip


def looks_ahead(weights: Weights) -> bool:
    """Whether some row sees a later key.

    Decided from the mask's bounds, a rectangle per row; rows that these leave undecided are checked pair by pair.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)
    >>> looks_ahead(Weights(q, k, q[..., 0], Causal())), looks_ahead(Weights(q, k, q[..., 0]))
    (False, True)
    """
    return any(map(_one_looks_ahead, weights.by_start()))


def _one_looks_ahead(weights: Weights) -> bool:
    """The same of a call that starts at one position."""
    queries, keys = weights.shape[2:]
    rows = np.arange(queries)[weights.first_position + np.arange(queries) < keys - 1]
    if weights.mask is None or not len(rows):
        return bool(len(rows))
    undecided = _some_later(weights, weights.mask, rows)
    device, key = weights.q.device, torch.arange(keys, device=weights.q.device)
    for row in torch.from_numpy(rows[undecided]).to(device).split(max(1, 2**20 // keys)):
        later = key > row[:, None] + weights.first_position
        if bool((weights.keep(row[:, None], key[None]) & later).any()):
            return True
    return False


def _some_later(weights: Weights, mask: Mask, rows: Ints) -> Bools:
    """For each row, whether by the bounds some head may see a later key."""
    batch, heads = _mask_sizes(weights)
    b, h, i = (axis.ravel() for axis in np.meshgrid(np.arange(batch), np.arange(heads), rows, indexing="ij"))
    at, next_key = i + weights.offset, np.maximum(i + weights.first_position + 1, 0)  # rows may be before all keys
    keys = np.full_like(i, weights.shape[3])
    some, _ = mask.bounds(Rectangles(b + weights.sequence, h, at, at + 1, next_key, keys))
    return np.logical_or.reduce(some.reshape(batch * heads, len(rows)), axis=0)


def _mask_sizes(weights: Weights) -> tuple[int, int]:
    """The batch rows and heads over which the mask or the positions vary, of those of the call."""
    batch, heads = weights.shape[:2]
    rows, of_heads = (1, 1) if weights.mask is None else weights.mask.broadcast_shape()
    return batch if rows > 1 or len(weights.first_positions) > 1 else 1, heads if of_heads > 1 else 1
