"""Caches: the keys and values of earlier tokens, kept so that the next token need not compute them again.

A cache keeps and never computes: `k, v = cache.append(k, v)`, then `attend(q, k, v, mask=Causal())`.
"""

from regard.cache.evict import Eviction, Knorm, SinksAndRecent
from regard.cache.evict_by_attention import H2O, TOVA, SnapKV
from regard.cache.expected_attention import ExpectedAttention
from regard.cache.kv_cache import KVCache
from regard.cache.pool import PagePool

__all__ = ["H2O", "TOVA", "Eviction", "ExpectedAttention", "KVCache", "Knorm", "PagePool", "SinksAndRecent", "SnapKV"]
