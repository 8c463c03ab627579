"""The largest context and batch that fit a memory, and the context from which attention outweighs its projections."""

from collections.abc import Callable

from regard.cost.model import Model
from regard.cost.parameter_count import parameters
from regard.cost.storage import Storage, cache_bytes, item_bytes
from regard.cost.work import Parts, forward, prompt_call

USABLE = 0.9
"""The share of a memory that weights and cache may fill; the rest is for activations and the runtime."""

MOST = 1 << 40
"""The longest context and largest batch that are tried."""


def weight_bytes(model: Model, dtype: str = "bfloat16") -> int:
    """Bytes of all parameters."""
    return parameters(model).total * item_bytes(dtype)


def largest_context(
    model: Model, memory: int, *, batch: int = 1, storage: Storage | None = None, dtype: str = "bfloat16"
) -> int | None:
    """The longest context, in tokens, whose cache fits beside the weights; 0 if they alone do not; None: any length.

    Where a group or page of tokens turns into codes the bytes fall a little, so the length may be off by one of these.

    Args:
        memory: bytes, of which `USABLE` is used.

    >>> from regard.cost import find_model
    >>> largest_context(find_model("llama-3-8b"), 80 * 2**30)
    467291
    """
    room = int(memory * USABLE) - weight_bytes(model, dtype)
    return _largest(lambda n: cache_bytes(model, n, batch=batch, storage=storage, dtype=dtype) <= room, room)


def largest_batch(
    model: Model, memory: int, *, context: int, storage: Storage | None = None, dtype: str = "bfloat16"
) -> int | None:
    """The largest batch of this context that fits; 0 if none does; None if nothing is cached.

    >>> from regard.cost import find_model
    >>> largest_batch(find_model("llama-3-8b"), 80 * 2**30, context=32768)
    14
    """
    room = int(memory * USABLE) - weight_bytes(model, dtype)
    one = cache_bytes(model, context, storage=storage, dtype=dtype)
    if room < 0:
        return 0
    return room // one if one else None


def crossing(model: Model, part: Callable[[Parts], float]) -> int | None:
    """The shortest prompt, in tokens, whose attention takes at least as many FLOPs as another part; None: no prompt.

    >>> from regard.cost import find_model
    >>> crossing(find_model("llama-2-7b"), lambda parts: parts.projections.flops)
    16383
    """

    def is_lighter(n: int) -> bool:
        parts = forward(model, prompt_call(n))
        return parts.attention.flops < part(parts)

    last = _largest(is_lighter, 0)
    return None if last is None else last + 1


def _largest(holds: Callable[[int], bool], room: int) -> int | None:
    """The largest n for which it holds, as for all smaller ones; 0 for none; None for more than `MOST`."""
    if room < 0 or not holds(1):
        return 0
    if holds(MOST):
        return None
    low, high = 1, MOST  # holds(low), not holds(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
