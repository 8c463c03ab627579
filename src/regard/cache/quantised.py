"""`Contiguous` with codes: plain sinks, then codes, then the latest tokens, plain until a whole group is old enough.

```
tokens   0 .. 31      32 .. 8,095                            8,096 .. 8,191
         sinks        codes, written a group at a time       tail: residual to residual + group - 1 tokens
         plain        (one run, or more after a crop)        plain
```

A step writes one row into the tail; once in `group` steps the oldest group of the tail becomes codes. A token becomes
codes once: where a crop ends inside a group, what is left of the group stays as it is, in a run of its own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.runs import Run, first_of, span, tokens_of, without
from regard.cache.side import Side, gathered
from regard.cache.store import CachedTensor, Form, check_has_data, memory, picked
from regard.errors import ProblemError
from regard.storage.codec import Codec, Codes
from regard.storage.stored import Contiguous, Part, StoredTensor


class _Mark(NamedTuple):
    """Where everything stood before the last append; the plain tokens of then are still in the tail's memory.

    `is_whole`: all new ones as well, behind those.
    """

    seen: int
    sinks: int
    runs: tuple[Run, ...]
    begin: int
    end: int
    is_whole: bool


class QuantisedStore:
    """Keys and values of which all but the first and the latest are codes.

    Args:
        sinks: how many of the first tokens stay plain; None: those of the codec, up to a whole group.
    """

    def __init__(self, layout: Contiguous, codec: Codec, form: Form, *, sinks: int | None = None) -> None:
        self.form, self.codec, self.limit = form, codec, layout.capacity
        self._sinks_room = self._whole(codec.sinks) if sinks is None else sinks
        self._room: int | None = None
        """Slots for codes, where it is known how many will be wanted; None: they double."""
        tail = 2 * (codec.residual + codec.group)  # what the last append began with, and what it added
        dims = [dim for dim in form.dims if dim]
        slots = (self._sinks_room, tail)
        self._sides = [Side(codec, form, dim, slots, tiled=not i) for i, dim in enumerate(dims)]
        self._tail_room = tail
        self._seen = self._sinks = self._begin = self._end = 0
        self._runs: tuple[Run, ...] = ()
        self._coded = 0  # tokens in all runs
        self._mark: _Mark | None = None
        self._is_still = True  # whether the sides' `still` is of now
        if layout.capacity is not None:
            self.hold(max(layout.capacity - self._sinks_room - codec.residual, 0))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_is_still": False}

    @property
    def tokens(self) -> int:
        return self._sinks + self._coded + self._end - self._begin

    @property
    def tokens_seen(self) -> int:
        return self._seen

    @property
    def min_crop(self) -> int:
        return self._seen - self.tokens

    @property
    def bytes(self) -> int:
        form, plain = self.form, self._sinks + self._end - self._begin
        wide = form.batch * form.kv_heads * form.dtype.itemsize
        codes = sum(side.coded.size(run.tokens) for side in self._sides for run in self._runs)
        return codes + sum(side.dim for side in self._sides) * wide * plain

    @property
    def sinks(self) -> Tensor:
        """The keys that stay plain at the front, [batch, kv_heads, sinks, qk_dim]; written to by who turns them."""
        return self._sides[0].sinks

    @property
    def allocated_bytes(self) -> int:
        return sum(side.sinks.nbytes + side.tail.nbytes + side.coded.allocated_bytes for side in self._sides)

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        new = k.shape[2]
        if not new:
            return self.found()
        self._check_limit(new)
        given, codec = (k,) if v is None else (k, v), self.codec
        first = self._free_sinks(new)
        left, rest = self._end - self._begin, new - first
        count = max(left + rest - codec.residual, 0) // codec.group * codec.group
        codes: list[Codes] = []
        if count:
            for side, x in zip(self._sides, given, strict=False):
                codes.append(side.coded.encoded(side.source(self._begin, self._end, x, first, count)))
            self._reserve(count)
        # Nothing that counts was changed so far, and nothing is refused from here on.
        over = max(count - left, 0)  # of the new ones, those that become codes at once
        if self._end + rest - over > self._tail_room:
            self._to_front()
        self._mark = _Mark(self._seen, self._sinks, self._runs, self._begin, self._end, not over)
        for side, x in zip(self._sides, given, strict=False):
            if first:
                side.sinks.narrow(2, self._sinks, first).copy_(x.narrow(2, 0, first))
            if rest > over:
                written = x if rest - over == new else x.narrow(2, first + over, rest - over)
                side.tail.narrow(2, self._end, rest - over).copy_(written)
        if first or count:
            self._sinks, self._is_still = self._sinks + first, False
        if count:
            self._write(codes, count)
        self._begin = self._end if over else self._begin + count
        self._end += rest - over
        self._seen += new
        return self.found()

    def crop(self, tokens: int) -> None:
        mark = self._mark
        if mark is not None and tokens < mark.seen:
            self._go_back(mark, mark.seen)
            self._mark = None
        elif mark is not None and (mark.is_whole or tokens == mark.seen):
            self._go_back(mark, tokens)
            return
        over = self._seen - tokens - (self._end - self._begin)  # that are not in the tail
        self._seen = tokens
        if over <= 0:
            self._end = self._begin - over
            return
        self._begin = self._end = 0
        self._sinks -= max(over - self._coded, 0)
        self._runs = first_of(self._runs, max(self._coded - over, 0))
        self._coded, self._mark, self._is_still = tokens_of(self._runs), None, False

    def _go_back(self, mark: _Mark, tokens: int) -> None:
        """Be as if of the last append only those up to `tokens` had come: what the others made old enough is plain."""
        new, coded, group = tokens - mark.seen, tokens_of(mark.runs), self.codec.group
        first = min(new, self._sinks - mark.sinks)
        left = mark.end - mark.begin + new - first
        count = max(left - self.codec.residual, 0) // group * group if new else 0
        self._seen, self._sinks = tokens, mark.sinks + first
        self._begin, self._end = mark.begin + count, mark.end + new - first
        self._runs, self._coded, self._is_still = first_of(self._runs, coded + count), coded + count, False

    def rolled(self, k: Tensor, v: Tensor | None, gone: int) -> tuple[CachedTensor, CachedTensor]:
        """Forget the first `gone` tokens behind the sinks, and append; or neither."""
        if not gone:
            return self.append(k, v)
        before = self._runs, self._coded, self._begin, self._mark
        codes = min(gone, self._coded)
        if codes:
            self._runs, self._coded, self._is_still = without(self._runs, codes), self._coded - codes, False
        self._begin += gone - codes
        try:
            return self.append(k, v)
        except BaseException:
            self._runs, self._coded, self._begin, self._mark = before
            self._is_still = False
            raise

    def reset(self) -> None:
        self._seen = self._sinks = self._begin = self._end = self._coded = 0
        self._runs, self._mark, self._is_still = (), None, False

    def select(self, rows: Tensor) -> None:
        self.form, self._is_still = self.form._replace(batch=len(rows)), False
        for side in self._sides:
            side.sinks, side.tail = picked(side.sinks, rows), picked(side.tail, rows)
            side.coded.select(rows, self._slot())

    def keep(self, index: Tensor) -> None:
        if self.codec.keys != "token":
            raise ProblemError(
                "tokens cannot be forgotten one by one where they share the scales of keys: "
                f'{type(self.codec).__name__}(keys="token") gives each scales of its own.'
            )
        check_has_data(index, "a policy over codes")
        kept, sinks, until = index.shape[2], self._sinks, self._sinks + self._coded
        first, last = (int(some.sum(-1).min()) for some in (index < sinks, index >= until))
        coded = index[:, :, first : kept - last]
        # Where heads keep different numbers of plain tokens, those that some head has too many of become codes.
        mixed = bool(coded.numel()) and (int(coded.min()) < sinks or int(coded.max()) >= until)
        slots = torch.cat([torch.arange(*span(run)) for run in self._runs] or [index.new_empty(0)]).to(index.device)
        found: list[list[Tensor]] = []
        for side in self._sides:
            plain = (side.sinks.narrow(2, 0, sinks), side.tail.narrow(2, self._begin, self._end - self._begin))
            entries = side.coded.entries(slots, plain if mixed else ())
            found.append([gathered(t, coded if mixed else coded - sinks) for t in entries])
        for side, entries in zip(self._sides, found, strict=True):
            begin = self._begin - until
            side.sinks.narrow(2, 0, first).copy_(gathered(side.sinks, index[:, :, :first]))
            side.tail.narrow(2, 0, last).copy_(gathered(side.tail, index[:, :, kept - last :] + begin))
            side.coded.put(entries, self._room or self._whole(coded.shape[2] + coded.shape[2] // 8))
        self._runs = (Run(0, coded.shape[2]),) if coded.shape[2] else ()
        self._sinks, self._coded, self._begin, self._end = first, coded.shape[2], 0, last
        self._mark, self._is_still = None, False

    def hold(self, slots: int) -> None:
        """Have room for so many codes from now on: more only while there are more."""
        self._room = self._whole(slots)
        for side in self._sides:
            side.coded.move(self._room, 0, 0)

    def keys(self) -> Tensor:
        found = self.found()[0]
        assert isinstance(found, StoredTensor)
        return found.dense()

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _whole(self, tokens: int) -> int:
        """Rounded up to whole groups."""
        return -(-tokens // self.codec.group) * self.codec.group

    def _slot(self) -> int:
        """The slot that the next group is written to."""
        return self._whole(sum(self._runs[-1])) if self._runs else 0

    def _free_sinks(self, new: int) -> int:
        """How many of the new tokens are sinks: the first ones of all."""
        if self._coded or self._end > self._begin:
            return 0
        return min(new, self._sinks_room - self._sinks)

    def _check_limit(self, new: int) -> None:
        if self.limit is not None and self.tokens + new > self.limit:
            raise ProblemError(
                f"{new} tokens more than the {self.tokens} that are stored make {self.tokens + new}, and "
                f"Contiguous(capacity={self.limit}) has no room for them: nothing was changed. Take a larger capacity, "
                "or none."
            )

    def _to_front(self) -> None:
        """Bring the tail to the front of its memory: once in some residual + group steps."""
        left = self._end - self._begin
        for side in self._sides:
            side.tail.narrow(2, 0, left).copy_(side.tail.narrow(2, self._begin, left).clone())
        self._begin, self._end = 0, left

    def _write(self, codes: list[Codes], count: int) -> None:
        """Append codes to the last run, or where that ends inside a group, to a new one."""
        slot = self._slot()
        for side, new in zip(self._sides, codes, strict=True):
            side.coded.write(slot, new)
        *before, last = self._runs or (Run(0, 0),)
        if sum(last) == slot:
            self._runs = (*before, Run(last.slot, last.tokens + count))
        else:
            self._runs = (*self._runs, Run(slot, count))
        self._coded += count

    def _reserve(self, count: int) -> None:
        """Have room for so many slots more; slots of tokens that were dropped are used again."""
        capacity, end = self._sides[0].coded.capacity, self._slot()
        begin = self._runs[0].slot // self.codec.group * self.codec.group if self._runs else 0
        wanted = end - begin + count
        is_too_large = self._room is not None and wanted <= self._room < capacity
        if end + count <= capacity and not is_too_large:
            return
        fits = self._room is not None and wanted <= self._room
        grown = self._room if fits else max(wanted, 2 * capacity if self._room is None else 0)
        assert grown is not None
        for side in self._sides:
            side.coded.move(grown, begin, end)
        self._runs = tuple(Run(slot - begin, tokens) for slot, tokens in self._runs)

    def found(self) -> tuple[CachedTensor, CachedTensor]:
        """Keys and values, all that are kept."""
        if not self._is_still:
            self._settle()
        form, tokens, begin = self.form, self.tokens, self._begin
        left, rotated, found = self._end - begin, self.codec.rotate, []
        for side in self._sides:
            still = side.still
            parts = (*still, Part(left, side.tail, "plain", begin)) if left or not still else still
            found.append(StoredTensor(parts, (form.batch, form.kv_heads, tokens, side.dim), form.dtype, None, rotated))
        if len(found) == 1:  # latents, and values without numbers
            shape = (form.batch, form.kv_heads, tokens, 0)
            return found[0], found[0] if form.v_dim is None else memory(shape, form.dtype, form.device)
        return found[0], found[1]

    def _settle(self) -> None:
        """Say again how sinks and codes lie."""
        for side in self._sides:
            sinks = (Part(self._sinks, side.sinks),) if self._sinks else ()
            side.still = (*sinks, *(side.coded.part(*run) for run in self._runs))
        self._is_still = True
