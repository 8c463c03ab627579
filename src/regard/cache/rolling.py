"""`Rolling`: the sink tokens and the latest tokens, in memory of constant size; plain, or with codes.

Xiao et al. 2023, StreamingLLM, arXiv:2309.17453, §3.2. The plain store has memory for about two windows. The window
moves forward through it; the sinks are written anew, re-rotated, into the slots just before the window, which belong to
evicted tokens:

```
slots   . . . . . S S S S t t t t t t t t . . . .     one step later:   . . . . . . S S S S t t t t t t t t . . .
                  first                   end
```

At the end of the memory the window is copied to its front: once per window, so a step costs its own token and the
sinks. There is no wrap-around, so keys are one strided tensor, and values another.

With a codec, sinks are plain and re-rotated each step, then come codes and a plain tail:

```
sinks              codes                                       tail
plain, written     whole groups; slots of evicted tokens at    plain
anew each step     the front of the first group are skipped
```
"""

import torch
from torch import Tensor

from regard.cache.quantised import QuantisedStore
from regard.cache.sinks import Sinks
from regard.cache.store import CachedTensor, Form, WrappedStore, allocate
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous, Part, Rolling, StoredTensor


class RollingStore:
    """Keys and values [batch, kv_heads, slots, dim]; slots first .. end - 1 are stored tokens, the sinks in front."""

    def __init__(self, layout: Rolling, codec: Codec | torch.dtype | None, form: Form) -> None:
        self.form, self.layout = form, layout
        self._dtype = codec if isinstance(codec, torch.dtype) else form.dtype
        self._sinks = Sinks(layout.sinks, layout.rope, form)
        self._slots = layout.sinks + 2 * layout.window
        self._memory = self._allocate(form.batch, self._slots)
        self._first = self._end = self._evicted = 0

    @property
    def tokens(self) -> int:
        return self._end - self._first

    @property
    def tokens_seen(self) -> int:
        return self._evicted + self._end - self._first

    @property
    def min_crop(self) -> int:
        return self._evicted and self._evicted + self.layout.window - 1

    @property
    def bytes(self) -> int:
        return sum(t[:, :, :1].nbytes for t in self._memory) * self.tokens

    @property
    def allocated_bytes(self) -> int:
        return sum(t.nbytes for t in self._memory) + self._sinks.allocated_bytes

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        assert v is not None
        new = k.shape[2]
        if new:
            self._evict(new)
            if self.tokens < self.layout.sinks:
                self._sinks.put(self.tokens, k, v)
            for t, x in zip(self._memory, (k, v), strict=True):
                t.narrow(2, self._end, new).copy_(x)
            self._end += new
        return self._cached(self._memory[0]), self._cached(self._memory[1])

    def crop(self, tokens: int) -> None:
        self._end -= self.tokens_seen - tokens

    def reset(self) -> None:
        self._first = self._end = self._evicted = 0

    def select(self, rows: Tensor) -> None:
        selected = self._allocate(len(rows), self._memory[0].shape[2])
        for old, new in zip(self._memory, selected, strict=True):
            here = (2, self._first, self.tokens)
            torch.index_select(old.narrow(*here), 0, rows, out=new.narrow(*here))
        self._sinks.select(rows)
        self._memory, self.form = selected, self.form._replace(batch=len(rows))

    def keep(self, index: Tensor) -> None:
        raise _no_choice(self.layout)

    def keys(self) -> Tensor:
        return self._stored(self._memory[0]).to(self.form.dtype)

    def _evict(self, new: int) -> None:
        """Evict tokens that are too old for `new` more, have memory for those, and rotate the sinks."""
        evicted = self.tokens - self.layout.window + 1  # with one new token there are `window` again
        if evicted > 0:
            self._first += evicted
            self._evicted += evicted
        if self._end + new > self._memory[0].shape[2] or self._memory[0].shape[2] > self._slots:
            self._move(max(self._slots, self.tokens + new))
        sinks = self.layout.sinks
        if sinks and evicted > 0:
            k, v = (t.narrow(2, self._first, sinks) for t in self._memory)
            self._sinks.write_keys(k, self._evicted, min(self.tokens + new, self.layout.window))
            self._sinks.write_values(v)

    def _move(self, slots: int) -> None:
        """Copy the stored tokens to the front of the memory, which is reallocated if its size changes."""
        stored, old = self.tokens, self._memory
        memory = old if old[0].shape[2] == slots else self._allocate(self.form.batch, slots)
        for source, target in zip(old, memory, strict=True):
            x = self._stored(source)
            target.narrow(2, 0, stored).copy_(x.clone() if memory is old and self._first < stored else x)
        self._memory, self._first, self._end = memory, 0, stored

    def _stored(self, t: Tensor) -> Tensor:
        return t.narrow(2, self._first, self._end - self._first)

    def _cached(self, t: Tensor) -> CachedTensor:
        if t.dtype == self.form.dtype:
            return self._stored(t)
        batch, heads, _, dim = t.shape
        part = Part(self.tokens, t, "plain", self._first)
        return StoredTensor((part,), (batch, heads, self.tokens, dim), self.form.dtype)

    def _allocate(self, batch: int, slots: int) -> tuple[Tensor, ...]:
        form = self.form
        return tuple(allocate((batch, form.kv_heads, slots, dim), self._dtype, form.device) for dim in form.dims)


class RollingCodes(WrappedStore[QuantisedStore]):
    """A `QuantisedStore` that evicts tokens after the layout's sinks, with memory for the codes of two windows."""

    def __init__(self, layout: Rolling, codec: Codec, form: Form) -> None:
        super().__init__(QuantisedStore(Contiguous(), codec, form, sinks=layout.sinks))
        self.layout = layout
        self._sinks = Sinks(layout.sinks, layout.rope, form, is_rotated=codec.rotate)
        self._inner.reserve(2 * layout.window)
        self._evicted = 0

    @property
    def min_crop(self) -> int:
        return self._evicted and self._evicted + self.layout.window - 1

    @property
    def allocated_bytes(self) -> int:
        return self._sinks.allocated_bytes + self._inner.allocated_bytes

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        new, before, window = k.shape[2], self.tokens, self.layout.window
        if not new:
            return self._inner.cached()
        evicted = max(before - window + 1, 0)  # with one new token there are `window` again
        cached = self._inner.evict_and_append(k, v, evicted)
        if before < self.layout.sinks:
            self._sinks.put(before, k, v)
        if evicted:
            self._evicted += evicted
            if self._sinks.rope is not None:
                self._sinks.write_keys(self._inner.sink_keys, self._evicted, min(before - evicted + new, window))
        return cached

    def reset(self) -> None:
        super().reset()
        self._evicted = 0

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._sinks.select(rows)

    def keep(self, index: Tensor) -> None:
        raise _no_choice(self.layout)


def _no_choice(layout: Rolling) -> ProblemError:
    return ProblemError(f"{layout!r} evicts tokens by itself: it takes no policy.")
