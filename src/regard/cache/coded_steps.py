"""Steps over codes: plain sinks, codes, and the latest tokens in a ring of plain groups, as functions of the position.

In each step one group is encoded, the oldest that may be complete; where it is not, its codes go to a place that is not
read. So the host does the same in every step. Where groups are written and read is all that layouts differ in:

```
contiguous   0 1 2 3 . . x       group g is group g of the memory, x takes those that are not complete
pages        7 2 9 4 . . x       group g is a page, which the block table names
rolling      4 5 2 3 x           group g is page g % 4 of a ring, read from the newest to the oldest
```

A rolling window begins inside its oldest group. A part of a row may end, but not begin, inside a group, so a ring has
each group in reverse: the tokens that were evicted are then the last ones.
"""

from typing import Protocol

import torch
from torch import Tensor

from regard.cache.steps import RotateSinks
from regard.storage.codec import Codec, encode_rows, encode_tiled
from regard.storage.stored import Part


class CodeMemory(Protocol):
    """Memory for the codes of keys, or of values."""

    def put_group(self, group: Tensor, x: Tensor) -> None:
        """Encode one group of each row, x [batch, kv_heads, group, dim], and write it to the places `group` [batch]."""
        ...

    def part(self, slot: int, tokens: int) -> Part:
        """A handle to `tokens` tokens from `slot` on."""
        ...


class PagedCodes:
    """Codes in pages; a page is a group, which is encoded at once.

    Args:
        pages: a part that has these pages, without a block table.
    """

    def __init__(self, pages: Part, codec: Codec) -> None:
        self._pages, self._codec = pages, codec

    def put_group(self, group: Tensor, x: Tensor) -> None:
        p = self._pages
        if p.tiled:
            codes = encode_tiled(x, self._codec, per_token=p.per_token, group=p.group, is_checked=True)
        else:
            codes = encode_rows(x, self._codec, is_checked=True)
        for own, new in zip((p.data, p.scale, p.zero_point), codes, strict=True):
            if own is not None and new is not None:
                own[group] = new

    def part(self, slot: int, tokens: int) -> Part:
        return self._pages._replace(first_slot=slot, tokens=tokens)


class Places(Protocol):
    """Where groups of codes are written and read.

    Attributes:
        count: groups that are read at most.
        is_reversed: whether each group has its tokens in reverse.
    """

    count: int
    is_reversed: bool

    def written(self, group: Tensor, is_complete: Tensor) -> Tensor:
        """Where each row's group is written, int64 [batch]: one that is not complete to a place that is not read."""
        ...

    def table(self, groups: Tensor) -> Tensor | None:
        """The block table of rows that have `groups` [batch] groups; None: they are in order, row by row."""
        ...


class InOrder:
    """Group after group in the memory of a row."""

    is_reversed = False

    def __init__(self, count: int) -> None:
        self.count = count

    def written(self, group: Tensor, is_complete: Tensor) -> Tensor:
        return torch.where(is_complete, group, self.count)

    def table(self, groups: Tensor) -> Tensor | None:
        return None


class InPages:
    """Groups in the pages of a block table, int64 [batch, groups + 1]; the last page is not read."""

    is_reversed = False

    def __init__(self, table: Tensor) -> None:
        self._table, self.count = table, table.shape[1] - 1

    def written(self, group: Tensor, is_complete: Tensor) -> Tensor:
        return self._table.gather(1, torch.where(is_complete, group, self.count)[:, None])[:, 0]

    def table(self, groups: Tensor) -> Tensor | None:
        return self._table[:, : self.count]


class InRing:
    """Groups in the `count` pages of a row's ring; a page more of each row is not read."""

    is_reversed = True

    def __init__(self, batch: int, count: int, device: torch.device) -> None:
        self.count = count
        self._row = torch.arange(batch, device=device) * (count + 1)
        self._back = torch.arange(1, count + 1, device=device)

    def written(self, group: Tensor, is_complete: Tensor) -> Tensor:
        return self._row + torch.where(is_complete, group % self.count, self.count)

    def table(self, groups: Tensor) -> Tensor | None:
        return self._row[:, None] + (groups[:, None] - self._back) % self.count


class CodedSteps:
    """The memory of a `StepCache` that has codes.

    Args:
        group: tokens that are encoded together.
        residual: of the latest tokens, how many are plain at least.
        sinks: parts with the plain keys and values of the first tokens; their `tokens` may be 0.
        codes: memory of the codes of keys and of values.
        places: where in it groups are.
        tail: keys and values of the tokens after the last code, [batch, kv_heads, tokens, dim].
        seen: tokens so far.
        window: tokens that a row has at most, sinks included; None: all.
        rotate: what rotates the sinks as tokens are evicted; None: nothing.
        owner: what frees the memory once nothing refers to it.
    """

    def __init__(
        self,
        group: int,
        residual: int,
        sinks: tuple[Part, ...],
        codes: tuple[CodeMemory, ...],
        places: Places,
        tail: tuple[Tensor, ...],
        seen: int,
        window: int | None = None,
        rotate: RotateSinks | None = None,
        owner: object = None,
    ) -> None:
        self._group, self._residual, self._sinks, self._codes, self._places = group, residual, sinks, codes, places
        self._window, self._rotate, self._front = window, rotate, sinks[0].tokens
        self._owner = owner
        self.is_ring = places.is_reversed
        self._pages = (residual + group - 1) // group + 1
        batch, heads, count, _ = tail[0].shape
        self._row = torch.arange(batch, device=tail[0].device)[:, None] * self._pages
        self._page = torch.arange(self._pages, device=tail[0].device)
        self._rings = tuple(t.new_zeros(batch * self._pages, heads, group, t.shape[3]) for t in tail)
        at = torch.arange(seen - count, seen, device=tail[0].device) - self._front
        for ring, t in zip(self._rings, tail, strict=True):
            pages = self._row + at // group % self._pages
            ring[pages, :, (at % group).expand(batch, -1)] = t.transpose(1, 2)

    def write(self, first: Tensor, new: tuple[Tensor, ...]) -> None:
        at = first - self._front
        page, place = self._row[:, 0] + at // self._group % self._pages, at % self._group
        before, coded = self._coded(first), self._coded(first + 1)
        group = (coded // self._group - 1).clamp(min=0)
        into = self._places.written(group, coded > before)
        for ring, codes, x in zip(self._rings, self._codes, new, strict=True):
            ring[page, :, place] = x[:, :, 0]
            complete = ring[self._row[:, 0] + group % self._pages]
            codes.put_group(into, complete.flip(2) if self._places.is_reversed else complete)
        if self._rotate is not None and self._front:
            self._rotate(self._sinks[0].data, self._evicted(first))

    def parts(self, first: Tensor) -> list[tuple[Part, ...]]:
        group, coded, evicted = self._group, self._coded(first + 1), self._evicted(first)
        table = self._row + ((coded // group)[:, None] + self._page) % self._pages
        places = self._places.table(coded // group)
        found: list[tuple[Part, ...]] = []
        for sinks, codes, ring in zip(self._sinks, self._codes, self._rings, strict=True):
            of_codes = codes.part(0, self._places.count * group)
            of_codes = of_codes._replace(table=places, row_ends=coded + self._front - evicted)
            tail = Part(self._pages * group, ring, table=table, row_ends=first + 1 - evicted)
            found.append((*((sinks,) if sinks.tokens else ()), of_codes, tail))
        return found

    def tokens(self, first: Tensor) -> Tensor:
        return first + 1 - self._evicted(first)

    def _coded(self, tokens: Tensor) -> Tensor:
        """How many of the first tokens are codes, or were before they were evicted."""
        old = tokens - self._front - self._residual
        return old.clamp(min=0) // self._group * self._group

    def _evicted(self, first: Tensor) -> Tensor:
        """How many tokens were evicted by the one at `first`."""
        return torch.zeros_like(first) if self._window is None else (first + 1 - self._window).clamp(min=0)
