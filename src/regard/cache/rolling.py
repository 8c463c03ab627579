"""`Rolling`: the sink tokens and the latest tokens, in memory of constant size; plain, or with codes.

Xiao et al. 2023, StreamingLLM, arXiv:2309.17453, §3.2. The plain store has memory for about two windows. The window
moves forward through it; the sinks are re-rotated and written again into the slots just before the window, which belong
to evicted tokens:

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
written each step  the front of the first group are skipped
```

The sinks are in `rolling_sinks.py`.
"""

import torch
from torch import Tensor

from regard.cache.coded_slots import CodedSlots, without_first
from regard.cache.coded_steps import CodedSteps, InRing, PagedCodes
from regard.cache.quantised import QuantisedStore
from regard.cache.rolling_sinks import Sinks
from regard.cache.steps import RollingSteps, ring_slot
from regard.cache.store import CachedTensor, Form, allocate_both, as_cached, select_into
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous, Rolling


class RollingStore:
    """Keys and values [batch, kv_heads, slots, dim]; slots first .. end - 1 are stored tokens, the sinks in front.

    An eviction moves the sinks to slots of evicted tokens. Where Ctrl-C comes before they are written there, the next
    use of the tokens writes them.
    """

    _are_sinks_written = True

    def __init__(self, layout: Rolling, codec: Codec | torch.dtype | None, form: Form) -> None:
        self.form, self.layout = form, layout
        self._dtype = codec if isinstance(codec, torch.dtype) else form.dtype
        self._sinks = Sinks(layout.sinks, layout.rope, form)
        self._slots = layout.sinks + 2 * layout.window
        self._memory = allocate_both(form, form.batch, self._slots, self._dtype)
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
        self._write_sinks()
        place = self._first, self.tokens, self.form.dtype
        return as_cached(self._memory[0], *place), as_cached(self._memory[1], *place)

    def crop(self, tokens: int) -> None:
        self._end -= self.tokens_seen - tokens

    def reset(self) -> None:
        self._first = self._end = self._evicted = 0
        self._are_sinks_written = True

    def select(self, rows: Tensor) -> None:
        self._write_sinks()
        selected = allocate_both(self.form, len(rows), self._memory[0].shape[2], self._dtype)
        for old, new in zip(self._memory, selected, strict=True):
            here = (2, self._first, self.tokens)
            select_into(new.narrow(*here), old.narrow(*here), rows)
        self._sinks, self._memory = self._sinks.selected(rows), selected
        self.form = self.form._replace(batch=len(rows))

    def keep(self, index: Tensor) -> None:
        raise _no_choice(self.layout)

    def keys(self) -> Tensor:
        self._write_sinks()
        return self._stored(self._memory[0]).to(self.form.dtype)

    def steps(self) -> RollingSteps:
        """A copy of the stored tokens, for steps whose position is on the device.

        Raises:
            ProblemError: fewer tokens than the sinks are stored; a scaling of the rope depends on the length.
        """
        sinks, window, seen = self.layout.sinks, self.layout.window, self.tokens_seen
        if seen < sinks:
            raise ProblemError(f"{seen} tokens are stored: expected the {sinks} sinks of {self.layout!r} or more.")
        self._write_sinks()
        memory = allocate_both(self.form, self.form.batch, window, self._dtype)
        latest = torch.arange(max(sinks, seen - (window - sinks)), seen, device=self.form.device)
        for old, new in zip(self._memory, memory, strict=True):
            stored = self._stored(old)
            new.zero_()
            new.narrow(2, 0, sinks).copy_(stored.narrow(2, 0, sinks))
            new.index_copy_(2, ring_slot(latest, sinks, window), stored.index_select(2, latest - self._evicted))
        return RollingSteps(memory, sinks, self._sinks.rotation())

    def _evict(self, new: int) -> None:
        """Evict tokens that are too old for `new` more, have memory for those, and rotate the sinks."""
        evicted = max(self.tokens - self.layout.window + 1, 0)  # with one new token there are `window` again
        left, total = self.tokens - evicted + new, self._evicted + evicted
        is_written = self._are_sinks_written and not (evicted and self.layout.sinks)
        keys = None if is_written else self._sinks.keys(total, min(left, self.layout.window))
        memory, first, end = self._memory, self._first + evicted, self._end
        if end + new > memory[0].shape[2] or memory[0].shape[2] > self._slots:
            memory = self._moved(first, max(self._slots, left))
            first, end = 0, end - first
        # All that can fail comes before the first change, which is one assignment: Ctrl-C comes before or after it.
        self._memory, self._first, self._end, self._evicted, self._are_sinks_written = (
            memory, first, end, total, is_written
        )  # fmt: skip
        if keys is not None:
            self._put_sinks(keys)

    def _moved(self, first: int, slots: int) -> tuple[Tensor, ...]:
        """Memory of this size with the tokens from slot `first` on at its front; the same if none is written over."""
        stored, memory = self._end - first, self._memory
        if memory[0].shape[2] != slots or stored > self._first:
            memory = allocate_both(self.form, self.form.batch, slots, self._dtype)
        for new, old in zip(memory, self._memory, strict=True):
            new.narrow(2, 0, stored).copy_(old.narrow(2, first, stored))
        return memory

    def _write_sinks(self) -> None:
        """Write the sinks if an eviction was interrupted before it did."""
        if not self._are_sinks_written:
            self._put_sinks(self._sinks.keys(self._evicted, min(self.tokens, self.layout.window)))

    def _put_sinks(self, keys: Tensor) -> None:
        k, v = (t.narrow(2, self._first, self.layout.sinks) for t in self._memory)
        k.copy_(keys)
        self._sinks.write_values(v)
        self._are_sinks_written = True

    def _stored(self, t: Tensor) -> Tensor:
        return t.narrow(2, self._first, self._end - self._first)


class RollingCodes(QuantisedStore):
    """A `QuantisedStore` that evicts tokens after the layout's sinks, with memory for the codes of two windows.

    `_evicted` is for how many evicted tokens the sinks in memory are rotated; -1 while they are written.
    """

    def __init__(self, layout: Rolling, codec: Codec, form: Form) -> None:
        super().__init__(Contiguous(), codec, form, sinks=layout.sinks)
        self.layout = layout
        self._original_sinks = Sinks(layout.sinks, layout.rope, form, is_rotated=codec.rotate)
        self.reserve(2 * layout.window)
        self._evicted = 0

    @property
    def min_crop(self) -> int:
        evicted = self.tokens_seen - self.tokens
        return evicted and evicted + self.layout.window - 1

    @property
    def allocated_bytes(self) -> int:
        return self._original_sinks.allocated_bytes + super().allocated_bytes

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        new, before, window = k.shape[2], self.tokens, self.layout.window
        if not new:
            return self.cached()
        evicted = max(before - window + 1, 0)  # with one new token there are `window` again
        if before < self.layout.sinks:
            self._original_sinks.put(before, k, v)
        return self._evict_and_append(k, v, evicted) if evicted else super().append(k, v)

    def cached(self) -> tuple[CachedTensor, CachedTensor]:
        self._rotate_sinks()
        return super().cached()

    def steps(self, tokens: int = 0) -> CodedSteps:
        """A copy of the stored tokens, for steps whose position is on the device; `tokens` has no meaning here.

        Raises:
            ProblemError: fewer tokens than the sinks are stored; some were cropped; a window without a whole group of
                codes; a scaling of the rope depends on the length.
        """
        codec, batch, seen = self.codec, self.form.batch, self.tokens_seen
        sinks, window = self.layout.sinks, self.layout.window
        least = sinks + codec.residual + codec.group
        if window < least:
            raise ProblemError(
                f"steps of {self.layout!r} with {codec!r}: expected a window of {least} tokens or more, the sinks, the "
                "residual and a group of codes. Use codec=None."
            )
        coded, left = self.coded_by(seen), self._end - self._begin
        gone = coded - self._coded  # of the codes, as many were evicted
        start = self._ranges[0].slot - gone if self._ranges else 0  # the slot of the first code, or where it would be
        if seen < sinks or left != max(seen - sinks - coded, 0) or len(self._ranges) > 1 or start % codec.group:
            raise ProblemError(
                f"{seen} tokens: steps begin after the {sinks} sinks of {self.layout!r} or more, and where none was "
                "cropped after it was a code."
            )
        count = -(-(window - sinks - codec.residual) // codec.group)
        first = max(gone // codec.group, coded // codec.group - count)
        groups = torch.arange(first, coded // codec.group, device="cpu")
        form = self.form._replace(batch=batch * (count + 1))
        memories: list[PagedCodes] = []
        for m in self._memories:
            pages = CodedSlots(codec, form, m.dim, tiled=m.codes.tiled)
            pages.move(codec.group, 0, 0)
            pages.put_reversed(m.codes, groups + start // codec.group, groups % count, batch)
            memories.append(PagedCodes(pages.part(0, codec.group), codec))
        self._rotate_sinks()
        parts, tails = self.plain_copies()
        places, rotate = InRing(batch, count, self.form.device), self._original_sinks.rotation()
        return CodedSteps(
            codec.group, codec.residual, parts, tuple(memories), places, tails, seen, window, rotate
        )  # fmt: skip

    def reset(self) -> None:
        super().reset()
        self._evicted = 0

    def select(self, rows: Tensor) -> None:
        sinks = self._original_sinks.selected(rows)
        super().select(rows)
        self._original_sinks = sinks

    def keep(self, index: Tensor) -> None:
        raise _no_choice(self.layout)

    def _rotate_sinks(self) -> None:
        """Rotate the sinks in memory if they are not rotated for as many tokens as were evicted."""
        evicted = self.tokens_seen - self.tokens
        if self._evicted == evicted:
            return
        if self._original_sinks.rope is not None:
            keys = self._original_sinks.keys(evicted, min(self.tokens, self.layout.window))
            self._evicted = -1
            self._memories[0].sinks.copy_(keys)
        self._evicted = evicted

    def _evict_and_append(self, k: Tensor, v: Tensor | None, count: int) -> tuple[CachedTensor, CachedTensor]:
        """Evict the first `count` tokens after the sinks, and append; if the append fails, neither."""
        state = self._ranges, self._coded, self._begin
        coded = min(count, self._coded)
        try:
            if coded:
                self._first_slot = self._next_slot()  # behind the evicted codes: the append must not write over them
                self._ranges, self._coded = without_first(self._ranges, coded), self._coded - coded
                self._are_parts_valid = False
            self._begin += count - coded
            return super().append(k, v)
        except BaseException:
            self._ranges, self._coded, self._begin = state
            self._are_parts_valid = False
            raise


def _no_choice(layout: Rolling) -> ProblemError:
    return ProblemError(f"{layout!r} evicts tokens by itself: it takes no policy.")
