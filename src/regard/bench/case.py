"""A case: one call of attention by its sizes and words, without tensors until they are asked for."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.mask import Mask

COLD = 256 << 20
"""Bytes of keys and values to read before the same are read again: several times the largest cache of most machines."""


@dataclass(frozen=True)
class Case:
    """A call of attention: sizes and words.

    Attributes:
        name: what it is called in tables.
        queries, keys: tokens; the queries are the last.
        heads, kv_heads, dim, batch: of q, k and v.
        v_dim: of v; None for `dim`.
        mask, bias: made when the tensors are, as some carry tensors; a bias gets the dtype of the call.
        softcap: the cap; None for none.
        backward: whether the gradients of q, k and v are computed as well.
        cold: whether keys and values come from memory and not from a cache, as in a model whose other layers were read
            in between: copies of them are taken in turn.
        anew: whether each call has to make its plan, as the first of its kind does; else the plan is known.
        threads: None for as many as are asked for.
        backend: an engine by name; None lets regard choose.
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
    anew: bool = False
    threads: int | None = None
    backend: str | None = None

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of random numbers, [batch, heads, tokens, dim]."""

        def made(heads: int, tokens: int, dim: int) -> Tensor:
            t = torch.randn(self.batch, heads, tokens, dim, device=device).to(dtype)
            return t.requires_grad_(self.backward)

        k = made(self.kv_heads, self.keys, self.dim)
        return made(self.heads, self.queries, self.dim), k, made(self.kv_heads, self.keys, self.v_dim or self.dim)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of q, k, v and the output, and of their gradients if those are computed."""
        v_dim, passes = self.v_dim or self.dim, 1 + self.backward
        rows = self.heads * self.queries * (self.dim + v_dim) + self.kv_heads * self.keys * (self.dim + v_dim)
        return self.batch * rows * dtype.itemsize * passes

    def copies(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
        """q, k and v as often as needed for keys and values to be out of every cache when their turn comes again."""
        first = self.tensors(dtype)
        if not self.cold:
            return [first]
        more = min(4096, math.ceil(COLD / max(1, first[1].nbytes + first[2].nbytes)))
        return [first, *((first[0], first[1].clone(), first[2].clone()) for _ in range(more))]

    def words(self, dtype: torch.dtype) -> dict[str, Any]:
        """The other arguments of `attend`, those left out that say nothing."""
        made = {
            "mask": self.mask and self.mask(),
            "bias": self.bias and self.bias(dtype),
            "softcap": self.softcap,
            "backend": self.backend,
        }
        return {name: word for name, word in made.items() if word is not None}
