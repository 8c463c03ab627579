"""Layouts of a KV cache, and the handle of its stored keys and values.

`Contiguous`, `Rolling`, `Paged` and `Latent` are the layouts of a cache; a codec may come with each
(`storage/codec.py`). A cache returns a tensor where a strided tensor can describe the storage, else a `StoredTensor`:

    tokens 0 .. 31        32 .. 8127                           8128 .. 8191
           plain pages    codes of int8 in pages of 64 tokens  plain pages
           part 0         part 1                               part 2

`attend` takes either. The native backend reads the parts in place; the others get `dense()`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from regard.describe.whole_number import whole_field
from regard.errors import ProblemError
from regard.storage.codec import TILE, Codes, decode_rows, decode_tiled
from regard.storage.hadamard import hadamard
from regard.torch_internals import ignore_func_transforms
from regard.wide import wide_of


@dataclass(frozen=True)
class Layout:
    """The memory layout of a cache; abstract, see `Contiguous`, `Rolling`, `Paged`, `Latent`."""


@dataclass(frozen=True)
class Contiguous(Layout):
    """One contiguous buffer that grows by doubling; the cache returns views of it.

    Args:
        capacity: tokens that are allocated at once, a fixed limit; None: the buffer grows.
    """

    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.capacity is not None:
            whole_field(self, "capacity", least=1)


@dataclass(frozen=True)
class Rolling(Layout):
    """Keeps the first `sinks` tokens and the latest, `window` in all: memory and time per token are constant.

    Positions are counted within the cache: a query is as far from the sinks as the cache is long. Xiao et al. 2023,
    StreamingLLM, arXiv:2309.17453, §3.2.

    Args:
        window: tokens in the cache, sinks included.
        sinks: first tokens that are never evicted; may be 0.
        rope: the `Rope` that keys were rotated by; sinks are rotated further as the tokens after them are evicted.
            None: keys are not rotated.
    """

    window: int
    sinks: int = 4
    rope: Any = None

    def __post_init__(self) -> None:
        whole_field(self, "window", least=1)
        whole_field(self, "sinks", least=0)
        if self.sinks >= self.window:
            raise ProblemError(
                f"Rolling(window={self.window}, sinks={self.sinks}): the window counts the sinks as well, so it must "
                "be larger."
            )


@dataclass(frozen=True)
class Paged(Layout):
    """Pages of a pool that many sequences share. Kwon et al. 2023, arXiv:2309.06180, §4.

    Args:
        page: tokens per page.
        pool: a `regard.cache.PagePool`; None: a growing pool for this cache alone.
    """

    page: int = 16
    pool: Any = None

    def __post_init__(self) -> None:
        whole_field(self, "page", least=1)


@dataclass(frozen=True)
class Latent(Layout):
    """One latent per token, from which keys and values of all heads are computed, followed by one rotated key part.

    Keys are both, values are the latent alone, in the same memory. DeepSeek-AI 2024, arXiv:2405.04434, §2.1.

    Args:
        rank: size of the latent.
    """

    rank: int

    def __post_init__(self) -> None:
        whole_field(self, "rank", "dimensions", least=1)


_NAMES = {
    dtype: str(dtype).removeprefix("torch.") for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
"""The names of the types that most parts have."""


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


class Part(NamedTuple):
    """Consecutive tokens in one encoding.

    Token t of the part is in slot `first_slot + t` of a row's pages: page `slot // page`, place `slot % page`.

    Attributes:
        tokens: count of tokens; where rows differ, that of the longest row.
        data: plain elements [pages, kv_heads, page, dim] of any float type; or codes, uint8: tiled
            [pages, kv_heads, page // 16, units, 16] or rows [pages, kv_heads, page, units] (`storage/codec.py`).
        kind: "plain", "int8", "int4" or "fp8".
        first_slot: slot of the first token.
        table: block table, int64 [batch, pages of a row], in order; None: row b is page b.
        row_ends: int64 [batch], index in the row one past the part's last token; None where rows do not differ.
        scale: bf16; tiled [pages, kv_heads, page // group, dim], or where `per_token` [pages, kv_heads, page]; rows
            [pages, kv_heads, page, dim / group rounded up].
        zero_point: bf16, like scale; None: symmetric codes.
        tiled: 16 tokens of a channel are adjacent.
        group: tokens (tiled) or channels (rows) that share a scale.
    """

    tokens: int
    data: Tensor
    kind: str = "plain"
    first_slot: int = 0
    table: Tensor | None = None
    row_ends: Tensor | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    tiled: bool = False
    per_token: bool = False
    group: int = 0

    @property
    def page(self) -> int:
        """Tokens per page."""
        return self.data.shape[2] * (TILE if self.tiled else 1)

    @property
    def encoding(self) -> str:
        """Element type or codec, and pages: "float32", "int8 in pages of 64"."""
        kind = _name(self.data.dtype) if self.kind == "plain" else self.kind
        return f"{kind} in pages of {self.page}" if self.table is not None else kind

    def pages(self, row: int) -> Tensor:
        """Indices of the pages of the part in a row, int64."""
        if self.table is None:
            return torch.tensor([row], device=self.data.device)
        return self.table[row, : -(-(self.first_slot + self.tokens) // self.page)]

    def decode(self, pages: Tensor, dim: int) -> Tensor:
        """The elements of these pages, [pages, kv_heads, page, dim]; codes are decoded to float32."""
        data = self.data[pages]
        if self.kind == "plain":
            return data
        assert self.scale is not None
        codes = Codes(data, self.scale[pages], None if self.zero_point is None else self.zero_point[pages])
        if self.tiled:
            return decode_tiled(codes, self.kind, dim=dim, per_token=self.per_token, group=self.group)
        return decode_rows(codes, self.kind, dim=dim, group=self.group)


class FixedParts:
    """The first parts of handles of many steps: what follows from these parts alone is found once.

    Args:
        parts: consecutive parts, in token order.

    Attributes:
        known: what a backend found, for itself; it may refer to the tensors of the parts and to no others.
    """

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts, self.known = parts, cast(Any, None)
        self._encodings: tuple[str, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """The parts alone: a copy has other tensors, of which nothing is known."""
        return FixedParts, (self.parts,)

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encodings of the parts."""
        if self._encodings is None:
            self._encodings = tuple([part.encoding for part in self.parts])
        return self._encodings


_NO_TENSOR = "it is a handle of stored keys or values, for attend to read in place; its dense() is a plain tensor."


RowEnds = tuple[tuple[int, ...] | None, ...]
"""`Part.row_ends` of each part of a tensor, read on the host."""


def _row_ends(parts: tuple[Part, ...]) -> RowEnds:
    return tuple([None if part.row_ends is None else tuple(part.row_ends.tolist()) for part in parts])


class StoredTensor:
    """A handle of stored keys or values: what `KVCache.append` returns when no strided tensor can describe them.

    It has a tensor's shape, type and device, and `attend` takes it in place of a tensor. For anything else, `dense()`
    makes a plain tensor of it. It is valid until the next write to the cache.

    Args:
        parts: consecutive parts, in token order.
        shape: (batch, kv_heads, tokens, dim).
        dtype: type of the call that takes the handle, and of `dense()`.
        lengths: int64 [batch], where rows differ in length: row b has the first `lengths[b]` tokens. On a GPU they are
            read on the host where a call needs them there, once.
        rotated: whether channels were rotated by `hadamard` before storage.
        is_ring: whether tokens are in another order than their positions; for one query that sees them all.
        fixed: what `parts` begins with, where other handles do so too.

    >>> part = Part(5, torch.arange(24.0).view(2, 1, 3, 4), table=torch.tensor([[1, 0]]))
    >>> stored = StoredTensor((part,), (1, 1, 5, 4), torch.float32)
    >>> stored
    StoredTensor([1, 1, 5, 4] float32: 5 float32 in pages of 3)
    >>> stored.dense()[0, 0, :, 0]
    tensor([12., 16., 20.,  0.,  4.])
    """

    __slots__ = (
        *("__dict__", "_encodings", "_read_ends", "_read_lengths", "dtype", "fixed", "is_ring", "lengths", "parts"),
        *("rotated", "shape"),
    )

    def __init__(
        self,
        parts: tuple[Part, ...],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        lengths: Tensor | None = None,
        rotated: bool = False,
        is_ring: bool = False,
        fixed: FixedParts | None = None,
    ) -> None:
        self.parts, self.dtype, self.lengths, self.rotated, self.is_ring = parts, dtype, lengths, rotated, is_ring
        self.shape, self.fixed = torch.Size(shape), fixed
        self._encodings: tuple[str, ...] | None = None
        # On a CPU at once, so that what torch traces finds numbers; a GPU is not waited for before they are needed.
        self._read_lengths = None if lengths is None or not lengths.is_cpu else tuple(lengths.tolist())
        unread = [part for part in parts if part.row_ends is not None and not part.data.is_cpu]
        self._read_ends = None if unread else _row_ends(parts)

    @property
    def row_lengths(self) -> tuple[int, ...] | None:
        """`lengths`, read on the host; None where rows do not differ."""
        if self._read_lengths is None and self.lengths is not None:
            self._read_lengths = tuple(self.lengths.tolist())
        return self._read_lengths

    @property
    def _ends(self) -> RowEnds:
        if self._read_ends is None:
            self._read_ends = _row_ends(self.parts)
        return self._read_ends

    @property
    def device(self) -> torch.device:
        """The device of the storage."""
        return self.parts[0].data.device

    @property
    def ndim(self) -> int:
        """4."""
        return len(self.shape)

    @classmethod
    def of(cls, t: Tensor) -> "StoredTensor":
        """A tensor [batch, kv_heads, tokens, dim] as a single plain part, in place."""
        batch, heads, tokens, dim = t.shape
        data = t if t.stride(3) == 1 or dim < 2 else t.contiguous()
        return cls((Part(tokens, data),), (batch, heads, tokens, dim), t.dtype)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the stored tokens."""
        batch, heads, tokens, _ = self.shape
        total = 0.0
        for part in self.parts:
            of_pages = sum([t.nbytes for t in (part.data, part.scale, part.zero_point) if t is not None])
            slots = len(part.data) * part.page
            total += batch * part.tokens * of_pages / slots if slots else 0
        share = 1.0 if self.row_lengths is None else sum(self.row_lengths) / max(1, batch * tokens)
        return round(total * share) if heads else 0

    @property
    def token_bytes(self) -> float:
        """Bytes of a token of one batch row, on average."""
        batch, _, tokens, _ = self.shape
        return self.nbytes / max(1, batch * tokens if self.row_lengths is None else sum(self.row_lengths))

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encodings of the parts; handles with equal encodings differ in sizes and contents only."""
        if self._encodings is None:
            first = () if self.fixed is None else self.fixed.encodings
            rows = ("rows of their own lengths",) if self.lengths is not None else ()
            others = [part.encoding for part in self.parts[len(first) :]]
            self._encodings = (*first, *others, *(("rotated",) if self.rotated else ()), *rows)
        return self._encodings

    @cached_property
    def placeholder(self) -> Tensor:
        """A tensor of this shape, type and device without data, for checks."""
        with ignore_func_transforms():  # later calls take it outside of the transform
            return torch.empty_strided(self.shape, (0, 0, 0, 0), dtype=self.dtype, device=self.device)

    def to(self, dtype: torch.dtype) -> "StoredTensor":
        """The same storage, for calls of another type."""
        shape = (self.shape[0], self.shape[1], self.shape[2], self.shape[3])
        return StoredTensor(self.parts, shape, dtype, self.lengths, self.rotated, self.is_ring)

    def dense(self) -> Tensor:
        """The tensor [batch, kv_heads, tokens, dim]: gathered, decoded, and rotated back.

        Tokens beyond a row's length are 0.
        """
        if self.lengths is None and all(part.row_ends is None for part in self.parts):
            found = [self._part(part) for part in self.parts if part.tokens] if self.shape[0] else []
            if not found:
                return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            return found[0] if len(found) == 1 else torch.cat(found, dim=2)
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for row in range(self.shape[0]):
            start = 0
            for part, ends in zip(self.parts, self._ends, strict=True):
                end = start + part.tokens if ends is None else ends[row]
                if end > start:
                    whole[row, :, start:end] = self._row(part, row, end - start)
                start = end
        return whole

    def _part(self, part: Part) -> Tensor:
        """The tokens of a part whose rows have equal length, [batch, kv_heads, tokens, dim]."""
        if part.table is None and part.kind == "plain" and not self.rotated:
            return part.data[: self.shape[0], :, part.first_slot : part.first_slot + part.tokens].to(self.dtype)
        return torch.stack([self._row(part, row, part.tokens) for row in range(self.shape[0])])

    def _row(self, part: Part, row: int, tokens: int) -> Tensor:
        data = part.decode(part.pages(row), self.shape[3]).transpose(0, 1).flatten(1, 2)
        data = data[:, part.first_slot : part.first_slot + tokens]
        if self.rotated:  # codes are decoded to float32: their rotation is as exact as the handle's own type
            data = hadamard(data.to(torch.promote_types(wide_of(data.dtype), wide_of(self.dtype))))
        return data.to(self.dtype)

    if not TYPE_CHECKING:  # where it would give every misspelled attribute a type

        def __getattr__(self, name: str) -> NoReturn:
            """Attributes of tensors are answered with `dense()`."""
            if name.startswith("_") or not hasattr(Tensor, name):
                raise AttributeError(f"StoredTensor has no attribute {name!r}")
            raise AttributeError(f"StoredTensor has no {name!r}: {_NO_TENSOR}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise `ProblemError`: functions of torch take tensors."""
        raise ProblemError(f"torch's {getattr(function, '__name__', 'function')} got a StoredTensor: {_NO_TENSOR}")

    def _refuse(self, *others: object) -> NoReturn:
        raise ProblemError(f"a StoredTensor has no operators and no indices: {_NO_TENSOR}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __getitem__ = __setitem__ = __iter__ = __len__ = _refuse

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        """Raise `ProblemError`: without it NumPy would make an array of one object."""
        raise ProblemError(f"NumPy got a StoredTensor: {_NO_TENSOR}")

    def __bool__(self) -> bool:
        return True  # without it Python asks for a length

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        parts = ", ".join(f"{part.tokens:,} {part.encoding}" for part in self.parts)
        return f"StoredTensor({list(self.shape)} {kind}: {parts}{', rotated' if self.rotated else ''})"
