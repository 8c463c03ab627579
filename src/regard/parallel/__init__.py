"""Attention over a sequence that is sharded over the ranks of a `torch.distributed` process group.

- `ring_attend`: each rank has some tokens, of queries, keys and values; keys and values travel around the ring.
- `ulysses_attend`: each rank has some tokens; for the attention, each rank gets all tokens of some heads.
- `attend_sharded`: each rank has some keys and all of the queries, as in decoding with a cache over several machines.
- `ShardedCache`: a KV cache whose tokens are on several ranks.
- `Layout`: which tokens each rank has: contiguous, zigzag, striped, or any other.
"""

from regard.parallel.layout import Layout
from regard.parallel.ring import ring_attend, ring_attend_state

__all__ = ["Layout", "ring_attend", "ring_attend_state"]
