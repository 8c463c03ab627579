"""`Rolling`, plain: the first tokens and the latest, in memory that does not grow, handed out as views.

Xiao et al. 2023, StreamingLLM, arXiv:2309.17453, §3.2. The memory holds about two windows. The latest tokens walk
through it; the sinks are written anew, turned, into the slots just before them, which belong to forgotten tokens:

```
slots   . . . . . S S S S t t t t t t t t . . . .     one step later:   . . . . . . S S S S t t t t t t t t . . .
                  first   kept            end
```

At the end of the memory the kept tokens are brought to its front: once in a window, so a step costs its own token and
the sinks. There is no wrap-around, so what is handed out is one strided tensor for keys and one for values.
"""

import torch
from torch import Tensor

from regard.cache.sinks import Sinks
from regard.cache.store import CachedTensor, Form, memory
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Part, Rolling, StoredTensor


class RollingStore:
    """Keys and values [batch, kv_heads, slots, dim]; those of slots first .. end - 1 are kept, the sinks in front."""

    def __init__(self, layout: Rolling, codec: Codec | torch.dtype | None, form: Form) -> None:
        self.form, self.layout = form, layout
        self._type = codec if isinstance(codec, torch.dtype) else form.dtype
        self._sinks = Sinks(layout.sinks, layout.rope, form)
        self._slots = layout.sinks + 2 * layout.window
        self._rooms = self._made(form.batch, self._slots)
        self._first = self._end = self._gone = 0

    @property
    def tokens(self) -> int:
        return self._end - self._first

    @property
    def tokens_seen(self) -> int:
        return self._gone + self._end - self._first

    @property
    def min_crop(self) -> int:
        return self._gone and self._gone + self.layout.window - 1

    @property
    def bytes(self) -> int:
        return sum(room[:, :, :1].nbytes for room in self._rooms) * self.tokens

    @property
    def allocated_bytes(self) -> int:
        return sum(room.nbytes for room in self._rooms) + self._sinks.allocated_bytes

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        assert v is not None
        new = k.shape[2]
        if new:
            self._forget(new)
            if self.tokens < self.layout.sinks:
                self._sinks.put(self.tokens, k, v)
            for room, x in zip(self._rooms, (k, v), strict=True):
                room.narrow(2, self._end, new).copy_(x)
            self._end += new
        return self._found(self._rooms[0]), self._found(self._rooms[1])

    def crop(self, tokens: int) -> None:
        self._end -= self.tokens_seen - tokens

    def reset(self) -> None:
        self._first = self._end = self._gone = 0

    def select(self, rows: Tensor) -> None:
        made = self._made(len(rows), self._rooms[0].shape[2])
        for old, new in zip(self._rooms, made, strict=True):
            here = (2, self._first, self.tokens)
            torch.index_select(old.narrow(*here), 0, rows, out=new.narrow(*here))
        self._sinks.select(rows)
        self._rooms, self.form = made, self.form._replace(batch=len(rows))

    def keep(self, index: Tensor) -> None:
        raise ProblemError(f"{self.layout!r} forgets by itself: of what it keeps nothing is chosen.")

    def keys(self) -> Tensor:
        return self._kept(self._rooms[0]).to(self.form.dtype)

    def _forget(self, new: int) -> None:
        """Forget what is too old for so many new tokens, and have room for them."""
        gone = self.tokens - self.layout.window + 1  # with one new token there are `window` again
        if gone > 0:
            self._first += gone
            self._gone += gone
        if self._end + new > self._rooms[0].shape[2] or self._rooms[0].shape[2] > self._slots:
            self._move(max(self._slots, self.tokens + new))
        sinks = self.layout.sinks
        if sinks and gone > 0:
            k, v = (room.narrow(2, self._first, sinks) for room in self._rooms)
            self._sinks.keys(k, self._gone, min(self.tokens + new, self.layout.window))
            self._sinks.values(v)

    def _move(self, slots: int) -> None:
        """Bring what is kept to the front, of other memory if it is to be of another size."""
        kept, old = self.tokens, self._rooms
        made = old if old[0].shape[2] == slots else self._made(self.form.batch, slots)
        for room, new in zip(old, made, strict=True):
            held = self._kept(room)
            new.narrow(2, 0, kept).copy_(held.clone() if made is old and self._first < kept else held)
        self._rooms, self._first, self._end = made, 0, kept

    def _kept(self, room: Tensor) -> Tensor:
        return room.narrow(2, self._first, self._end - self._first)

    def _found(self, room: Tensor) -> CachedTensor:
        if room.dtype == self.form.dtype:
            return self._kept(room)
        batch, heads, _, dim = room.shape
        part = Part(self.tokens, room, "plain", self._first)
        return StoredTensor((part,), (batch, heads, self.tokens, dim), self.form.dtype)

    def _made(self, batch: int, slots: int) -> tuple[Tensor, ...]:
        form = self.form
        return tuple(memory((batch, form.kv_heads, slots, dim), self._type, form.device) for dim in form.dims)
