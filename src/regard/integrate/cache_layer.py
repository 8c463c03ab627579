"""The layers of a `RegardCache`: what transformers asks of one layer's cache, answered by a `KVCache`.

    update(k, v)                what attention reads: tensors, or handles where the model only hands them on
    get_mask_sizes(queries)     how many keys that will be, and at which position the first of them stands
    crop, reorder_cache ...     drafts that were not accepted, beams

Those that forget tokens stand in `cache_forgetting.py`, those of latents in `latent.py`.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from regard.cache.kv_cache import KVCache
from regard.cache.store import CachedTensor, describe_tensor
from regard.errors import ProblemError
from regard.integrate.cache_move import move
from regard.storage.stored import Contiguous, Rolling, StoredTensor

F = TypeVar("F", bound=Callable[..., Any])


def untraced(method: F) -> F:
    """A method at which a graph of `torch.compile` ends: what it gives has no fixed shape, as a `FixedLayer`'s has."""
    return cast(F, torch.compiler.disable(method))


class KeptLayer(CacheLayerMixin):
    """One layer's keys and values in a `KVCache`.

    Args:
        make: gives the `KVCache`, empty.
        takes_handles: asked at each update: whether what reads the cache takes `StoredTensor` handles.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, make: Callable[[], KVCache], takes_handles: Callable[[], bool]) -> None:
        # transformers' own __init__ sets `keys` and `values`, which are read out of the KVCache here.
        self.kv, self._make, self._takes_handles = make(), make, takes_handles
        self._like: tuple[Tensor, Tensor] | None = None  # no tokens, of the form of those that came

    # ---- what attention reads ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: memory is made at the first update."""

    @untraced
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Keep the keys and values of new tokens; all that are kept come back, tensors or `StoredTensor` handles."""
        found = self._append(key_states, value_states)
        if self._like is None:
            k, v = (t.new_empty((*t.shape[:2], 0, t.shape[3])) for t in (key_states, value_states))
            self._like, self.batch_size = (k, v), key_states.shape[0]
        return self._handles(found) if self._takes_handles() else self._tensors(found)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the next update hands out, position of the first of them)."""
        return self.kv.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens were seen: the position of the next one."""
        return self.kv.tokens_seen

    def get_max_length(self) -> int:
        """The capacity; -1 where there is none."""
        layout = self.kv.layout
        capacity = layout.capacity if isinstance(layout, Contiguous) else None
        return -1 if capacity is None else capacity

    @property
    def is_initialized(self) -> bool:
        """Whether anything was kept."""
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
            kv.check_crop(max(kv.tokens_seen + tokens_to_remove, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last tokens, given as a negative number.

        Raises:
            ProblemError: a positive number; or tokens that the next one would look back on are no longer there.
        """
        self.check_crop(tokens_to_remove)
        if tokens_to_remove and self.kv.tokens_seen:
            self.kv.crop(max(self.kv.tokens_seen + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` is."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self.kv.tokens_seen:
            self._select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows only: numbers, or a bool for each."""
        if self.kv.tokens_seen:
            self._select(torch.arange(self.batch_size)[indices.cpu()])

    def reset(self) -> None:
        """Forget everything."""
        self.kv.reset()
        self._like = None
        if hasattr(self, "batch_size"):  # as transformers asks
            del self.batch_size

    def offload(self) -> None:
        """Move what is kept to the memory of the CPU."""
        if self._like is not None:
            move(self.kv, "cpu")

    def prefetch(self) -> None:
        """Move it back to where its keys came from."""
        if self._like is not None:
            move(self.kv, self._like[0].device)

    def __repr__(self) -> str:
        return repr(self.kv)

    @property
    def caches(self) -> list[KVCache]:
        """What it keeps its tokens in."""
        return [self.kv]

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _append(self, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        return self._stored(self.kv, k, v)

    def _stored(self, kv: KVCache, k: Tensor, v: Tensor) -> tuple[CachedTensor, CachedTensor]:
        return kv.append(k, v)

    def _handles(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        return found

    def _tensors(self, found: tuple[CachedTensor, CachedTensor]) -> tuple[Any, Any]:
        return dense(found[0]), dense(found[1])

    def _read(self, side: int) -> Tensor | None:
        return None if self._like is None else self._tensors(self._append(*self._like))[side]

    def _select(self, rows: Tensor) -> None:
        self.kv.select(rows)
        if self._like is not None:
            self.batch_size = len(rows)
            k, v = (t.new_empty((len(rows), *t.shape[1:])) for t in self._like)
            self._like = k, v


class WindowLayer(KeptLayer):
    """A layer whose attention looks back over a window: the last tokens that a next one may see are kept, exactly.

    While drafts are tried out (`activate_past_recording`), what leaves the window waits until `crop` has said how many
    of them stay.

    Args:
        window: tokens that a query sees, itself among them.
    """

    is_sliding = True

    def __init__(self, window: int, make: Callable[[Any], KVCache], takes_handles: Callable[[], bool]) -> None:
        super().__init__(lambda: make(Rolling(window, sinks=0)), takes_handles)
        self.window, self.sliding_window = window - 1, window
        self._make_whole = lambda: make(Contiguous())
        self.record_past, self._before = False, 0

    def activate_past_recording(self) -> None:
        """From now on, wait for `crop` before what leaves the window is forgotten."""
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
                f"crop({tokens_to_remove}): of the {seen} tokens that were seen the first {gone} have left the "
                f"window of {self.sliding_window}, so at most {seen - gone - self.window} can be removed. Call "
                "activate_past_recording() before tokens that may be taken back, or start anew with reset()."
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
        """Whether all tokens are kept just now."""
        return isinstance(self.kv.layout, Contiguous)

    def _append(self, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        if self.record_past != self.is_recording:
            self._move(self._make_whole() if self.record_past else self._make())
        visible = min(self.kv.tokens, self.window) + k.shape[2]
        keys, values = self.kv.append(k, v)
        if self.is_recording:
            return dense(keys)[:, :, -visible:], dense(values)[:, :, -visible:]
        return keys, values

    def _move(self, other: KVCache) -> None:
        """Go on in another cache, with what of this one may still be seen."""
        seen = self.get_seq_length()
        kept = min(self.kv.tokens, self.window)
        if kept and self._like is not None:
            keys, values = (dense(found)[:, :, -kept:] for found in self.kv.append(*self._like))
            other.append(keys, values)
        self.kv, self._before = other, seen - other.tokens_seen


class FixedLayer(StaticLayer):
    """One layer's keys and values in memory of a fixed size, as `torch.compile` needs it; says so when it is full.

    It is transformers' own otherwise. Slots of tokens still to come are handed out as well; the mask hides them.
    """

    is_croppable = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens in place; the whole memory comes back, [batch, kv_heads, capacity, dim].

        Raises:
            ProblemError: there is no room for them; the cache is as it was. Looked at on the CPU, outside of graphs.
        """
        check_form(self, key_states, value_states)
        if not torch.compiler.is_compiling() and key_states.device.type == "cpu":
            check_room(int(self.cumulative_length), key_states.shape[2], self.max_cache_len)
        return super().update(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last tokens, given as a negative number: the next are written over them."""
        check_crop(tokens_to_remove)
        self.cumulative_length.add_(tokens_to_remove).clamp_(min=0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, in new memory."""
        if self.is_initialized:
            self.reorder_cache(cast(Any, torch.arange(cast(Tensor, self.keys).shape[0]).repeat_interleave(repeats)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows only, in new memory."""
        if self.is_initialized:
            self.reorder_cache(cast(Any, torch.arange(cast(Tensor, self.keys).shape[0])[indices.cpu()]))

    def __repr__(self) -> str:
        return f"FixedLayer({int(self.cumulative_length):,} tokens of {self.max_cache_len:,})"


def dense(found: CachedTensor) -> Tensor:
    """What a cache hands out, as a tensor."""
    return found.dense() if isinstance(found, StoredTensor) else found


def check_crop(tokens_to_remove: int) -> None:
    """Raise `ProblemError` for a positive number: transformers took it for the length to keep once."""
    if tokens_to_remove > 0:
        raise ProblemError(
            f"crop({tokens_to_remove}): expected how many tokens to remove, as a negative number: "
            f"crop(-{tokens_to_remove})."
        )


def check_form(layer: StaticLayer, k: Tensor, v: Tensor) -> None:
    """Raise `ProblemError` unless new tokens have the form that a layer of a fixed size has memory for."""
    if not layer.is_initialized:
        return
    for name, new, memory in (("k", k, layer.keys), ("v", v, layer.values)):
        form = cast(Tensor, memory)
        if (*new.shape[:2], new.shape[3], new.dtype) != (*form.shape[:2], form.shape[3], form.dtype):
            raise ProblemError(
                f"{name} is {describe_tensor(new)}, and the cache has memory for {describe_tensor(form)}: only the "
                "number of tokens may differ. A new batch needs a new cache."
            )


def check_room(stored: int, new: int, capacity: int) -> None:
    """Raise `ProblemError` where a cache of a fixed size is full."""
    if stored + new > capacity:
        raise ProblemError(
            f"the cache has room for {capacity:,} tokens, and {stored:,} + {new:,} are {stored + new:,}: make it with "
            f"Contiguous(capacity={stored + new}) or more, or with Contiguous(), which grows."
        )
