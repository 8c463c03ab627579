"""Streams of tokens through caches that evict, and the same by the definition: dictionaries and loops, float64."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.evict import Eviction
from regard.cache.kv_cache import KVCache
from regard.cache.query_observer import QueryWindow
from regard.cache.store import Store


def sums_of_weights(q: Tensor, k: Tensor, mask: Any = None, scale: float | None = None) -> Tensor:
    """The column sums of the attention of the last queries, [batch, kv_heads, keys]."""
    return QueryWindow.last(q, k.shape[2], mask, scale).column_sums(k)


class Stream(NamedTuple):
    """Queries, keys, values; the first number of a value is its token's place in the sequence."""

    q: Tensor
    k: Tensor
    v: Tensor

    def tokens(self, start: int, stop: int) -> "Stream":
        return Stream(*(t[:, :, start:stop] for t in self))

    def rows(self, rows: Iterable[int]) -> "Stream":
        return Stream(*(t[list(rows)] for t in self))


def stream(tokens: int, *, batch: int = 2, heads: int = 6, kv_heads: int = 3, dim: int = 8, seed: int = 0) -> Stream:
    made = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, h, tokens, d, generator=made, dtype=torch.float64)
        for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, 5))
    )
    v[..., 0] = torch.arange(tokens)
    return Stream(2 * q, k, v)


def feed(cache: KVCache, s: Stream, sizes: Iterable[int], start: int = 0) -> list[Tensor]:
    """Append tokens in steps of these sizes and show their queries; what was kept of the earlier ones, each step."""
    kept: list[Tensor] = []
    for size in sizes:
        q, k, v = s.tokens(start, start + size)
        _, values = append(cache, k, v)
        cache.observe(q)
        kept.append(values[:, :, : values.shape[2] - size, 0].long())
        start += size
    return kept


def append(cache: KVCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """To a cache that gives tensors."""
    keys, values = cache.append(k, v)
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    return keys, values


def inside(cache: KVCache) -> tuple[Any, Store]:
    """What the policy has seen, and the store."""
    assert cache._store is not None
    return cache._policy_state, cache._store


def kept_by(word: Eviction, s: Stream, sizes: Iterable[int]) -> list[Tensor]:
    return feed(KVCache(evict=word), s, sizes)


def weights(s: Stream, b: int, head: int, token: int, alive: list[int]) -> dict[int, float]:
    """The attention of one query over the tokens that are alive and not after it."""
    group = s.q.shape[1] // s.k.shape[1]
    seen = [j for j in alive if j <= token]
    scores = s.k[b, head // group, seen] @ s.q[b, head, token] / math.sqrt(s.q.shape[3])
    return dict(zip(seen, scores.softmax(0).tolist(), strict=True))


Score = Callable[[int, int, list[int], list[int]], dict[int, float]]
"""(batch row, kv head, tokens alive, all queries so far since the last eviction) -> a score of each token alive."""


def by_definition(
    s: Stream, sizes: Iterable[int], score: Score, *, budget: int, sinks: int, recent: int, every: int = 1
) -> list[Tensor]:
    """Which tokens are alive before each step, if those of the lowest scores go: [batch, kv_heads, kept] each."""
    batch, kv_heads = s.k.shape[:2]
    alive = {(b, h): list[int]() for b in range(batch) for h in range(kv_heads)}
    shown, start, found = list[int](), 0, list[Tensor]()
    for size in sizes:
        if len(alive[0, 0]) >= budget + every:
            for (b, h), tokens in alive.items():
                scores = score(b, h, tokens, shown)
                middle = sorted(tokens[sinks : len(tokens) - recent], key=lambda j: scores[j])
                gone = set(middle[: len(tokens) - budget])
                alive[b, h] = [j for j in tokens if j not in gone]
            shown = []
        found.append(torch.tensor([[alive[b, h] for h in range(kv_heads)] for b in range(batch)]).long())
        for tokens in alive.values():
            tokens.extend(range(start, start + size))
        shown += range(start, start + size)
        start += size
    return found
