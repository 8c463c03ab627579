"""What stands behind a `KVCache`: a store, which keeps one layout, and a policy, which says what may be forgotten.

`KVCache` checks what comes in, once, for all of them; a store is handed what fits its `Form` and keeps it. So a store
is short, and a new one is a class with these methods and a line in the table below.
"""

import importlib
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.describe.tensors import is_without_data
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling, StoredTensor

CachedTensor = Tensor | StoredTensor
"""Keys, or values, as `append` gives them: a tensor where a strided one can say how they lie, else a handle."""


class Form(NamedTuple):
    """What a cache keeps of every token, as it came first. Latents have no values of their own: v_dim is None."""

    batch: int
    kv_heads: int
    qk_dim: int
    v_dim: int | None
    dtype: torch.dtype
    device: torch.device

    @property
    def dims(self) -> tuple[int, ...]:
        """The widths of what is kept: keys, and values where there are any."""
        return (self.qk_dim,) if self.v_dim is None else (self.qk_dim, self.v_dim)


class Store(Protocol):
    """Keys and values in one layout. Made as `Class(layout, codec, form)` at the first `append`.

    Every method leaves the store as it was if it raises.

    The codec is None, a float dtype, or a `Codec` whose `keys` is "channel" or "token", never None. Where
    `codec.rotate`, what comes to `append` was turned by `hadamard` already, and handles say `rotated=True`.
    """

    form: Form
    """As it is now: `select` may change the batch."""

    @property
    def tokens(self) -> int:
        """How many tokens the next `append` would hand out besides its own; where rows differ, of the longest."""
        ...

    @property
    def tokens_seen(self) -> int:
        """How many were ever appended and not cropped: the position of the next."""
        ...

    @property
    def min_crop(self) -> int:
        """The fewest tokens that `crop` can leave: what those would look back on is still there."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of what is stored: tokens as they are written, and scales."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that are held for it."""
        ...

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        """Keep new tokens, [batch, kv_heads, tokens, dim] that fit the form; all that are kept come back."""
        ...

    def crop(self, tokens: int) -> None:
        """Forget all but the first `tokens` of all that were ever seen; least <= tokens <= seen."""
        ...

    def reset(self) -> None:
        """Forget everything and give back what is held: the cache drops the store, and makes another when it must."""
        ...

    def select(self, rows: Tensor) -> None:
        """Make batch row i what row `rows[i]` is: int64 [batch to be] on the device, in range."""
        ...

    def keep(self, index: Tensor) -> None:
        """Forget all tokens but these: int64 [batch, kv_heads, kept], ascending, in range. `seen` stays.

        Raises:
            ProblemError: tokens cannot go one by one here.
        """
        ...

    def keys(self) -> Tensor:
        """All keys as they were meant, [batch, kv_heads, tokens, qk_dim] of the form's type."""
        ...


class Watch(Protocol):
    """What a policy has seen in one cache, per token that is kept; it follows what the cache does to its tokens."""

    def append(self, k: Tensor, v: Tensor | None) -> None:
        """These were stored, as `Store.append` took them."""
        ...

    def observe(self, q: Tensor, store: Store, mask: Any, scale: float | None) -> None:
        """Look at the queries of this step, [batch, heads, queries, qk_dim], whose keys were just appended."""
        ...

    def choose(self, store: Store, coming: int) -> Tensor | None:
        """The tokens to keep before `coming` new ones, int64 [batch, kv_heads, kept], ascending; None: all stay."""
        ...

    def keep(self, index: Tensor) -> None:
        """The store keeps only these."""
        ...

    def crop(self, tokens: int) -> None:
        """The store now has its first `tokens` tokens only, of those that it had."""
        ...

    def select(self, rows: Tensor) -> None:
        """As `Store.select`."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A word that says which tokens go when there are more than `budget`; see `regard.cache.evict`.

    `KVCache` asks at the start of each `append` that adds tokens, so what `append` hands out always holds all new ones.
    """

    @property
    def budget(self) -> int | float:
        """Tokens that are kept from one append to the next; below 1, a share of those that were seen."""
        ...

    @property
    def recent(self) -> int | None:
        """So many of the last tokens are never forgotten, so they may be cropped; 0, None: nothing is promised."""
        ...

    def start(self) -> Watch:
        """What one cache keeps of what the policy looks at, empty."""
        ...


_STORES: dict[tuple[type[Layout], bool], tuple[str, str]] = {
    (Contiguous, False): ("regard.cache.dense", "DenseStore"),
    (Contiguous, True): ("regard.cache.quantised", "QuantisedStore"),
    (Rolling, False): ("regard.cache.rolling", "RollingStore"),
    (Rolling, True): ("regard.cache.rolling_codes", "RollingCodes"),
    (Latent, False): ("regard.cache.latent", "LatentStore"),
    (Latent, True): ("regard.cache.latent", "LatentStore"),
    (Paged, False): ("regard.cache.paged", "PagedStore"),
    (Paged, True): ("regard.cache.paged", "PagedStore"),
}
"""The store of a layout, plain or with a codec that writes codes. Imported when first asked for."""


def store_for(layout: Layout, codec: Codec | torch.dtype | None, form: Form) -> Store:
    """An empty store of this layout.

    Raises:
        ProblemError: the form does not fit the layout.
    """
    module, name = _STORES[type(layout), isinstance(codec, Codec)]
    return getattr(importlib.import_module(module), name)(layout, codec, form)


def has_store(layout: object) -> bool:
    """Whether it is a layout that caches know."""
    return (type(layout), False) in _STORES


def memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that may be written to in and out of `torch.inference_mode`, whichever it is now. Nothing is in it yet."""
    if torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.inference_mode(mode=False):
        return torch.empty(shape, dtype=dtype, device=device)


def picked(t: Tensor, rows: Tensor) -> Tensor:
    """Batch rows of t, in memory as `memory` makes it."""
    made = memory((len(rows), *t.shape[1:]), t.dtype, t.device)
    return torch.index_select(t, 0, rows, out=made)


def describe_tensor(t: Tensor) -> str:
    """Type, shape and device, as errors name them."""
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"


def check_has_data(t: Tensor, what: str) -> None:
    """Raise `ProblemError` unless the tensor holds numbers, which `what` goes by."""
    if is_without_data(t):
        raise ProblemError(
            f"{what} goes by numbers, and a tensor on meta, or a fake one, has none: leave it out there, or take real "
            "tensors."
        )
