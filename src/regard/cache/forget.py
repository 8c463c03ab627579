"""Tokens that are forgotten one by one: those that stay move together, and whole pages are given back."""

from collections import Counter

import torch
from torch import Tensor

from regard.cache.page_memory import slots_of
from regard.cache.pages import Page
from regard.cache.room import Room
from regard.cache.sequence import Sequence
from regard.cache.store import check_has_data
from regard.errors import ProblemError


def keep(room: Room, sequences: list[Sequence], index: Tensor) -> None:
    """Keep of each sequence, head by head, these tokens alone.

    Args:
        index: int64 [rows, kv_heads, kept], ascending.

    Raises:
        ProblemError: shared pages cannot be written to, and the pool has none left for what stays. Nothing was changed.
    """
    if room.codec is None:
        front, plain = 0, index
        written: list[Tensor] = []
    else:
        front, plain, written = _coded(room, sequences, index)
    first, kept = _first_kept(sequences, index) if room.codec is not None else 0, index.shape[2]
    found = room.numbers.read(_slots(room, _table(room, [s.plain for s in sequences]), plain))
    sinks, coded, tail = (-(-tokens // room.page) for tokens in (first, front - first, kept - front))
    gone = Counter(page for s in sequences for page in (*s.plain, *s.coded))
    freed = [sum(p.holders == n and p.home is home for p, n in gone.items()) for home in (room.plain, room.coded)]
    wanted = [(sinks + tail) * len(sequences), coded * len(sequences)]
    room.check(sum(wanted) - sum(freed), sum(wanted))
    room.make(room.plain.used - freed[0] + wanted[0], room.coded.used - freed[1] + wanted[1])
    for s in sequences:
        s.release(0)
    for s in sequences:
        s.plain = [room.plain.take() for _ in range(sinks + tail)]
        s.coded = [room.coded.take() for _ in range(coded)]
        s.tokens, s.seat, s.named, s.prefix = kept, None, 0, room.root
        s.loose = None if room.codec is None else (first, front - first)
        s.ids.clear()
    places = [*range(first), *range(sinks * room.page, sinks * room.page + kept - front)]
    at = room.tensor(places).expand(*index.shape[:2], len(places))
    room.numbers.write(_slots(room, _table(room, [s.plain for s in sequences]), at), found)
    if coded:
        assert room.codes is not None
        room.codes.write_tokens(_table(room, [s.coded for s in sequences]), written)


def _first_kept(sequences: list[Sequence], index: Tensor) -> int:
    """How many of the tokens that stay are numbers at the front in every head."""
    s = sequences[0]
    first = min(s.tokens, s.sinks * s.room.page) if s.loose is None else s.loose[0]
    return int((index < first).sum(-1).min())


def _coded(room: Room, sequences: list[Sequence], index: Tensor) -> tuple[int, Tensor, list[Tensor]]:
    """What stays as codes, of rows that are alike: those that are, and numbers that some head has more of than others.

    Returns:
        How many tokens then stand before the tail; the slots of numbers that stay, counted in their pages; and the
        codes of the others, token by token.
    """
    assert room.codec is not None
    assert room.codes is not None
    if room.codec.keys != "token":
        raise ProblemError(
            f"tokens cannot be forgotten one by one where they share the scales of keys: {type(room.codec).__name__}"
            '(keys="token") gives each scales of its own.'
        )
    check_has_data(index, "a policy over codes")
    s, kept = sequences[0], index.shape[2]
    front, sinks = min(s.front, s.tokens), s.sinks * room.page
    before = min(s.tokens, sinks) if s.loose is None else s.loose[0]
    first = _first_kept(sequences, index)
    last = min(int((index >= front).sum(-1).min()), room.residual)
    middle = index[:, :, first : kept - last]
    plain_at = torch.cat([torch.arange(before), torch.arange(s.tokens - front) + sinks]).to(index.device)
    at = plain_at.expand(*index.shape[:2], len(plain_at))
    plain = room.numbers.read(_slots(room, _table(room, [s.plain for s in sequences]), at))
    entries = room.codes.tokens(_table(room, [s.coded for s in sequences]), front - before)
    written = [
        torch.cat([new[:, :, :before], old, new[:, :, before:]], 2)
        for old, new in zip(entries, room.codes.encode_tokens(*plain), strict=True)
    ]
    chosen = [t.gather(2, middle[..., None].expand(-1, -1, -1, t.shape[3])) for t in written]
    rest = torch.cat([index[:, :, :first], index[:, :, kept - last :] - front + sinks], 2)
    return kept - last, rest, chosen


def _table(room: Room, pages: list[list[Page]]) -> Tensor:
    """int64 [rows, pages], with a page that exists where a row has none."""
    width = max(1, *map(len, pages))
    return room.tensor([[page.number for page in row] + [0] * (width - len(row)) for row in pages])


def _slots(room: Room, table: Tensor, index: Tensor) -> Tensor:
    """Where the tokens of each head stand among those of the head: int64 like index, [rows, kv_heads, tokens]."""
    rows, heads, tokens = index.shape
    numbers = table.gather(1, (index // room.page).view(rows, heads * tokens)).view(index.shape)
    return slots_of(numbers, index % room.page, room.page)
