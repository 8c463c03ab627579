"""`Contiguous`, plain: keys and values in contiguous memory that grows by doubling.

`append` returns views, so a step copies only its own tokens; concatenating tensors at each step would copy all earlier
tokens every time. If elements are stored in another dtype than they arrive in, `append` returns handles of one part.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from regard.cache.store import (
    CachedTensor,
    Form,
    allocate_both,
    allocate_filled,
    as_cached,
    check_capacity,
    select_into,
    with_spare,
)
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous

MIN_TOKENS = 64
"""Tokens that memory is allocated for at first, and at least."""


class DenseStore:
    """Keys [batch, kv_heads, capacity, qk_dim] and values [batch, kv_heads, capacity, v_dim], filled from the front.

    Returned views stay valid, also after `reset`: memory is written only after the last returned token, except after
    `crop`.
    """

    def __init__(self, layout: Contiguous, codec: Codec | torch.dtype | None, form: Form) -> None:
        self.form, self.limit = form, layout.capacity
        self._dtype = codec if isinstance(codec, torch.dtype) else form.dtype
        self.tokens = self.tokens_seen = self._capacity = 0
        self._memory: tuple[Tensor, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """The state, without the memory for later tokens, which may double the size, unless the capacity is fixed."""
        if self.limit is not None:
            return self.__dict__
        memory = tuple(self._stored(t).contiguous() for t in self._memory) if self.tokens else ()
        return self.__dict__ | {"_memory": memory, "_capacity": self.tokens}

    @property
    def min_crop(self) -> int:
        return self.tokens_seen - self.tokens

    @property
    def bytes(self) -> int:
        return sum(t.nbytes // self._capacity for t in self._memory) * self.tokens

    @property
    def allocated_bytes(self) -> int:
        return sum(t.nbytes for t in self._memory)

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        start, new = self.tokens, k.shape[2]
        end = start + new
        if end > self._capacity or not self._memory:
            self._grow(end)
        memory = self._memory
        if new:
            memory[0].narrow(2, start, new).copy_(k)
            if v is not None:
                memory[1].narrow(2, start, new).copy_(v)
        self.tokens, self.tokens_seen = end, self.tokens_seen + new
        dtype = self.form.dtype
        return as_cached(memory[0], 0, end, dtype), as_cached(memory[-1], 0, end, dtype)

    def crop(self, tokens: int) -> None:
        self.tokens, self.tokens_seen = self.tokens - (self.tokens_seen - tokens), tokens

    def reset(self) -> None:
        self._memory, self.tokens, self.tokens_seen, self._capacity = (), 0, 0, 0

    def select(self, rows: Tensor) -> None:
        selected = allocate_both(self.form, len(rows), self._capacity, self._dtype)
        for old, new in zip(self._memory, selected, strict=True):
            select_into(self._stored(new), self._stored(old), rows)
        self._memory, self.form = selected, self.form._replace(batch=len(rows))

    def keep(self, index: Tensor) -> None:
        kept = index.shape[2]
        memory = allocate_both(self.form, self.form.batch, self.limit or max(MIN_TOKENS, with_spare(kept)), self._dtype)
        for old, new in zip(self._memory, memory, strict=True):
            if old.is_cpu:  # copies whole tokens, 20 times faster than `gather`, which copies single elements
                for b, h in itertools.product(range(old.shape[0]), range(old.shape[1])):
                    select_into(new[b, h, :kept], old[b, h], index[b, h])
            else:
                new.narrow(2, 0, kept).copy_(old.gather(2, index[..., None].expand(-1, -1, -1, old.shape[3])))
        self._memory, self.tokens, self._capacity = memory, kept, memory[0].shape[2]

    def keys(self) -> Tensor:
        return self._stored(self._memory[0]).to(self.form.dtype)

    def _stored(self, t: Tensor) -> Tensor:
        return t.narrow(2, 0, self.tokens)

    def _grow(self, tokens: int) -> None:
        """Allocate memory for `tokens` tokens, and copy the stored tokens."""
        check_capacity(self.limit, self.tokens, tokens - self.tokens)
        if self.limit:
            capacity = self.limit
            memory = allocate_both(self.form, self.form.batch, capacity, self._dtype)
        else:
            capacity = max(with_spare(tokens), 2 * self._capacity, MIN_TOKENS)
            memory = allocate_filled(self.form, capacity, self._dtype, tokens)
        for old, new in zip(self._memory, memory, strict=False):
            self._stored(new).copy_(self._stored(old))
        self._memory, self._capacity = memory, capacity
