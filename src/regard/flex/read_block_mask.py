"""A `BlockMask` read as a mask: in listed blocks what `mask_mod` keeps, in full ones everything."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import And, Bools, CallSizes, Mask, Or, Positions, broadcast_shape_of
from regard.describe.mask_by_term import MaskTerm
from regard.describe.spec import bound_to, spec
from regard.describe.tensors import ContentKey, content_key
from regard.describe.term import Captured, Constant, Op, Term, Variable
from regard.errors import ProblemError
from regard.flex.every_pair import tabulated
from regard.flex.layout import block_layout
from regard.flex.mod_mask import is_opaque, mask_of_mod
from regard.flex.outside_derivatives import outside_derivatives
from regard.flex.trace import Mod, is_traced


@dataclass
class _Reading:
    """What was read from a `BlockMask`.

    Attributes:
        lists: the content of its lists, when they were read.
        partial, full: bool [batch or 1, heads or 1, rows, columns], whether a block is in the lists.
        agrees: by mask of its `mask_mod` and the batch rows and heads in which that and the lists differ, whether that
            mask alone keeps the same pairs as with the lists: lists of one batch row fit no other rows of a mask that
            has more.
    """

    lists: tuple[ContentKey | None, ...]
    partial: Tensor
    full: Tensor
    agrees: dict["_MaskKey", bool] = field(default_factory=dict["_MaskKey", bool])


_MaskKey = tuple[Fingerprint, tuple[int, ...]]


def _key(mask: Mask, sizes: CallSizes, table: Tensor) -> _MaskKey:
    return mask.fingerprint(), (*broadcast_shape_of(bound_to(mask, sizes)), *table.shape[:2])


_readings: WeakKeyDictionary[BlockMask, _Reading] = WeakKeyDictionary()


def mask_of_block_mask(block_mask: BlockMask, sizes: CallSizes, device: torch.device) -> Mask | bool:
    """The mask of a `BlockMask` in a call: in listed blocks what `mask_mod` keeps, in full ones everything.

    Where the lists are those that follow from `mask_mod`, as they nearly always are, the mask is that of `mask_mod`.
    """
    own = mask_of_mod(block_mask.mask_mod, sizes, device)
    reading = _read(block_mask)
    given = reading.partial
    reading = replace(reading, partial=_of_call(reading.partial, sizes), full=_of_call(reading.full, sizes))
    if _agrees(reading, own, sizes, block_mask.BLOCK_SIZE):
        return own
    _refuse_fewer(given, sizes)
    partial = MaskTerm(_listed(reading.partial, block_mask.BLOCK_SIZE))
    if isinstance(own, Mask):
        partial = And(partial, own)
    full = MaskTerm(_listed(reading.full, block_mask.BLOCK_SIZE))
    if own is False:
        return full
    return Or(full, partial) if bool(reading.full.any()) else partial


@spec
class BlockLists(Mask):
    """What a `BlockMask` keeps whose lists are read when the call is planned: while torch traces, they have no data.

    Attributes:
        partial, full: bool [batch or 1, heads or 1, rows, columns], whether a block is in the lists.
        rows, columns: queries and keys per block.
        own: what `mask_mod` keeps; None for everything.
    """

    partial: Tensor
    full: Tensor
    rows: int
    columns: int
    own: Mask | None

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self._together(has_full=True).keep(b, h, q, k)

    def broadcast_shape(self) -> tuple[int, int]:
        batch, heads = (1, 1) if self.own is None else broadcast_shape_of(self.own)
        return max(batch, self.full.shape[0]), max(heads, self.full.shape[1])

    def bind(self, sizes: CallSizes) -> Mask:
        with outside_derivatives():
            return self._bound(sizes)

    def _bound(self, sizes: CallSizes) -> Mask:
        own = True if self.own is None else self.own
        partial, full = _of_call(self.partial, sizes), _of_call(self.full, sizes)
        if _agrees(_Reading((), partial, full), own, sizes, (self.rows, self.columns)):
            return bound_to(MaskTerm(Constant(True)) if self.own is None else self.own, sizes)
        _refuse_fewer(self.partial, sizes)
        found = BlockLists(partial, full, self.rows, self.columns, self.own)
        return bound_to(found._together(bool(full.any())), sizes)

    def _together(self, has_full: bool) -> Mask:
        block = self.rows, self.columns
        partial: Mask = MaskTerm(_listed(self.partial, block))
        if self.own is not None:
            partial = And(partial, self.own)
        return Or(MaskTerm(_listed(self.full, block)), partial) if has_full else partial


def mask_of_lists(
    lists: Sequence[Tensor], block: tuple[int, int], mask_mod: Mod, sizes: CallSizes, device: torch.device
) -> Mask | bool:
    """`mask_of_block_mask` of lists that torch traces.

    Args:
        lists: `kv_num_blocks`, `kv_indices`, and those of full blocks if there are any; empty if what they list
            follows from `mask_mod`.
    """
    own = mask_of_mod(mask_mod, sizes, device)
    if is_opaque(own) and any(map(is_traced, lists)):
        own = tabulated(cast(Mask, own), sizes)
    if not lists:
        return own
    columns = -(-sizes.keys // block[1])
    partial = _dense(lists[0], lists[1], columns)
    full = _dense(lists[2], lists[3], columns) if len(lists) == 4 else torch.zeros_like(partial)
    if own is False:
        return MaskTerm(_listed(full, block))
    return BlockLists(partial, full, *block, own=None if own is True else own)


FOLLOWS = "_follows_from"
"""The attribute of a `BlockMask` with the function and the lists that it was made with, if the lists follow from it."""


def lists_of(block_mask: BlockMask) -> tuple[Tensor | None, ...]:
    """Counts and order of the partial blocks, and of the full ones."""
    return (
        block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices,
    )  # fmt: skip


def mark_as_following(made: BlockMask) -> None:
    """Note, while dynamo traces, that the lists of a `BlockMask` are those of its `mask_mod`."""
    setattr(made, FOLLOWS, (made.mask_mod, *lists_of(made)))


def follows_function(block_mask: BlockMask) -> bool:
    """Whether the lists are known to be those of `mask_mod`, unless they were written to."""
    made_with = getattr(block_mask, FOLLOWS, None)
    now = (block_mask.mask_mod, *lists_of(block_mask))
    return made_with is not None and all(a is b for a, b in zip(made_with, now, strict=True))


def remember(made: BlockMask, mask: Mask, sizes: CallSizes, partial: Bools, full: Bools) -> None:
    """Note what the lists of a `BlockMask` are, and that they follow from its mask."""
    if mask.fingerprint().is_cacheable:
        tables = torch.from_numpy(partial), torch.from_numpy(full)
        _readings[made] = _Reading(_content(made), *tables, {_key(mask, sizes, tables[0]): True})


def _content(block_mask: BlockMask) -> tuple[ContentKey | None, ...]:
    return tuple(None if t is None else content_key(t) for t in lists_of(block_mask))


def _read(block_mask: BlockMask) -> _Reading:
    lists = _content(block_mask)
    reading = _readings.get(block_mask)
    if reading is None or reading.lists != lists:
        columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
        partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
        full = torch.zeros_like(partial)
        if block_mask.full_kv_num_blocks is not None:
            full = _dense(block_mask.full_kv_num_blocks, cast(Tensor, block_mask.full_kv_indices), columns)
        reading = _readings[block_mask] = _Reading(lists, partial, full)
    return reading


def _dense(counts: Tensor, order: Tensor, columns: int) -> Tensor:
    """The lists as bool [batch, heads, rows, columns]."""
    counts, order = (_checked(t.detach().cpu()) for t in (counts, order))
    batch, heads = (max(counts.shape[i], order.shape[i]) for i in range(2))
    order = order.expand(batch, heads, *order.shape[2:])
    listed = (torch.arange(order.shape[3], device="cpu") < counts[..., None]) & (order >= 0) & (order < columns)
    dense = torch.zeros(*order.shape[:3], columns + 1, dtype=torch.bool, device="cpu")
    dense.scatter_(3, torch.where(listed, order, columns).long(), value=True)
    return dense[..., :columns].contiguous()


def _of_call(table: Tensor, sizes: CallSizes) -> Tensor:
    """The table for the batch rows and heads of a call: the first ones; row b reads row b % rows where it has fewer."""
    for axis, size in enumerate(sizes[:2]):
        if table.shape[axis] not in (1, size):
            table = table.index_select(axis, torch.arange(size, device="cpu") % table.shape[axis])
    return table


def _refuse_fewer(table: Tensor, sizes: CallSizes) -> None:
    """Raise where torch's own functions differ: on CPUs, GPUs and without torch.compile, rows read different lists."""
    rows, heads = table.shape[:2]
    if 1 < rows < sizes.batch or 1 < heads < sizes.heads:
        raise ProblemError(
            f"block_mask has lists for {rows} batch rows and {heads} heads, and the call has {sizes.batch} and "
            f"{sizes.heads}: create one for these, or for 1 where all are alike."
        )


def _checked(lists: Tensor) -> Tensor:
    if lists.ndim < 3:
        raise ProblemError(f"the lists of a BlockMask are {list(lists.shape)}: expected [batch, heads, rows, ...].")
    return lists


def _agrees(reading: _Reading, own: Mask | bool, sizes: CallSizes, block: tuple[int, int]) -> bool:
    rows = reading.partial.shape[2]
    if rows * block[0] < sizes.queries:
        raise ProblemError(
            f"block_mask has lists for {rows} blocks of {block[0]} queries, and the call has {sizes.queries} queries: "
            "a slice of a BlockMask has the seq_lengths of the whole one until you set them."
        )
    if is_opaque(own):
        return isinstance(own, Mask) and reading.agrees.get(_key(own, sizes, reading.partial), False)
    key = _key(own, sizes, reading.partial) if isinstance(own, Mask) else None
    if key is not None and key in reading.agrees:
        return reading.agrees[key]
    some, every = (torch.from_numpy(found) for found in block_layout(own, sizes, block))
    found = not bool((some & ~(reading.partial | reading.full)).any() | (reading.full & ~every).any())
    if key is not None and key[0].is_cacheable:
        reading.agrees[key] = found
    return found


def _listed(table: Tensor, block: tuple[int, int]) -> Term:
    """`table[b, h, q // rows, k // columns]`; axes of one element are indexed by 0."""
    index = [Variable(name) if size > 1 else Constant(0) for name, size in zip("bh", table.shape[:2], strict=True)]
    down = Op("floor_divide", "int64", Variable("q"), Constant(block[0]))
    across = Op("floor_divide", "int64", Variable("k"), Constant(block[1]))
    return Op("index", "bool", Captured(table), index[0], index[1], down, across)
