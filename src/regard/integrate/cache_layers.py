"""The layers of a `RegardCache`: what transformers calls on one layer's cache, computed by a `KVCache`.

    update(k, v)                what attention reads: tensors, or lazy tensors whose source is read in place
    get_mask_sizes(queries)     how many keys that will be, and the position of the first of them
    crop, reorder_cache ...     rejected drafts, beams

Layers with an eviction policy are in `cache_evicting.py`, those of a fixed capacity in `cache_fixed.py`, those of
latents in `cache_latent.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from regard.cache.kv_cache import KVCache
from regard.cache.store import CachedTensor
from regard.errors import ProblemError
from regard.integrate.cache_move import move
from regard.integrate.lazy import LazyTensor
from regard.storage.stored import Contiguous, Rolling, StoredTensor

F = TypeVar("F", bound=Callable[..., Any])


def untraced(method: F) -> F:
    """A method at which `torch.compile` breaks the graph: shapes that it returns change from call to call."""
    return cast(F, torch.compiler.disable(method))


class StoredLayer(CacheLayerMixin):
    """One layer's keys and values in a `KVCache`.

    Args:
        make: makes the `KVCache`, empty.
        is_read_by_regard: is called at each update: whether regard computes the model's attention. If not, `update`
            returns tensors alone.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, make: Callable[[], KVCache], is_read_by_regard: Callable[[], bool]) -> None:
        # transformers' own __init__ sets `keys` and `values`, which are read out of the KVCache here.
        self.kv, self._make, self._is_read_by_regard = make(), make, is_read_by_regard
        self._like: tuple[Tensor, Tensor] | None = None  # keys and values of no tokens, of the form of the first ones
        self.first_use: str | None = None
        """The line of the model's code that computed with keys or values before attention did; None: there is none."""

    # ---- what attention reads ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: memory is made at the first update."""

    @untraced
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append the keys and values of new tokens, and return all that are kept: tensors, or `LazyTensor`s."""
        found = self._append(key_states, value_states)
        if self._like is None:
            k, v = (t.new_empty((*t.shape[:2], 0, t.shape[3])) for t in (key_states, value_states))
            self._like, self.batch_size = (k, v), key_states.shape[0]
        return self._as_read(found)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the next update returns, position of the first of them)."""
        return self.kv.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens were appended: the position of the next one."""
        return self.kv.tokens_seen

    def get_max_length(self) -> int:
        """The capacity; -1 where there is none."""
        layout = self.kv.layout
        capacity = layout.capacity if isinstance(layout, Contiguous) else None
        return -1 if capacity is None else capacity

    @property
    def is_initialized(self) -> bool:
        """Whether there are any tokens."""
        return self.kv.tokens_seen > 0

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All keys as a tensor, [batch, kv_heads, tokens, dim], decoded if need be; None before the first."""
        return self._read(0)

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All values as a tensor."""
        return self._read(1)

    # ---- what generation does with it -------------------------------------------------------------------------------

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise, and change nothing."""
        check_crop(tokens_to_remove)
        for kv in self.caches:
            left = kv.tokens_seen + tokens_to_remove
            if 0 < left < kv.min_crop:
                owner = kv.layout if kv.evict is None else kv.evict
                raise ProblemError(
                    f"crop({tokens_to_remove}): {owner!r} has dropped some of the {kv.tokens_seen} tokens, which the "
                    f"next one would look back on, so at most {kv.tokens_seen - kv.min_crop} can be removed. Start "
                    "anew, with reset()."
                )
            kv.check_crop(max(left, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their count is a negative number.

        Raises:
            ProblemError: a positive number; or the next token would look back on tokens that are no longer kept.
        """
        self.check_crop(tokens_to_remove)
        if tokens_to_remove and self.kv.tokens_seen:
            self.kv.crop(max(self.kv.tokens_seen + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` is."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self.is_initialized:
            self._select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only: their indices, or a bool for each row."""
        if self.is_initialized:
            self._select(torch.arange(self.batch_size)[indices.cpu()])

    def reset(self) -> None:
        """Remove all tokens."""
        self.kv.reset()
        self._like = None
        if hasattr(self, "batch_size"):  # as transformers asks
            del self.batch_size

    def offload(self) -> None:
        """Move all tokens to the memory of the CPU."""
        if self._like is not None:
            move(self.kv, "cpu")

    def prefetch(self) -> None:
        """Move all tokens back to the device that their keys came from."""
        if self._like is not None:
            move(self.kv, self._like[0].device)

    def __repr__(self) -> str:
        return repr(self.kv)

    @property
    def caches(self) -> list[KVCache]:
        """The caches that hold the tokens."""
        return [self.kv]

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _append(self, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        return self._append_to(self.kv, k, v)

    def _append_to(self, kv: KVCache, k: Tensor, v: Tensor) -> tuple[CachedTensor, CachedTensor]:
        return kv.append(k, v)

    def _sources(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        """What the attention function reads."""
        return found

    def _as_read(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        """Tensors as they are; what is stored otherwise as lazy tensors for regard, and decoded for others."""
        if not (isinstance(found[0], StoredTensor) or isinstance(found[1], StoredTensor)):
            return found  # in every step: to find out who reads takes longer
        return self._lazy(found) if self._is_read_by_regard() else self._dense(found)

    def _lazy(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        """Lazy tensors, whose source the attention function reads in place."""
        k, v = (LazyTensor(t, t.shape, t, functools.partial(dense, t), self._note_use) for t in found)
        return k, v

    def _dense(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        return dense(found[0]), dense(found[1])

    def _note_use(self, line: str) -> None:
        self.first_use = self.first_use or line

    def _read(self, side: int) -> Tensor | None:
        return None if self._like is None else self._dense(self._append(*self._like))[side]

    def _select(self, rows: Tensor) -> None:
        self.kv.select(rows)
        if self._like is not None:
            self.batch_size = len(rows)
            k, v = (t.new_empty((len(rows), *t.shape[1:])) for t in self._like)
            self._like = k, v


class WindowLayer(StoredLayer):
    """A layer whose attention looks back over a window: the last tokens that a next one may see are kept, exactly.

    While drafts are tried (`activate_past_recording`), tokens that leave the window are kept until `crop` has removed
    the rejected drafts.

    Args:
        window: tokens that a query sees, itself included.
    """

    is_sliding = True

    def __init__(self, window: int, make: Callable[[Any], KVCache], is_read_by_regard: Callable[[], bool]) -> None:
        super().__init__(lambda: make(Rolling(window, sinks=0)), is_read_by_regard)
        self.window, self.sliding_window = window - 1, window
        self._make_whole = lambda: make(Contiguous())
        self.record_past, self._before = False, 0

    def activate_past_recording(self) -> None:
        """Keep what leaves the window from now on, until the next `crop`."""
        self.record_past = True

    def get_seq_length(self) -> int:
        return self._before + self.kv.tokens_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = min(self.kv.tokens, self.window)
        return kept + query_length, self.get_seq_length() - kept

    def get_max_length(self) -> int:
        return self.sliding_window

    def check_crop(self, tokens_to_remove: int) -> None:
        check_crop(tokens_to_remove)
        seen = self.get_seq_length()
        gone, left = seen - self.kv.tokens, seen + tokens_to_remove
        if gone and 0 < left < gone + self.window:
            raise ProblemError(
                f"crop({tokens_to_remove}): the first {gone} of {seen} tokens have left the window of "
                f"{self.sliding_window}, so at most {seen - gone - self.window} can be removed. Call "
                "activate_past_recording() before you append tokens that may be removed again, or call reset()."
            )

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if tokens_to_remove and self.get_seq_length() + tokens_to_remove <= 0:
            self.reset()
        elif tokens_to_remove:
            self.kv.crop(self.kv.tokens_seen + tokens_to_remove)
        if self.is_recording and self.kv.tokens > 2 * self.window:
            self._move(self._make_whole())

    def reset(self) -> None:
        super().reset()
        self.kv, self._before = self._make(), 0

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    @property
    def is_recording(self) -> bool:
        """Whether all tokens are kept at present."""
        return isinstance(self.kv.layout, Contiguous)

    def _append(self, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        if self.record_past != self.is_recording:
            self._move(self._make_whole() if self.record_past else self._make())
        if k.shape[2] > self.sliding_window and self.kv.codec is None and not self.is_recording:
            return self._append_long(k, v)
        visible = min(self.kv.tokens, self.window) + k.shape[2]
        keys, values = self.kv.append(k, v)
        if self.is_recording:
            return dense(keys)[:, :, -visible:], dense(values)[:, :, -visible:]
        return keys, values

    def _append_long(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """More tokens than the window: attention reads them as they are, and only the last ones are stored.

        So a model holds the keys of a whole prompt for one layer at a time.
        """
        kept, keys, values = min(self.kv.tokens, self.window), k, v
        if kept:
            stored = self.kv.append(k[:, :, :0], v[:, :, :0])  # which also checks that k and v fit
            keys, values = (torch.cat([dense(t)[:, :, -kept:], x], 2) for t, x in zip(stored, (k, v), strict=True))
        other = self._make()
        other.append(k[:, :, -self.sliding_window :], v[:, :, -self.sliding_window :])
        self.kv, self._before = other, self.get_seq_length() + k.shape[2] - other.tokens_seen
        return keys, values

    def _read(self, side: int) -> Tensor | None:
        """The tokens that a next one sees, as in transformers: DiffusionGemma's decoder joins its own to them."""
        found = super()._read(side)
        return None if found is None else found[:, :, max(found.shape[2] - self.window, 0) :]

    def _move(self, other: KVCache) -> None:
        """Continue in another cache, with the tokens of this one that later queries may see."""
        seen = self.get_seq_length()
        kept = min(self.kv.tokens, self.window)
        if kept and self._like is not None:
            keys, values = (dense(t)[:, :, -kept:] for t in self.kv.append(*self._like))
            other.append(keys, values)
        self.kv, self._before = other, seen - other.tokens_seen


def dense(t: CachedTensor) -> Tensor:
    """Keys or values of a cache as a tensor."""
    return t.dense() if isinstance(t, StoredTensor) else t


def of_one_type(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values; where `torch.autocast` left them in two types, as RoPE in float32 does, in its own."""
    if k.dtype == v.dtype or not torch.is_autocast_enabled(k.device.type):
        return k, v
    dtype = torch.get_autocast_dtype(k.device.type)
    return k.to(dtype), v.to(dtype)


class CrossLayer(DynamicLayer):
    """The keys and values of images, as they come. They are no tokens of the text, so `crop` leaves them."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Forget them; the layer of transformers 5.17 fills them with zeros instead."""
        self.keys = self.values = None
        self.is_initialized = False


def check_crop(tokens_to_remove: int) -> None:
    """Raise `ProblemError` for a positive number: older versions of transformers took it for the length to keep."""
    if tokens_to_remove > 0:
        raise ProblemError(
            f"crop({tokens_to_remove}): expected how many tokens to remove, as a negative number: "
            f"crop(-{tokens_to_remove})."
        )
