"""The balanced layout: blocks of tokens dealt so that all ranks compute the same number of pairs, for any mask.

A step of the ring lasts as long as its slowest rank, so the work must be even in each step, not only in sum. Blocks
that are dealt in turn (`Layout.striped`) have that property: in step s every rank meets keys s blocks before its own.
It stays where each round of blocks is rotated as a whole, so a layout here is one rotation for each round:

    round 0     0 1 2 3        blocks in the order of positions, and the rank of each;
    round 1     2 3 0 1        a rotation by 2
    round 2     1 2 3 0

Where links are slow, time is lost by sending keys far, so blocks may be dealt within groups of neighbours, and the
layout with the least time is taken instead of that with the most even work.

The rotations level the sums: a round is rotated such that the sum of squared loads is least, which is the least value
of a circular correlation. More rounds share more evenly and make smaller blocks, so the fewest rounds that come close
to the ideal are taken; one contiguous block or zigzag's two, where they do.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.parallel.layout import Layout, even_parts, joined
from regard.parallel.pair_counts import PairCounts, pair_counts, rank_pairs, step_pairs
from regard.parallel.route import ring_steps

if TYPE_CHECKING:
    from regard.cost.pairs import Pattern
    from regard.describe.mask import Mask

CLOSE = 1.01
"""Times the ideal that ends the search."""

TILE = 64
"""Tokens of a tile in the kernels: long blocks are whole tiles."""

SHORTEST, FEW = 16, 16
"""Tokens of the shortest block; a tile, for ranks of FEW tiles or more."""

BITS = 20
"""The bits of a block's work: products of sums fit into 64 bits, and integers give the same layout on every machine."""

SWEEPS = 3
"""How often each round is rotated anew."""


def balanced(
    tokens: int, ranks: int, mask: "Mask | Pattern | None", sending: float = 0.0, batch: int = 1, heads: int = 1
) -> Layout:
    """The layout of a mask, see `Layout.balanced`."""
    return balanced_by(pair_counts(mask, tokens, batch, heads), ranks, sending)


def balanced_by(counts: PairCounts, ranks: int, sending: float = 0.0) -> Layout:
    """The layout for pairs that are counted so."""
    found, least = Layout.contiguous(counts.tokens, ranks), float("inf")
    for layout in _candidates(counts, ranks, local=sending > 0):
        pairs = rank_pairs(counts, layout)
        time = time_of(pairs, layout.counts, sending) if sending else imbalance(pairs)
        if time < least - 1e-3:
            found, least = layout, time
        if least <= CLOSE:
            break
    return found


class Slowest(NamedTuple):
    """The ranks that a ring waits for.

    Attributes:
        pairs: [steps], of the rank with most of them.
        tokens: [steps], whose keys and values are sent, by the rank that sends most.
        sent: [ranks], tokens that each rank sends in all steps.
    """

    pairs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    sent: NDArray[np.int64]


def steps_of(pairs: NDArray[np.int64], counts: Sequence[int]) -> Slowest:
    """What the steps of a ring take, by its slowest ranks; see `ring_steps`."""
    steps = ring_steps(pairs, counts)
    return Slowest(steps.pairs.max(axis=1), steps.sent.max(axis=1), steps.sent.sum(axis=0))


def time_of(pairs: NDArray[np.int64], counts: Sequence[int], sending: float) -> float:
    """The time of a ring, each step as long as its longest computation or transfer, as a multiple of shared work."""
    steps, total = steps_of(pairs, counts), int(pairs.sum())
    return float(np.maximum(steps.pairs, sending * steps.tokens).sum()) * len(pairs) / total if total else 1.0


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


def _candidates(counts: PairCounts, ranks: int, local: bool) -> Iterator[Layout]:
    """Layouts of ever smaller blocks; with `local` also those whose blocks are dealt to few neighbouring ranks."""
    tokens = counts.tokens
    shortest = TILE if tokens >= FEW * TILE * ranks else SHORTEST
    yield Layout.contiguous(tokens, ranks)
    yield Layout.zigzag(tokens, ranks)
    if local:
        for group in (2 * 4**i for i in range(16)):
            for rounds in (4, 32):
                if group < ranks and ranks % group == 0 and tokens >= shortest * ranks * rounds:
                    yield _rotated(counts, ranks, rounds, group)
    rounds = 2
    while tokens >= shortest * ranks * rounds:
        yield _rotated(counts, ranks, rounds, ranks)
        rounds *= 2
    if tokens >= 2 * shortest * ranks:
        yield _rotated(counts, ranks, tokens // (shortest * ranks), ranks)
        yield Layout.striped(tokens, ranks, block=shortest)


def _rotated(counts: PairCounts, ranks: int, rounds: int, group: int) -> Layout:
    """The sequence in `rounds` times `ranks` blocks, dealt to groups of ranks, each round rotated to level the sums."""
    parts = _blocks(counts.tokens, ranks * rounds)
    edges = np.array([0, *(part.stop for part in parts)])
    work = np.diff(counts.before(edges))
    work = work >> max(0, int(work.max()).bit_length() - BITS)
    runs = list[list[range]]()
    size = group * rounds
    for first in range(0, len(parts), size):
        by = _rotations(work[first : first + size].reshape(rounds, group))
        own = parts[first : first + size]
        runs += [[own[i * group + (rank - by[i]) % group] for i in range(rounds)] for rank in range(group)]
    return Layout(counts.tokens, tuple(joined(each) for each in runs))


def _rotations(work: NDArray[np.int64]) -> list[int]:
    """The rotation of each round of [rounds, ranks]."""
    by, load = [0] * len(work), work.sum(axis=0)
    for _ in range(SWEEPS):
        for i, each in enumerate(work):
            load -= np.roll(each, by[i])
            by[i] = _best_rotation(load, each)
            load += np.roll(each, by[i])
    return by


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
