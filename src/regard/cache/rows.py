"""Sequences that are appended to together: their tables of pages as tensors, kept from step to step.

A step that adds a token to each of eight sequences must not look at their thousands of pages again. So the tables
stay, a page more is one number more in them, and while every row has room in its last page nothing changes but where
the next token goes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.page_memory import slots_of
from regard.cache.room import Room
from regard.cache.sequence import Sequence
from regard.cache.store import memory
from regard.storage.stored import Part, StoredTensor

NARROW = 8
"""Columns that a table has at first, and at least."""


class _Table:
    """int64 [rows, columns], wider than is used; what is not used is 0, a page that exists."""

    def __init__(self, room: Room, data: list[list[int]]) -> None:
        self.room = room
        self.data = self._made(len(data), max(NARROW, *map(len, data)))
        self.fill(data)

    def fill(self, data: list[list[int]]) -> None:
        """Have these numbers, row by row, from the left."""
        width = max(map(len, data))
        self._widen(width)
        self.data[:, :width] = self.room.tensor([[*row, *(0 for _ in range(width - len(row)))] for row in data])

    def put(self, places: list[tuple[int, int, int]]) -> None:
        """Write single numbers: (row, column, number)."""
        if places:
            rows, columns, numbers = zip(*places, strict=True)
            self._widen(max(columns) + 1)
            index = self.room.tensor([list(rows), list(columns), list(numbers)])
            self.data[index[0], index[1]] = index[2]

    def select(self, rows: Tensor) -> "_Table":
        """A table of what these rows are now."""
        new = object.__new__(_Table)
        new.room, new.data = self.room, self._made(len(rows), self.data.shape[1])
        new.data.copy_(self.data[rows])
        return new

    def _widen(self, width: int) -> None:
        if width > self.data.shape[1]:
            old = self.data
            self.data = self._made(old.shape[0], max(width, 2 * old.shape[1]))
            self.data[:, : old.shape[1]] = old

    def _made(self, rows: int, columns: int) -> Tensor:
        assert self.room.form is not None
        return memory((rows, columns), torch.int64, self.room.form.device).zero_()


class _Stretch(NamedTuple):
    """A part to be: its tokens, its columns of a table, whether they are codes, and its ends."""

    coded: bool
    tokens: int
    table: Tensor
    ends: Tensor | None


class Rows:
    """Sequences in the order of batch rows.

    Attributes:
        count: how many. Each of them has `(rows, its number)` as its seat while what stands here is true of it.
        slack: so many tokens fit behind each row with no change of pages.
    """

    def __init__(self, room: Room, sequences: list[Sequence]) -> None:
        self.room, self.slack, self.count, self._sinks = room, 0, len(sequences), sequences[0].sinks
        self._plain = _Table(room, [[page.number for page in s.plain] for s in sequences])
        self._coded: _Table | None = None
        self._first_codes(sequences)
        self._seat(sequences)
        self._measure(sequences)

    def select(self, rows: Tensor, sequences: list[Sequence]) -> "Rows":
        """The tables of what these rows are now."""
        new = object.__new__(Rows)
        new.room, new.slack, new.count, new._sinks = self.room, 0, len(sequences), self._sinks
        new._plain, new._coded = (None if t is None else t.select(rows) for t in (self._plain, self._coded))
        new._seat(sequences)
        new._measure(sequences)
        return new

    def change(
        self, sequences: list[Sequence], plain: list[tuple[int, int, int]], coded: list[tuple[int, int, int]]
    ) -> None:
        """Pages have changed, (row, column, number): plain ones, and those of codes."""
        if self.room.codec is None:
            self._plain.put(plain)
        elif plain or coded:  # the plain pages are few, and move up when those before them become codes
            self._plain.fill([[page.number for page in s.plain] for s in sequences])
            if self._coded is None:
                self._first_codes(sequences)
            else:
                self._coded.put(coded)

    def write(self, sequences: list[Sequence], k: Tensor, v: Tensor) -> None:
        """Write new tokens into the plain pages that are there for them; those that are in codes are left out."""
        room, new = self.room, k.shape[2]
        starts = room.tensor([s.tokens for s in sequences])
        at = starts[:, None] + torch.arange(new, device=starts.device)  # [rows, new]
        kept = None
        if room.codec is not None:
            fronts = room.tensor([s.front for s in sequences])[:, None]
            behind = at >= fronts
            kept = behind | (at < self._sinks * room.page)
            at = torch.where(behind, at - fronts + self._sinks * room.page, at) * kept
        column = at // room.page
        slots = slots_of(self._plain.data.gather(1, column), at % room.page, room.page)
        coded = any(max(s.tokens, self._sinks * room.page) < min(s.tokens + new, s.front) for s in sequences)
        room.numbers.write(slots[:, None], (k, v), kept[:, None] if coded and kept is not None else None)

    def settle(self, sequences: list[Sequence]) -> None:
        """The sequences have their new tokens: find out what can be handed out, and where the next ones go."""
        self._measure(sequences)
        self.slack = min(_slack(s) for s in sequences)
        if not self.slack:
            return
        room = self.room
        at = room.tensor([s.tokens - s.front for s in sequences])
        column, place = at // room.page + self._sinks, at % room.page
        numbers = self._plain.data.gather(1, column[:, None])[:, 0]
        self._cursor = slots_of(numbers, place, room.page)[:, None, None]

    def extend(self, k: Tensor, v: Tensor) -> None:
        """Write new tokens that the slack has room for."""
        new, cursor = k.shape[2], self._cursor
        slots = cursor if new == 1 else cursor + torch.arange(new, device=cursor.device)
        self.room.numbers.write(slots, (k, v))
        self._cursor = cursor + new
        self.slack -= new
        self._longest += new
        self._tail += new
        if self._ends is not None:
            self._ends = self._ends + new
            if self._lengths is not None:
                self._lengths = self._ends

    def stored(self) -> tuple[StoredTensor, StoredTensor]:
        """Keys and values of all tokens, where they lie."""
        room, form = self.room, self.room.form
        assert form is not None
        assert form.v_dim is not None
        stretches = [*self._before]
        if self._tail or not stretches:
            pages = -(-self._tail // room.page)
            columns = self._plain.data[:, self._sinks : self._sinks + pages]
            stretches.append(_Stretch(False, self._tail, columns, self._ends))
        pairs = [self._parts(*stretch) for stretch in stretches]
        rows, turned = self.count, room.codec is not None and room.codec.rotate
        return tuple(  # pyright: ignore[reportReturnType]
            StoredTensor(parts, (rows, form.kv_heads, self._longest, dim), form.dtype, self._lengths, turned)
            for parts, dim in zip(zip(*pairs, strict=True), form.dims, strict=True)
        )

    def _parts(self, coded: bool, tokens: int, table: Tensor, ends: Tensor | None) -> tuple[Part, Part]:
        if not coded:
            return self.room.numbers.parts(tokens, table, ends)
        assert self.room.codes is not None
        return self.room.codes.parts(tokens, table, ends)

    def _seat(self, sequences: list[Sequence]) -> None:
        for number, s in enumerate(sequences):
            s.seat = self, number

    def _first_codes(self, sequences: list[Sequence]) -> None:
        if any(s.coded for s in sequences):
            self._coded = _Table(self.room, [[page.number for page in s.coded] for s in sequences])

    def _measure(self, sequences: list[Sequence]) -> None:
        """Find out how long the rows are, and what stands before their tails."""
        room, page = self.room, self.room.page
        tokens, tails = [s.tokens for s in sequences], [s.front for s in sequences]
        self._longest = max(tokens)
        self._tail = max(0, *(t - tail for t, tail in zip(tokens, tails, strict=True)))
        same_lengths, same_tails = len(set(tokens)) == 1, len(set(tails)) == 1
        self._ends = None if same_lengths and same_tails else room.tensor(tokens)
        self._lengths = None if same_lengths else self._ends
        self._before: list[_Stretch] = []
        loose = sequences[0].loose
        first = self._sinks * page if loose is None else loose[0]
        if first:
            ends = [min(t, first) for t in tokens]
            table = self._plain.data[:, : -(-max(ends) // page)]
            self._before.append(_Stretch(False, max(ends), table, _differing(room, ends)))
        if max(tails) > first:
            assert self._coded is not None
            ends = [min(t, tail) for t, tail in zip(tokens, tails, strict=True)]
            table = self._coded.data[:, : -(-(max(tails) - first) // page)]
            self._before.append(_Stretch(True, max(tails) - first, table, _differing(room, ends)))


def rows_of(room: Room, sequences: list[Sequence]) -> Rows:
    """The rows that these sequences are, in this order; made if they were not together last."""
    rows = seated(sequences)
    return Rows(room, sequences) if rows is None else rows


def seated(sequences: list[Sequence]) -> Rows | None:
    """The rows that these sequences are, in this order, if nothing else has happened to them since."""
    seat = sequences[0].seat
    if seat is None or seat[0].count != len(sequences):
        return None
    rows = seat[0]
    for number, s in enumerate(sequences):
        if s.seat is None or s.seat[0] is not rows or s.seat[1] != number:
            return None
    return rows


def _differing(room: Room, ends: list[int]) -> Tensor | None:
    return None if len(set(ends)) == 1 else room.tensor(ends)


def _slack(s: Sequence) -> int:
    """Tokens that fit behind a sequence until a page is full whose ids are known, is needed, or becomes codes."""
    room = s.room
    if s.loose is not None:
        return (s.front - s.tokens) % room.page
    if s.tokens < room.sinks * room.page:
        return 0
    least = -s.tokens % room.page
    if least and len(s.ids) >= s.tokens + least:
        least -= 1
    if room.codec is not None:
        least = min(least, (s.tail + 1) * room.page + room.residual - 1 - s.tokens)
    return least
