"""Rows of a product of matrices of weights, layer by layer, and never a matrix: what rollout and gradients share.

Both methods multiply one tokens x tokens matrix per layer. Of the product, m chosen rows are wanted, and they are a row
vector times the last layer's matrix, times the one before, and so on: m x tokens numbers, while the matrices pass by in
tiles, made of q, k and lse. O(tokens^2 + m tokens^2) time a layer, O(m tokens) memory beside the tile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.weights.index import counted_rows
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.tiles import Tile


@brief
@dataclass(frozen=True, eq=False)
class Relevance:
    """How much each token is said to matter to chosen rows.

    Args:
        rows: which rows.
        values: [batch, rows, tokens].
        caveat: what must be said where they are shown.

    >>> print(Relevance((2,), torch.tensor([[[0.1, 0.6, 0.3]]]), "Weights are not importance."))
    sequence 0, row 2: token 1 0.600, token 2 0.300, token 0 0.100
    Weights are not importance.
    """

    rows: tuple[int, ...]
    values: Tensor
    caveat: str

    def __str__(self) -> str:
        best = self.values.topk(min(5, self.values.shape[2]), dim=2)
        lines = [
            f"sequence {b}, row {row}: " + ", ".join(f"token {t} {v:.3f}" for v, t in zip(top, where, strict=True))
            for b, (tops, wheres) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True))
            for row, top, where in zip(self.rows, tops, wheres, strict=True)
        ]
        return "\n".join([*lines, self.caveat])


def through(rows: Tensor, weights: Weights, matrix: Callable[[Tile], Tensor]) -> Tensor:
    """`rows @ M`, with M one layer's matrix, given tile by tile.

    Args:
        rows: [batch, m, queries].
        matrix: for a tile of weights, the same part of M: [batch, rows of the tile, its keys].

    Returns:
        [batch, m, keys]
    """
    product = rows.new_zeros(*rows.shape[:2], weights.shape[3])
    for tile in weights.tiles():
        own = rows[:, :, tile.rows]
        if own.any():  # below the last layer, rows after the chosen ones count for nothing
            product[:, :, tile.key : tile.key + tile.weights.shape[3]] += own @ matrix(tile)
    return product


def chosen_rows(rows: Sequence[int], weights: Sequence[Weights]) -> tuple[tuple[int, ...], Tensor]:
    """(the rows counted from 0, unit vectors [batch, m, tokens]): what the product begins with.

    Raises:
        ProblemError: no layers, layers that are not self-attention over the same tokens, or rows that there are not.
    """
    if not weights:
        raise ProblemError("there are no layers: pass the weights of each, from the first to the last.")
    batch, _, queries, tokens = weights[0].shape
    for layer, one in enumerate(weights):
        if (one.shape[0], *one.shape[2:]) != (batch, tokens, tokens) or one.offset != 0:
            raise ProblemError(
                f"layer {layer} has {one.shape[2]} queries at position {one.offset} and {one.shape[3]} keys, of "
                f"{one.shape[0]} sequences: products of layers need self-attention over the same {queries} tokens in "
                "every one, a whole text at a time and without a cache."
            )
    if not rows:
        raise ProblemError("no rows were chosen: name at least one token.")
    counted = counted_rows("row", rows, tokens)
    units = torch.zeros(len(rows), tokens, dtype=weights[0].dtype, device=weights[0].q.device)
    units[range(len(rows)), counted] = 1.0
    return counted, units.expand(batch, -1, -1).clone()
