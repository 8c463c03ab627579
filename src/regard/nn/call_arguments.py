"""What a module passes to `attend` and to its cache: masks and biases of module and call, and the length."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from regard.cache import KVCache
from regard.cache.store import CachedTensor
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Prefix
from regard.describe.position import Rope
from regard.describe.position_table import end_of
from regard.describe.spec import Spec
from regard.nn.spec_module import SpecModule, spec_of
from regard.storage.stored import Rolling

W = TypeVar("W", bound=Spec)


def both(name: str, combine: Callable[[W, W], W], part: SpecModule[W] | None, value: W | None) -> W | None:
    """The mask or bias of the module, its attribute `name`, and that of the call, combined; one where one is None."""
    own = spec_of(name, part)
    if own is None or value is None:
        return value if own is None else own
    return combine(own, value)


def length_of(rope: Rope, first: int | Tensor, queries: int, keys: int, cache: KVCache | None) -> int | None:
    """The length of the sequence, for queries and keys; None where the rope's scaling does not depend on it."""
    if rope.scaling is None or not rope.scaling.looks_at_length():
        return None
    if cache is not None and isinstance(cache.layout, Rolling):
        return max(cache.keys_after(keys), 1)  # positions are slots of the cache
    total = keys if cache is None else cache.tokens_seen + keys
    if isinstance(first, Tensor):
        return max(0 if first.is_meta else end_of(first), total, 1)
    return max(first + queries, total, 1)


def observed_mask(visible: Mask | None, q: Tensor, keys: CachedTensor) -> Mask | None:
    """The mask for `KVCache.observe`, where None is `Causal()`: here it hides nothing."""
    return Prefix(keys.shape[2]) if visible is None and q.shape[2] > 1 else visible
