"""Which blocks of pairs a mask keeps whole, in part or not at all.

That follows from the bounds of the mask. Only blocks that stay undecided are evaluated, one for each signature. torch
evaluates every pair, 17 s and 10 GB for 32,768 x 32,768.
"""

import numpy as np
import torch

from regard.describe.mask import Bools, CallSizes, Mask, Rectangles, bounds_of, broadcast_shape_of, kept_pairs, marked
from regard.describe.spec import bound_to

CHUNK = 1 << 22
"""Pairs that are evaluated at once."""


def block_layout(mask: Mask | bool, sizes: CallSizes, block: tuple[int, int]) -> tuple[Bools, Bools]:
    """(some, every): whether some pair, and every pair, of a block is kept; [batch or 1, heads or 1, rows, columns]."""
    down, across = (-(-tokens // size) for tokens, size in zip((sizes.queries, sizes.keys), block, strict=True))
    if isinstance(mask, bool):
        return np.full((1, 1, down, across), mask), np.full((1, 1, down, across), mask)
    mask = bound_to(mask, sizes)
    batch, heads = broadcast_shape_of(mask)
    b, h, row, column = (x.reshape(-1) for x in np.indices((batch, heads, down, across)))
    r = Rectangles(
        b, h,
        row * block[0], np.minimum((row + 1) * block[0], sizes.queries),
        column * block[1], np.minimum((column + 1) * block[1], sizes.keys),
    )  # fmt: skip
    some, every = (np.array(found) for found in bounds_of(mask, r))
    open_ = np.flatnonzero(some & ~every)
    if len(open_):
        some[open_], every[open_] = _evaluated(mask, Rectangles(*(side[open_] for side in r)))
    return some.reshape(batch, heads, down, across), every.reshape(batch, heads, down, across)


def _evaluated(mask: Mask, r: Rectangles) -> tuple[Bools, Bools]:
    """`block_layout` of some blocks by evaluating one for each signature."""
    kinds = np.concatenate([marked(mask, r), np.stack([r.q1 - r.q0, r.k1 - r.k0], axis=1)], axis=1)
    _, first, kind = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    shape = int((r.q1 - r.q0).max()), int((r.k1 - r.k0).max())
    found = np.zeros((2, len(first)), dtype=bool)
    step = max(1, CHUNK // (shape[0] * shape[1]))
    for start in range(0, len(first), step):
        at = first[start : start + step]
        b, h, q0, q1, k0, k1 = (torch.from_numpy(side[at])[:, None, None] for side in r)
        rows, columns = (torch.arange(size, device="cpu") for size in shape)
        q = torch.minimum(q0 + rows[:, None], q1 - 1)  # beyond an edge, the last position again
        k = torch.minimum(k0 + columns, k1 - 1)
        kept = kept_pairs(mask, b, h, q, k).cpu().expand(len(at), *shape).flatten(1)
        found[:, start : start + step] = kept.any(dim=1).numpy(), kept.all(dim=1).numpy()
    some, every = found[:, kind.reshape(-1)]
    return some, every
