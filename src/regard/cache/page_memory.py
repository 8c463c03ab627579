"""The memory of pages: keys and values of one layer, as numbers (`PlainMemory`) or as codes (`CodedMemory`).

Page n of a memory is entry n of each of its tensors. Memory grows by doubling, so pages are copied rarely; what was
handed out before lies in the old tensors, and is true there until its pages are written to again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.store import Form, memory
from regard.describe.codec import Codec, decode_rows, decode_tiled, encode_rows, encode_tiled, units
from regard.describe.codec import Codes as Written
from regard.describe.storage import TILE, Part


class Grain(NamedTuple):
    """How the keys of a page of codes share scales: `group` tokens a channel's, or each token one of its own."""

    page: int
    group: int
    per_token: bool


class PageMemory:
    """Tensors whose first axis are pages."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @property
    def pages(self) -> int:
        """Pages that there is memory for."""
        return self.tensors[0].shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values."""
        return sum(t.shape[1:].numel() * t.element_size() for t in self.tensors)

    @property
    def held(self) -> int:
        """Bytes of all pages."""
        return sum(t.nbytes for t in self.tensors)

    def grow(self, pages: int) -> None:
        """Make room for so many."""
        larger = [memory((pages, *t.shape[1:]), t.dtype, t.device) for t in self.tensors]
        for new, old in zip(larger, self.tensors, strict=True):
            new[: len(old)] = old
        self.tensors = larger

    def copy(self, source: list[int], target: list[int]) -> None:
        """Write what stands in some pages into others."""
        for t in self.tensors:
            t[torch.tensor(target, device=t.device)] = t[torch.tensor(source, device=t.device)]


class PlainMemory(PageMemory):
    """Numbers: keys [pages, kv_heads, page, qk_dim], values [pages, kv_heads, page, v_dim]."""

    def __init__(self, form: Form, page: int, dtype: torch.dtype) -> None:
        super().__init__([memory((0, form.kv_heads, page, dim), dtype, form.device) for dim in form.dims])

    def write(self, slots: Tensor, new: tuple[Tensor, Tensor]) -> None:
        """Write tokens.

        Args:
            slots: int64 [tokens of all heads], as `slots_of` gives them.
            new: keys and values, [..., dim], whose leading axes have as many entries.
        """
        for t, x in zip(self.tensors, new, strict=True):
            t.flatten(0, 2).index_copy_(0, slots, x.reshape(len(slots), x.shape[-1]).to(t.dtype))

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens as `write` takes them: keys and values, [..., dim] for slots [...]."""
        k, v = (t.flatten(0, 2)[slots] for t in self.tensors)
        return k, v

    def put(self, page: int, new: tuple[Tensor, Tensor]) -> None:
        """Write a whole page, [kv_heads, page, dim]."""
        for t, x in zip(self.tensors, new, strict=True):
            t[page] = x

    def parts(self, tokens: int, table: Tensor, ends: Tensor | None) -> tuple[Part, Part]:
        """The part of keys and that of values that these pages are."""
        k, v = self.tensors
        return Part(tokens, k, table=table, ends=ends), Part(tokens, v, table=table, ends=ends)


class CodedMemory(PageMemory):
    """Codes, and their scales: keys tiled, values in rows (`describe/codec.py`)."""

    def __init__(self, form: Form, codec: Codec, grain: Grain) -> None:
        self.codec, self.grain, (self.qk_dim, self.v_dim) = codec, grain, form.dims
        page, heads, kind = grain.page, form.kv_heads, codec.kind
        keys = (heads, page // TILE, units(kind, self.qk_dim, tiled=True), TILE)
        values = (heads, page, units(kind, self.v_dim, tiled=False))
        key_scale = (heads, page) if grain.per_token else (heads, page // grain.group, self.qk_dim)
        value_scale = (heads, page, -(-self.v_dim // codec.channels(self.v_dim)))
        scales = [(s, torch.bfloat16) for s in (key_scale, value_scale) for _ in range(2 if kind == "int4" else 1)]
        shapes = [(keys, torch.uint8), (values, torch.uint8), *scales]
        super().__init__([memory((0, *shape), dtype, form.device) for shape, dtype in shapes])

    def encode(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Pages of keys and of values, [pages, kv_heads, page, dim], as they will be written; nothing is yet.

        Raises:
            ProblemError: a number is NaN or infinite.
        """
        keys = encode_tiled(k, self.codec, per_token=self.grain.per_token, group=self.grain.group)
        values = encode_rows(v, self.codec)
        scales = [t for codes in (keys, values) for t in (codes.scale, codes.low) if t is not None]
        return [keys.data, values.data, *scales]

    def write(self, pages: list[int], written: list[Tensor]) -> None:
        """Write what `encode` gave into these pages."""
        index = torch.tensor(pages, device=self.tensors[0].device)
        for t, new in zip(self.tensors, written, strict=True):
            t[index] = new

    def read(self, page: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of a page, float32 [kv_heads, page, dim]."""
        keys, values = (
            Written(data[page], scale[page], None if low is None else low[page]) for data, scale, low in self._codes()
        )
        return (
            decode_tiled(
                keys, self.codec.kind, dim=self.qk_dim, per_token=self.grain.per_token, group=self.grain.group
            ),
            decode_rows(values, self.codec.kind, dim=self.v_dim, group=self.codec.channels(self.v_dim)),
        )

    def tokens(self, table: Tensor, count: int) -> list[Tensor]:
        """The first tokens of rows whose pages are these, one by one: as `encode_tokens` gives them."""
        at = self._places(table, count)
        data, *others = self.tensors
        found = [data[at[0], at[1], at[2] // TILE, :, at[2] % TILE], *(t[at] for t in others)]
        return [t if t.ndim == 4 else t[..., None] for t in found]

    def write_tokens(self, table: Tensor, written: list[Tensor]) -> None:
        """Write tokens from the front of rows whose pages are these."""
        pages, heads, places = self._places(table, written[0].shape[2])
        data, *others = self.tensors
        data[pages, heads, places // TILE, :, places % TILE] = written[0]
        for t, new in zip(others, written[1:], strict=True):
            t[pages, heads, places] = new if t.ndim == 4 else new[..., 0]

    def encode_tokens(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Any number of tokens, [rows, kv_heads, tokens, dim], each with scales of its own: [..., tokens, numbers]."""
        short = -k.shape[2] % TILE
        keys, *others = self.encode(torch.nn.functional.pad(k, (0, 0, 0, short)), v)
        found = [keys.transpose(-1, -2).flatten(2, 3), *others]
        return [(t if t.ndim == 4 else t[..., None])[:, :, : k.shape[2]] for t in found]

    def _places(self, table: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Page, head and place of each token, [rows, kv_heads, tokens] together."""
        at = torch.arange(count, device=table.device)
        heads = torch.arange(self.tensors[0].shape[1], device=table.device)[:, None]
        return table[:, at // self.grain.page][:, None], heads, at % self.grain.page

    def parts(self, tokens: int, table: Tensor, ends: Tensor | None) -> tuple[Part, Part]:
        """The part of keys and that of values that these pages are."""
        (k, k_scale, k_low), (v, v_scale, v_low) = self._codes()
        group, per_token = self.grain.group, self.grain.per_token
        keys = Part(
            tokens, k, self.codec.kind, 0, table, ends, k_scale, k_low, tiled=True, per_token=per_token, group=group
        )
        channels = self.codec.channels(self.v_dim)
        return keys, Part(tokens, v, self.codec.kind, 0, table, ends, v_scale, v_low, group=channels)

    def _codes(self) -> tuple[tuple[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]:
        k, v, *scales = self.tensors
        if len(scales) == 2:
            return (k, scales[0], None), (v, scales[1], None)
        return (k, scales[0], scales[1]), (v, scales[2], scales[3])


def slots_of(numbers: Tensor, places: Tensor, heads: int, page: int) -> Tensor:
    """Where tokens stand in the memory of all heads, seen as one row of tokens after the other.

    Args:
        numbers: int64 [...], the page of each token.
        places: int64 [...], its place in it.

    Returns:
        int64 [..., heads].
    """
    heads_before = torch.arange(heads, device=numbers.device)
    return (numbers[..., None] * heads + heads_before) * page + places[..., None]
