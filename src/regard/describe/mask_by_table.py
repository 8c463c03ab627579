"""Masks with data: ids, layouts, trees, tensors.

Their bounds come from small tables, computed once per tensor (`rectangle_tables.py`). Data on a GPU is copied to the
host once.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.interval import Interval, Union
from regard.describe.mask import Bools, CallSizes, Ints, Mask, Positions, Rectangles, as_tensors, broadcasts
from regard.describe.rectangle_tables import BlockCounts, RangeExtremes
from regard.describe.require_tensor import require_tensor
from regard.describe.spec import spec
from regard.describe.tensors import derived, derived_view, distinct_elements, elements
from regard.describe.whole_number import whole
from regard.errors import ProblemError


@spec
class Documents(Mask):
    """Packed documents: a token sees the tokens of its own document, those with the same id.

    Args:
        ids: a document number per position, integer [tokens] or [batch, tokens]; tokens at least the call's keys and
            positions. `Documents(torch.repeat_interleave(torch.arange(n), lengths))` packs n documents.

    >>> from regard import draw
    >>> print(draw(Documents(torch.tensor([0, 0, 1])), 3, 3))
    █ █ ·
    █ █ ·
    · · █
    """

    ids: Tensor

    def __post_init__(self) -> None:
        _check_tensor(self.ids, "Documents(ids)", (1, 2), "integers [tokens] or [batch, tokens]", integers=True)

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        ids = _on_device_of(self.ids, q, k)
        ids = ids[0] if ids.ndim == 2 and ids.shape[0] == 1 else ids
        return ids[q] == ids[k] if ids.ndim == 1 else ids[b, q] == ids[b, k]

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        (lowest_q, highest_q), (lowest_k, highest_k) = self._extremes(r)
        some = (lowest_q <= highest_k) & (lowest_k <= highest_q)
        return some, (lowest_q == highest_k) & (lowest_k == highest_q) & some

    def signature(self, r: Rectangles) -> Ints:
        (lowest_q, highest_q), (lowest_k, highest_k) = self._extremes(r)
        one_q, one_k = lowest_q == highest_q, lowest_k == highest_k  # a side within one document: only its id matters
        row = np.where(one_q, lowest_q, r.q0)
        column = np.where(one_k & ~one_q, lowest_k, r.k0)
        return np.stack([r.b, one_q, one_k & ~one_q, row, column], axis=1)

    def intervals(self, sizes: CallSizes) -> Union:
        found = derived(self.ids, "intervals", lambda t: _document_ranges(_numpy(t.reshape(-1, t.shape[-1]))))
        if found is None:
            return None
        queries = slice(sizes.offset, sizes.positions)
        return [Interval(start=found[0][:, queries], stop=found[1][:, queries])]

    def _extremes(self, r: Rectangles) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """(least, greatest) id among the queries, and among the keys, of each rectangle."""
        extremes = derived(self.ids, "extremes", lambda t: RangeExtremes(_numpy(t.reshape(-1, t.shape[-1]))))
        row = r.b if self.broadcast_shape()[0] > 1 else np.zeros_like(r.b)
        return extremes(row, r.q0, r.q1), extremes(row, r.k0, r.k1)

    def broadcast_shape(self) -> tuple[int, int]:
        return (self.ids.shape[0], 1) if self.ids.ndim == 2 else (1, 1)

    def bind(self, sizes: CallSizes) -> Mask:
        tokens = max(sizes.positions, sizes.keys)
        if self.ids.ndim == 2 and not broadcasts(self.ids.shape[0], sizes.batch):
            raise ProblemError(f"{self!r} has ids for {self.ids.shape[0]} batch rows and the call has {sizes.batch}.")
        if self.ids.shape[-1] < tokens or sizes.offset < 0:
            raise ProblemError(
                f"{self!r} has ids for positions 0 to {self.ids.shape[-1] - 1}, and the call has {sizes.keys} keys and "
                f"queries at {sizes.offset} to {sizes.positions - 1}: give an id for every position."
            )
        return self


@spec
class Blocks(Mask):
    """Any block-sparse layout: the pair is kept where `layout[q // size, k // size]`.

    Args:
        layout: bool [query blocks, key blocks], or with heads, or batch and heads, in front.
        size: tokens per side of a block, at least 1.

    >>> from regard import draw
    >>> print(draw(Blocks(torch.tensor([[True, False], [True, True]]), size=2), 4, 4))
    █ █ · ·
    █ █ · ·
    █ █ █ █
    █ █ █ █
    """

    layout: Tensor
    size: int

    def __post_init__(self) -> None:
        expected = "bool [query blocks, key blocks], or [heads, ...] or [batch, heads, ...] in front"
        _check_tensor(self.layout, "Blocks(layout)", (2, 3, 4), expected)
        object.__setattr__(self, "size", whole(self.size, "Blocks(size)", "tokens a side", least=1))

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return _index_table(_on_device_of(self.layout, q, k), b, h, q // self.size, k // self.size)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        counts = derived(self.layout, f"blocks {self.size}", lambda t: BlockCounts.of_layout(_in_4d(t), self.size))
        return counts.bounds(r)

    def signature(self, r: Rectangles) -> Ints:
        """The rectangle's offset within its first block, and the layout of the blocks that it overlaps, as bits."""
        table = derived(self.layout, "layout", _in_4d)
        top, left = r.q0 // self.size, r.k0 // self.size
        down, across = ((stop - 1) // self.size - start + 1 for stop, start in ((r.q1, top), (r.k1, left)))
        if not len(top) or down.max() * across.max() > 62:
            return super().signature(r)
        met = np.zeros_like(r.b)
        b, h = (index * (size > 1) for index, size in zip((r.b, r.h), table.shape, strict=False))
        for i in range(down.max()):
            for j in range(across.max()):
                inside = (i < down) & (j < across)
                kept = table[b, h, top + np.minimum(i, down - 1), left + np.minimum(j, across - 1)]
                met |= (inside & kept).astype(np.int64) << (i * int(across.max()) + j)
        return np.stack([r.q0 % self.size, r.k0 % self.size, met], axis=1)

    def broadcast_shape(self) -> tuple[int, int]:
        return _sizes_in_4d(self.layout)[:2]

    def bind(self, sizes: CallSizes) -> Mask:
        rows, columns = (n * self.size for n in self.layout.shape[-2:])
        _check_rows("Blocks", self, self.layout, sizes)
        if sizes.offset < 0 or rows < sizes.positions or columns < sizes.keys:
            raise ProblemError(
                f"{self!r} covers positions below {rows} x {columns}, and the call has queries at {sizes.offset} to "
                f"{sizes.positions - 1} and {sizes.keys} keys."
            )
        once = _each_map_once(self.layout)
        return self if once is self.layout else self.with_fields(layout=once)


@spec
class Tree(Mask):
    """Speculative decoding: a draft token sees its ancestors in the tree of drafts, itself, and the whole context.

    The tree's tokens are the last `len(parents)` keys of the call. The keys before them are the context: all of the
    tree sees it, and within itself it is causal. Miao et al. 2024, arXiv:2305.09781, §4.2.

    Args:
        parents: for each draft token the index of its parent in the tree, -1 or None for a root; a parent comes before
            its children. A sequence or integer tensor [tokens].
        start: position of the tree's first token; None puts the tree at the end of the keys.

    >>> from regard import draw
    >>> print(draw(Tree([-1, 0, 0, 1]), 4, 5))
    █ █ · · ·
    █ █ █ · ·
    █ █ · █ ·
    █ █ █ · █
    """

    parents: Sequence[int | None] | Tensor
    start: int | None = None

    def __post_init__(self) -> None:
        value = cast(object, self.parents)
        if isinstance(value, Tensor):
            parents = require_tensor(value, "Tree(parents)", "integers [tokens]", read=True)
            value = parents.tolist() if parents.ndim == 1 else None
        elif isinstance(value, np.ndarray) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str) or not len(cast("Sequence[object]", value)):
            raise ProblemError(
                f"Tree(parents) is {self.parents!r}: expected the parent of each draft token, at least one: [-1, 0, 0]."
            )
        listed = cast("Sequence[object]", value)
        parents = tuple(-1 if p is None else whole(p, "a parent of Tree(parents)", "an index, or None") for p in listed)
        if self.start is not None:
            object.__setattr__(self, "start", whole(self.start, "Tree(start)"))
        for child, parent in enumerate(parents):
            if not -1 <= parent < child:
                raise ProblemError(
                    f"Tree: token {child} has parent {parent}; a parent is -1 (none) or comes before its child."
                )
        object.__setattr__(self, "parents", parents)

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        q, k = as_tensors(q, k)
        last = len(self.parents) - 1
        i, j = q - (self.start or 0), k - (self.start or 0)
        related = torch.from_numpy(self._ancestors()).to(q.device)[i.clamp(0, last), j.clamp(0, last)]
        return torch.where((i >= 0) & (j >= 0), related, k <= q)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        start = self.start or 0
        context = (r.k1 <= start) | (r.q1 <= start)  # causal there: the tree's tokens come after the context
        return r.k0 <= r.q1 - 1, context & (r.k1 - 1 <= r.q0)

    def bind(self, sizes: CallSizes) -> Mask:
        tokens = len(self.parents)
        start = sizes.keys - tokens if self.start is None else self.start
        if start < 0 or start + tokens < max(sizes.keys, sizes.positions):
            raise ProblemError(
                f"Tree has {tokens} tokens from position {start}, and the call has {sizes.keys} keys and queries up to "
                f"{sizes.positions - 1}: the tree's tokens are the last keys."
            )
        return self.with_fields(start=start)

    def _ancestors(self) -> Bools:
        seen = np.eye(len(self.parents), dtype=bool)
        for child, parent in enumerate(cast("tuple[int, ...]", self.parents)):
            if parent >= 0:
                seen[child] |= seen[parent]
        return seen


@spec
class TensorMask(Mask):
    """Any mask as a bool tensor; True keeps, as in torch's `scaled_dot_product_attention`.

    Its rows are the queries of the call and its columns the keys. `torch.nn.MultiheadAttention` means the opposite by
    True: pass `TensorMask(~mask)`.

    A padding mask [batch, keys] needs two more axes: `TensorMask(t[:, None, None])`. Without them it is read as
    [queries, keys], which raises no error where the batch has as many rows as there are queries.

    Args:
        mask: bool, broadcastable to [batch, heads, queries, keys]; two axes are [queries, keys].
        offset: position of its first row; None: the offset of the call (outside of a call: last row at last column).

    >>> from regard import draw
    >>> print(draw(TensorMask(torch.tensor([[True, False], [False, True]])), 2, 2))
    █ ·
    · █
    """

    mask: Tensor
    offset: int | None = None

    def __post_init__(self) -> None:
        expected = "bool, broadcastable to [batch, heads, queries, keys] (a float mask is a bias: TensorBias(mask))"
        _check_tensor(self.mask, "TensorMask(mask)", (0, 1, 2, 3, 4), expected)
        if self.offset is not None:
            object.__setattr__(self, "offset", whole(self.offset, "TensorMask(offset)"))

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return _index_table(_on_device_of(self.mask, q, k), b, h, q - self._first(), k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        counts = derived(self.mask, "dense", lambda t: BlockCounts.of_table(_distinct_in_4d(t)))
        return counts.bounds(r._replace(q0=r.q0 - self._first(), q1=r.q1 - self._first()))

    def signature(self, r: Rectangles) -> Ints:
        batch, heads, rows, columns = _sizes_in_4d(self.mask)
        moves = (batch > 1, heads > 1, rows > 1, columns > 1)
        return np.stack([x * moved for x, moved in zip((r.b, r.h, r.q0, r.k0), moves, strict=True)], axis=1)

    def broadcast_shape(self) -> tuple[int, int]:
        return _sizes_in_4d(self.mask)[:2]

    def bind(self, sizes: CallSizes) -> Mask:
        _check_rows("TensorMask", self, self.mask, sizes)
        *_, rows, columns = _sizes_in_4d(self.mask)
        first = sizes.offset if self.offset is None else self.offset
        if not broadcasts(columns, sizes.keys):
            raise ProblemError(f"{self!r} has {columns} columns and the call has {sizes.keys} keys.")
        if self.offset is None and not broadcasts(rows, sizes.queries):
            is_padding = self.mask.ndim == 2 and rows == sizes.batch
            hint = (
                " A padding mask [batch, keys] needs two more axes: TensorMask(t[:, None, None])." if is_padding else ""
            )
            raise ProblemError(f"{self!r} has {rows} rows and the call has {sizes.queries} queries.{hint}")
        if rows != 1 and not (first <= sizes.offset and sizes.positions <= first + rows):
            raise ProblemError(
                f"{self!r} has rows for queries at {first} to {first + rows - 1}, and the call has queries at "
                f"{sizes.offset} to {sizes.positions - 1}."
            )
        return self.with_fields(mask=_each_map_once(self.mask), offset=first)

    def _first(self) -> int:
        *_, rows, columns = _sizes_in_4d(self.mask)
        return columns - rows if self.offset is None else self.offset


def _check_tensor(value: object, name: str, axes: tuple[int, ...], expected: str, *, integers: bool = False) -> None:
    """Raise `ProblemError` unless it is a tensor of integers or else of bools, and its rank is one of `axes`."""
    table = require_tensor(value, name, expected)
    fits = not (table.is_floating_point() or table.is_complex()) if integers else table.dtype == torch.bool
    if not fits or table.ndim not in axes:
        is_integer = not (integers or table.dtype == torch.bool or table.is_floating_point() or table.is_complex())
        hint = " Zeros and ones become bools by t.bool()." if is_integer else ""
        raise ProblemError(f"{name} is {table.dtype} {list(table.shape)}: expected {expected}.{hint}")


def _index_table(table: Tensor, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
    """table[b, h, q, k] for a table that may lack leading axes or broadcast along some."""
    index = (b, h, q, k)[4 - table.ndim :]
    return table[tuple(i * 0 if n == 1 else i for i, n in zip(index, table.shape, strict=True))]


def _check_rows(name: str, mask: Mask, table: Tensor, sizes: CallSizes) -> None:
    batch, heads = _sizes_in_4d(table)[:2]
    if not broadcasts(batch, sizes.batch) or not broadcasts(heads, sizes.heads):
        raise ProblemError(
            f"{mask!r} is for {batch} batch rows and {heads} heads, and the call has {sizes.batch} and "
            f"{sizes.heads}: {name} broadcasts from size 1 only. A mask per batch row is [batch, 1, queries, keys]."
        )


def _each_map_once(table: Tensor) -> Tensor:
    """The table with one element in place of batch rows or heads that `expand` repeats: they share a schedule."""
    axes = [axis for axis in range(table.ndim - 2) if table.shape[axis] > 1 and not table.stride(axis)]
    return derived_view(table, f"once {axes}", lambda t: _first_of(t, axes)) if axes else table


def _first_of(table: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        table = table.narrow(axis, 0, 1)
    return table


def _sizes_in_4d(table: Tensor) -> tuple[int, int, int, int]:
    return cast("tuple[int, int, int, int]", (1,) * (4 - table.ndim) + tuple(table.shape))


def _in_4d(table: Tensor) -> Bools:
    return cast(Bools, elements(table).reshape(_sizes_in_4d(table)))


def _distinct_in_4d(table: Tensor) -> Bools:
    found = distinct_elements(table)
    return cast(Bools, found.reshape((1,) * (4 - found.ndim) + found.shape))


def _document_ranges(ids: Ints) -> tuple[Ints, Ints] | None:
    """(start, stop) of each position's document, [batch, tokens]; None if a document is in several pieces."""
    rows, tokens = ids.shape
    begins = np.ones(ids.shape, dtype=bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = begins.ravel().nonzero()[0]
    row, start = np.divmod(first, tokens)
    if len(set(zip(row.tolist(), ids.ravel()[first].tolist(), strict=True))) < len(first):
        return None
    length = np.concatenate([first[1:], [rows * tokens]]) - first
    return np.repeat(start, length).reshape(rows, tokens), np.repeat(start + length, length).reshape(rows, tokens)


def _numpy(ids: Tensor) -> Ints:
    return elements(ids).astype(np.int64)


def _on_device_of(table: Tensor, *positions: Positions) -> Tensor:
    """The table on the device of the positions."""
    device = next((p.device for p in positions if isinstance(p, Tensor)), table.device)
    return table.to(device)
