"""Stored keys and values for tests: a tensor laid out in pages, or written in codes."""

import torch
from torch import Tensor

from regard.cache import Codec, PagePool, StoredTensor
from regard.cache.store import CachedTensor
from regard.storage.codec import TILE, Codes, encode_rows, encode_tiled
from regard.storage.stored import Part


def normal(*sizes: int, seed: int = 0) -> Tensor:
    """Numbers that depend on the sizes and the seed alone."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed + sum(sizes)))


def dense(t: CachedTensor) -> Tensor:
    """What is stored, decoded; a tensor as it is."""
    return t if isinstance(t, Tensor) else t.dense()


def used_pages(pool: PagePool) -> int:
    """Pages that sequences hold, to which something refers."""
    with pool.storage.exclusive:
        return pool.storage.used


def plain(t: Tensor) -> Part:
    """A part of the tokens of t, where they lie."""
    return StoredTensor.of(t).parts[0]


def paged(t: Tensor, page: int, *, first_slot: int = 0, seed: int = 0) -> StoredTensor:
    """t in pages that lie in random order, the first token in slot `first_slot`; unused slots hold NaN."""
    batch, heads, tokens, dim = t.shape
    each = -(-(first_slot + tokens) // page) or 1
    pages = torch.full((batch * each, heads, page, dim), torch.nan, dtype=t.dtype)
    table = torch.randperm(batch * each, generator=torch.Generator().manual_seed(seed)).view(batch, each)
    for slot in range(first_slot, first_slot + tokens):
        pages[table[:, slot // page], :, slot % page] = t[:, :, slot - first_slot]
    return StoredTensor(
        (Part(tokens, pages, first_slot=first_slot, table=table),), (batch, heads, tokens, dim), t.dtype
    )


def coded(t: Tensor, codec: Codec, *, keys: bool, per_token: bool = False, page: int | None = None) -> Part:
    """t, a whole number of groups, in codes: of keys or of values; in pages that lie in reverse order, if asked."""
    tokens, dim = t.shape[2:]
    codes = encode_tiled(t, codec, per_token=per_token) if keys else encode_rows(t, codec)
    group = codec.group if keys else codec.channels(dim)
    data, scale, low = codes if page is None else _in_pages(codes, tokens // page)
    table = None if page is None else torch.arange(len(data)).flip(0).view(len(t), -1)
    return Part(tokens, data, codec.kind, 0, table, None, scale, low, keys, per_token, group)


def _in_pages(codes: Codes, count: int) -> Codes:
    """Each tensor [batch, heads, n, ...] as [batch * count, heads, n / count, ...], the last page first."""

    def cut(t: Tensor) -> Tensor:
        return t.unflatten(2, (count, t.shape[2] // count)).transpose(1, 2).flatten(0, 1).flip(0).contiguous()

    assert codes.data.shape[2] % count == 0, f"pages hold whole tiles of {TILE} tokens"
    return Codes(cut(codes.data), cut(codes.scale), None if codes.zero_point is None else cut(codes.zero_point))
