"""The mask function that models of transformers call: a regard mask for all layers of a forward pass.

It makes a regard mask (`masks.py`), which reaches the attention of each layer as one value (`layer_mask.py`), so a plan
made for the first layer serves them all. `generate` makes the masks outside of the step that it compiles, so they are
regard masks there, too, and their offset is a tensor: one graph serves all steps. While torch.compile or torch.export
traces the making of masks, the mask is the dense one of transformers: neither can trace into closures.
"""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_tracing

from regard.integrate.layer_mask import LayerMask
from regard.integrate.masks import MaskRequest, Predicate, is_of_step, to_mask

_COMPUTE_WITH_MASKS = frozenset({"doge", "deepseek_v4"})
"""Models that test the type of their mask before they compute with it; they get the dense tensor at once.

A `LayerMask` turns dense when code computes with it, but cannot notice `isinstance(mask, BlockMask)` (Doge then leaves
it out) or `isinstance(mask, Tensor)`, and `generate` passes on no mask of another type."""


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Predicate | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """The mask of one forward pass, for all layers of a kind: a `LayerMask`; while tracing, a dense bool tensor.

    It has the parameters of transformers' `sdpa_mask`. `q_offset` may be the cache's own counter, which the first layer
    increases: it is read here, once; for a step of decoding on a GPU it is copied there, and the host does not wait.
    """
    make = None if is_compiling() else _sharded.get()  # dynamo cannot trace it
    if make is not None:
        function = mask_function or inspect.signature(sdpa_mask).parameters["mask_function"].default
        return make(function, batch_size, q_length, kv_length, device, use_vmap, attention_mask)
    called: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    called |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask, "device": device}
    if mask_function is not None:
        called["mask_function"] = mask_function
    if _is_traced(q_offset, attention_mask) or getattr(config, "model_type", "") in _COMPUTE_WITH_MASKS:
        return sdpa_mask(**called, use_vmap=use_vmap, allow_is_causal_skip=False)
    function = mask_function or inspect.signature(sdpa_mask).parameters["mask_function"].default
    shape = batch_size, 1, q_length, kv_length
    if isinstance(q_offset, Tensor) and q_offset.is_cuda and q_length == 1 and attention_mask is None:
        # the last position: no window that hides a key at an earlier one is left out
        end = kv_offset + kv_length - 1
        keep = to_mask(MaskRequest(function, batch_size, 1, kv_length, end, kv_offset, None, use_vmap, device))
        if is_of_step(keep):
            return LayerMask(keep, shape, q_offset - kv_offset, device)
    first = int(q_offset)
    request = MaskRequest(function, batch_size, q_length, kv_length, first, kv_offset, attention_mask, use_vmap, device)
    return LayerMask(to_mask(request), shape, request.offset, device, attention_mask)


MakeMask = Callable[..., LayerMask]
"""From (mask function, batch, queries, keys, device, use_vmap, padding)."""

_sharded: ContextVar[MakeMask | None] = ContextVar("sharded", default=None)


@contextmanager
def sharded_masks(make: MakeMask) -> Generator[None]:
    """Let `make` make the masks of the models that are called inside, in this thread: `integrate/sharded.py`."""
    token = _sharded.set(make)
    try:
        yield
    finally:
        _sharded.reset(token)


def _is_traced(q_offset: int | Tensor, attention_mask: Tensor | None) -> bool:
    """Whether a mask's arguments have no values yet. `is_tracing` cannot trace a symbolic int.

    It takes 20 us, and says the same of an int as of no tensor: whether anything is traced.
    """
    if torch.compiler.is_compiling() or is_tracing(attention_mask):
        return True
    return type(q_offset) is not int and is_tracing(q_offset)
