"""KV caches: the keys and values of earlier tokens, stored so that the next token need not compute them again.

`KVCache(layout=, codec=, evict=)` combines a layout, a codec and an eviction policy. A cache stores and never computes
attention: `k, v = cache.append(k, v)`, then `attend(q, k, v, mask=Causal())`.
"""

from regard.cache.evict import Eviction, Knorm, SinksAndRecent
from regard.cache.evict_by_attention import H2O, TOVA, SnapKV
from regard.cache.expected_attention import ExpectedAttention
from regard.cache.kv_cache import KVCache
from regard.cache.pool import PagePool
from regard.cache.steps import StepCache
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling, StoredTensor

__all__ = [
    "H2O",
    "TOVA",
    "Codec",
    "Contiguous",
    "Eviction",
    "ExpectedAttention",
    "Fp8",
    "Int4",
    "Int8",
    "KVCache",
    "Knorm",
    "Latent",
    "Layout",
    "PagePool",
    "Paged",
    "Rolling",
    "SinksAndRecent",
    "SnapKV",
    "StepCache",
    "StoredTensor",
]
