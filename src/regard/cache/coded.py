"""`Coded`: the codes of keys, or of values, in memory that grows; tokens stand in slots, written in whole groups.

Keys are tiled (16 tokens of a channel side by side), values are rows (token after token), as `storage/codec.py` has
them. Which slots hold a token that still counts is for others to know: slots of all batch rows and heads are alike.
"""

import torch
from torch import Tensor

from regard.cache.store import Form, memory
from regard.storage.codec import TILE, Codec, Codes, code_bytes, encode_rows, encode_tiled
from regard.storage.stored import Part


class Coded:
    """`capacity` slots for codes, with their scales.

    ```
            data [batch, kv_heads, ...]      scale (and low) [batch, kv_heads, ...]
    tiled   [capacity / 16, units, 16]       [capacity / group, dim], or where each token has its own, [capacity]
    rows    [capacity, units]                [capacity, dim / channels that share one]
    ```
    """

    def __init__(self, codec: Codec, form: Form, dim: int, *, tiled: bool) -> None:
        self.codec, self.dim, self.tiled = codec, dim, tiled
        self.per_token = tiled and codec.keys == "token"
        self.group = codec.group if tiled else codec.channels(dim)
        self._slots = (TILE, 1 if self.per_token else codec.group) if tiled else (1, 1)
        """Slots that one entry of data, and of scale, stands for."""
        self.capacity = 0
        self.tensors = self._made(form.batch, form.kv_heads, 0, form.device)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory."""
        return sum(t.nbytes for t in self.tensors)

    def size(self, tokens: int) -> int:
        """Bytes that so many tokens take, which begin with a group, scales included."""
        sizes = zip(self.tensors, self._steps(), strict=True)
        return sum(-(-tokens // step) * t[:, :, :1].nbytes for t, step in sizes if self.capacity)

    def encoded(self, x: Tensor) -> Codes:
        """The codes of x, [batch, kv_heads, tokens, dim], whole groups; nothing is kept yet.

        Raises:
            ProblemError: a number is NaN or infinite.
        """
        return encode_tiled(x, self.codec, per_token=self.per_token) if self.tiled else encode_rows(x, self.codec)

    def write(self, slot: int, codes: Codes) -> None:
        """Put codes into the slots from `slot` on, where there is room; it is a multiple of the group."""
        for mine, new, step in zip(self.tensors, _without_none(codes), self._steps(), strict=True):
            mine.narrow(2, slot // step, new.shape[2]).copy_(new)

    def move(self, capacity: int, begin: int, end: int) -> None:
        """Have room for `capacity` slots, into which the slots begin .. end - 1 come first; begin starts a group."""
        old, batch, heads = self.tensors, *self.tensors[0].shape[:2]
        self.tensors, self.capacity = self._made(batch, heads, capacity, old[0].device), capacity
        for mine, theirs, step in zip(self.tensors, old, self._steps(), strict=True):
            count = -(-(end - begin) // step)
            mine.narrow(2, 0, count).copy_(theirs.narrow(2, begin // step, count))

    def select(self, rows: Tensor, end: int) -> None:
        """Make batch row i what row rows[i] is, in slots 0 .. end - 1."""
        old = self.tensors
        self.tensors = self._made(len(rows), old[0].shape[1], self.capacity, rows.device)
        for mine, theirs, step in zip(self.tensors, old, self._steps(), strict=True):
            count = -(-end // step)
            torch.index_select(theirs.narrow(2, 0, count), 0, rows, out=mine.narrow(2, 0, count))

    def entries(self, slots: Tensor, plain: tuple[Tensor, ...]) -> list[Tensor]:
        """Data and scales token by token, [batch, kv_heads, tokens, ...]: of these slots, with the codes of plain ones.

        Args:
            slots: int64 [tokens].
            plain: nothing, or tokens that stand before the slots, and behind them, [batch, kv_heads, tokens, dim].
        """
        whole = self._flat(self.tensors)
        found = [t.index_select(2, slots) for t in whole]
        if plain:
            before, after = ([t.narrow(2, 0, x.shape[2]) for t in self._flat(self._encoded_any(x))] for x in plain)
            found = [torch.cat(three, 2) for three in zip(before, found, after, strict=True)]
        return found

    def put(self, entries: list[Tensor], capacity: int) -> None:
        """Hold these tokens alone, as `entries` gave them, in room for `capacity` slots or what they need."""
        (batch, heads, tokens), group = entries[0].shape[:3], self.codec.group
        capacity = max(capacity, -(-tokens // group) * group)
        old, self.capacity = self.tensors, capacity
        self.tensors = self._made(batch, heads, capacity, old[0].device)
        data, *scales = entries
        if self.tiled:
            padded = torch.nn.functional.pad(data, (0, 0, 0, -tokens % TILE))
            data, scales = padded.unflatten(2, (-1, TILE)).transpose(-1, -2), [t.squeeze(-1) for t in scales]
        for mine, new in zip(self.tensors, (data, *scales), strict=True):
            mine.narrow(2, 0, new.shape[2]).copy_(new)

    def part(self, slot: int, tokens: int) -> Part:
        """The tokens of the slots from `slot` on."""
        data, scale, *low = self.tensors
        return Part(
            tokens, data, self.codec.kind, slot, None, None, scale, low[0] if low else None, self.tiled,
            self.per_token, self.group,
        )  # fmt: skip

    def _flat(self, tensors: list[Tensor]) -> list[Tensor]:
        """Token by token, [batch, kv_heads, slots, ...], where each has scales of its own."""
        if not self.tiled:
            return tensors
        return [tensors[0].transpose(-1, -2).flatten(2, 3), *(t[..., None] for t in tensors[1:])]

    def _encoded_any(self, x: Tensor) -> list[Tensor]:
        """The codes of any number of tokens, each with scales of its own; some come after them."""
        short = -x.shape[2] % TILE if self.tiled else 0
        return _without_none(self.encoded(torch.nn.functional.pad(x, (0, 0, 0, short))))

    def _steps(self) -> tuple[int, ...]:
        """Slots that an entry of each tensor stands for."""
        data, scale = self._slots
        return (data, *[scale] * (len(self.tensors) - 1))

    def _made(self, batch: int, heads: int, capacity: int, device: torch.device) -> list[Tensor]:
        kind, dim = self.codec.kind, self.dim
        wide = code_bytes(kind, dim, self.tiled)
        if self.tiled:
            data = (capacity // TILE, wide, TILE)
            scale = (capacity,) if self.per_token else (capacity // self.group, dim)
        else:
            data, scale = (capacity, wide), (capacity, -(-dim // self.group))
        scales = 2 if kind == "int4" else 1
        made = [memory((batch, heads, *data), torch.uint8, device)]
        return made + [memory((batch, heads, *scale), torch.bfloat16, device) for _ in range(scales)]


def _without_none(codes: Codes) -> list[Tensor]:
    return [t for t in codes if t is not None]
