"""The two interfaces behind a `KVCache`: a `Store` keeps one layout, a `Policy` chooses the tokens to evict.

`KVCache` checks every argument, so a store may rely on arguments that fit its `Form`. A new store is a class with these
methods and an entry in the tables of `store_kinds.py`.
"""

import math
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from regard.describe.tensors import has_tangent, is_without_data
from regard.errors import ProblemError
from regard.huge_pages import advise_huge_pages
from regard.storage.codec import Codec, code_bytes
from regard.storage.stored import Part, StoredTensor

LAZY_BYTES = 8 << 20
"""Smaller memory that is soon filled is torch's own; larger memory is taken from the system as it is used.

Beside activations of a similar size, memory from NumPy makes the heap of glibc grow more: at the peak of a prompt of
777 to 3,001 tokens, SmolLM2-135M took 48 to 90 % of the memory that it takes with NumPy's (16 pairs of runs, 4 lengths
and 2 dtypes).
"""
ALIGNMENT = 64
"""Bytes: a line of a CPU's cache."""

S = TypeVar("S")

CachedTensor = Tensor | StoredTensor
"""Keys, or values, as `append` returns them: a view where a strided tensor can describe the memory, else a handle."""


class Form(NamedTuple):
    """Shape, dtype and device of the tokens that a cache was given first. Latents have no values: v_dim is None."""

    batch: int
    kv_heads: int
    qk_dim: int
    v_dim: int | None
    dtype: torch.dtype
    device: torch.device

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of keys, and of values if there are any."""
        return (self.qk_dim,) if self.v_dim is None else (self.qk_dim, self.v_dim)


class Store(Protocol):
    """Keys and values in one layout. Created as `Class(layout, codec, form)` at the first `append`.

    A method that raises leaves the store unchanged. `crop`, `select` and `keep` are called on a `replacement`, so an
    error or Ctrl-C in them leaves the store in use as it was if they only assign new values; `append` must undo what it
    changed.

    The codec is None, a float dtype, or a `Codec` whose `keys` is "channel" or "token", never None. With
    `codec.rotate`, `append` receives keys and values rotated by `hadamard`, and handles have `rotated=True`.
    """

    @property
    def form(self) -> Form:
        """The current form: `select` may change the batch."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens that the next `append` returns besides its own; where rows differ, of the longest row."""
        ...

    @property
    def tokens_seen(self) -> int:
        """Tokens that were appended and not cropped: the position of the next token."""
        ...

    @property
    def min_crop(self) -> int:
        """The fewest tokens that `crop` can leave so that all tokens visible to them are still stored."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the stored tokens and their scales."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """Bytes of allocated memory."""
        ...

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        """Store new tokens, [batch, kv_heads, tokens, dim] that fit the form; returns all stored tokens."""
        ...

    def crop(self, tokens: int) -> None:
        """Remove all but the first `tokens` of all tokens that were seen; min_crop <= tokens <= tokens_seen."""
        ...

    def reset(self) -> None:
        """Remove all tokens and free the memory. The cache then drops the store."""
        ...

    def select(self, rows: Tensor) -> None:
        """Make batch row i a copy of row `rows[i]`: int64 [new batch] on the device, in range."""
        ...

    def keep(self, index: Tensor) -> None:
        """Evict all tokens but these: int64 [batch, kv_heads, kept], ascending, in range. `tokens_seen` stays.

        Raises:
            ProblemError: this store cannot evict single tokens.
        """
        ...

    def keys(self) -> Tensor:
        """All keys, decoded, [batch, kv_heads, tokens, qk_dim] of the form's dtype."""
        ...


class PolicyState(Protocol):
    """What a policy knows about the tokens of one cache; it follows every change of the cache.

    All methods but `append` are called on a shallow copy (`copy.copy`), which replaces the state once the store has
    changed as well: so after an error both are as they were. They assign new values, and change none in place.
    """

    def append(self, k: Tensor, v: Tensor | None) -> None:
        """The store has appended these tokens, as `KVCache.append` received them."""
        ...

    def observe(self, q: Tensor, store: Store, mask: Any, scale: float | None) -> None:
        """Receive the queries of this step, [batch, heads, queries, qk_dim]; their keys were just appended."""
        ...

    def choose(self, store: Store, coming: int) -> Tensor | None:
        """The tokens to keep before `coming` new ones, int64 [batch, kv_heads, kept], ascending; None: all tokens."""
        ...

    def keep(self, index: Tensor) -> None:
        """The store evicts all tokens but these."""
        ...

    def crop(self, tokens: int) -> None:
        """The store removes all but its first `tokens` tokens."""
        ...

    def select(self, rows: Tensor) -> None:
        """The store selects batch rows, see `Store.select`."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A value that says which tokens are evicted when there are more than `budget`; see `regard.cache.evict`.

    `KVCache` evicts at the start of an `append` that adds tokens, so `append` always returns all new tokens.
    """

    @property
    def budget(self) -> int | float:
        """Tokens that stay from one append to the next; below 1, a share of the tokens that were seen."""
        ...

    @property
    def recent(self) -> int | None:
        """How many of the last tokens are never evicted, so that they can be cropped; 0, None: no promise."""
        ...

    def start(self) -> PolicyState:
        """The state for one new cache."""
        ...


def replacement(store: S) -> S:
    """A store in the same memory, to be changed and then used in place of the given one."""
    other = object.__new__(type(store))
    other.__dict__.update(store.__dict__)
    return other


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that can be written in and out of `torch.inference_mode`, whichever mode is active now.

    A file or a pickle of a cache has its unused slots as well, and must not show what the process had in that memory.
    """
    if torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.inference_mode(mode=False):
        none = torch.empty(0, dtype=dtype, device=device)
        if type(none) is not Tensor or not none.is_cpu:
            return torch.zeros(shape, dtype=dtype, device=device)
        memory = _lazy_zeros(shape, dtype)
    advise_huge_pages(memory)
    return memory


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros, aligned as torch's own. Large ones take no memory until they are used; `torch.zeros` writes all of it."""
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))
    return memory.narrow(0, -memory.data_ptr() % ALIGNMENT, size).view(dtype).view(shape)


def leading_channels(stored: CachedTensor, dim: int) -> CachedTensor:
    """The first `dim` channels of what a cache returned, in the same memory: a latent, from an entry of `Latent`.

    Raises:
        ProblemError: the channels are rotated, so that each mixes all of them.

    >>> leading_channels(torch.arange(12.0).view(1, 1, 3, 4), 2)[0, 0]
    tensor([[0., 1.],
            [4., 5.],
            [8., 9.]])
    """
    if isinstance(stored, Tensor):
        return stored.narrow(3, 0, dim)
    if stored.rotated:
        raise ProblemError(f"{stored!r} is rotated: its first {dim} channels are made of all. Use rotate=False.")
    parts = tuple(_leading_channels(part, dim) for part in stored.parts)
    batch, heads, tokens = stored.shape[:3]
    return StoredTensor(parts, (batch, heads, tokens, dim), stored.dtype, stored.lengths)


def _leading_channels(part: Part, dim: int) -> Part:
    if part.kind == "plain":
        return part._replace(data=part.data.narrow(3, 0, dim))
    assert part.tiled  # entries are keys
    data = part.data.narrow(3, 0, code_bytes(part.kind, dim, tiled=True))
    if part.per_token:
        return part._replace(data=data)
    scale, zero_point = (None if t is None else t.narrow(3, 0, dim) for t in (part.scale, part.zero_point))
    return part._replace(data=data, scale=scale, zero_point=zero_point)


def with_spare(count: int) -> int:
    """`count` tokens or pages, and an eighth more: after a prompt, the first new tokens need no copy of it."""
    return count + count // 8


def allocate_both(form: Form, batch: int, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Memory for keys, and for values if there are any: [batch, kv_heads, slots, dim] each."""
    return tuple(allocate((batch, form.kv_heads, slots, dim), dtype, form.device) for dim in form.dims)


def allocate_filled(form: Form, slots: int, dtype: torch.dtype, tokens: int) -> tuple[Tensor, ...]:
    """Memory for keys and values: the caller writes the first `tokens` slots at once, those after them are zeros."""
    return tuple(_allocate_filled((form.batch, form.kv_heads, slots, dim), dtype, form, tokens) for dim in form.dims)


def _allocate_filled(shape: tuple[int, ...], dtype: torch.dtype, form: Form, tokens: int) -> Tensor:
    if math.prod(shape) * dtype.itemsize >= LAZY_BYTES:
        return allocate(shape, dtype, form.device)
    memory = _empty(shape, dtype, form.device)
    memory.narrow(2, tokens, shape[2] - tokens).zero_()
    return memory


def as_cached(memory: Tensor, first: int, tokens: int, dtype: torch.dtype) -> CachedTensor:
    """`tokens` tokens of plain memory from slot `first` on: a view, or a handle if they are stored in another dtype."""
    if memory.dtype == dtype:
        return memory.narrow(2, first, tokens)
    batch, heads, _, dim = memory.shape
    return StoredTensor((Part(tokens, memory, "plain", first),), (batch, heads, tokens, dim), dtype)


def select_rows(t: Tensor, rows: Tensor) -> Tensor:
    """A copy of batch rows of t, which can be written as memory from `allocate`."""
    selected = _empty((len(rows), *t.shape[1:]), t.dtype, t.device)
    select_into(selected, t, rows)
    return selected


def select_into(out: Tensor, t: Tensor, index: Tensor) -> None:
    """Write `t[index]` into `out`; index is int64 [len(out)]."""
    if has_tangent(t):  # torch's functions with out= refuse it
        out.copy_(t.index_select(0, index))
    else:
        torch.index_select(t, 0, index, out=out)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory as `allocate` gives it, without zeros, where it is written as a whole at once."""
    if torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.inference_mode(mode=False):
        memory = torch.empty(shape, dtype=dtype, device=device)
    advise_huge_pages(memory)
    return memory


def describe_tensor(t: Tensor) -> str:
    """Dtype, shape and device, for messages."""
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"


def check_has_data(t: Tensor, what: str) -> None:
    """Raise `ProblemError` unless the tensor has elements to read, which `what` needs."""
    if is_without_data(t):
        raise ProblemError(
            f"{what} reads elements, and a tensor on meta, or a fake one, has none: leave it out there, or take real "
            "tensors."
        )


def check_capacity(capacity: int | None, stored: int, new: int) -> None:
    """Raise `ProblemError` if new tokens exceed the capacity of `Contiguous`."""
    if capacity is not None and stored + new > capacity:
        raise ProblemError(
            f"{new} tokens more than the {stored} that are stored make {stored + new}, and "
            f"Contiguous(capacity={capacity}) has no memory for them: nothing was changed. Use a larger capacity, "
            "or none."
        )


def token_scales_error(codec: Codec) -> ProblemError:
    """The error for evicting single tokens whose keys share scales."""
    return ProblemError(
        f"tokens cannot be evicted one by one where they share the scales of keys: {type(codec).__name__}"
        '(keys="token") gives each token its own.'
    )
