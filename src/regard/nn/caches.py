"""`Caches`: the KV caches of a block. One call creates those of all blocks."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import nn

from regard.cache import ExpectedAttention, KVCache
from regard.cache.store import Policy
from regard.describe.position import Position, Rope, has_own_rotate
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.spec_module import spec_of
from regard.storage.codec import Codec
from regard.storage.stored import Layout, Rolling


class Caches(NamedTuple):
    """The KV caches of a block: `own` for self-attention, `cross` for the context."""

    own: KVCache
    cross: KVCache


def caches_for(
    attentions: Iterable[object], layout: Layout | None, codec: Codec | torch.dtype | None, evict: Policy | None
) -> list[Caches]:
    """Empty caches for blocks with these attention modules.

    `Rolling` and `ExpectedAttention` without a rope get the module's. The cache of a context is contiguous and evicts
    nothing.

    >>> from regard import Rope
    >>> caches_for([MultiHeadAttention(32, 4, position=Rope(8))], Rolling(64), None, None)[0].own.layout
    Rolling(window=64, sinks=4, rope=Rope(dim=8))
    """
    return [
        Caches(KVCache(_layout_with_rope(layout, one), codec, _policy_with_rope(evict, one)), KVCache(codec=codec))
        for one in attentions
    ]


def _position_of(attention: object) -> Position | None:
    """The position of multi-head attention, also where a wrapper has it: of torch.compile, of checkpointing."""
    parts = attention.modules() if isinstance(attention, nn.Module) else ()
    found = next((part for part in parts if isinstance(part, MultiHeadAttention)), None)
    return None if found is None else spec_of("position", found.position)


def _layout_with_rope(layout: Layout | None, attention: object) -> Layout | None:
    position = _position_of(attention)
    if isinstance(layout, Rolling) and layout.rope is None and position is not None:
        return replace(layout, rope=cast(Rope, position))
    return layout


def _policy_with_rope(evict: Policy | None, attention: object) -> Policy | None:
    """The policy with the module's rope, unless queries cannot be unrotated: by a `rotate` of its own, or by length."""
    rope = _position_of(attention)
    if not isinstance(evict, ExpectedAttention) or evict.rope is not None or not isinstance(rope, Rope):
        return evict
    if has_own_rotate(rope) or (rope.scaling is not None and rope.scaling.looks_at_length()):
        return evict
    return replace(evict, rope=rope)
