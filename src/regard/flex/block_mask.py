"""FlexAttention's `BlockMask`: made without evaluating all pairs, and read as a mask.

Which blocks a `mask_mod` keeps whole, in part or not at all follows from the bounds of its mask (`mod_mask.py`). Only
blocks that stay undecided are evaluated, one for each signature. torch evaluates every pair, 17 s and 10 GB for
32,768 x 32,768.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import BlockMask

from regard.describe.mask import And, Bools, CallSizes, Mask, Or, Rectangles, kept_pairs, marked
from regard.describe.mask_by_term import MaskTerm
from regard.describe.spec import Fingerprint
from regard.describe.term import Captured, Constant, Op, Term, Variable
from regard.errors import ProblemError
from regard.flex.mod_mask import is_opaque, mask_of_mod
from regard.flex.trace import Mod
from regard.torch_internals import leave_to_python, version

CHUNK = 1 << 22
"""Pairs that are evaluated at once."""


@leave_to_python("regard.flex traces mask_mod itself")
def create_block_mask(
    mask_mod: Mod,
    B: int | None,  # noqa: N803  # torch's names
    H: int | None,  # noqa: N803
    Q_LEN: int,  # noqa: N803
    KV_LEN: int,  # noqa: N803
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,  # noqa: N803
    _compile: bool = False,
    separate_full_blocks: bool = True,
    **options: Any,
) -> BlockMask:
    """torch's `create_block_mask`: the same arguments, and a `BlockMask` of the same lists.

    A `mask_mod` that compares positions, looks tables up by them and combines such conditions, in any way of writing,
    is decided block by block by arithmetic on intervals; only blocks at the edge of the mask are evaluated. One that
    does more (an operator that does not work element by element, a `torch.autograd.Function`) is called for every
    pair, in pieces: that takes seconds for 32,768 x 32,768.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`, True where the pair is kept.
        B, H: batch rows and heads; None for 1.
        Q_LEN, KV_LEN: tokens.
        device: of the lists; None for the accelerator, or "cpu" without one, as in torch.
        BLOCK_SIZE: tokens per side of a block, or (queries, keys).
        separate_full_blocks: whether blocks that are kept whole have lists of their own.
        options: further ones of torch's, as `compute_dq_write_order`; torch's own function makes the mask then.

    >>> from regard.flex import create_block_mask
    >>> create_block_mask(lambda b, h, q, k: q >= k, None, None, 32768, 32768, device="cpu").sparsity()
    49.8046875
    """
    if _compile:
        warnings.warn(
            "_compile has no effect: the mask is not evaluated pair by pair.", DeprecationWarning, stacklevel=2
        )
    sizes = CallSizes(B or 1, H or 1, Q_LEN, KV_LEN, 0)
    block = _pair_of(BLOCK_SIZE)
    place = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    mask = mask_of_mod(mask_mod, sizes, place)
    if options or (is_opaque(mask) and place.type != "cpu"):
        make: Any = of_torch.create_block_mask
        return make(
            mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks=separate_full_blocks, **options
        )
    some, every = block_layout(mask, sizes, block)
    whole = every & _is_uncut(sizes, block) if separate_full_blocks else np.zeros_like(every)
    lists = [_lists(kept, sizes, place) for kept in (some & ~whole, whole)]
    (kv, q), (full_kv, full_q) = lists if separate_full_blocks else (lists[0], ((None, None), (None, None)))
    made = BlockMask((Q_LEN, KV_LEN), *kv, *full_kv, *q, *full_q, BLOCK_SIZE=block, mask_mod=mask_mod)
    if isinstance(mask, Mask) and mask.fingerprint().is_cacheable:
        partial, full = (torch.from_numpy(kept) for kept in (some & ~whole, whole))
        _readings[made] = _Reading(_versions(made), partial, full, {mask.fingerprint(): True})
    return made


def block_layout(mask: Mask | bool, sizes: CallSizes, block: tuple[int, int]) -> tuple[Bools, Bools]:
    """(some, every): whether some pair, and every pair, of a block is kept; [batch or 1, heads or 1, rows, columns]."""
    down, across = (-(-tokens // size) for tokens, size in zip((sizes.queries, sizes.keys), block, strict=True))
    if isinstance(mask, bool):
        return np.full((1, 1, down, across), mask), np.full((1, 1, down, across), mask)
    mask = mask.bind(sizes)
    batch, heads = mask.broadcast_shape()
    b, h, row, column = (x.reshape(-1) for x in np.indices((batch, heads, down, across)))
    r = Rectangles(
        b, h,
        row * block[0], np.minimum((row + 1) * block[0], sizes.queries),
        column * block[1], np.minimum((column + 1) * block[1], sizes.keys),
    )  # fmt: skip
    some, every = (np.array(found) for found in mask.bounds(r))
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
        q = torch.minimum(q0 + torch.arange(shape[0])[:, None], q1 - 1)  # beyond an edge, the last position again
        k = torch.minimum(k0 + torch.arange(shape[1]), k1 - 1)
        kept = kept_pairs(mask, b, h, q, k).cpu().expand(len(at), *shape).flatten(1)
        found[:, start : start + step] = kept.any(dim=1).numpy(), kept.all(dim=1).numpy()
    some, every = found[:, kind.reshape(-1)]
    return some, every


def _is_uncut(sizes: CallSizes, block: tuple[int, int]) -> Bools:
    """Which blocks the edges of the call do not cut: torch pads these with False, so they are never whole."""
    rows, columns = (
        np.arange(1, -(-tokens // size) + 1) * size <= tokens
        for tokens, size in zip((sizes.queries, sizes.keys), block, strict=True)
    )
    return rows[:, None] & columns


Lists = tuple[Tensor, Tensor]
"""Counts [batch, heads, rows], and the listed columns [batch, heads, rows, columns], these first; int32."""


def _lists(kept: Bools, sizes: CallSizes, device: torch.device) -> tuple[Lists, Lists]:
    """The lists by rows of blocks, and by columns."""
    return _ordered(kept, sizes, device), _ordered(kept.swapaxes(2, 3), sizes, device)


def _ordered(kept: Bools, sizes: CallSizes, device: torch.device) -> Lists:
    counts = torch.from_numpy(kept.sum(axis=3, dtype=np.int32))
    order = torch.from_numpy(np.argsort(~kept, axis=3, kind="stable").astype(np.int32))
    batch, heads = sizes[:2]
    return (
        counts.to(device).expand(batch, heads, *counts.shape[2:]).contiguous(),  # users take views of them
        order.to(device).expand(batch, heads, *order.shape[2:]).contiguous(),
    )


def _pair_of(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """What was read from a `BlockMask`.

    Attributes:
        versions: of its lists, when they were read.
        partial, full: bool [batch or 1, heads or 1, rows, columns], whether a block is in the lists.
        agrees: by mask of its `mask_mod`, whether that mask alone keeps the same pairs as with the lists.
    """

    versions: tuple[object, ...]
    partial: Tensor
    full: Tensor
    agrees: dict[Fingerprint, bool] = field(default_factory=dict[Fingerprint, bool])


_readings: WeakKeyDictionary[BlockMask, _Reading] = WeakKeyDictionary()


def mask_of_block_mask(given: BlockMask, sizes: CallSizes, device: torch.device) -> Mask | bool:
    """The mask of a `BlockMask` in a call: in listed blocks what `mask_mod` keeps, in full ones everything.

    Where the lists are those that follow from `mask_mod`, as they nearly always are, the mask is that of `mask_mod`.
    """
    own = mask_of_mod(given.mask_mod, sizes, device)
    reading = _read(given)
    if _agrees(reading, own, sizes, given.BLOCK_SIZE):
        return own
    partial = MaskTerm(_listed(reading.partial, given.BLOCK_SIZE))
    if isinstance(own, Mask):
        partial = And(partial, own)
    full = MaskTerm(_listed(reading.full, given.BLOCK_SIZE))
    if own is False:
        return full
    return Or(full, partial) if bool(reading.full.any()) else partial


def _versions(given: BlockMask) -> tuple[object, ...]:
    lists = (given.kv_num_blocks, given.kv_indices, given.full_kv_num_blocks, given.full_kv_indices)
    return tuple((id(t), None if t is None or t.is_inference() else version(t)) for t in lists)


def _read(given: BlockMask) -> _Reading:
    versions = _versions(given)
    reading = _readings.get(given)
    if reading is None or reading.versions != versions:
        columns = -(-given.seq_lengths[1] // given.BLOCK_SIZE[1])
        partial = _dense(given.kv_num_blocks, given.kv_indices, columns)
        full = torch.zeros_like(partial)
        if given.full_kv_num_blocks is not None:
            full = _dense(given.full_kv_num_blocks, cast(Tensor, given.full_kv_indices), columns)
        reading = _readings[given] = _Reading(versions, partial, full)
    return reading


def _dense(counts: Tensor, order: Tensor, columns: int) -> Tensor:
    """The lists as bool [batch, heads, rows, columns]."""
    counts, order = (_checked(t.detach().cpu()) for t in (counts, order))
    batch, heads = (max(counts.shape[i], order.shape[i]) for i in range(2))
    order = order.expand(batch, heads, *order.shape[2:])
    listed = (torch.arange(order.shape[3]) < counts[..., None]) & (order >= 0) & (order < columns)
    dense = torch.zeros(*order.shape[:3], columns + 1, dtype=torch.bool)
    dense.scatter_(3, torch.where(listed, order, columns).long(), value=True)
    return dense[..., :columns].contiguous()


def _checked(lists: Tensor) -> Tensor:
    if lists.ndim < 3:
        raise ProblemError(f"the lists of a BlockMask are {list(lists.shape)}: expected [batch, heads, rows, ...].")
    return lists


def _agrees(reading: _Reading, own: Mask | bool, sizes: CallSizes, block: tuple[int, int]) -> bool:
    if is_opaque(own):
        return isinstance(own, Mask) and reading.agrees.get(own.fingerprint(), False)
    key = own.fingerprint() if isinstance(own, Mask) else None
    if key is not None and key in reading.agrees:
        return reading.agrees[key]
    some, every = (torch.from_numpy(found) for found in block_layout(own, sizes, block))
    found = not bool((some & ~(reading.partial | reading.full)).any() | (reading.full & ~every).any())
    if key is not None and key.is_cacheable:
        reading.agrees[key] = found
    return found


def _listed(table: Tensor, block: tuple[int, int]) -> Term:
    """`table[b, h, q // rows, k // columns]`; axes of one element are indexed by 0."""
    index = [Variable(name) if size > 1 else Constant(0) for name, size in zip("bh", table.shape[:2], strict=True)]
    down = Op("floor_divide", "int64", Variable("q"), Constant(block[0]))
    across = Op("floor_divide", "int64", Variable("k"), Constant(block[1]))
    return Op("index", "bool", Captured(table), index[0], index[1], down, across)
