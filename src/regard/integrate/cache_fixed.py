"""Layers of a cache in memory of a fixed size, as `torch.compile` needs it: transformers' own, with checks."""

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from regard.cache.store import describe_tensor
from regard.errors import ProblemError
from regard.integrate.cache_layers import check_crop


class FixedLayer(StaticLayer):
    """One layer's keys and values in memory of a fixed size; an error says when it is full.

    `update` returns the slots of future tokens as well; the mask hides them.
    """

    is_croppable = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens in place and return the whole memory, [batch, kv_heads, capacity, dim].

        Raises:
            ProblemError: they exceed the capacity; the cache is unchanged. Checked on the CPU, outside of graphs.
        """
        check_form(self, key_states, value_states)
        self._check_room(key_states)
        return super().update(key_states, value_states)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise, and change nothing."""
        check_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, whose count is a negative number: the next tokens overwrite them."""
        self.check_crop(tokens_to_remove)
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

    def _check_room(self, new: Tensor) -> None:
        if not torch.compiler.is_compiling() and new.device.type == "cpu":
            check_room(int(self.cumulative_length), new.shape[2], self.max_cache_len)


class FixedWindowLayer(FixedLayer, StaticSlidingWindowLayer):
    """One layer's keys and values of a window, or a chunk, in memory of a fixed size.

    Memory of the whole window never gets full: the first tokens leave it. Memory smaller than the window keeps all
    tokens, so an error says when it is full.

    Args:
        max_cache_len: the capacity in tokens; more than the window are never kept.
        sliding_window: tokens that a query sees, itself included.
    """

    def __init__(self, max_cache_len: int, sliding_window: int, **kwargs: Any) -> None:
        super().__init__(max_cache_len, sliding_window)
        self.sliding_window = sliding_window
        self._is_window_alone = max_cache_len > sliding_window

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the last tokens can be removed up to the capacity of the cache, as none leaves the window before."""
        return not self._is_window_alone

    def check_crop(self, tokens_to_remove: int) -> None:
        super().check_crop(tokens_to_remove)
        seen, kept = self.cumulative_length_int, self.max_cache_len
        if tokens_to_remove and seen > kept and seen + tokens_to_remove > 0:
            raise ProblemError(
                f"crop({tokens_to_remove}): the first {seen - kept} of {seen} tokens have left the window of {kept}, "
                "in memory of a fixed size, so none can be removed. Use Contiguous() and activate_past_recording(), "
                "or call reset()."
            )

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.cumulative_length_int = max(self.cumulative_length_int + tokens_to_remove, 0)

    def __repr__(self) -> str:
        return f"FixedWindowLayer({self.cumulative_length_int:,} tokens, memory for {self.max_cache_len:,})"

    def _check_room(self, new: Tensor) -> None:
        if self.max_cache_len < self.sliding_window:
            check_room(self.cumulative_length_int, new.shape[2], self.max_cache_len)


def check_form(layer: StaticLayer, k: Tensor, v: Tensor) -> None:
    """Raise `ProblemError` unless new tokens have the shape and dtype that a layer of a fixed size was made for."""
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
