"""Append tokens to sequences where pages change: new pages, copies of shared pages, and codes of old tokens.

First comes what fails in use, and nothing is changed by it: pages are counted, codes are computed, memory is allocated.
Then pages change owners, and last the new tokens are written. An error there (no memory for a block table, Ctrl-C) is
undone.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.cache.batch_table import BatchTable, batch_table
from regard.cache.page_storage import PageStorage
from regard.cache.pages import Page
from regard.cache.sequence import Sequence
from regard.cache.undo import Undo
from regard.storage.stored import StoredTensor

ENCODED_PAGES = 256
"""Pages that are encoded at once: temporary tensors stay at a few MiB."""


@dataclass(slots=True)
class _RowChange:
    """What changes in one row.

    Attributes:
        tail_page: its first page after the codes, before the change.
        removed: plain pages that become codes, from there on; the last may not be full yet.
        codes: pages of codes to add, from there on: an existing page, or an index into `_Change.new_codes`.
        new_plain: plain pages to allocate.
        writes_last: whether its last page stays plain and receives tokens.
        copies_last: whether these go to a copy of that page, because it is shared.
    """

    tail_page: int
    removed: list[Page]
    codes: list[Page | int]
    new_plain: int
    writes_last: bool
    copies_last: bool = False


@dataclass(slots=True)
class _Change:
    """What changes in all rows; `new_codes` are the pages of codes to write, (row, position in the sequence)."""

    rows: list[_RowChange] = field(default_factory=list[_RowChange])
    new_codes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    removed: Counter[Page] = field(default_factory=Counter[Page])


def append_tokens(
    storage: PageStorage, sequences: list[Sequence], k: Tensor, v: Tensor, ids: list[list[int]] | None
) -> tuple[StoredTensor, StoredTensor]:
    """Append new tokens, [rows, kv_heads, new, dim]; returns handles to the keys and values of all tokens.

    After an error nothing was changed.

    Raises:
        ProblemError: the pool is full, an element cannot be written as a code, or another thread was first to append,
            tokens of another shape or dtype.
    """
    undo: Undo | None = None
    try:
        with storage.exclusive:
            _settle_form(storage, k, v)
            batch = batch_table(storage, sequences)
            change, encoded = _prepared(storage, sequences, k, v)
            undo = Undo(storage, sequences)
            try:
                return _write(batch, sequences, change, encoded, k, v, ids)
            except BaseException:  # here, before another thread takes the pages
                undo.restore()
                raise
    except BaseException:  # also Ctrl-C behind the last of these lines
        if undo is not None:
            undo.restore()
        raise


def _settle_form(storage: PageStorage, k: Tensor, v: Tensor) -> None:
    """Let the first tokens say what all others must be like, if the pool has pages for them."""
    form = storage.check_form(k, v)
    if storage.form is None:
        pages = form.batch * -(-k.shape[2] // storage.page)
        storage.check_free(pages, pages)
        storage.set_form(form)


def _write(
    batch: BatchTable,
    sequences: list[Sequence],
    change: _Change,
    encoded: list[Tensor],
    k: Tensor,
    v: Tensor,
    ids: list[list[int]] | None,
) -> tuple[StoredTensor, StoredTensor]:
    """`append_tokens` once there is memory; an error may leave a part done."""
    storage = batch.storage
    plain_entries, coded_entries, copied = _move_pages(storage, sequences, change, encoded)
    if copied:
        storage.plain_memory.copy(*map(list, zip(*copied, strict=True)))
    batch.change(sequences, plain_entries, coded_entries)
    batch.write(sequences, k, v)
    _count_tokens(sequences, k.shape[2], ids)
    batch.refresh(sequences)
    return batch.stored()


def _prepared(storage: PageStorage, sequences: list[Sequence], k: Tensor, v: Tensor) -> tuple[_Change, list[Tensor]]:
    """What will change, and the new pages of codes; there is memory for it then.

    Raises:
        ProblemError: as in `append_tokens`.
    """
    change = _changes(storage, sequences, k.shape[2])
    _choose_copies(sequences, change)
    copied = Counter(s.plain[-1] for s, row in zip(sequences, change.rows, strict=True) if row.copies_last)
    freed = sum(page.references == count for page, count in (change.removed + copied).items())
    revived = len({page for row in change.rows for page in row.codes if isinstance(page, Page) and not page.references})
    plain, coded = sum(row.new_plain for row in change.rows) + copied.total(), len(change.new_codes)
    storage.check_free(plain + coded + revived - freed, plain + coded)
    encoded = _encode(storage, sequences, change, k, v)
    # Plain pages that become codes are not overwritten by this append: a crop, or an undo, needs them again.
    storage.reserve(storage.plain.used + plain, storage.coded.used + revived + coded)
    return change, encoded


def _changes(storage: PageStorage, sequences: list[Sequence], new: int) -> _Change:
    change, page = _Change(), storage.page
    new_codes: dict[Page, int] = {}
    for row, s in enumerate(sequences):
        start, end, tail = s.tokens, s.tokens + new, s.tail_page
        if s.segments is not None:
            before, after = (-(-(tokens - s.tail_start) // page) for tokens in (start, end))
            writes_last = bool(new and (start - s.tail_start) % page)
            change.rows.append(_RowChange(tail, [], [], after - before, writes_last))
            continue
        stop = max(tail, storage.coded_page_end(end)) if storage.codec is not None else tail
        before, after = -(-start // page), -(-end // page)
        removed = s.plain[storage.sink_pages : storage.sink_pages + stop - tail]
        codes: list[Page | int] = []
        for position in range(tail, stop):
            old = removed[position - tail] if (position + 1) * page <= start else None
            if old is not None and (twin := old.twin_with(page)) is not None:
                codes.append(twin)
            elif old is not None and old in new_codes:
                codes.append(new_codes[old])
            else:
                codes.append(len(change.new_codes))
                if old is not None:
                    new_codes[old] = len(change.new_codes)
                change.new_codes.append((row, position))
        writes_last = bool(new and start % page and not tail <= start // page < stop)
        new_plain = after - before - max(0, stop - max(tail, before))
        change.rows.append(_RowChange(tail, removed, codes, new_plain, writes_last))
        if removed:
            change.removed.update(removed)
    return change


def _choose_copies(sequences: list[Sequence], change: _Change) -> None:
    """Which rows write to a copy of their last page: all that share it but one, whose writing overwrites no token.

    That one has the most tokens of all rows that have the page now, and every other of them leaves the page. An undo
    gives these the page back, so their tokens must still be in it.
    """
    writers: defaultdict[Page, list[int]] = defaultdict(list)
    removed: Counter[Page] = Counter()  # the tokens of the longest row in which a page becomes codes
    for row, (s, step) in enumerate(zip(sequences, change.rows, strict=True)):
        if step.writes_last:
            writers[s.plain[-1]].append(row)
        if step.removed:
            removed |= Counter(dict.fromkeys(step.removed, s.tokens))
    for page, rows in writers.items():
        if page.references == 1:
            continue
        longest = max(rows, key=lambda row: sequences[row].tokens)
        stays = page.references > len(rows) + change.removed[page] or removed[page] > sequences[longest].tokens
        for row in rows:
            change.rows[row].copies_last = stays or row != longest


def _encode(storage: PageStorage, sequences: list[Sequence], change: _Change, k: Tensor, v: Tensor) -> list[Tensor]:
    """The new pages of codes, in the order of `change.new_codes`: per tensor of their memory [pages, ...]."""
    if not change.new_codes:
        return []
    assert storage.coded_memory is not None
    alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for row, (s, step) in enumerate(zip(sequences, change.rows, strict=True)):
        if step.codes:
            alike[s.tokens, step.tail_page, len(step.codes)].append(row)
    elements: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for (start, tail, count), rows in alike.items():
        removed = storage.index_tensor([[page.index for page in change.rows[row].removed] for row in rows])
        sides = zip(storage.plain_memory.tensors, (k, v), strict=True)
        blocks = [_elements(storage, t, x, removed, rows, (start, tail, count)) for t, x in sides]
        for i, row in enumerate(rows):
            for j in range(count):
                elements[row, tail + j] = blocks[0][i, j], blocks[1][i, j]
    pairs = [elements[entry] for entry in change.new_codes]
    encoded = [
        storage.coded_memory.encode(torch.stack([k for k, _ in some]), torch.stack([v for _, v in some]))
        for some in (pairs[i : i + ENCODED_PAGES] for i in range(0, len(pairs), ENCODED_PAGES))
    ]
    return [torch.cat(parts) for parts in zip(*encoded, strict=True)]


def _elements(
    storage: PageStorage, stored: Tensor, new: Tensor, removed: Tensor, rows: list[int], place: tuple[int, int, int]
) -> Tensor:
    """The elements of pages to encode, of rows that are alike: [rows, pages, kv_heads, page, dim].

    Those of tokens that are there come from `stored`, pages `removed` [rows, pages]; the others from `new`.
    """
    start, tail, count = place
    first, stop = tail * storage.page, (tail + count) * storage.page
    old = stored[removed].transpose(1, 2).flatten(2, 3)[:, :, : max(start - first, 0)]
    coming = (new if len(rows) == len(new) else new[rows])[:, :, max(first - start, 0) : max(stop - start, 0)]
    return torch.cat([old, coming], dim=2).unflatten(2, (count, storage.page)).transpose(1, 2)


def _move_pages(
    storage: PageStorage, sequences: list[Sequence], change: _Change, encoded: list[Tensor]
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Give every row the pages it needs, and write the codes.

    Returns:
        The changed entries of the batch table, (row, column, page index), of plain pages and of codes; and the pages to
        copy, (from, to).
    """
    for step in change.rows:  # retain everything before anything is allocated
        for page in step.codes:
            if isinstance(page, Page):
                storage.coded.retain(page)
    codes = _allocate_codes(storage, sequences, change, encoded)
    released = [page for step in change.rows for page in step.removed]  # last of all: an undo needs what is in them
    plain: list[tuple[int, int, int]] = []
    coded: list[tuple[int, int, int]] = []
    copied: list[tuple[int, int]] = []
    for row, (s, step) in enumerate(zip(sequences, change.rows, strict=True)):
        coded += [(row, len(s.coded) + i, page.index) for i, page in enumerate(codes[row])]
        s.coded.extend(codes[row])
        del s.plain[storage.sink_pages : storage.sink_pages + len(step.removed)]
        if step.writes_last:
            last = s.plain[-1]
            if step.copies_last:
                s.plain[-1] = storage.plain.allocate()
                released.append(last)
                copied.append((last.index, s.plain[-1].index))
                plain.append((row, len(s.plain) - 1, s.plain[-1].index))
            else:
                last.invalidate()
        for _ in range(step.new_plain):
            s.plain.append(storage.plain.allocate())
            plain.append((row, len(s.plain) - 1, s.plain[-1].index))
    for page in released:
        storage.plain.release(page)
    return plain, coded, copied


def _count_tokens(sequences: list[Sequence], new: int, ids: list[list[int]] | None) -> None:
    """Count the tokens that were written, and let other sequences find their pages."""
    for row, s in enumerate(sequences):
        if ids is not None:
            s.ids[s.tokens : s.tokens + new] = ids[row]
        s.tokens += new
        s.index_pages()


def _allocate_codes(
    storage: PageStorage, sequences: list[Sequence], change: _Change, encoded: list[Tensor]
) -> list[list[Page]]:
    """The pages of codes that each row gets; new ones are written here and linked to their plain twins."""
    new = [storage.coded.allocate() for _ in change.new_codes]
    if new:
        assert storage.coded_memory is not None
        storage.coded_memory.write([page.index for page in new], encoded)
    seen: set[Page] = set()
    rows: list[list[Page]] = []
    for s, step in zip(sequences, change.rows, strict=True):
        pages: list[Page] = []
        for i, entry in enumerate(step.codes):
            page = entry if isinstance(entry, Page) else new[entry]
            if page in seen and not isinstance(entry, Page):
                storage.coded.retain(page)
            seen.add(page)
            pages.append(page)
            if i < len(step.removed) and page.twin is None:
                old, tokens = step.removed[i], min(s.tokens - (step.tail_page + i) * storage.page, storage.page)
                if old.twin is None or not old.twin.references:
                    old.pair(page, tokens)
                if old.node is not None and tokens == storage.page:
                    old.node.add(page)
        rows.append(pages)
    return rows
