"""Biases that depend on the head and on k - q alone (`Bias.per_distance`), as one vector per head.

A call of n queries and m keys has n * m scores, but only n + m - 1 distances.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import cast

import torch
from torch import Tensor

from regard.describe.bias import Alibi, Bias, TensorBias, values_of
from regard.describe.fingerprint import Fingerprint
from regard.describe.tensors import reads_again
from regard.lru_cache import LRUCache
from regard.plan.problem import Operands, Problem

KEPT = 64 << 20
"""The most bytes of cached vectors."""

CPU = torch.device("cpu")

EXACT = 1 << 24
"""Integers below this are exact in float32."""


def by_distance(
    bias: Bias, heads: int, dtype: torch.dtype, first: int, count: int, device: torch.device = CPU
) -> Tensor:
    """The bias at `count` distances q - k, from `first` on: [heads, count], differentiable in its tensors.

    >>> from regard import Alibi
    >>> by_distance(Alibi(2), heads=2, dtype=torch.float32, first=-1, count=4)[0].tolist()
    [-0.0625, -0.0, -0.0625, -0.125]
    """
    distance = torch.arange(first, first + count, device=device)
    head = torch.arange(heads, device=device)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    terms = (values_of(term, zero, head, zero, -distance).to(dtype) for term in bias.widened(dtype).terms())
    return reduce(add, terms).expand(heads, count).contiguous()


def split_by_distance(bias: Bias | None) -> tuple[Bias | None, list[Bias]]:
    """The sum of the terms that depend on the distance alone, None without one; and the other terms.

    >>> from regard import Alibi, TensorBias
    >>> by_distance, others = split_by_distance(Alibi(2) + TensorBias(torch.zeros(3, 3)))
    >>> by_distance, len(others)
    (Alibi(heads=2), 1)
    """
    if bias is None:
        return None, []
    of_distance: list[Bias] = []
    others: list[Bias] = []
    for term in bias.terms():
        (of_distance if term.per_distance() else others).append(term)
    return (reduce(add, of_distance) if of_distance else None), others


def vectors(
    bias: Bias | None, problem: Problem, operands: Operands, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """A bias that depends on the distance alone, [heads, queries + keys - 1]; None without one.

    Query i and key j, both counted from 0 in the call, have the element i - j + keys - 1.
    """
    if bias is None:
        return None
    p, sizes, device = problem, operands.sizes, operands.q.device
    first, count = sizes.offset - (sizes.keys - 1), max(sizes.queries + sizes.keys - 1, 0)
    vectors_of = by_distance if p.grad and bias.may_learn() else kept_by_distance
    return vectors_of(bias, p.heads, dtype, first, count, device)


def line(bias: Bias | None, operands: Operands) -> Tensor | None:
    """A bias `-slope * |i - j + offset|` of query i and key j as (slope, offset) of each head, float32 [heads, 2].

    None for other biases, for slopes of the caller, and where a distance is no float32.
    """
    sizes, device = operands.sizes, operands.q.device
    if type(bias) is not Alibi or bias.slopes is not None:
        return None
    if abs(sizes.offset) + sizes.queries + sizes.keys >= EXACT:
        return None
    key = cast(int, bias.heads), sizes.offset, device
    found = _lines.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # a graph must not copy from the host; what ran before its capture is found above
        with torch.inference_mode(mode=False), torch.no_grad():
            slopes = bias.slope_per_head().float()
            found = torch.stack([slopes, torch.full_like(slopes, float(sizes.offset))], 1).to(device)
        if _is_complete(device):
            _lines.put(key, found)
    return found


def table(others: Sequence[Bias], operands: Operands) -> Tensor | None:
    """The rows of the other terms, [batch or 1, heads or 1, queries or 1, keys or 1]: after lowering, one tensor."""
    if not others:
        return None
    (whole,) = cast("Sequence[TensorBias]", others)
    return whole.rows(operands.q.shape[2], operands.offset)


def kept_by_distance(
    bias: Bias, heads: int, dtype: torch.dtype, first: int, count: int, device: torch.device = CPU
) -> Tensor:
    """`by_distance` from a cache, not differentiable.

    A cached vector has more distances than the call needs, so a call with one more key finds it again.
    """
    content = bias.fingerprint()
    key = (content, heads, dtype, device)
    low, made = _vectors.get(key) or (0, None)
    if made is None or first < low or first + count > low + made.shape[1]:
        low, high = -_next_power(-first), _next_power(first + count)
        if high - low > 4 * count + 1024:  # far from the diagonal
            low, high = first, first + count
        with torch.inference_mode(mode=False), torch.no_grad():  # a later call may save it for its backward pass
            made = by_distance(bias, heads, dtype, low, high - low, device)
        if (content.is_constant or reads_again(bias.fingerprint, content)) and _is_complete(device):
            _vectors.put(key, (low, made))
    return made[:, first - low : first - low + count]


def _is_complete(device: torch.device) -> bool:
    """Whether what this stream was asked to compute may be kept for calls on every stream; waits for it on a GPU.

    Not while a CUDA graph is captured: nothing may wait then, and the memory is the graph's.
    """
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.current_stream(device).synchronize()
    return True


def _next_power(n: int) -> int:
    """The next power of two, so that growing calls seldom make a new vector."""
    return 1 << max(n - 1, 0).bit_length()


_Key = tuple[Fingerprint, int, torch.dtype, torch.device]

_vectors: LRUCache[_Key, tuple[int, Tensor]] = LRUCache(entries=1024, nbytes=KEPT, size=lambda kept: kept[1].nbytes)
"""Vectors, each with its first distance. They keep no tensor of the user alive."""

_lines: LRUCache[tuple[int, int, torch.device], Tensor] = LRUCache(entries=256, nbytes=1 << 20, size=lambda t: t.nbytes)
"""The slopes of ALiBi's paper on a device, with an offset."""
