"""Attention over a sequence that is sharded over the ranks of a `torch.distributed` process group.

- `context_parallel`: models run over a sharded sequence by one line around the call.
- `ring_attend`: each rank has some tokens, of queries, keys and values; keys and values travel around the ring.
- `ulysses_attend`: the same, where each rank gets all tokens of some heads; `attend_on_mesh`: both on a `DeviceMesh`.
- `attend_sharded`: each rank has some keys and all of the queries, as in decoding; `ShardedCache`: a KV cache for that.
- `Layout`: which tokens each rank has: contiguous, zigzag, striped, balanced, or any other.
- `RankError`: another rank is lost.

Names are imported when the first of them is used: layouts are counted with before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.errors import RankError
    from regard.parallel.context import ContextParallel, Shard, context_parallel
    from regard.parallel.layout import Layout
    from regard.parallel.ring import ring_attend, ring_attend_state
    from regard.parallel.sharded import attend_sharded
    from regard.parallel.sharded_cache import ShardedCache
    from regard.parallel.ulysses import attend_on_mesh, ulysses_attend

__all__ = [
    "ContextParallel",
    "Layout",
    "RankError",
    "Shard",
    "ShardedCache",
    "attend_on_mesh",
    "attend_sharded",
    "context_parallel",
    "ring_attend",
    "ring_attend_state",
    "ulysses_attend",
]

MODULES = {
    "context": ("ContextParallel", "Shard", "context_parallel"),
    "layout": ("Layout",),
    "ranks": ("RankError",),
    "ring": ("ring_attend", "ring_attend_state"),
    "sharded": ("attend_sharded",),
    "sharded_cache": ("ShardedCache",),
    "ulysses": ("attend_on_mesh", "ulysses_attend"),
}
"""The public names of each module."""


def __getattr__(name: str) -> Any:
    module = next((module for module, names in MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'regard.parallel' has no attribute {name!r}")
    return getattr(import_module(f"regard.parallel.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
