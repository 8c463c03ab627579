"""Attention to earlier occurrences of a token and to the tokens after them: induction and duplicate tokens.

The pairs of rows and keys that induction reads are, for each token of the vocabulary, all pairs of its occurrences. A
token that occurs m times has m (m - 1) / 2 of them, so that the frequent tokens of a text make up nearly all: in blocks
they are matrix products.

    tokens    a b a c a b        occurrences of a: 0 2 4        of b: 1 5        c occurs once and has no pairs
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.measures.blocks import by_head, chunks, dots, kept, scaled_queries, summed, weighed
from regard.inspect.measures.means import Tokens, check_positions, one_in, selected_rows, tokens_of
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.index import index_of, listed
from regard.inspect.weights.lazy import Weights

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


SHIFTS = tuple(range(9))
"""The shifts of a scan: 0 is the earlier occurrence itself, 1 the token after it, and up to the eighth after it."""


@checked
def induction(weights: Weights, tokens: Tokens, shift: int = 1, rows: Tensor | None = None) -> HeadScores:
    """Prefix matching: the mass on tokens that followed an earlier occurrence of the current one.

        mean over rows i with M_i not empty of  sum_{j in M_i} A[i, j],     M_i = {j <= i : x[j-1] = x[i], j-1 < i}

    Olsson et al. 2022, *In-context learning and induction heads*, appendix (head activation evaluators). It is defined
    on repeated random tokens (`regard.inspect.measures.stimulus`): on plain text it also counts attention to tokens
    that are merely frequent, and with a fixed period a purely positional head scores as well (`Jittered` separates the
    two). Circuits may be shifted (x[j-shift] = x[i]): scan with `induction_scan` before concluding none exists.
    TransformerLens' `detect_head` ("mul", "induction_head") sums over the same pairs and divides by all rows, also
    those without a repetition: it is (rows with M_i not empty) / rows of ours. O(matches), in blocks, all counted.

    Chance: the mean over the same rows of (visible keys in M_i) / (visible keys).

    Args:
        tokens: integer [batch, keys], the token at each key position, as a tensor or lists.
        rows: bool [batch, queries], the rows to count; None counts all that see a key.

    Returns:
        NaN for a sequence without repeated tokens.

    Raises:
        ProblemError: the tokens are not [batch, keys], or not integers; a cache dropped tokens of the text.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(5)[[0, 0, 0, 1, 2]], torch.eye(5)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 5), 50.0), Causal())
    >>> tokens = torch.tensor([[7, 8, 9, 7, 8]])  # 7 is at 0, followed by token 1; 8 is at 1, followed by 9
    >>> induction(weights, tokens)  # chance is the mean of 1/4 and 1/5
    HeadScores(value=tensor([[1.]]), chance=tensor([[0.2250]]))
    """
    return next(iter(induction_scan(weights, tokens, (shift,), rows).values()))


@checked
def duplicate(weights: Weights, tokens: Tokens, rows: Tensor | None = None) -> HeadScores:
    """The mass on earlier occurrences of the same token: `induction` at shift 0.

        mean over rows i with one of  sum_{j < i, x[j] = x[i]} A[i, j]

    Wang et al. 2023, arXiv:2211.00593 (duplicate token heads).

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(5)[[0, 0, 0, 0, 2]], torch.eye(5)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 5), 50.0), Causal())
    >>> duplicate(weights, torch.tensor([[7, 8, 9, 7, 8]]))  # row 3 looks at the 7 before, row 4 not at the 8
    HeadScores(value=tensor([[0.5000]]), chance=tensor([[0.2250]]))
    """
    return induction(weights, tokens, 0, rows)


@checked
def induction_scan(
    weights: Weights, tokens: Tokens, shifts: Sequence[int] = SHIFTS, rows: Tensor | None = None
) -> dict[int, HeadScores]:
    """`induction` at each of several shifts, together: a circuit whose first layer looks o tokens back, not 1, is at o.

    Raises:
        ProblemError: no shifts, or not integers; or an error of `induction`.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(5)[[0, 0, 0, 2, 3]], torch.eye(5)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 5), 50.0), Causal())
    >>> scan = induction_scan(weights, torch.tensor([[7, 8, 9, 7, 8]]), (0, 1, 2))  # two behind the token before
    >>> {shift: score.value.item() for shift, score in scan.items()}
    {0: 0.0, 1: 0.0, 2: 1.0}
    """
    shifts = listed("shift", shifts)
    if not shifts:
        raise ProblemError("shifts is empty: expected distances after an earlier occurrence, 1 for induction.")
    if any(index_of(shift) is None for shift in shifts):
        raise ProblemError(f"shifts is {list(shifts)}: expected integers, 1 for induction.")
    check_positions(weights, "induction")
    tokens = tokens_of(weights, tokens)
    on_host = tokens.cpu()  # blocks are found there: tokens are read once, and not each size of a block
    each = [_Matched(weights.only(b), tuple(shifts), of) for b, of in enumerate(on_host)]
    counting, chance = selected_rows(weights, rows), one_in(weights)
    masses, visibles = [one.mass for one in each], [one.visible for one in each]
    found: dict[int, HeadScores] = {}
    for at, shift in enumerate(shifts):
        mass, visible = (torch.cat([part[..., at] for part in parts]) for parts in (masses, visibles))
        having = torch.cat([one.matched[..., at] for one in each])[:, None] > 0
        found[shift] = HeadScores.of_rows(mass, (visible * chance).expand(mass.shape), counting & having)
    return found


def best(scan: dict[int, HeadScores]) -> HeadScores:
    """Each head's score where it is furthest above chance, in the mean over sequences; `at` is the shift or offset.

    The largest of several is large by chance too: it suggests a circuit, and does not measure its strength.

    Raises:
        ProblemError: the scan is empty.

    >>> chance = torch.tensor([[0.1]])
    >>> found = best({1: HeadScores(torch.tensor([[0.2]]), chance), 4: HeadScores(torch.tensor([[0.7]]), chance)})
    >>> found.value, found.at
    (tensor([[0.7000]]), tensor([[4]]))
    """
    if not scan:
        raise ProblemError("the scan is empty: give the scores at several shifts or offsets, as offset_scan does.")
    at, scores = list(scan), list(scan.values())
    above = torch.stack([(score.mean() - score.mean_chance()).nan_to_num(-torch.inf) for score in scores])
    which = above.argmax(0)  # [heads]

    def chosen(each: list[Tensor]) -> Tensor:
        """For each head, the tensor at its best shift: [batch, heads, ...]."""
        return torch.stack(each)[which, :, torch.arange(len(which), device=which.device)].transpose(0, 1)

    sums, counts = ([getattr(score, name) for score in scores] for name in ("sums", "counts"))
    where = torch.tensor(at, device=which.device)[which]
    return HeadScores(
        chosen([s.value for s in scores]),
        chosen([s.chance for s in scores]),
        None if any(s is None for s in sums) else chosen(sums),
        None if any(c is None for c in counts) else chosen(counts),
        where.expand(len(scores[0].value), -1),
    )


class _Matched:
    """The mass on M_i of every row of one sequence, for several shifts.

    Args:
        tokens: of the sequence, on the host.

    Attributes:
        mass: [1, heads, queries, shifts].
        matched: blocks that have keys in M_i, visible or not; [1, queries, shifts].
        visible: keys in M_i that the mask keeps; [1, heads or 1, queries, shifts].
    """

    def __init__(self, weights: Weights, shifts: tuple[int, ...], tokens: Tensor) -> None:
        device = weights.q.device
        self._weights, self._shifts = weights, torch.tensor(shifts, device=device)
        _, heads, queries, _ = weights.shape
        mask_heads = 1 if weights.mask is None or weights.mask.broadcast_shape()[1] == 1 else heads
        self.mass = torch.zeros((1, heads, queries, len(shifts)), dtype=weights.dtype, device=device)
        self.visible = self.mass.new_zeros((1, mask_heads, queries, len(shifts)))
        self.matched = torch.zeros((1, queries, len(shifts)), dtype=torch.int64, device=device)
        for blocks in occurrences(tokens):
            for some in chunks(weights, len(blocks.spans), blocks.size**2 * len(shifts)):
                positions, occurring = blocks.at(some)
                here = (positions >= weights.first_position) & (positions < weights.first_position + queries)
                if bool(here.any()):
                    self._add(*(t.to(device) for t in (positions, occurring, here, *here.nonzero(as_tuple=True))))

    def _add(self, positions: Tensor, occurring: Tensor, here: Tensor, block: Tensor, row: Tensor) -> None:
        """Add the rows of some blocks that are in this call (`here`), which are each `row` of each `block`."""
        weights, shifts, of_shifts = self._weights, self._shifts, (-1, occurring.shape[1])
        rows = (positions - weights.first_position).clamp(0, weights.shape[2] - 1)
        keys = (occurring[:, None] + shifts[:, None]).flatten(1)  # [blocks, shifts * c]
        pair = paired(positions, occurring, shifts) & here[:, :, None, None]
        keys = keys.clamp(0, weights.shape[3] - 1)
        i, j = rows[:, :, None], keys[:, None]
        visible = (kept(weights, i, j) & pair.flatten(2)[:, None]).to(weights.dtype).unflatten(-1, of_shifts)
        a = weighed(weights, dots(weights, scaled_queries(weights, rows), keys), i, j).unflatten(-1, of_shifts)
        at = rows[block, row]
        self.mass.index_add_(2, at, by_head(summed(a, visible))[:, :, block, row])
        self.matched.index_add_(1, at, pair.any(-1)[block, row][None].to(self.matched.dtype))
        mask_heads = self.visible.shape[1]
        seen = by_head(visible.sum(-1))[:, :mask_heads]  # one mask head serves all heads
        self.visible.index_add_(2, at, seen[:, :, block, row].expand(1, mask_heads, -1, -1))
