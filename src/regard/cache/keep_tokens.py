"""Evict single tokens from sequences: the tokens that stay move together, and pages that become empty are freed."""

from collections import Counter

import torch
from torch import Tensor

from regard.cache.page_memory import slots_of
from regard.cache.page_storage import PageStorage
from regard.cache.pages import Page
from regard.cache.sequence import Sequence
from regard.cache.store import check_has_data, token_scales_error


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
    for s in sequences:
        s.release_from(0)
    for s in sequences:
        s.plain = [storage.plain.allocate() for _ in range(sinks + tail)]
        s.coded = [storage.coded.allocate() for _ in range(coded)]
        s.tokens, s.batch, s.indexed, s.node = kept, None, 0, storage.root
        s.segments = None if storage.codec is None else (front, tail_start - front)
        s.ids.clear()
    places = [*range(front), *range(sinks * storage.page, sinks * storage.page + kept - tail_start)]
    at = storage.index_tensor(places).expand(*index.shape[:2], len(places))
    storage.plain_memory.write(_slots(storage, _table(storage, [s.plain for s in sequences]), at), elements)
    if coded:
        assert storage.coded_memory is not None
        storage.coded_memory.write_tokens(_table(storage, [s.coded for s in sequences]), encoded)


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
    plain_at = torch.cat([torch.arange(before), torch.arange(s.tokens - tail_start) + sinks]).to(index.device)
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
