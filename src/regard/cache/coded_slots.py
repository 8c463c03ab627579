"""`CodedSlots`: memory for the codes of keys, or of values: one slot per token, written in whole quantisation groups.

Keys are tiled (16 tokens of a channel side by side), values are rows (token after token), see `storage/codec.py`. Which
slots are in use is not recorded here but in a list of `SlotRange`s: it is the same for all batch rows and heads.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.store import Form, allocate
from regard.storage.codec import TILE, Codec, Codes, code_bytes, encode_rows, encode_tiled
from regard.storage.stored import Part


class SlotRange(NamedTuple):
    """`tokens` consecutive tokens starting at `slot`."""

    slot: int
    tokens: int

    @property
    def end(self) -> int:
        """One past the last slot."""
        return self.slot + self.tokens


def only_first(ranges: tuple[SlotRange, ...], tokens: int) -> tuple[SlotRange, ...]:
    """The ranges of the first `tokens` tokens.

    >>> only_first((SlotRange(0, 5), SlotRange(16, 32)), 7)
    (SlotRange(slot=0, tokens=5), SlotRange(slot=16, tokens=2))
    """
    first: list[SlotRange] = []
    for slot, count in ranges:
        if tokens > 0:
            first.append(SlotRange(slot, min(count, tokens)))
        tokens -= count
    return tuple(first)


def without_first(ranges: tuple[SlotRange, ...], tokens: int) -> tuple[SlotRange, ...]:
    """The ranges without their first `tokens` tokens.

    >>> without_first((SlotRange(0, 5), SlotRange(16, 32)), 7)
    (SlotRange(slot=18, tokens=30),)
    """
    rest: list[SlotRange] = []
    for slot, count in ranges:
        removed = min(count, max(tokens, 0))
        if removed < count:
            rest.append(SlotRange(slot + removed, count - removed))
        tokens -= count
    return tuple(rest)


class CodedSlots:
    """`capacity` slots for codes, with their scales.

    ```
            data [batch, kv_heads, ...]      scale (and zero point) [batch, kv_heads, ...]
    tiled   [capacity / 16, units, 16]       [capacity / group, dim], or where each token has its own, [capacity]
    rows    [capacity, units]                [capacity, dim / channels that share one]
    ```
    """

    def __init__(self, codec: Codec, form: Form, dim: int, *, tiled: bool) -> None:
        self.codec, self.dim, self.tiled = codec, dim, tiled
        self.per_token = tiled and codec.keys == "token"
        self.group = codec.group if tiled else codec.channels(dim)
        self._slots = (TILE, 1 if self.per_token else codec.group) if tiled else (1, 1)
        """Slots per entry of data, and per entry of scale."""
        self.capacity = 0
        self.tensors = self._allocate(form.batch, form.kv_heads, 0, form.device)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of allocated memory."""
        return sum(t.nbytes for t in self.tensors)

    def size(self, tokens: int) -> int:
        """Bytes of the codes and scales of `tokens` tokens that begin with a group."""
        sizes = zip(self.tensors, self._steps(), strict=True)
        return sum(-(-tokens // step) * t[:, :, :1].nbytes for t, step in sizes if self.capacity)

    def encode(self, x: Tensor) -> Codes:
        """The codes of x, [batch, kv_heads, tokens, dim], whole groups; nothing is written yet.

        Raises:
            ProblemError: an element is NaN or infinite.
        """
        return encode_tiled(x, self.codec, per_token=self.per_token) if self.tiled else encode_rows(x, self.codec)

    def put_group(self, group: Tensor, x: Tensor) -> None:
        """Encode one group of each row, and write it; nothing is read on the host, and elements are not checked.

        Args:
            group: int64 [batch], which group of slots.
            x: [batch, kv_heads, group, dim].
        """
        size, row = self.codec.group, torch.arange(len(group), device=group.device)[:, None]
        encode = partial(encode_tiled, per_token=self.per_token) if self.tiled else encode_rows
        codes = encode(x, self.codec, is_checked=True)
        for own, new, step in zip(self.tensors, _without_none(codes), self._steps(), strict=True):
            count = size // step
            at = group[:, None] * count + torch.arange(count, device=group.device)
            own[row, :, at] = new.transpose(1, 2)

    def write(self, slot: int, codes: Codes) -> None:
        """Write codes to the slots from `slot` on, within the capacity; `slot` is a multiple of the group."""
        for own, new, step in zip(self.tensors, _without_none(codes), self._steps(), strict=True):
            own.narrow(2, slot // step, new.shape[2]).copy_(new)

    def move(self, capacity: int, begin: int, end: int) -> None:
        """Reallocate `capacity` slots; slots begin .. end - 1 move to the front. `begin` is the start of a group."""
        self.tensors, self.capacity = self.moved(capacity, begin, end), capacity

    def moved(self, capacity: int, begin: int, end: int) -> list[Tensor]:
        """The tensors that `move` leaves; nothing is changed."""
        batch, heads = self.tensors[0].shape[:2]
        moved = self._allocate(batch, heads, capacity, self.tensors[0].device)
        for new, old, step in zip(moved, self.tensors, self._steps(), strict=True):
            count = -(-(end - begin) // step)
            new.narrow(2, 0, count).copy_(old.narrow(2, begin // step, count))
        return moved

    def copy_from(self, other: "CodedSlots", end: int) -> None:
        """Copy slots 0 .. end - 1 of another memory."""
        for own, source, step in zip(self.tensors, other.tensors, self._steps(), strict=True):
            own.narrow(2, 0, end // step).copy_(source.narrow(2, 0, end // step))

    def put_reversed(self, other: "CodedSlots", groups: Tensor, pages: Tensor, batch: int) -> None:
        """Write groups of other rows into pages, each with its tokens in reverse.

        Args:
            other: the memory of `batch` rows; of this one each row is a page, and those of a batch row are consecutive.
            groups, pages: int64, which groups of a row, and the page of each.
            batch: rows.
        """
        groups, pages = groups.to(self.tensors[0].device), pages.to(self.tensors[0].device)
        for i, (own, source, step) in enumerate(zip(self.tensors, other.tensors, self._steps(), strict=True)):
            found = source.unflatten(2, (-1, self.codec.group // step)).index_select(2, groups).flip(3)
            if self.tiled and not i:
                found = found.flip(-1)  # the 16 tokens of a tile
            own.unflatten(0, (batch, -1))[:, pages] = found.transpose(1, 2)

    def selected(self, rows: Tensor, end: int) -> list[Tensor]:
        """Tensors whose batch row i is a copy of row rows[i], in slots 0 .. end - 1; nothing is changed."""
        selected = self._allocate(len(rows), self.tensors[0].shape[1], self.capacity, rows.device)
        for new, old, step in zip(selected, self.tensors, self._steps(), strict=True):
            count = -(-end // step)
            torch.index_select(old.narrow(2, 0, count), 0, rows, out=new.narrow(2, 0, count))
        return selected

    def entries(self, slots: Tensor, plain: tuple[Tensor, ...]) -> list[Tensor]:
        """Codes and scales per token, [batch, kv_heads, tokens, ...]: of these slots, between those of plain tokens.

        Args:
            slots: int64 [tokens].
            plain: nothing, or the tokens before the slots and the tokens after them, [batch, kv_heads, tokens, dim].
        """
        entries = [t.index_select(2, slots) for t in self._flatten(self.tensors)]
        if plain:
            before, after = ([t.narrow(2, 0, x.shape[2]) for t in self._flatten(self._encode_any(x))] for x in plain)
            entries = [torch.cat(three, 2) for three in zip(before, entries, after, strict=True)]
        return entries

    def packed(self, entries: list[Tensor], capacity: int) -> list[Tensor]:
        """Tensors of `capacity` slots with these tokens alone, the result of `entries`; nothing is changed."""
        batch, heads, tokens = entries[0].shape[:3]
        packed = self._allocate(batch, heads, capacity, self.tensors[0].device)
        data, *scales = entries
        if self.tiled:
            padded = torch.nn.functional.pad(data, (0, 0, 0, -tokens % TILE))
            data, scales = padded.unflatten(2, (-1, TILE)).transpose(-1, -2), [t.squeeze(-1) for t in scales]
        for own, new in zip(packed, (data, *scales), strict=True):
            own.narrow(2, 0, new.shape[2]).copy_(new)
        return packed

    def part(self, slot: int, tokens: int) -> Part:
        """A handle to `tokens` consecutive tokens starting at `slot`."""
        data, scale, *zero_point = self.tensors
        return Part(
            tokens, data, self.codec.kind, slot, None, None, scale,
            zero_point[0] if zero_point else None, self.tiled, self.per_token, self.group,
        )  # fmt: skip

    def _flatten(self, tensors: list[Tensor]) -> list[Tensor]:
        """One entry per token, [batch, kv_heads, slots, ...], where each token has its own scales."""
        if not self.tiled:
            return tensors
        return [tensors[0].transpose(-1, -2).flatten(2, 3), *(t[..., None] for t in tensors[1:])]

    def _encode_any(self, x: Tensor) -> list[Tensor]:
        """The codes of any count of tokens, each with its own scales; padding follows them."""
        short = -x.shape[2] % TILE if self.tiled else 0
        return _without_none(self.encode(torch.nn.functional.pad(x, (0, 0, 0, short))))

    def _steps(self) -> tuple[int, ...]:
        """Slots per entry of each tensor."""
        data, scale = self._slots
        return (data, *[scale] * (len(self.tensors) - 1))

    def _allocate(self, batch: int, heads: int, capacity: int, device: torch.device) -> list[Tensor]:
        kind, dim = self.codec.kind, self.dim
        wide = code_bytes(kind, dim, self.tiled)
        if self.tiled:
            data = (capacity // TILE, wide, TILE)
            scale = (capacity,) if self.per_token else (capacity // self.group, dim)
        else:
            data, scale = (capacity, wide), (capacity, -(-dim // self.group))
        scales = 2 if kind == "int4" else 1
        codes = [allocate((batch, heads, *data), torch.uint8, device)]
        return codes + [allocate((batch, heads, *scale), torch.bfloat16, device) for _ in range(scales)]


def _without_none(codes: Codes) -> list[Tensor]:
    return [t for t in codes if t is not None]
