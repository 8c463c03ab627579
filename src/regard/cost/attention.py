"""Floating-point operations and bytes of one call.

>>> from regard.plan.tiling import schedule
>>> s = schedule(None, batch=1, heads=8, queries=2048, keys=2048, offset=0, tile=128)
>>> flops(s, qk_dim=64, v_dim=64) / 1e9
8.589934592
"""

from regard.cost.products import attention_flops, attention_gradient_flops
from regard.plan.schedule import Schedule


def flops(schedule: Schedule, *, qk_dim: int, v_dim: int) -> int:
    """FLOPs of the two products, `q . k` and `weights @ v`, over the kept pairs only: 2 (qk_dim + v_dim) each.

    The convention of Dao et al. 2022, arXiv:2205.14135, §4 and of torch's FLOP counter; softmax is not counted.
    """
    return attention_flops(schedule.pairs, qk_dim, v_dim)


def gradient_flops(schedule: Schedule, *, qk_dim: int, v_dim: int) -> int:
    """FLOPs of the backward pass: the scores once more, the gradients of the weights, and those of q, k and v.

    The five products that Dao et al. 2022, arXiv:2205.14135, §B.4 and torch's FLOP counter count.
    """
    return attention_gradient_flops(schedule.pairs, qk_dim, v_dim)


def bytes_moved(schedule: Schedule, *, kv_heads: int, of_query: float, of_key: float) -> int:
    """The least that any backend reads and writes, in bytes: q, out, the keys and values that are seen, each once.

    If query heads that share a key head have different masks, this counts the mean number of keys per query head: a
    lower bound, as a key must be read if at least one of these heads sees it.

    Args:
        of_query: bytes of a query and its row of the output, for one head.
        of_key: bytes of a key and its value, for one key head.
    """
    rows = schedule.batch * schedule.heads * schedule.queries
    batches, heads = schedule.maps
    copies = (schedule.batch // batches if batches else 0) * (kv_heads if heads == 1 else 1)
    if heads > 1:  # the mean over the heads of a group
        copies = copies * kv_heads / schedule.heads
    return round(rows * of_query + schedule.keys_read * copies * of_key)  # of_key may be a mean over stored keys
