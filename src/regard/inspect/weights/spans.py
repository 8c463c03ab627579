"""The keys that a range of rows may see, from the mask's bounds: pairs that the bounds decide are not evaluated.

The bounds of a rectangle cost the same for any size, so they are computed for chunks of keys, and single pairs are
evaluated only along the mask's boundary.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from regard.describe.mask import Bools, Ints, Mask, Rectangles
from regard.inspect.weights.scores import CallScores

ROWS = 128
"""Rows whose visible keys are counted at a time."""


def visible_runs(call: CallScores, row: slice, chunk: int) -> Iterator[slice]:
    """Ranges of keys that some of the rows may see, in whole chunks of keys, left to right.

    >>> from regard import Causal, Prefix, Window
    >>> from regard.inspect.weights.lazy import Weights
    >>> q, mask = torch.zeros(1, 1, 1024, 2), Causal() & (Window(5) | Prefix(1))
    >>> list(visible_runs(Weights(q, q, q[..., 0], mask), slice(600, 700), chunk=128))
    [slice(0, 128, None), slice(512, 768, None)]
    """
    keys = call.shape[3]
    if call.mask is None:
        yield slice(0, keys)
        return
    some, _ = _bounds(call, call.mask, row, chunk)
    yield from _runs(np.logical_or.reduce(some, axis=(0, 1)), keys, chunk)


def count_visible(call: CallScores, chunk: int) -> Tensor:
    """The number of keys that each row may see; int64, broadcasts to [batch, heads, queries].

    >>> from regard import Causal, Window
    >>> from regard.inspect.weights.lazy import Weights
    >>> q = torch.zeros(1, 1, 5, 2)
    >>> count_visible(Weights(q, q, q[..., 0], Causal() & Window(3)), chunk=128)
    tensor([[[1, 2, 3, 3, 3]]])
    """
    queries, keys = call.shape[2:]
    if call.mask is None or not queries:
        return torch.full((1, 1, queries), keys, device=call.q.device)
    spans = [slice(start, min(start + ROWS, queries)) for start in range(0, queries, ROWS)]
    counts = [_count(call, call.mask, span, chunk) for span in spans]
    sizes = torch.broadcast_shapes(*(count.shape[:2] for count in counts))  # equal for all heads where bounds decide
    return torch.cat([count.expand(*sizes, -1) for count in counts], dim=-1)


def kept_columns(call: CallScores, row: slice, chunk: int) -> tuple[Bools, Ints]:
    """The pairs of some rows that the mask keeps; consecutive keys that its bounds decide alike are one column.

    Returns:
        bool [batch, heads, rows, columns], axes of 1 where the mask does not tell batch rows or heads apart; and the
        first key of each column with the end of the last, int [columns + 1].

    >>> from regard import Causal
    >>> from regard.inspect.weights.lazy import Weights
    >>> q = torch.zeros(1, 1, 8, 2)
    >>> kept, edges = kept_columns(Weights(q, q, q[..., 0], Causal()), slice(4, 6), chunk=2)
    >>> edges
    array([0, 4, 5, 6, 8])
    >>> kept[0, 0]
    array([[ True,  True, False, False],
           [ True,  True,  True, False]])
    """
    keys, device = call.shape[3], call.q.device
    if call.mask is None:
        return np.ones((1, 1, row.stop - row.start, 1), dtype=np.bool_), np.array([0, keys])
    some, every = _bounds(call, call.mask, row, chunk)
    surely = np.where(every.all(axis=(0, 1)), 1, np.where(some.any(axis=(0, 1)), -1, 0))  # -1: evaluate the pairs
    of_key = np.repeat(surely, np.diff(_edges(keys, chunk)))
    starts = np.flatnonzero((np.diff(of_key, prepend=2) != 0) | (of_key < 0))
    known = of_key[starts]
    i = torch.arange(row.start, row.stop, device=device)[:, None]
    asked = call.keep(i, torch.from_numpy(starts[known < 0]).to(device)[None, :])
    kept = np.broadcast_to(known > 0, (*asked.shape[:2], len(i), len(known))).copy()
    kept[..., known < 0] = asked.expand(-1, -1, len(i), -1).cpu().numpy()
    return kept, np.append(starts, keys)


def _count(call: CallScores, mask: Mask, row: slice, chunk: int) -> Tensor:
    keys, device = call.shape[3], call.q.device
    some, every = _bounds(call, mask, row, chunk)
    decided = np.logical_and.reduce(
        every | ~some, axis=(0, 1)
    )  # a chunk that is undecided for one head or row is evaluated for all
    sure = (every * decided * np.diff(_edges(keys, chunk))).sum(axis=-1)  # keys of each [batch, heads]
    counts = torch.from_numpy(sure).to(device)[:, :, None].repeat(1, 1, row.stop - row.start)
    i = torch.arange(row.start, row.stop, device=device)[:, None]
    for key in _runs(~decided, keys, chunk):
        kept = call.keep(i, torch.arange(key.start, key.stop, device=device)[None, :])
        counts = counts + kept.expand(-1, -1, len(i), key.stop - key.start).sum(-1)
    return counts


def _bounds(call: CallScores, mask: Mask, row: slice, chunk: int) -> tuple[Bools, Bools]:
    """(some, all) of the rows times each chunk of keys: [batch, heads, chunks], or 1 where equal for all."""
    keys = call.shape[3]
    batch, heads = (min(size, here) for size, here in zip(mask.broadcast_shape(), call.shape[:2], strict=True))
    starts = _edges(keys, chunk)[:-1]
    b, h, k0 = (a.ravel() for a in np.meshgrid(np.arange(batch), np.arange(heads), starts, indexing="ij"))
    q0, q1 = (np.full_like(k0, end + call.offset) for end in (row.start, row.stop))
    some, every = mask.bounds(Rectangles(b + call.sequence, h, q0, q1, k0, np.minimum(k0 + chunk, keys)))
    shape = batch, heads, len(starts)
    return some.reshape(shape), every.reshape(shape)


def _edges(keys: int, chunk: int) -> Ints:
    """The starts of the chunks of keys, and the end of the last one."""
    return np.append(np.arange(0, keys, chunk), keys)


def _runs(wanted: Bools, keys: int, chunk: int) -> Iterator[slice]:
    """The selected chunks as ranges; adjacent ones are joined."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    for first, last in ends.reshape(-1, 2):
        yield slice(int(first) * chunk, min(int(last) * chunk, keys))
