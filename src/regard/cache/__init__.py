"""Caches: the keys and values of earlier tokens, kept so that the next token need not compute them again.

A cache keeps and never computes: `k, v = cache.append(k, v)`, then `attend(q, k, v, mask=Causal())`.
"""

from regard.cache.dense import KVCache

__all__ = ["KVCache"]
