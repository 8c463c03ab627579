"""`Contiguous`, plain: keys and values side by side, in memory that grows by doubling.

What `append` returns are views, so a step costs its own tokens and nothing per token before them; joining tensors
anew each step would copy all of them every time. Where numbers are kept in another type than they come in, it returns
handles of one part instead.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from regard.cache.store import CachedTensor, Form, memory
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous, Part, StoredTensor

LEAST = 64
"""Tokens for which room is made at first, and at least."""


class DenseStore:
    """Keys [batch, kv_heads, capacity, qk_dim] and values [batch, kv_heads, capacity, v_dim], filled from the front.

    What was given out stays true, also after `reset`: memory that was given out is written again beyond its last token
    only, and after `crop`.
    """

    def __init__(self, layout: Contiguous, codec: Codec | torch.dtype | None, form: Form) -> None:
        self.form, self.limit = form, layout.capacity
        self._type = codec if isinstance(codec, torch.dtype) else form.dtype
        self._tokens = self._seen = self._capacity = 0
        self._rooms: tuple[Tensor, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Without room for tokens to come, which may be as much again, unless it is of a fixed size."""
        if self.limit is not None:
            return self.__dict__
        rooms = tuple(self._kept(room).contiguous() for room in self._rooms) if self._tokens else ()
        return self.__dict__ | {"_rooms": rooms, "_capacity": self._tokens}

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def tokens_seen(self) -> int:
        return self._seen

    @property
    def min_crop(self) -> int:
        return self._seen - self.tokens

    @property
    def bytes(self) -> int:
        return sum(room.nbytes // self._capacity for room in self._rooms) * self._tokens

    @property
    def allocated_bytes(self) -> int:
        return sum(room.nbytes for room in self._rooms)

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        start, new = self._tokens, k.shape[2]
        end = start + new
        if end > self._capacity or not self._rooms:
            self._grow(end)
        rooms = self._rooms
        if new:
            rooms[0].narrow(2, start, new).copy_(k)
            if v is not None:
                rooms[1].narrow(2, start, new).copy_(v)
        self._tokens, self._seen = end, self._seen + new
        return self._found(rooms[0]), self._found(rooms[-1])

    def crop(self, tokens: int) -> None:
        self._tokens, self._seen = self._tokens - (self._seen - tokens), tokens

    def reset(self) -> None:
        self._rooms, self._tokens, self._seen, self._capacity = (), 0, 0, 0

    def select(self, rows: Tensor) -> None:
        made = self._made(len(rows), self._capacity)
        for old, new in zip(self._rooms, made, strict=True):
            torch.index_select(self._kept(old), 0, rows, out=self._kept(new))
        self._rooms, self.form = made, self.form._replace(batch=len(rows))

    def keep(self, index: Tensor) -> None:
        kept = index.shape[2]
        made = self._made(self.form.batch, self.limit or max(LEAST, kept + kept // 8))
        for old, new in zip(self._rooms, made, strict=True):
            if old.is_cpu:  # whole tokens are copied at once, 20 times faster than `gather` number by number
                for b, h in itertools.product(range(old.shape[0]), range(old.shape[1])):
                    torch.index_select(old[b, h], 0, index[b, h], out=new[b, h, :kept])
            else:
                new.narrow(2, 0, kept).copy_(old.gather(2, index[..., None].expand(-1, -1, -1, old.shape[3])))
        self._rooms, self._tokens = made, kept
        self._capacity = made[0].shape[2]

    def keys(self) -> Tensor:
        return self._kept(self._rooms[0]).to(self.form.dtype)

    def _kept(self, room: Tensor) -> Tensor:
        return room.narrow(2, 0, self._tokens)

    def _found(self, room: Tensor) -> CachedTensor:
        if room.dtype == self.form.dtype:
            return self._kept(room)
        batch, heads, _, dim = room.shape
        return StoredTensor((Part(self._tokens, room),), (batch, heads, self._tokens, dim), self.form.dtype)

    def _grow(self, tokens: int) -> None:
        """Make room for so many tokens, and bring what is there."""
        if self.limit is not None and tokens > self.limit:
            raise ProblemError(
                f"{tokens - self._tokens} tokens more than the {self._tokens} that are stored make {tokens}, and "
                f"Contiguous(capacity={self.limit}) has no room for them: nothing was changed. Take a larger capacity, "
                "or none."
            )
        capacity = self.limit or max(tokens, 2 * self._capacity, LEAST)
        made = self._made(self.form.batch, capacity)
        for old, new in zip(self._rooms, made, strict=False):
            self._kept(new).copy_(self._kept(old))
        self._rooms, self._capacity = made, capacity

    def _made(self, batch: int, capacity: int) -> tuple[Tensor, ...]:
        form = self.form
        return tuple(memory((batch, form.kv_heads, capacity, dim), self._type, form.device) for dim in form.dims)
