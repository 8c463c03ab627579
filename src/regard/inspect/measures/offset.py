"""Attention at a fixed distance: the previous token, and any other offset."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.measures.blocks import by_head, chunks, dots, scaled_queries, weighed
from regard.inspect.measures.means import check_distances, one_in, selected_rows
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.index import index_of, listed
from regard.inspect.weights.lazy import Weights

OFFSETS = tuple(range(9))
"""The offsets of a scan: the token itself, the previous token, and up to the eighth before."""

ROWS = 32
"""Rows of a block of the band. Larger blocks read keys fewer times, and compute more pairs outside of the band."""

SPAN = 32
"""The span of offsets that share a block: offsets further apart have bands of their own."""


@checked
def offset_score(weights: Weights, offset: int = 1, rows: Tensor | None = None) -> HeadScores:
    """The mean weight that a token gives to the one `offset` before it.

        mean over rows i with 0 <= p_i - offset < keys of  A[i, p_i - offset]

    Offset 1 is the previous-token score; 0 is the token itself, negative offsets look ahead. Olsson et al. 2022,
    *In-context learning and induction heads*, appendix (head activation evaluators). TransformerLens' `detect_head`
    ("mul") divides by all rows, also those without such a token: n - offset in n of ours for a causal text of n tokens.
    O(queries).

    Chance: the mean over the same rows of 1 / visible keys, 0 where the mask hides the token.

    Args:
        rows: bool [batch, queries], the rows to count; None counts all that see a key.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> offset_score(Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal()))  # the mean of 1/2 and 1/3
    HeadScores(value=tensor([[0.4167]]), chance=tensor([[0.4167]]))
    """
    return next(iter(offset_scan(weights, (offset,), rows).values()))


@checked
def previous_token(weights: Weights, rows: Tensor | None = None) -> HeadScores:
    """The mean of A[i, p_i - 1]: `offset_score` at offset 1.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 0, 1, 1]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> previous_token(weights)  # rows 1 and 2 of rows 1 to 3; chance is the mean of 1/2, 1/3 and 1/4
    HeadScores(value=tensor([[0.6667]]), chance=tensor([[0.3611]]))
    """
    return offset_score(weights, 1, rows)


@checked
def offset_scan(
    weights: Weights, offsets: Sequence[int] = OFFSETS, rows: Tensor | None = None
) -> dict[int, HeadScores]:
    """`offset_score` at each of several offsets, together: a previous-token head may look two or four tokens back.

    Heads of models with rotated positions often do, and the induction heads that build on them are then shifted as
    well: see `induction_scan`. O(queries x offsets).

    Raises:
        ProblemError: no offsets, or not integers; a cache dropped tokens between the keys.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(4)[[0, 1, 0, 1]], torch.eye(4)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 4), 50.0), Causal())
    >>> {offset: score.value.item() for offset, score in offset_scan(weights, (0, 1, 2)).items()}  # of 4, 3 and 2 rows
    {0: 0.5, 1: 0.0, 2: 1.0}
    """
    offsets = listed("offset", offsets)
    if not offsets:
        raise ProblemError("offsets is empty: expected the distances to score, 1 for the previous token.")
    if any(index_of(offset) is None for offset in offsets):
        raise ProblemError(f"offsets is {list(offsets)}: expected integers, 1 for the previous token.")
    check_distances(weights, "a score at a distance")
    wanted, found = sorted(set(offsets)), dict[int, HeadScores]()
    while wanted:
        near = [offset for offset in wanted if offset < wanted[0] + SPAN]
        band = torch.cat([_band(part, near) for part in weights.by_start()])
        found |= {offset: _score(weights, band[..., at], offset, rows) for at, offset in enumerate(near)}
        wanted = wanted[len(near) :]
    return {offset: found[offset] for offset in offsets}


def _score(weights: Weights, mass: Tensor, offset: int, rows: Tensor | None) -> HeadScores:
    key, visible = weights.positions - offset, weights.keep_at(offset)
    there = (key >= 0) & (key < weights.shape[3])
    return HeadScores.of_rows(
        mass.where(visible, 0.0), one_in(weights) * visible, selected_rows(weights, rows) & there
    )  # the mask is evaluated once per diagonal, not per block


def _band(weights: Weights, offsets: list[int]) -> Tensor:
    """A[i, p_i - offset] for ascending offsets less than SPAN apart, [batch, heads, queries, offsets].

    A block is ROWS rows times the keys that any of them asks for; the diagonals wanted are gathered from it. Where
    there is no key, or the mask hides it, the value is arbitrary.
    """
    queries, keys = weights.shape[2:]
    device, furthest = weights.q.device, offsets[-1]
    row = torch.arange(-(-queries // ROWS) * ROWS, device=device).view(-1, ROWS)
    first = row[:, :1] + weights.first_position - furthest  # the position of a block's first key
    key = first + torch.arange(ROWS + furthest - offsets[0], device=device)
    diagonal = torch.arange(ROWS, device=device)[:, None] + (furthest - torch.tensor(offsets, device=device))
    row, safe = row.clamp(max=queries - 1), key.clamp(0, keys - 1)
    parts: list[Tensor] = []
    for some in chunks(weights, len(row), row.shape[1] * key.shape[1]):
        products = dots(weights, scaled_queries(weights, row[some]), safe[some])
        on_band = products.gather(-1, diagonal.expand(*products.shape[:-1], -1))
        at = safe[some][:, diagonal]  # [blocks, ROWS, offsets]
        parts.append(by_head(weighed(weights, on_band, row[some, :, None], at)))
    return torch.cat(parts, dim=2).flatten(2, 3)[:, :, :queries]
