"""`Caches`: what a block of a whole model keeps of earlier tokens, made in one line for all, rolled back together."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from regard.cache import ExpectedAttention, KVCache
from regard.cache.store import Policy
from regard.describe.position import Rope
from regard.nn.multi_head import MultiHeadAttention
from regard.storage.codec import Codec
from regard.storage.stored import Layout, Rolling


class Caches(NamedTuple):
    """What a block keeps of earlier tokens: of its own, and of the context."""

    own: KVCache
    cross: KVCache


def caches_for(
    attentions: Iterable[object], layout: Layout | None, codec: Codec | torch.dtype | None, evict: Policy | None
) -> list[Caches]:
    """Empty caches for blocks with these attentions.

    A `Rolling` layout, or `ExpectedAttention`, without a rope gets that of the module. A context is kept whole.

    >>> from regard import Rope
    >>> caches_for([MultiHeadAttention(32, 4, position=Rope(8))], Rolling(64), None, None)[0].own.layout
    Rolling(window=64, sinks=4, rope=Rope(dim=8))
    """
    return [
        Caches(KVCache(_with_rope(layout, one), codec, _told_rope(evict, one)), KVCache(codec=codec))
        for one in attentions
    ]


def _with_rope(layout: Layout | None, attention: object) -> Layout | None:
    position = attention.position if isinstance(attention, MultiHeadAttention) else None
    if isinstance(layout, Rolling) and layout.rope is None and position is not None:
        return replace(layout, rope=position.spec)
    return layout


def _told_rope(evict: Policy | None, attention: object) -> Policy | None:
    """The policy; by angles that change with the length queries cannot be turned back, so they count as they came."""
    position = attention.position if isinstance(attention, MultiHeadAttention) else None
    rope = None if position is None else position.spec
    if not isinstance(evict, ExpectedAttention) or evict.rope is not None or not isinstance(rope, Rope):
        return evict
    if rope.scaling is not None and rope.scaling.looks_at_length():
        return evict
    return replace(evict, rope=rope)


@contextmanager
def kept_on_failure(caches: Sequence[Caches]) -> Generator[None]:
    """If what is done here fails, no cache knows more than before, and it can be done again."""
    before = [(cache, cache.tokens_seen) for pair in caches for cache in pair]
    try:
        yield
    except BaseException:
        for cache, seen in before:
            if cache.tokens_seen > seen:
                cache.crop(seen)
        raise
