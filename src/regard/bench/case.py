"""A case: one call of attention by its sizes, mask and bias. Tensors are made on request."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.bench.limits import STREAMED
from regard.cache.kv_cache import KVCache
from regard.describe.bias import Bias
from regard.describe.mask import Mask

COLD = STREAMED
"""Bytes of keys and values that are read before the same are read again: more than the last-level cache has."""


@dataclass(frozen=True)
class Case:
    """A call of attention: sizes, mask and bias.

    Attributes:
        name: its name in tables.
        queries, keys: tokens; the queries are the last.
        heads, kv_heads, dim, batch: of q, k and v.
        v_dim: dim of v; None for `dim`.
        mask, bias: functions that make them, as some carry tensors; a bias gets the dtype of the call.
        softcap: None for none.
        backward: whether the gradients of q, k and v are computed as well.
        cold: whether keys and values are read from memory, not from a processor cache, as in a model that reads other
            layers in between: copies of them are used in turn.
        new_plan: whether each call makes its plan, as the first of its kind does; else the plan is cached.
        threads: None for those of the measurement.
        backend: a backend by name; None lets regard choose.
    """

    name: str
    queries: int
    keys: int
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    batch: int = 1
    v_dim: int | None = None
    mask: Callable[[], Mask] | None = None
    bias: Callable[[torch.dtype], Bias] | None = None
    softcap: float | None = None
    backward: bool = False
    cold: bool = False
    new_plan: bool = False
    threads: int | None = None
    backend: str | None = None
    cached: bool = False

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v, [batch, heads, tokens, dim]."""

        def random(heads: int, tokens: int, dim: int) -> Tensor:
            t = torch.randn(self.batch, heads, tokens, dim, device=device).to(dtype)
            return t.requires_grad_(self.backward)

        k = random(self.kv_heads, self.keys, self.dim)
        return random(self.heads, self.queries, self.dim), k, random(self.kv_heads, self.keys, self.v_dim or self.dim)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of q, k, v and the output, and of their gradients if those are computed."""
        v_dim, passes = self.v_dim or self.dim, 1 + self.backward
        rows = self.heads * self.queries * (self.dim + v_dim) + self.kv_heads * self.keys * (self.dim + v_dim)
        return self.batch * rows * dtype.itemsize * passes

    def copies(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Copies of q, k, v: enough that keys and values have left every processor cache before they are used again."""
        q, k, v = self.tensors(dtype)
        more = min(4096, math.ceil(COLD / max(1, k.nbytes + v.nbytes))) if self.cold else 0
        if self.cached:
            return [(q, *_from_cache(k, v)) for _ in range(1 + more)]
        return [(q, k, v), *((q, k.clone(), v.clone()) for _ in range(more))]

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """The other arguments of `attend` that are not None."""
        options = {
            "mask": self.mask and self.mask(),
            "bias": self.bias and self.bias(dtype),
            "softcap": self.softcap,
            "backend": self.backend,
        }
        return {name: value for name, value in options.items() if value is not None}


def _from_cache(k: Tensor, v: Tensor) -> tuple[Any, Any]:
    """What a new cache with these tokens gives back: tensors, as it is contiguous and has no codec."""
    return KVCache().append(k, v)
