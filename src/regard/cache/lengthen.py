"""Tokens put behind sequences where pages change: new ones, copies of shared ones, and codes of old ones.

First everything that can fail, with nothing changed: what is needed is counted, codes are computed, memory is made.
Then the pages change hands, and last the numbers are written.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.cache.pages import Page
from regard.cache.reuse import name
from regard.cache.room import Room
from regard.cache.rows import Rows
from regard.cache.sequence import Sequence


@dataclass(slots=True)
class _Step:
    """What becomes of one row.

    Attributes:
        tail: its first page behind the codes, as it is now.
        gone: plain pages that become codes, from there on; the last may not be full yet.
        codes: pages of codes to come, from there on: one that is there already, or the number of one to be written.
        plain: how many plain pages it needs.
        writes: whether its last page stays plain and gets more tokens.
    """

    tail: int
    gone: list[Page]
    codes: list[Page | int]
    plain: int
    writes: bool


@dataclass(slots=True)
class _Plan:
    """What becomes of all rows; `made` are the pages of codes to be written, (row, number in the sequence)."""

    steps: list[_Step] = field(default_factory=list[_Step])
    made: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    gone: Counter[Page] = field(default_factory=Counter[Page])


def lengthen(
    room: Room, rows: Rows, sequences: list[Sequence], k: Tensor, v: Tensor, ids: list[list[int]] | None
) -> None:
    """Put new tokens behind sequences, [rows, kv_heads, new, dim].

    Raises:
        ProblemError: the pool is full, or numbers cannot be written as codes. Nothing was changed then.
    """
    new = k.shape[2]
    plan = _plan(room, sequences, new)
    copies = _copies(sequences, plan)
    freed = sum(page.holders == count for page, count in plan.gone.items())
    revived = len({page for step in plan.steps for page in step.codes if isinstance(page, Page) and not page.holders})
    plain, coded = sum(step.plain for step in plan.steps) + copies, len(plan.made)
    room.check(plain + coded + revived - freed, plain + coded)
    written = _encode(room, sequences, plan, k, v)
    room.make(room.plain.used - freed + plain, room.coded.used + revived + coded)
    plain_places, coded_places, copied = _change_hands(room, sequences, plan, written)
    if copied:
        room.numbers.copy(*map(list, zip(*copied, strict=True)))
    rows.change(sequences, plain_places, coded_places)
    rows.write(sequences, k, v)
    for row, s in enumerate(sequences):
        if ids is not None:
            s.ids[s.tokens : s.tokens + new] = ids[row]
        s.tokens += new
        name(s)
    rows.settle(sequences)


def _plan(room: Room, sequences: list[Sequence], new: int) -> _Plan:
    plan, page = _Plan(), room.page
    numbers: dict[Page, int] = {}
    for row, s in enumerate(sequences):
        start, end, tail = s.tokens, s.tokens + new, s.tail
        if s.loose is not None:
            pages = [-(-(tokens - s.front) // page) for tokens in (start, end)]
            plan.steps.append(_Step(tail, [], [], pages[1] - pages[0], bool(new and (start - s.front) % page)))
            continue
        stop = max(tail, room.coded_pages(end)) if room.codec is not None else tail
        here, there = -(-start // page), -(-end // page)
        gone = s.plain[room.sinks : room.sinks + stop - tail]
        codes: list[Page | int] = []
        for number in range(tail, stop):
            old = gone[number - tail] if (number + 1) * page <= start else None
            if old is not None and old.twin is not None:
                codes.append(old.twin)
            elif old is not None and old in numbers:
                codes.append(numbers[old])
            else:
                codes.append(len(plan.made))
                if old is not None:
                    numbers[old] = len(plan.made)
                plan.made.append((row, number))
        writes = bool(new and start % page and not tail <= start // page < stop)
        plain = there - here - max(0, stop - max(tail, here))
        plan.steps.append(_Step(tail, gone, codes, plain, writes))
        if gone:
            plan.gone.update(gone)
    return plan


def _copies(sequences: list[Sequence], plan: _Plan) -> int:
    """How many shared pages must be copied: each row that writes to one copies it, but its last holder."""
    writers = Counter(s.plain[-1] for s, step in zip(sequences, plan.steps, strict=True) if step.writes)
    return sum(min(count, page.holders - plan.gone[page] - 1) for page, count in writers.items())


def _encode(room: Room, sequences: list[Sequence], plan: _Plan, k: Tensor, v: Tensor) -> list[Tensor]:
    """The pages of codes to be made, written in the order of `plan.made`: per tensor of their memory [pages, ...]."""
    if not plan.made:
        return []
    assert room.codes is not None
    alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for row, (s, step) in enumerate(zip(sequences, plan.steps, strict=True)):
        if step.codes:
            alike[s.tokens, step.tail, len(step.codes)].append(row)
    keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for (start, tail, count), rows in alike.items():
        gone = room.tensor([[page.number for page in plan.steps[row].gone] for row in rows])
        sides = zip(room.numbers.tensors, (k, v), strict=True)
        blocks = [_blocks(room, t, x, gone, rows, (start, tail, count)) for t, x in sides]
        for place, row in enumerate(rows):
            for number in range(count):
                keys[row, tail + number] = blocks[0][place, number], blocks[1][place, number]
    pairs = [keys[made] for made in plan.made]
    found = [
        room.codes.encode(torch.stack([k for k, _ in part]), torch.stack([v for _, v in part])) for part in _few(pairs)
    ]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _blocks(
    room: Room, numbers: Tensor, new: Tensor, gone: Tensor, rows: list[int], place: tuple[int, int, int]
) -> Tensor:
    """The numbers of pages to be codes, of rows that are alike: [rows, pages, kv_heads, page, dim].

    Those of tokens that are there come from `numbers`, pages `gone` [rows, pages]; the others from `new`.
    """
    start, tail, count = place
    first, stop = tail * room.page, (tail + count) * room.page
    old = numbers[gone].transpose(1, 2).flatten(2, 3)[:, :, : max(start - first, 0)]
    coming = (new if len(rows) == len(new) else new[rows])[:, :, max(first - start, 0) : max(stop - start, 0)]
    return torch.cat([old, coming], dim=2).unflatten(2, (count, room.page)).transpose(1, 2)


def _change_hands(
    room: Room, sequences: list[Sequence], plan: _Plan, written: list[Tensor]
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Give every row the pages it needs, and write the codes; nothing here can fail.

    Returns:
        The places of tables that change, (row, column, number), of plain pages and of codes; and the pages to copy,
        (from, to).
    """
    for step in plan.steps:  # all that is held is held before anything is taken
        for page in step.codes:
            if isinstance(page, Page):
                room.coded.hold(page)
    for step in plan.steps:
        for page in step.gone:
            room.plain.drop(page)
    made = _take_codes(room, sequences, plan, written)
    plain: list[tuple[int, int, int]] = []
    coded: list[tuple[int, int, int]] = []
    copied: list[tuple[int, int]] = []
    for row, (s, step) in enumerate(zip(sequences, plan.steps, strict=True)):
        coded += [(row, len(s.coded) + i, page.number) for i, page in enumerate(made[row])]
        s.coded += made[row]
        del s.plain[room.sinks : room.sinks + len(step.gone)]
        if step.writes:
            last = s.plain[-1]
            if last.holders > 1:
                s.plain[-1] = room.plain.take()
                room.plain.drop(last)
                copied.append((last.number, s.plain[-1].number))
                plain.append((row, len(s.plain) - 1, s.plain[-1].number))
            else:
                last.forget()
        for _ in range(step.plain):
            s.plain.append(room.plain.take())
            plain.append((row, len(s.plain) - 1, s.plain[-1].number))
    return plain, coded, copied


def _take_codes(room: Room, sequences: list[Sequence], plan: _Plan, written: list[Tensor]) -> list[list[Page]]:
    """The pages of codes that each row gets, those that are new now written and known as twins."""
    fresh = [room.coded.take() for _ in plan.made]
    if fresh:
        assert room.codes is not None
        room.codes.write([page.number for page in fresh], written)
    seen: set[Page] = set()
    rows: list[list[Page]] = []
    for s, step in zip(sequences, plan.steps, strict=True):
        pages: list[Page] = []
        for i, given in enumerate(step.codes):
            page = given if isinstance(given, Page) else fresh[given]
            if page in seen and not isinstance(given, Page):
                room.coded.hold(page)
            seen.add(page)
            pages.append(page)
            if i < len(step.gone) and (step.tail + i + 1) * room.page <= s.tokens and page.twin is None:
                old = step.gone[i]
                old.twin, page.twin = page, old
                if old.prefix is not None:
                    old.prefix.add(page)
        rows.append(pages)
    return rows


def _few(pairs: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """So many pages at once as keep what is computed between in a few MiB."""
    return [pairs[i : i + 256] for i in range(0, len(pairs), 256)]
