"""`Contiguous` with a codec: plain sinks, then codes, then the latest tokens, plain until a whole group is old enough.

```
tokens   0 .. 31      32 .. 8,095                            8,096 .. 8,191
         sinks        codes, written a group at a time       tail: residual to residual + group - 1 tokens
         plain        (one range, or more after a crop)      plain
```

A step writes one row into the tail. Once in `group` steps the oldest group of the tail is encoded. A token is encoded
once: where a crop ends inside a group, the rest of the group stays as it is, in a range of its own.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.coded_slots import CodedSlots, SlotRange, only_first
from regard.cache.coded_steps import CodedSteps, InOrder
from regard.cache.store import (
    CachedTensor,
    Form,
    allocate,
    check_capacity,
    check_has_data,
    select_rows,
    token_scales_error,
    with_spare,
)  # fmt: skip
from regard.errors import ProblemError
from regard.storage.codec import Codec, Codes
from regard.storage.stored import Contiguous, FixedParts, Part, StoredTensor


class _Memory:
    """The memory of keys, or of values: plain sinks and tail [batch, kv_heads, slots, dim], and codes."""

    def __init__(self, codec: Codec, form: Form, dim: int, slots: tuple[int, int], *, tiled: bool) -> None:
        self.dim = dim
        self.sinks, self.tail = (
            allocate((form.batch, form.kv_heads, n, dim), form.dtype, form.device) for n in slots
        )  # fmt: skip
        self.codes = CodedSlots(codec, form, dim, tiled=tiled)
        self.fixed_parts = FixedParts(())
        """The parts before the tail: they change only when sinks or codes change."""

    def __getstate__(self) -> dict[str, Any]:
        """The state, without the parts, which refer to the same memory and are made again."""
        return self.__dict__ | {"fixed_parts": FixedParts(())}

    def with_tensors(self, sinks: Tensor, tail: Tensor, codes: list[Tensor], capacity: int) -> "_Memory":
        """The same with other tensors: plain ones, and codes of `capacity` slots with their scales."""
        other = copy.copy(self)
        other.sinks, other.tail, other.codes = sinks, tail, copy.copy(self.codes)
        other.codes.tensors, other.codes.capacity = codes, capacity
        return other

    def oldest(self, begin: int, end: int, x: Tensor, skip: int, tokens: int) -> Tensor:
        """The first `tokens` tokens of the tail, slots begin .. end - 1, followed by x from token `skip` on."""
        left = end - begin
        if tokens <= left:
            return self.tail.narrow(2, begin, tokens)
        new = x.narrow(2, skip, tokens - left)
        return torch.cat((self.tail.narrow(2, begin, left), new), 2) if left else new


class _Snapshot(NamedTuple):
    """The state before the last append, whose plain tokens are still in the memory of the tail.

    `has_new`: all tokens of that append are in the tail as well, after them.
    """

    seen: int
    sinks: int
    ranges: tuple[SlotRange, ...]
    begin: int
    end: int
    has_new: bool


class QuantisedStore:
    """Keys and values as codes, except for the first and the latest tokens.

    Args:
        sinks: how many of the first tokens stay plain; None: those of the codec, rounded up to a whole group.
    """

    def __init__(self, layout: Contiguous, codec: Codec, form: Form, *, sinks: int | None = None) -> None:
        self.form, self.codec, self.limit = form, codec, layout.capacity
        self._sink_capacity = self._round_up(codec.sinks) if sinks is None else sinks
        self._code_capacity: int | None = None
        """Slots for codes, if it is known how many will be needed; None: the memory doubles."""
        self._tail_capacity = 2 * (codec.residual + codec.group)  # the tail before the last append, and its tokens
        slots = (self._sink_capacity, self._tail_capacity)
        dims = [dim for dim in form.dims if dim]
        self._memories = [_Memory(codec, form, dim, slots, tiled=not i) for i, dim in enumerate(dims)]
        self.tokens_seen = self._sinks = self._begin = self._end = 0
        self._ranges: tuple[SlotRange, ...] = ()
        self._coded = 0  # tokens in all ranges
        self._first_slot = 0
        """The slot that the next group is written to while there are no ranges."""
        self._before: _Snapshot | None = None
        self._are_parts_valid = True
        if layout.capacity is not None:
            self.reserve(max(layout.capacity - self._sink_capacity - codec.residual, 0))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_are_parts_valid": False}

    @property
    def tokens(self) -> int:
        return self._sinks + self._coded + self._end - self._begin

    @property
    def min_crop(self) -> int:
        return self.tokens_seen - self.tokens

    @property
    def bytes(self) -> int:
        form, plain = self.form, self._sinks + self._end - self._begin
        width = form.batch * form.kv_heads * form.dtype.itemsize
        codes = sum(m.codes.size(slots.tokens) for m in self._memories for slots in self._ranges)
        return codes + sum(m.dim for m in self._memories) * width * plain

    @property
    def allocated_bytes(self) -> int:
        return sum(m.sinks.nbytes + m.tail.nbytes + m.codes.allocated_bytes for m in self._memories)

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        new = k.shape[2]
        if not new:
            return self.cached()
        check_capacity(self.limit, self.tokens, new)
        given, codec = (k,) if v is None else (k, v), self.codec
        sinks = self._new_sinks(new)
        left, rest = self._end - self._begin, new - sinks
        count = max(left + rest - codec.residual, 0) // codec.group * codec.group  # tokens to encode
        encoded: list[Codes] = []
        if count:
            for m, x in zip(self._memories, given, strict=False):
                encoded.append(m.codes.encode(m.oldest(self._begin, self._end, x, sinks, count)))
        over = max(count - left, 0)  # new tokens that are encoded at once
        moves = self._end + rest - over > self._tail_capacity
        tails = [m.tail.clone() for m in self._memories] if moves else []
        before = self._state()
        try:
            if count:
                self._grow_codes(count)
            if moves:
                self._move_to_front(tails)
            self._before = _Snapshot(self.tokens_seen, self._sinks, self._ranges, self._begin, self._end, not over)
            for m, x in zip(self._memories, given, strict=False):
                if sinks:
                    m.sinks.narrow(2, self._sinks, sinks).copy_(x.narrow(2, 0, sinks))
                if rest > over:
                    written = x if rest - over == new else x.narrow(2, sinks + over, rest - over)
                    m.tail.narrow(2, self._end, rest - over).copy_(written)
            if sinks or count:
                self._sinks, self._are_parts_valid = self._sinks + sinks, False
            if count:
                self._write_codes(encoded, count)
            self._begin = self._end if over else self._begin + count
            self._end += rest - over
            self.tokens_seen += new
            return self.cached()
        except BaseException:
            self._undo(before, tails)
            raise

    def crop(self, tokens: int) -> None:
        before = self._before
        if before is not None and tokens < before.seen:
            self._restore(before, before.seen)
            self._before = None
        elif before is not None and (before.has_new or tokens == before.seen):
            self._restore(before, tokens)
            return
        over = self.tokens_seen - tokens - (self._end - self._begin)  # tokens to remove that are not in the tail
        self.tokens_seen = tokens
        if over <= 0:
            self._end = self._begin - over
            return
        self._begin = self._end = 0
        self._sinks -= max(over - self._coded, 0)
        self._ranges = only_first(self._ranges, max(self._coded - over, 0))
        self._coded, self._before, self._are_parts_valid = _count(self._ranges), None, False

    def _restore(self, before: _Snapshot, tokens: int) -> None:
        """The state as if the last append had ended with token `tokens`; tokens encoded only after that are plain."""
        new, coded, group = tokens - before.seen, _count(before.ranges), self.codec.group
        sinks = min(new, self._sinks - before.sinks)
        left = before.end - before.begin + new - sinks
        count = max(left - self.codec.residual, 0) // group * group if new else 0
        self.tokens_seen, self._sinks = tokens, before.sinks + sinks
        self._begin, self._end = before.begin + count, before.end + new - sinks
        self._ranges, self._coded = only_first(self._ranges, coded + count), coded + count
        self._are_parts_valid = False

    def _state(self) -> tuple[Any, ...]:
        codes = [(m.codes.tensors, m.codes.capacity) for m in self._memories]
        return codes, self.tokens_seen, self._sinks, self._begin, self._end, self._ranges, self._coded, self._before

    def _undo(self, state: tuple[Any, ...], tails: list[Tensor]) -> None:
        """The state before an append; `tails` are copies of the memory of the tails, if that was written over."""
        codes, self.tokens_seen, self._sinks, self._begin, self._end, self._ranges, self._coded, self._before = state
        self._are_parts_valid = False
        for m, (tensors, capacity) in zip(self._memories, codes, strict=True):
            m.codes.tensors, m.codes.capacity = tensors, capacity
        for m, tail in zip(self._memories, tails, strict=False):
            m.tail.copy_(tail)

    def reset(self) -> None:
        self.tokens_seen = self._sinks = self._begin = self._end = self._coded = 0
        self._ranges, self._before, self._are_parts_valid = (), None, False

    def select(self, rows: Tensor) -> None:
        end = self._next_slot()
        self._memories = [
            m.with_tensors(
                select_rows(m.sinks, rows), select_rows(m.tail, rows), m.codes.selected(rows, end), m.codes.capacity
            )
            for m in self._memories
        ]
        self.form, self._are_parts_valid = self.form._replace(batch=len(rows)), False

    def keep(self, index: Tensor) -> None:
        if self.codec.keys != "token":
            raise token_scales_error(self.codec)
        check_has_data(index, "a policy over codes")
        kept, sinks, tail = index.shape[2], self._sinks, self._sinks + self._coded
        first, last = (_fewest(index < sinks), _fewest(index >= tail))
        coded = index[:, :, first : kept - last]
        count = coded.shape[2]
        # Heads may keep different numbers of plain tokens: where a head has more than another, the rest is encoded.
        mixed = bool(coded.numel()) and (int(coded.min()) < sinks or int(coded.max()) >= tail)
        ranges = [torch.arange(r.slot, r.end, device=index.device) for r in self._ranges]
        slots = torch.cat(ranges or [index.new_empty(0)])
        capacity = max(self._code_capacity or self._round_up(with_spare(count)), self._round_up(count))
        left: list[_Memory] = []
        for m in self._memories:
            plain = (m.sinks.narrow(2, 0, sinks), m.tail.narrow(2, self._begin, self._end - self._begin))
            entries = m.codes.entries(slots, plain if mixed else ())
            codes = m.codes.packed([_gather(t, coded if mixed else coded - sinks) for t in entries], capacity)
            of_tail = index[:, :, kept - last :] + (self._begin - tail)
            of_sinks = _chosen(m.sinks, index[:, :, :first])
            left.append(m.with_tensors(of_sinks, _chosen(m.tail, of_tail), codes, capacity))
        self._memories = left
        self._ranges = (SlotRange(0, count),) if count else ()
        self._sinks, self._coded, self._begin, self._end = first, count, 0, last
        self._before, self._are_parts_valid = None, False

    def reserve(self, slots: int) -> None:
        """Have memory for this many codes from now on; it grows only while more are stored."""
        self._code_capacity = self._round_up(slots)
        for m in self._memories:
            m.codes.move(self._code_capacity, 0, 0)

    def steps(self, tokens: int) -> CodedSteps:
        """A copy of the stored tokens with memory for `tokens` in all, for steps whose position is on the device.

        Raises:
            ProblemError: fewer tokens than the sinks are stored, or some were cropped or evicted after they were codes.
        """
        codec, sinks, seen = self.codec, self._sink_capacity, self.tokens_seen
        coded = self.coded_by(seen)
        whole = (SlotRange(0, coded),) if coded else ()
        if seen < sinks:
            rounded = f" (sinks={codec.sinks}, rounded up to groups of {codec.group})" if sinks != codec.sinks else ""
            raise ProblemError(f"{seen} tokens are stored: steps begin after {sinks} sinks or more{rounded}.")
        if self.tokens != seen or self._ranges != whole:
            raise ProblemError(
                f"{seen} tokens, {self._coded} of them in codes: steps begin where no token was cropped or evicted, so "
                f"that {coded} are codes."
            )
        slots = [CodedSlots(codec, self.form, m.dim, tiled=m.codes.tiled) for m in self._memories]
        groups = self._round_up(max(tokens - sinks - codec.residual, coded)) // codec.group
        for new, m in zip(slots, self._memories, strict=True):
            new.move((groups + 1) * codec.group, 0, 0)
            new.copy_from(m.codes, coded)
        parts, tails = self.plain_copies()
        return CodedSteps(codec.group, codec.residual, parts, tuple(slots), InOrder(groups), tails, seen)

    def coded_by(self, tokens: int) -> int:
        """How many of the first tokens are codes where nothing was cropped, those that were evicted included."""
        return max(tokens - self._sink_capacity - self.codec.residual, 0) // self.codec.group * self.codec.group

    def plain_copies(self) -> tuple[tuple[Part, ...], tuple[Tensor, ...]]:
        """Copies of the sinks, in parts, and of the tails, [batch, kv_heads, tokens, dim]."""
        sinks = tuple(Part(self._sink_capacity, m.sinks.clone()) for m in self._memories)
        return sinks, tuple(m.tail.narrow(2, self._begin, self._end - self._begin) for m in self._memories)

    def keys(self) -> Tensor:
        keys = self.cached()[0]
        assert isinstance(keys, StoredTensor)
        return keys.dense()

    def cached(self) -> tuple[CachedTensor, CachedTensor]:
        """Handles to all keys and values."""
        if not self._are_parts_valid:
            self._update_parts()
        form, tokens, left = self.form, self.tokens, self._end - self._begin
        batch, heads, _, _, dtype, _ = form
        handles: list[StoredTensor] = []
        for m in self._memories:
            fixed = m.fixed_parts
            parts = fixed.parts
            if left or not parts:
                parts = (*parts, Part(left, m.tail, "plain", self._begin))
            shape = (batch, heads, tokens, m.dim)
            handles.append(StoredTensor(parts, shape, dtype, None, self.codec.rotate, fixed=fixed))
        if len(handles) == 1:  # latents, or values without channels
            shape = (form.batch, form.kv_heads, tokens, 0)
            return handles[0], handles[0] if form.v_dim is None else allocate(shape, form.dtype, form.device)
        return handles[0], handles[1]

    def _update_parts(self) -> None:
        for m in self._memories:
            sinks = (Part(self._sinks, m.sinks),) if self._sinks else ()
            m.fixed_parts = FixedParts((*sinks, *[m.codes.part(*slots) for slots in self._ranges]))
        self._are_parts_valid = True

    def _round_up(self, tokens: int) -> int:
        """The tokens, rounded up to whole groups."""
        return -(-tokens // self.codec.group) * self.codec.group

    def _next_slot(self) -> int:
        """The slot that the next group is written to."""
        return self._round_up(self._ranges[-1].end) if self._ranges else self._first_slot

    def _new_sinks(self, new: int) -> int:
        """How many of the new tokens are sinks."""
        if self._coded or self._end > self._begin:
            return 0
        return min(new, self._sink_capacity - self._sinks)

    def _move_to_front(self, tails: list[Tensor]) -> None:
        """Write the tails to the front of their memory, from copies of it: once in residual + group steps."""
        left = self._end - self._begin
        for m, tail in zip(self._memories, tails, strict=True):
            m.tail.narrow(2, 0, left).copy_(tail.narrow(2, self._begin, left))
        self._begin, self._end = 0, left

    def _write_codes(self, encoded: list[Codes], count: int) -> None:
        """Append codes to the last range or, if that ends inside a group, in a new range."""
        slot = self._next_slot()
        for m, codes in zip(self._memories, encoded, strict=True):
            m.codes.write(slot, codes)
        *before, last = self._ranges or (SlotRange(0, 0),)
        if last.end == slot:
            self._ranges = (*before, SlotRange(last.slot, last.tokens + count))
        else:
            self._ranges = (*self._ranges, SlotRange(slot, count))
        self._coded += count

    def _grow_codes(self, count: int) -> None:
        """Have memory for `count` more slots; slots of evicted tokens are used again."""
        capacity, end = self._memories[0].codes.capacity, self._next_slot()
        begin = self._ranges[0].slot // self.codec.group * self.codec.group if self._ranges else end
        wanted, known = end - begin + count, self._code_capacity
        is_too_large = known is not None and wanted <= known < capacity
        if end + count <= capacity and not is_too_large:
            return
        grown = max(self._round_up(with_spare(wanted)), 2 * capacity) if known is None else max(wanted, known)
        moved = [m.codes.moved(grown, begin, end) for m in self._memories]  # there may be no memory for the values
        for m, tensors in zip(self._memories, moved, strict=True):
            m.codes.tensors, m.codes.capacity = tensors, grown
        self._ranges = tuple(SlotRange(slot - begin, tokens) for slot, tokens in self._ranges)
        self._first_slot = 0


def _count(ranges: tuple[SlotRange, ...]) -> int:
    return sum(slots.tokens for slots in ranges)


def _fewest(chosen: Tensor) -> int:
    """How many tokens every head has that are chosen, [batch, kv_heads, tokens]; 0 in a batch without rows."""
    return int(chosen.sum(-1).min()) if len(chosen) else 0


def _chosen(memory: Tensor, index: Tensor) -> Tensor:
    """Memory of the same size with the tokens `index` of each head at its front."""
    chosen = allocate(tuple(memory.shape), memory.dtype, memory.device)
    chosen.narrow(2, 0, index.shape[2]).copy_(_gather(memory, index))
    return chosen


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """The tokens `index` of each head, from x [batch, kv_heads, tokens, ...]."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))
