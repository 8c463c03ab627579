"""Block tables of sequences that are appended to together, as tensors that are kept from step to step.

A step that adds a token to each of eight sequences must not read their thousands of pages again. So the tensors stay,
a new page changes one element of them, and while every sequence has free slots in its last page only the slot of the
next token changes.
"""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.page_memory import slots_of
from regard.cache.page_storage import PageStorage
from regard.cache.pages import BlockTable
from regard.cache.store import allocate
from regard.storage.stored import Part, StoredTensor

MIN_COLUMNS = 8
"""Columns that a table has at first, and at least."""


class _IndexTable:
    """Page indices, int64 [rows, columns], with spare columns. An unused element is 0, an existing page."""

    def __init__(self, storage: PageStorage, data: list[list[int]]) -> None:
        self.storage = storage
        self.data = self._allocate(len(data), max(MIN_COLUMNS, *map(len, data)))
        self.fill(data)

    def fill(self, data: list[list[int]]) -> None:
        """Write whole rows, from the left."""
        width = max(map(len, data))
        self._widen(width)
        rows = [[*row, *(0 for _ in range(width - len(row)))] for row in data]
        self.data[:, :width] = self.storage.index_tensor(rows)

    def put(self, entries: list[tuple[int, int, int]]) -> None:
        """Write single elements: (row, column, page index)."""
        if entries:
            rows, columns, pages = zip(*entries, strict=True)
            self._widen(max(columns) + 1)
            index = self.storage.index_tensor([list(rows), list(columns), list(pages)])
            self.data[index[0], index[1]] = index[2]

    def select(self, rows: Tensor) -> "_IndexTable":
        """A new table of these rows."""
        new = object.__new__(_IndexTable)
        new.storage, new.data = self.storage, self._allocate(len(rows), self.data.shape[1])
        new.data.copy_(self.data[rows])
        return new

    def _widen(self, width: int) -> None:
        if width > self.data.shape[1]:
            old = self.data
            self.data = self._allocate(old.shape[0], max(width, 2 * old.shape[1]))
            self.data[:, : old.shape[1]] = old

    def _allocate(self, rows: int, columns: int) -> Tensor:
        assert self.storage.form is not None
        return allocate((rows, columns), torch.int64, self.storage.form.device)


class _Segment(NamedTuple):
    """A `Part` to be: whether it is codes, its tokens, its pages [rows, pages], and where its rows end."""

    is_coded: bool
    tokens: int
    pages: Tensor
    row_ends: Tensor | None


class BatchTable:
    """The block tables of sequences, in the order of batch rows.

    Attributes:
        count: rows.
        slack: tokens that can be appended to each row before any page changes.
    """

    def __init__(self, storage: PageStorage, tables: Rows[BlockTable]) -> None:
        self.storage, self.slack, self.count, self._front = storage, 0, len(tables), tables[0].front_pages
        self._plain = _IndexTable(storage, _plain_pages(tables))
        self._coded: _IndexTable | None = None
        self._create_coded(tables)
        self._measure(tables)
        self._attach(tables)

    def select(self, rows: Tensor, tables: Rows[BlockTable]) -> "BatchTable":
        """The batch table of `tables`, which have the pages of these rows."""
        new = object.__new__(BatchTable)
        new.storage, new.slack, new.count, new._front = self.storage, 0, len(tables), self._front
        new._plain, new._coded = self._plain.select(rows), None if self._coded is None else self._coded.select(rows)
        new._measure(tables)
        new._attach(tables)
        return new

    def change(
        self, tables: Rows[BlockTable], plain: list[tuple[int, int, int]], coded: list[tuple[int, int, int]]
    ) -> None:
        """Record changed pages, (row, column, page index): plain pages, and pages of codes."""
        if self.storage.codec is None:
            self._plain.put(plain)
        elif plain or coded:  # plain pages are few, and move to the front when those before them become codes
            self._plain.fill(_plain_pages(tables))
            if self._coded is None:
                self._create_coded(tables)
            else:
                self._coded.put(coded)

    def write(self, tables: Rows[BlockTable], k: Tensor, v: Tensor) -> None:
        """Write new tokens into their plain pages; tokens that were written as codes already are left out."""
        storage, new, front = self.storage, k.shape[2], self._front * self.storage.page
        starts = storage.index_tensor([s.tokens for s in tables])
        at = starts[:, None] + torch.arange(new, device=starts.device)  # [rows, new]
        plain = None
        if storage.codec is not None:
            tails = storage.index_tensor([s.tail_start for s in tables])[:, None]
            in_tail = at >= tails
            plain = in_tail | (at < front)
            at = torch.where(in_tail, at - tails + front, at) * plain
        column = at // storage.page
        slots = slots_of(self._plain.data.gather(1, column), at % storage.page, storage.page)
        any_coded = any(max(s.tokens, front) < min(s.tokens + new, s.tail_start) for s in tables)
        chosen = plain[:, None] if any_coded and plain is not None else None
        storage.plain_memory.write(slots[:, None], (k, v), chosen)

    def refresh(self, tables: Rows[BlockTable]) -> None:
        """Read lengths and pages again after tokens were added, and find the slots of the next tokens."""
        self._measure(tables)
        self.slack = min(_slack(s, self.storage) for s in tables)
        if not self.slack:
            return
        storage = self.storage
        at = storage.index_tensor([s.tokens - s.tail_start for s in tables])
        column, place = at // storage.page + self._front, at % storage.page
        pages = self._plain.data.gather(1, column[:, None])[:, 0]
        self._next_slots = slots_of(pages, place, storage.page)[:, None, None]

    def extend(self, k: Tensor, v: Tensor) -> None:
        """Write at most `slack` new tokens."""
        new, first = k.shape[2], self._next_slots
        slots = first if new == 1 else first + torch.arange(new, device=first.device)
        self.storage.plain_memory.write(slots, (k, v))
        self._next_slots = first + new
        self.slack -= new
        self._longest += new
        self._tail += new
        if self._row_ends is not None:
            self._row_ends = self._row_ends + new
            if self._lengths is not None:
                self._lengths = self._row_ends

    def stored(self) -> tuple[StoredTensor, StoredTensor]:
        """Handles to the keys and values of all tokens."""
        storage, form = self.storage, self.storage.form
        assert form is not None
        assert form.v_dim is not None
        segments = [*self._before_tail]
        if self._tail or not segments:
            pages = -(-self._tail // storage.page)
            columns = self._plain.data[:, self._front : self._front + pages]
            segments.append(_Segment(False, self._tail, columns, self._row_ends))
        pairs = [self._parts(segment) for segment in segments]
        k_parts, v_parts = zip(*pairs, strict=True)
        return self._handle(k_parts, form.qk_dim), self._handle(v_parts, form.v_dim)

    def _handle(self, parts: tuple[Part, ...], dim: int) -> StoredTensor:
        storage, form = self.storage, self.storage.form
        assert form is not None
        is_rotated = storage.codec is not None and storage.codec.rotate
        return StoredTensor(
            parts, (self.count, form.kv_heads, self._longest, dim), form.dtype, self._lengths, is_rotated
        )

    def _parts(self, segment: _Segment) -> tuple[Part, Part]:
        memory = self.storage.coded_memory if segment.is_coded else self.storage.plain_memory
        assert memory is not None
        return memory.parts(segment.tokens, segment.pages, segment.row_ends)

    def _attach(self, tables: Rows[BlockTable]) -> None:
        """Make it the batch table of these sequences; the last step, so that they never have half of one."""
        for row, s in enumerate(tables):
            s.batch, s.row = self, row

    def _create_coded(self, tables: Rows[BlockTable]) -> None:
        if any(s.coded for s in tables):
            self._coded = _IndexTable(self.storage, [[page.index for page in s.coded] for s in tables])

    def _measure(self, tables: Rows[BlockTable]) -> None:
        """Compute the lengths of rows, and the segments before their tails."""
        storage, page = self.storage, self.storage.page
        tokens, tails = [s.tokens for s in tables], [s.tail_start for s in tables]
        self._longest = max(tokens)
        self._tail = max(0, *(t - tail for t, tail in zip(tokens, tails, strict=True)))
        same_lengths, same_tails = len(set(tokens)) == 1, len(set(tails)) == 1
        self._row_ends = None if same_lengths and same_tails else storage.index_tensor(tokens)
        self._lengths = None if same_lengths else self._row_ends
        self._before_tail: list[_Segment] = []
        segments = tables[0].segments
        front = self._front * page if segments is None else segments[0]
        if front:
            ends = [min(t, front) for t in tokens]
            pages = self._plain.data[:, : -(-max(ends) // page)]
            self._before_tail.append(_Segment(False, max(ends), pages, _row_ends(storage, ends)))
        if max(tails) > front:
            assert self._coded is not None
            ends = [min(t, tail) for t, tail in zip(tokens, tails, strict=True)]
            pages = self._coded.data[:, : -(-(max(tails) - front) // page)]
            self._before_tail.append(_Segment(True, max(tails) - front, pages, _row_ends(storage, ends)))


def batch_table(storage: PageStorage, tables: Rows[BlockTable]) -> BatchTable:
    """The batch table of these rows, in this order: the one of the last step, if it is still valid, else a new one."""
    batch = tables[0].batch
    if not isinstance(batch, BatchTable) or batch.count != len(tables):
        return BatchTable(storage, tables)
    if any(s.batch is not batch or s.row != row for row, s in enumerate(tables)):
        return BatchTable(storage, tables)
    return batch


def _plain_pages(tables: Rows[BlockTable]) -> list[list[int]]:
    return [[page.index for page in s.plain] for s in tables]


def _row_ends(storage: PageStorage, ends: list[int]) -> Tensor | None:
    return None if len(set(ends)) == 1 else storage.index_tensor(ends)


def _slack(s: BlockTable, storage: PageStorage) -> int:
    """Tokens that can be appended until a page is needed, becomes codes, or is full with known ids."""
    if s.segments is not None:
        return (s.tail_start - s.tokens) % s.page
    if s.tokens < s.sink_pages * s.page:
        return 0
    slack = -s.tokens % s.page
    if slack and len(s.ids) >= s.tokens + slack:
        slack -= 1
    if storage.codec is not None:
        slack = min(slack, (s.tail_page + 1) * s.page + storage.residual - 1 - s.tokens)
    return slack
