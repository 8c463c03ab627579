"""`Paged`: each batch row is a sequence of a pool, which may belong to this cache alone or to several caches.

Selecting rows passes pages on: nothing is copied until two beams that share a page write to it. Where a policy evicts
single tokens, the tokens that stay move together, and pages that become empty are freed.
"""

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from regard.cache.batch_table import batch_table
from regard.cache.coded_steps import CodedSteps, InPages, PagedCodes
from regard.cache.page_memory import slots_of
from regard.cache.page_storage import PageStorage
from regard.cache.pages import Page
from regard.cache.pool import PagePool
from regard.cache.sequence import Sequence, crop_sequences
from regard.cache.store import CachedTensor, Form, check_has_data, replacement, token_scales_error
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Paged, Part, StoredTensor
from regard.torch_internals import leave_out_of_graphs


class PagedStore:
    """Rows of a batch as sequences of a pool. Returned handles are valid until the cache is written to again.

    A crop or an eviction changes the sequences themselves, which the store that it replaces has as well. Where Ctrl-C
    comes before the replacement, that store sees by their number of tokens that they are not its own any more.
    """

    def __init__(self, layout: Paged, codec: Codec | torch.dtype | None, form: Form) -> None:
        self.form, self._is_shared = form, layout.pool is not None
        self.pool = _checked_pool(layout.pool, form) if self._is_shared else PagePool(None, layout.page, codec)
        if not form.batch:
            raise ProblemError("a paged cache for a batch of 0 rows: expected one row or more.")
        self.sequences = [self.pool.sequence() for _ in range(form.batch)]
        self.tokens = self.tokens_seen = 0

    @property
    def min_crop(self) -> int:
        return self.tokens_seen - self.tokens

    @property
    def bytes(self) -> int:
        return self.pool.storage.stored_bytes(self.sequences)

    @property
    def allocated_bytes(self) -> int:
        """All memory of a pool of its own; of a shared pool the pages of its rows."""
        if not self._is_shared:
            return self.pool.allocated_bytes
        plain = {page for s in self.sequences for page in s.plain}
        coded = {page for s in self.sequences for page in s.coded}
        return self.pool.storage.page_bytes(len(plain), len(coded)) if plain or coded else 0

    def check_usable(self) -> None:
        """Raise `ProblemError` if the pages were freed or changed, because Ctrl-C interrupted an eviction or a crop."""
        if self.sequences[0].is_freed or self.sequences[0].tokens != self.tokens:
            raise ProblemError("an eviction or a crop was interrupted, and the tokens are lost: call reset().")

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        assert v is not None
        self.check_usable()
        tokens, seen = self.tokens + k.shape[2], self.tokens_seen + k.shape[2]
        stored, self.tokens, self.tokens_seen = self.pool.write(self.sequences, k, v), tokens, seen
        return stored

    def crop(self, tokens: int) -> None:
        left = self.tokens - (self.tokens_seen - tokens)
        crop_sequences(self.sequences, left)
        self.tokens, self.tokens_seen = left, tokens

    def reset(self) -> None:
        for sequence in self.sequences:
            sequence.free()
        self.sequences = [self.pool.sequence() for _ in range(self.form.batch)]
        self.tokens = self.tokens_seen = 0

    def select(self, rows: Tensor) -> None:
        check_has_data(rows, "select of pages")
        self.sequences = self.pool.chosen(self.sequences, rows.tolist())  # what is left out is freed with its last user
        self.form = self.form._replace(batch=len(rows))

    def keep(self, index: Tensor) -> None:
        with self.pool.storage.exclusive:
            keep_tokens(self.pool.storage, self.sequences, index)
        self.tokens = index.shape[2]

    def shrink(self) -> None:
        """Free memory that has become empty, unless other caches use the pool as well."""
        if not self._is_shared:
            self.pool.storage.shrink()

    def keys(self) -> Tensor:
        with self.pool.storage.exclusive:
            stored = batch_table(self.pool.storage, self.sequences).stored()
        return stored[0].dense()

    @property
    def is_coded(self) -> bool:
        """Whether pages hold codes."""
        return self.pool.storage.codec is not None

    def coded_steps(self, capacity: int) -> CodedSteps:
        """Steps whose position is on the device, over pages of codes; those of whole tokens so far stay shared.

        Raises:
            ProblemError: fewer tokens than the plain pages at the front are stored; some were cropped or evicted; the
                pool has too few free pages.
        """
        with self.pool.storage.exclusive:
            return self._coded_steps(capacity)

    def _coded_steps(self, capacity: int) -> CodedSteps:
        storage, seen = self.pool.storage, self.tokens_seen
        page, front = storage.page, storage.sink_pages * storage.page
        coded, s = storage.coded_page_end(seen) - storage.sink_pages, self.sequences[0]
        if seen < front or self.tokens != seen or any(
            t.segments is not None or not t.is_exact or len(t.coded) != coded for t in self.sequences
        ):  # fmt: skip
            raise ProblemError(
                f"{seen} tokens in pages, {len(s.coded) * page} of them codes: steps begin after {front} tokens or "
                f"more, and where none was cropped or evicted after it was a code, so that {coded * page} are codes."
            )
        assert storage.codec is not None
        tails = [self._tail(t, seen - front - coded * page) for t in batch_table(storage, self.sequences).stored()]
        full = copy.deepcopy(self)
        # to a page of codes beyond the capacity, of which no step has all tokens
        more = capacity - seen + storage.residual + page
        shape = self.form.batch, self.form.kv_heads, more
        zeros = (torch.zeros(*shape, dim, dtype=self.form.dtype, device=self.form.device) for dim in self.form.dims)
        handles = [t for t in full.append(*zeros) if isinstance(t, StoredTensor)]
        codes = [next(part for part in t.parts if part.kind != "plain") for t in handles]
        sinks = tuple(_copied_table(t.parts[0]._replace(tokens=front)) for t in handles)
        table, memories = codes[0].table, tuple(PagedCodes(part, storage.codec) for part in codes)
        assert table is not None
        return CodedSteps(
            page, storage.residual, sinks, memories, InPages(table.clone()), tuple(tails), seen, owner=full
        )  # fmt: skip

    def _tail(self, stored: StoredTensor, tokens: int) -> Tensor:
        """The last tokens of what is stored, as they are in memory."""
        (*shape, _, dim), part = stored.shape, stored.parts[-1]
        if not tokens:
            return torch.empty(*shape, 0, dim, dtype=stored.dtype, device=self.form.device)
        return StoredTensor((part,), (shape[0], shape[1], tokens, dim), stored.dtype).dense()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PagedStore":
        """Forks of its rows, in the same pool; a page is copied when one of the two writes to it."""
        other = replacement(self)
        other.sequences = [sequence.fork() for sequence in self.sequences]
        return other


leave_out_of_graphs(PagedStore.keep)  # as the changes of sequences are


def _copied_table(part: Part) -> Part:
    """The part with a block table of its own: that of a `BatchTable` is written to."""
    return part._replace(table=None if part.table is None else part.table.clone())


def check_paged(layout: Paged, codec: Codec | torch.dtype | None) -> None:
    """Raise `ProblemError` unless the pool of the layout stores what a cache with this codec writes."""
    pool = layout.pool
    if pool is None:
        return
    if not isinstance(pool, PagePool):
        raise ProblemError(f"{layout!r}: expected a regard.cache.PagePool, or None for one of its own.")
    if pool.storage.page != layout.page:
        raise ProblemError(
            f"{layout!r}: the pages of its pool have {pool.storage.page} tokens: expected "
            f"Paged(page={pool.storage.page}, pool=...)."
        )
    if pool.storage.stored_as != codec:
        raise ProblemError(
            f"the cache has codec={codec!r} and its pool codec={pool.storage.stored_as!r}: a pool stores everything in "
            "one way. Give both the same codec."
        )


def _checked_pool(pool: PagePool, form: Form) -> PagePool:
    """The pool of the layout, if keys and values of this form fit into it."""
    other = pool.storage.form
    if other is not None and other[1:] != form[1:]:
        raise ProblemError(
            f"keys and values with {form.kv_heads} heads, {form.qk_dim} and {form.v_dim} dimensions, {form.dtype} on "
            f"{form.device}, for a pool with {other.kv_heads} heads, {other.qk_dim} and {other.v_dim} dimensions, "
            f"{other.dtype} on {other.device}: a pool is for one layer. Give other layers pools of their own."
        )
    return pool


def keep_tokens(storage: PageStorage, sequences: list[Sequence], index: Tensor) -> None:
    """Keep only these tokens of each sequence, each head its own.

    Args:
        index: int64 [rows, kv_heads, kept], ascending.

    Raises:
        ProblemError: shared pages cannot be written to, and the pool has too few free pages for what stays. Nothing was
            changed then.
    """
    kept = index.shape[2]
    front, tail_start, plain = 0, 0, index
    encoded: list[Tensor] = []
    if storage.codec is not None:
        tail_start, plain, encoded = _plan_codes(storage, sequences, index)
        front = _kept_front(sequences, index)
    elements = storage.plain_memory.read(_slots(storage, _table(storage, [s.plain for s in sequences]), plain))
    sinks, coded, tail = (-(-tokens // storage.page) for tokens in (front, tail_start - front, kept - tail_start))
    removed = Counter(page for s in sequences for page in (*s.plain, *s.coded))
    freed = [
        sum(p.references == n and p.allocator is allocator for p, n in removed.items())
        for allocator in (storage.plain, storage.coded)
    ]
    wanted = [(sinks + tail) * len(sequences), coded * len(sequences)]
    storage.check_free(sum(wanted) - sum(freed), sum(wanted))
    storage.reserve(storage.plain.used - freed[0] + wanted[0], storage.coded.used - freed[1] + wanted[1])
    places = [*range(front), *range(sinks * storage.page, sinks * storage.page + kept - tail_start)]
    at = storage.index_tensor(places).expand(*index.shape[:2], len(places))
    is_writing = False
    try:
        for s in sequences:
            s.release_pages(0)  # which it lists until all is written
        new_plain = [[storage.plain.allocate() for _ in range(sinks + tail)] for _ in sequences]
        new_coded = [[storage.coded.allocate() for _ in range(coded)] for _ in sequences]
        slots = _slots(storage, _table(storage, new_plain), at)
        codes_at = None
        if coded and storage.coded_memory is not None:
            codes_at = storage.coded_memory.places(_table(storage, new_coded), tail_start - front)
        is_writing = True
        storage.plain_memory.write(slots, elements)  # the last that can lack memory, before it writes
        if codes_at is not None and storage.coded_memory is not None:
            storage.coded_memory.write_tokens(codes_at, encoded)
        for s, plain, coded in zip(sequences, new_plain, new_coded, strict=True):
            s.plain[:], s.coded[:] = plain, coded
            s.tokens, s.batch, s.indexed, s.node = kept, None, 0, storage.root
            s.segments = None if storage.codec is None else (front, tail_start - front)
            s.ids.clear()
    except BaseException as error:
        storage.count_references()  # the sequences still have their former pages
        if is_writing and not isinstance(error, Exception):  # Ctrl-C: pages were written to, or given to sequences
            for s in sequences:
                s.free()
        raise


def _kept_front(sequences: list[Sequence], index: Tensor) -> int:
    """How many of the tokens that stay are plain at the front in every head."""
    s = sequences[0]
    front = min(s.tokens, s.front_pages * s.page) if s.segments is None else s.segments[0]
    return int((index < front).sum(-1).min())


def _plan_codes(storage: PageStorage, sequences: list[Sequence], index: Tensor) -> tuple[int, Tensor, list[Tensor]]:
    """Which tokens stay as codes, of rows that are alike: those that are codes, and plain ones where heads differ.

    Returns:
        How many tokens then come before the tail; the slots of plain tokens that stay, counted in their pages; and the
        codes of the other tokens.
    """
    assert storage.codec is not None
    assert storage.coded_memory is not None
    if storage.codec.keys != "token":
        raise token_scales_error(storage.codec)
    check_has_data(index, "a policy over codes")
    s, kept = sequences[0], index.shape[2]
    tail_start, sinks = min(s.tail_start, s.tokens), s.front_pages * storage.page
    before = min(s.tokens, sinks) if s.segments is None else s.segments[0]
    front = _kept_front(sequences, index)
    last = min(int((index >= tail_start).sum(-1).min()), storage.residual)
    middle = index[:, :, front : kept - last]
    plain_at = torch.cat([
        torch.arange(before, device=index.device),
        torch.arange(s.tokens - tail_start, device=index.device) + sinks,
    ])  # fmt: skip
    at = plain_at.expand(*index.shape[:2], len(plain_at))
    plain = storage.plain_memory.read(_slots(storage, _table(storage, [s.plain for s in sequences]), at))
    coded = storage.coded_memory.read_tokens(_table(storage, [s.coded for s in sequences]), tail_start - before)
    all_codes = [
        torch.cat([new[:, :, :before], old, new[:, :, before:]], 2)
        for old, new in zip(coded, storage.coded_memory.encode_tokens(*plain), strict=True)
    ]
    chosen = [t.gather(2, middle[..., None].expand(-1, -1, -1, t.shape[3])) for t in all_codes]
    rest = torch.cat([index[:, :, :front], index[:, :, kept - last :] - tail_start + sinks], 2)
    return kept - last, rest, chosen


def _table(storage: PageStorage, pages: list[list[Page]]) -> Tensor:
    """int64 [rows, pages], with an existing page where a row has none."""
    width = max(1, *map(len, pages))
    return storage.index_tensor([[page.index for page in row] + [0] * (width - len(row)) for row in pages])


def _slots(storage: PageStorage, table: Tensor, index: Tensor) -> Tensor:
    """The slots of each head's tokens in the memory of the head: int64 like index, [rows, kv_heads, tokens]."""
    rows, heads, tokens = index.shape
    pages = table.gather(1, (index // storage.page).view(rows, heads * tokens)).view(index.shape)
    return slots_of(pages, index % storage.page, storage.page)
