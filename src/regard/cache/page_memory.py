"""The memory of pages: keys and values of one layer, plain (`PlainPageMemory`) or as codes (`CodedPageMemory`).

Page n of a memory is entry n of each of its tensors. The pages of one head follow one another in memory: pages that
were filled in order are read as one contiguous range, as fast as a contiguous tensor. With all heads of a page together
reading would take 1.5 times as long. Memory grows by doubling, so pages are copied rarely. Handles that were returned
before still refer to the old tensors, and stay valid there until their pages are written to again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.store import Form, allocate
from regard.describe.tensors import is_without_data
from regard.storage.codec import Codec, Codes, code_bytes, decode_rows, decode_tiled, encode_rows, encode_tiled
from regard.storage.stored import TILE, Part


class KeyScales(NamedTuple):
    """How keys in pages of `page` tokens share scales: `group` tokens, one per channel; or each token has its own."""

    page: int
    group: int
    per_token: bool


class TokenPlaces(NamedTuple):
    """Where tokens are in pages; the tensors broadcast to [rows, kv_heads, tokens].

    Attributes:
        page: index of the page of a token.
        head: index of the key head.
        place: index of the token in its page.
        tile: index of its tile in the page.
        in_tile: index of the token in its tile.
    """

    page: Tensor
    head: Tensor
    place: Tensor
    tile: Tensor
    in_tile: Tensor


class PageMemory:
    """Tensors [pages, kv_heads, ...], contiguous per head."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @torch.inference_mode(mode=False)  # the tensors of a copy may be of inference mode, and are written to out of it
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tensors = [t.clone() if t.is_inference() else t for t in self.tensors]

    @property
    def pages(self) -> int:
        """Allocated pages."""
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
        """Have memory for `pages` pages."""
        larger = [_allocate(pages, t.shape[1:], t.dtype, t.device) for t in self.tensors]
        for new, old in zip(larger, self.tensors, strict=True):
            new[: len(old)] = old
        self.tensors = larger

    def shrunk(self, kept: list[int], pages: int) -> list[Tensor]:
        """Tensors for `pages` pages, of which the first are the pages `kept`; nothing is changed."""
        smaller = [_allocate(pages, t.shape[1:], t.dtype, t.device) for t in self.tensors]
        for new, old in zip(smaller, self.tensors, strict=True):
            new[: len(kept)] = old[torch.tensor(kept, dtype=torch.int64, device=old.device)]
        return smaller

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy pages `source` to pages `target`."""
        for t in self.tensors:
            t[torch.tensor(target, device=t.device)] = t[torch.tensor(source, device=t.device)]


class PlainPageMemory(PageMemory):
    """Plain elements: keys [pages, kv_heads, page, qk_dim], values [pages, kv_heads, page, v_dim]."""

    def __init__(self, form: Form, page: int, dtype: torch.dtype) -> None:
        super().__init__([_allocate(0, (form.kv_heads, page, dim), dtype, form.device) for dim in form.dims])
        self._heads = torch.zeros(1, dtype=torch.int64, device="cpu")  # slots before each head, [kv_heads, 1]
        self._heads_pages = -1  # for which they are valid

    def write(self, slots: Tensor, new: tuple[Tensor, Tensor], chosen: Tensor | None = None) -> None:
        """Write tokens.

        Args:
            slots: int64 [rows, kv_heads or 1, tokens], as `slots_of` gives them.
            new: keys and values, [rows, kv_heads, tokens, dim].
            chosen: bool, the shape of slots: which tokens are written; None: all.
        """
        if is_without_data(self.tensors[0]):
            return
        at = self._element_rows(slots)
        among = None if chosen is None else chosen.expand(at.shape)
        at = at.reshape(-1) if among is None else at[among]
        for t, x in zip(self.tensors, new, strict=True):
            flat = x.flatten(0, 2) if among is None else x[among]
            t.transpose(0, 1).flatten(0, 2).index_copy_(0, at, flat.to(t.dtype))

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values in some slots, as for `write`: [rows, kv_heads, tokens, dim]."""
        at = self._element_rows(slots)
        k, v = (t.transpose(0, 1).flatten(0, 2)[at] for t in self.tensors)
        return k, v

    def _element_rows(self, slots: Tensor) -> Tensor:
        """The rows of the tokens in the flattened memory, [rows, kv_heads, tokens]."""
        if self._heads_pages != self.pages:
            heads, page = self.tensors[0].shape[1:3]
            self._heads = (torch.arange(heads, device=slots.device) * (self.pages * page))[:, None]
            self._heads_pages = self.pages
        return slots + self._heads

    def write_page(self, page: int, new: tuple[Tensor, Tensor]) -> None:
        """Write a whole page, [kv_heads, page, dim]."""
        for t, x in zip(self.tensors, new, strict=True):
            t[page] = x

    def parts(self, tokens: int, table: Tensor, row_ends: Tensor | None) -> tuple[Part, Part]:
        """The part of the keys and the part of the values in these pages."""
        k, v = self.tensors
        return Part(tokens, k, table=table, row_ends=row_ends), Part(tokens, v, table=table, row_ends=row_ends)


class CodedPageMemory(PageMemory):
    """Codes and their scales: keys tiled, values in rows (`storage/codec.py`)."""

    def __init__(self, form: Form, codec: Codec, scales: KeyScales) -> None:
        self.codec, self.scales, (self.qk_dim, self.v_dim) = codec, scales, form.dims
        page, heads, kind = scales.page, form.kv_heads, codec.kind
        keys = (heads, page // TILE, code_bytes(kind, self.qk_dim, tiled=True), TILE)
        values = (heads, page, code_bytes(kind, self.v_dim, tiled=False))
        key_scale = (heads, page) if scales.per_token else (heads, page // scales.group, self.qk_dim)
        value_scale = (heads, page, -(-self.v_dim // codec.channels(self.v_dim)))
        of_scales = [(s, torch.bfloat16) for s in (key_scale, value_scale) for _ in range(2 if kind == "int4" else 1)]
        shapes = [(keys, torch.uint8), (values, torch.uint8), *of_scales]
        super().__init__([_allocate(0, shape, dtype, form.device) for shape, dtype in shapes])

    def encode(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """The codes and scales of pages, from keys and values [pages, kv_heads, page, dim]; nothing is written yet.

        Raises:
            ProblemError: an element is NaN or infinite.
        """
        keys = encode_tiled(k, self.codec, per_token=self.scales.per_token, group=self.scales.group)
        values = encode_rows(v, self.codec)
        scales = [t for codes in (keys, values) for t in (codes.scale, codes.zero_point) if t is not None]
        return [keys.data, values.data, *scales]

    def write(self, pages: list[int], encoded: list[Tensor]) -> None:
        """Write the result of `encode` into these pages."""
        index = torch.tensor(pages, device=self.tensors[0].device)
        for t, new in zip(self.tensors, encoded, strict=True):
            t[index] = new

    def read(self, page: int) -> tuple[Tensor, Tensor]:
        """The decoded keys and values of a page, float32 [kv_heads, page, dim]."""
        keys, values = (
            Codes(data[page], scale[page], None if low is None else low[page]) for data, scale, low in self._codes()
        )
        return (
            decode_tiled(
                keys, self.codec.kind, dim=self.qk_dim, per_token=self.scales.per_token, group=self.scales.group
            ),
            decode_rows(values, self.codec.kind, dim=self.v_dim, group=self.codec.channels(self.v_dim)),
        )

    def read_tokens(self, table: Tensor, count: int) -> list[Tensor]:
        """Codes and scales of the first `count` tokens of rows with these pages, in the format of `encode_tokens`."""
        at = self.places(table, count)
        data, *others = self.tensors
        found = [data[at.page, at.head, at.tile, :, at.in_tile], *(t[at.page, at.head, at.place] for t in others)]
        return [t if t.ndim == 4 else t[..., None] for t in found]

    def write_tokens(self, at: TokenPlaces, encoded: list[Tensor]) -> None:
        """Write the result of `encode_tokens` to these places."""
        data, *others = self.tensors
        data[at.page, at.head, at.tile, :, at.in_tile] = encoded[0]
        for t, new in zip(others, encoded[1:], strict=True):
            t[at.page, at.head, at.place] = new if t.ndim == 4 else new[..., 0]

    def encode_tokens(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Codes and scales of any count of tokens, [rows, kv_heads, tokens, dim], each with its own scales."""
        short = -k.shape[2] % TILE
        keys, *others = self.encode(torch.nn.functional.pad(k, (0, 0, 0, short)), v)
        found = [keys.transpose(-1, -2).flatten(2, 3), *others]
        return [(t if t.ndim == 4 else t[..., None])[:, :, : k.shape[2]] for t in found]

    def places(self, table: Tensor, count: int) -> TokenPlaces:
        """The places of the first `count` tokens of rows with these pages."""
        at = torch.arange(count, device=table.device)
        heads = torch.arange(self.tensors[0].shape[1], device=table.device)[:, None]
        place = at % self.scales.page
        return TokenPlaces(table[:, at // self.scales.page][:, None], heads, place, place // TILE, place % TILE)

    def parts(self, tokens: int, table: Tensor, row_ends: Tensor | None) -> tuple[Part, Part]:
        """The part of the keys and the part of the values in these pages."""
        (k, k_scale, k_low), (v, v_scale, v_low) = self._codes()
        group, per_token = self.scales.group, self.scales.per_token
        keys = Part(
            tokens, k, self.codec.kind, 0, table, row_ends, k_scale, k_low, tiled=True, per_token=per_token, group=group
        )
        channels = self.codec.channels(self.v_dim)
        return keys, Part(tokens, v, self.codec.kind, 0, table, row_ends, v_scale, v_low, group=channels)

    def _codes(self) -> tuple[tuple[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]:
        k, v, *scales = self.tensors
        if len(scales) == 2:
            return (k, scales[0], None), (v, scales[1], None)
        return (k, scales[0], scales[1]), (v, scales[2], scales[3])


def slots_of(pages: Tensor, places: Tensor, page: int) -> Tensor:
    """The slots of tokens in the memory of a head: `page` slots per page.

    Args:
        pages: int64 [...], the page index of each token.
        places: int64 [...], its place in the page.
    """
    return pages * page + places


def _allocate(pages: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for pages of a shape, [pages, kv_heads, ...], contiguous per head."""
    return allocate((shape[0], pages, *shape[1:]), dtype, device).transpose(0, 1)
