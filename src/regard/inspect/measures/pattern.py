"""The mass on chosen (query, key) pairs: a measure from any pattern."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.measures.means import check_positions, one_in, selected_rows
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.lazy import Weights

Pattern = Callable[[Tensor], tuple[Tensor, Tensor] | Tensor]
"""A function from the tokens of a sequence to the pairs that count: (queries, keys), or bool [tokens, tokens]."""

AT_ONCE = 2**20
"""Weights computed at a time, of all heads: 4 MiB of float32."""


@checked
def pattern_mass(weights: Weights, tokens: Tensor, pattern: Pattern, rows: Tensor | None = None) -> HeadScores:
    """The mean over the rows that have a pair of sum_j A[i, j] over their pairs; see `Measure.of_pattern`.

    Args:
        tokens: integer [batch, keys].
        rows: bool [batch, queries], the rows to count; None counts all that see a key.

    Raises:
        ProblemError: the pattern returns anything but pairs of positions of the text, or a bool matrix of its size;
            a cache dropped tokens of the text.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 0, 0, 2]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> def two_back(tokens):
    ...     return torch.arange(2, len(tokens)), torch.arange(len(tokens) - 2)
    >>> pattern_mass(weights, torch.tensor([[7, 8, 9, 7]]), two_back)  # row 2 looks at key 0, row 3 not at key 1
    HeadScores(value=tensor([[0.5000]]), chance=tensor([[0.2917]]))
    """
    check_positions(weights, "a pattern of pairs")
    batch, heads, queries, _ = weights.shape
    mask_heads = 1 if weights.mask is None or weights.mask.broadcast_shape()[1] == 1 else heads
    mass = torch.zeros((batch, heads, queries), dtype=weights.dtype, device=weights.q.device)
    visible = mass.new_zeros((batch, mask_heads, queries))
    paired = torch.zeros((batch, 1, queries), dtype=torch.bool, device=mass.device)
    step = max(1, AT_ONCE // heads)
    for b in range(batch):
        own, pairs = weights.only(b), _pairs(pattern(tokens[b]), tokens.shape[1]).to(mass.device)
        here = (pairs[0] >= own.first_position) & (pairs[0] < own.first_position + queries)
        for i, j in zip(*(side.split(step) for side in pairs[:, here]), strict=True):
            row = i - own.first_position
            mass[b].index_add_(1, row, own.pairs(row, j)[0])
            kept = own.keep(row, j).to(mass.dtype).expand(1, mask_heads, len(row))
            visible[b].index_add_(1, row, kept[0])
            paired[b, 0, row] = True
    return HeadScores.of_rows(mass, visible * one_in(weights), selected_rows(weights, rows) & paired)


def _pairs(found: object, tokens: int) -> Tensor:
    """The pairs of a pattern, int64 [2, pairs], each once."""
    if isinstance(found, Tensor) and found.dtype == torch.bool and tuple(found.shape) == (tokens, tokens):
        return found.nonzero().T
    try:
        queries, keys = (torch.as_tensor(side) for side in found)  # type: ignore[attr-defined]
        pairs = torch.stack([queries, keys])
    except (TypeError, ValueError, RuntimeError):
        pairs = torch.zeros(0)
    fits = pairs.ndim == 2 and not pairs.is_floating_point() and pairs.dtype != torch.bool
    if not fits or (pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < tokens):
        raise ProblemError(
            f"the pattern returned {_describe(found)} for {tokens} tokens: expected (queries, keys), integers "
            f"[pairs] each from 0 to {tokens - 1}, or a bool matrix [{tokens}, {tokens}]."
        )
    return pairs.long().unique(dim=1) if pairs.numel() else pairs.long()


def _describe(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{found.dtype} {list(found.shape)}"
    if isinstance(found, tuple | list):
        return f"{type(found).__name__} of {', '.join(_describe(each) for each in found)}"
    return type(found).__name__
