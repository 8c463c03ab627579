"""The balanced layout: blocks of tokens dealt so that all ranks compute the same number of pairs, for any mask.

A step of the ring lasts as long as its slowest rank, so the work must be even in each step, not only in sum. Blocks
that are dealt in turn (`Layout.striped`) have that property: in step s every rank meets keys s blocks before its own.
It stays where each round of blocks is rotated as a whole, so a layout here is one rotation for each round:

    round 0     0 1 2 3        blocks in the order of positions, and the rank of each;
    round 1     2 3 0 1        a rotation by 2
    round 2     1 2 3 0

The rotations level the sums: a round is rotated such that the sum of squared loads is least, which is the least value
of a circular correlation. More rounds share more evenly and make smaller blocks, so the fewest rounds that come close
to the ideal are taken; one contiguous block or zigzag's two, where they do.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from regard.parallel.layout import Layout, even_parts, joined
from regard.parallel.pair_counts import PairCounts, pair_counts, rank_pairs, step_pairs

if TYPE_CHECKING:
    from regard.cost.pairs import Pattern
    from regard.describe.mask import Mask

CLOSE = 1.01
"""Times the ideal that ends the search."""

TILE = 64
"""Tokens of a tile in the kernels: long blocks are whole tiles."""

SHORTEST = 16
"""Tokens of the shortest block."""

BITS = 20
"""Of the work of a block: products of sums fit into 64 bits, and integers give the same layout on every machine."""

SWEEPS = 3
"""How often each round is rotated anew."""


def balanced(tokens: int, ranks: int, mask: "Mask | Pattern | None") -> Layout:
    """The layout of a mask, see `Layout.balanced`."""
    return balanced_by(pair_counts(mask, tokens), ranks)


def balanced_by(counts: PairCounts, ranks: int) -> Layout:
    """The layout for pairs that are counted so."""
    found, least = Layout.contiguous(counts.tokens, ranks), float("inf")
    for layout in _candidates(counts, ranks):
        time = imbalance(rank_pairs(counts, layout))
        if time < least - 1e-3:
            found, least = layout, time
        if least <= CLOSE:
            break
    return found


def imbalance(pairs: NDArray[np.int64]) -> float:
    """The time of a ring whose ranks wait for one another after each step, as a multiple of perfectly shared work.

    Args:
        pairs: [ranks, ranks] of `rank_pairs`.

    >>> from regard.cost import Pattern
    >>> imbalance(rank_pairs(pair_counts(Pattern(), 4096), Layout.contiguous(4096, 8)))
    1.87...
    """
    total = int(pairs.sum())
    return float(step_pairs(pairs).max(axis=1).sum()) * len(pairs) / total if total else 1.0


def _candidates(counts: PairCounts, ranks: int) -> Iterator[Layout]:
    """Layouts of ever smaller blocks."""
    tokens, rounds = counts.tokens, 2
    yield Layout.contiguous(tokens, ranks)
    yield Layout.zigzag(tokens, ranks)
    while tokens >= SHORTEST * ranks * rounds:
        yield _rotated(counts, ranks, rounds)
        rounds *= 2


def _rotated(counts: PairCounts, ranks: int, rounds: int) -> Layout:
    """The sequence in `rounds` times `ranks` blocks, each round rotated to level the sums."""
    parts = _blocks(counts.tokens, ranks * rounds)
    edges = np.array([0, *(part.stop for part in parts)])
    work = np.diff(counts.before(edges)).reshape(rounds, ranks)
    work = work >> max(0, int(work.max()).bit_length() - BITS)
    by = [0] * rounds
    load = work.sum(axis=0)
    for _ in range(SWEEPS):
        for i, each in enumerate(work):
            load -= np.roll(each, by[i])
            by[i] = _best_rotation(load, each)
            load += np.roll(each, by[i])
    runs = [[parts[i * ranks + (rank - by[i]) % ranks] for i in range(rounds)] for rank in range(ranks)]
    return Layout(counts.tokens, tuple(joined(each) for each in runs))


def _best_rotation(load: NDArray[np.int64], work: NDArray[np.int64]) -> int:
    """The rotation of `work` for which the sum of squares of load + work is least; of equal ones the smallest."""
    rotated = np.lib.stride_tricks.sliding_window_view(np.concatenate([load, load]), len(load))[: len(load)]
    return int(np.argmin(rotated @ work))


def _blocks(tokens: int, blocks: int) -> list[range]:
    """Blocks of nearly equal length, of whole tiles where each has some."""
    if tokens < TILE * blocks:
        return even_parts(tokens, blocks)
    parts = even_parts(tokens // TILE, blocks)
    stops = [part.stop * TILE for part in parts[:-1]] + [tokens]
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
