"""The memory of pages: keys and values of one layer, as numbers (`PlainMemory`) or as codes (`CodedMemory`).

Page n of a memory is entry n of each of its tensors. In memory a head's pages follow one another: pages that are filled
in order are read as one stretch, as fast as side by side, where pages of all heads would take 1.5 times as long. Memory
grows by doubling, so pages are copied rarely; what was
handed out before lies in the old tensors, and is true there until its pages are written to again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.store import Form, memory
from regard.describe.tensors import is_without_data
from regard.storage.codec import Codec, code_bytes, decode_rows, decode_tiled, encode_rows, encode_tiled
from regard.storage.codec import Codes as Written
from regard.storage.stored import TILE, Part


class Grain(NamedTuple):
    """How the keys of a page of codes share scales: `group` tokens a channel's, or each token one of its own."""

    page: int
    group: int
    per_token: bool


class PageMemory:
    """Tensors [pages, kv_heads, ...], which lie head by head."""

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
    def allocated_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(t.nbytes for t in self.tensors)

    def grow(self, pages: int) -> None:
        """Make room for so many."""
        larger = [_by_head(pages, t.shape[1:], t.dtype, t.device) for t in self.tensors]
        for new, old in zip(larger, self.tensors, strict=True):
            new[: len(old)] = old
        self.tensors = larger

    def shrink(self, kept: list[int], pages: int) -> None:
        """Make room for so many, the first of them these."""
        smaller = [_by_head(pages, t.shape[1:], t.dtype, t.device) for t in self.tensors]
        for new, old in zip(smaller, self.tensors, strict=True):
            new[: len(kept)] = old[torch.tensor(kept, dtype=torch.int64, device=old.device)]
        self.tensors = smaller

    def copy(self, source: list[int], target: list[int]) -> None:
        """Write what stands in some pages into others."""
        for t in self.tensors:
            t[torch.tensor(target, device=t.device)] = t[torch.tensor(source, device=t.device)]


class PlainMemory(PageMemory):
    """Numbers: keys [pages, kv_heads, page, qk_dim], values [pages, kv_heads, page, v_dim]."""

    def __init__(self, form: Form, page: int, dtype: torch.dtype) -> None:
        super().__init__([_by_head(0, (form.kv_heads, page, dim), dtype, form.device) for dim in form.dims])
        self._heads = torch.zeros(1, dtype=torch.int64)  # slots before each head, [kv_heads, 1], for so many pages:
        self._heads_of = -1

    def write(self, slots: Tensor, new: tuple[Tensor, Tensor], kept: Tensor | None = None) -> None:
        """Write tokens.

        Args:
            slots: int64 [rows, kv_heads or 1, tokens], as `slots_of` gives them.
            new: keys and values, [rows, kv_heads, tokens, dim].
            kept: bool like slots: which of them are written; None for all.
        """
        if is_without_data(self.tensors[0]):
            return
        at = self._of_heads(slots)
        among = None if kept is None else kept.expand(at.shape)
        at = at.reshape(-1) if among is None else at[among]
        for t, x in zip(self.tensors, new, strict=True):
            flat = x.reshape(-1, x.shape[3]) if among is None else x[among]
            t.transpose(0, 1).flatten(0, 2).index_copy_(0, at, flat.to(t.dtype))

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens as `write` takes them: keys and values, [rows, kv_heads, tokens, dim]."""
        at = self._of_heads(slots)
        k, v = (t.transpose(0, 1).flatten(0, 2)[at] for t in self.tensors)
        return k, v

    def _of_heads(self, slots: Tensor) -> Tensor:
        """Where the tokens stand in the memory as it lies, [rows, kv_heads, tokens]."""
        if self._heads_of != self.pages:
            heads, page = self.tensors[0].shape[1:3]
            self._heads_of = self.pages
            self._heads = (torch.arange(heads, device=slots.device) * (self.pages * page))[:, None]
        return slots + self._heads

    def put(self, page: int, new: tuple[Tensor, Tensor]) -> None:
        """Write a whole page, [kv_heads, page, dim]."""
        for t, x in zip(self.tensors, new, strict=True):
            t[page] = x

    def parts(self, tokens: int, table: Tensor, ends: Tensor | None) -> tuple[Part, Part]:
        """The part of keys and that of values that these pages are."""
        k, v = self.tensors
        return Part(tokens, k, table=table, row_ends=ends), Part(tokens, v, table=table, row_ends=ends)


class CodedMemory(PageMemory):
    """Codes, and their scales: keys tiled, values in rows (`storage/codec.py`)."""

    def __init__(self, form: Form, codec: Codec, grain: Grain) -> None:
        self.codec, self.grain, (self.qk_dim, self.v_dim) = codec, grain, form.dims
        page, heads, kind = grain.page, form.kv_heads, codec.kind
        keys = (heads, page // TILE, code_bytes(kind, self.qk_dim, tiled=True), TILE)
        values = (heads, page, code_bytes(kind, self.v_dim, tiled=False))
        key_scale = (heads, page) if grain.per_token else (heads, page // grain.group, self.qk_dim)
        value_scale = (heads, page, -(-self.v_dim // codec.channels(self.v_dim)))
        scales = [(s, torch.bfloat16) for s in (key_scale, value_scale) for _ in range(2 if kind == "int4" else 1)]
        shapes = [(keys, torch.uint8), (values, torch.uint8), *scales]
        super().__init__([_by_head(0, shape, dtype, form.device) for shape, dtype in shapes])

    def encode(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Pages of keys and of values, [pages, kv_heads, page, dim], as they will be written; nothing is yet.

        Raises:
            ProblemError: a number is NaN or infinite.
        """
        keys = encode_tiled(k, self.codec, per_token=self.grain.per_token, group=self.grain.group)
        values = encode_rows(v, self.codec)
        scales = [t for codes in (keys, values) for t in (codes.scale, codes.zero_point) if t is not None]
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


def slots_of(numbers: Tensor, places: Tensor, page: int) -> Tensor:
    """Where tokens stand among those of a head: slots are counted page by page.

    Args:
        numbers: int64 [...], the page of each token.
        places: int64 [...], its place in it.
    """
    return numbers * page + places


def _by_head(pages: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for so many pages of that shape, [pages, kv_heads, ...], which lies head by head."""
    return memory((shape[0], pages, *shape[1:]), dtype, device).transpose(0, 1)
