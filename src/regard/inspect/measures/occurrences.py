"""The earlier occurrences of each token, as blocks of pairs.

The pairs of rows and keys that induction reads are, for each token of the vocabulary, all pairs of its
occurrences. A token that occurs m times has m (m - 1) / 2 of them, so that the frequent tokens of a text make up
nearly all: in blocks they are matrix products.

    tokens    a b a c a b        occurrences of a: 0 2 4        of b: 1 5        c occurs once and has no pairs
"""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 32
"""Occurrences in a block: of a token with more, each 32 are a block with themselves and with each 32 before."""

BEYOND = 2**40
"""The padding for "no key": later than any row."""


class Occurrences(NamedTuple):
    """Blocks of rows and keys with the same token, size x size each.

    Each pair of a position and an earlier one with the same token is in one block. Blocks are kept as spans of `order`,
    four integers each, and become positions when they are read.
    """

    order: Tensor  # int64 [tokens], positions, those of a token together and ascending
    spans: Tensor  # int64 [blocks, 4]: start in `order` and count of the rows, then of the keys
    size: int

    def at(self, some: slice) -> tuple[Tensor, Tensor]:
        """The positions of some blocks: rows int64 [blocks, size], filled up with -1, and keys, with `BEYOND`."""
        nth = torch.arange(self.size, device=self.order.device)
        row, rows, key, keys = self.spans[some, :, None].unbind(1)
        last = len(self.order) - 1
        i, j = (self.order[(first + nth).clamp(max=last)] for first in (row, key))
        return i.where(nth < rows, -1), j.where(nth < keys, BEYOND)


def occurrences(tokens: Tensor) -> list[Occurrences]:
    """The blocks of one sequence, int64 [tokens], grouped by size.

    >>> [blocks.at(slice(None)) for blocks in occurrences(torch.tensor([7, 8, 6, 9, 7, 8]))]
    [(tensor([[0, 4],
            [1, 5]]), tensor([[0, 4],
            [1, 5]]))]
    """
    ordered, order = torch.sort(tokens, stable=True)
    counts = torch.unique_consecutive(ordered, return_counts=True)[1]
    starts, several = counts.cumsum(0) - counts, counts > 1
    starts, counts = starts[several], counts[several]
    found, size = list[Occurrences](), 2
    while size <= LARGEST:
        narrow = (counts <= size) & ((counts > size // 2) | (size == 2))
        own = torch.stack([starts[narrow], counts[narrow]], dim=1)
        found.append(Occurrences(order, torch.cat([own, own], dim=1), size))
        size *= 2
    wide = counts > LARGEST
    found.append(Occurrences(order, _pieces(starts[wide], counts[wide]), LARGEST))
    return [blocks for blocks in found if len(blocks.spans)]


def _pieces(starts: Tensor, counts: Tensor) -> Tensor:
    """For tokens whose occurrences begin at `starts`, the spans of every piece with itself and each earlier piece."""
    pieces = -(-counts // LARGEST)
    blocks = pieces * (pieces + 1) // 2
    of = torch.repeat_interleave(torch.arange(len(blocks), device=starts.device), blocks)
    nth = torch.arange(len(of), device=starts.device) - (blocks.cumsum(0) - blocks)[of]
    row = (((8 * nth + 1).double().sqrt() - 1) / 2).floor().long()  # nth = row (row + 1) / 2 + key, key <= row
    ends = [(at * LARGEST, (counts[of] - at * LARGEST).clamp(max=LARGEST)) for at in (row, nth - row * (row + 1) // 2)]
    return torch.stack([number for first, many in ends for number in (starts[of] + first, many)], dim=1)


def matches(tokens: Tensor, shift: int = 1) -> tuple[Tensor, Tensor]:
    """All pairs (i, j) with j in M_i, as two int64 tensors, by i and then j; see `induction`.

    >>> [pair.tolist() for pair in matches(torch.tensor([7, 8, 9, 7, 8]))]
    [[3, 4], [1, 2]]
    """
    pairs: list[Tensor] = [torch.empty((0, 2), dtype=torch.int64, device=tokens.device)]
    for rows, keys in (blocks.at(slice(None)) for blocks in occurrences(tokens)):
        i, j = torch.broadcast_tensors(rows[:, :, None], keys[:, None] + shift)
        pair = paired(rows, keys, torch.tensor([shift], device=tokens.device))[:, :, 0]
        pairs.append(torch.stack([i, j], dim=-1)[pair])
    i, j = torch.cat(pairs).unbind(-1)
    order = torch.argsort(i * len(tokens) + j)
    return i[order], j[order]


def paired(rows: Tensor, keys: Tensor, shifts: Tensor) -> Tensor:
    """The pairs of a block that count: the occurrence is earlier, and the key `shift` after it no later than the row.

    Returns:
        bool [blocks, r, shifts, c].
    """
    first, last = keys[:, None] + shifts.clamp(max=0)[:, None], keys[:, None] + shifts.clamp(min=1)[:, None]
    there = last.where(first >= 0, BEYOND)  # [blocks, shifts, c]
    return there[:, None] <= rows[:, :, None, None]
