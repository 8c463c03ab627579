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
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal
from regard.describe.mask_by_table import TensorMask
from regard.errors import ProblemError, RefusalError
from regard.integrate.cache_evicting import latest
from regard.integrate.implementation import attends_by_itself, is_known_to_ask
from regard.integrate.layer_mask import LayerMask
from regard.integrate.masks import MaskRequest, Predicate, is_of_distances, is_of_step, real_keys, to_mask

_CPU = torch.device("cpu")
"""Comparing takes 0.4 us in a pass, reading `device.type` 16."""

COMPUTE_WITH_MASKS = {
    "doge": sdpa_mask,
    "deepseek_v4": eager_mask,
    "gemma4_audio": eager_mask,
    "informer": eager_mask,
    "nllb-moe": eager_mask,
}
"""Models that compute with their mask outside of attention, and what makes the dense tensor that they expect at once.

A `LayerMask` turns into a dense bool tensor when code computes with it, but cannot notice `isinstance(mask, BlockMask)`
(Doge then leaves it out) or `isinstance(mask, Tensor)`, and `generate` passes on no mask of another type. The others
take floats, 0 for a key that is kept, where True would mean the opposite: DeepSeek-V4 joins its mask and a bias of 0
and -inf, the router of NLLB-MoE finds padding by its mask, and the audio encoder of Gemma 4 and the sparse attention of
Informer attend by themselves. They get no mask where eager has none: Informer's would not fit its halved encoder."""


ADD_THEIR_MASK = frozenset({"bigbird_pegasus", "git"})
"""Models whose own attention adds the mask to its scores. While torch traces they get the floats of eager attention:
there, no `LayerMask` turns into floats when it is added, and a bool would add 1."""


_DEFAULT: Predicate = inspect.signature(sdpa_mask).parameters["mask_function"].default
"""The mask function of a call that names none."""


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

    In a trace, models of `ADD_THEIR_MASK` get floats.

    It has the parameters of transformers' `sdpa_mask`. `q_offset` may be the cache's own counter, which the first layer
    increases: it is read here, once; for a step of decoding on a GPU it is copied there, and the host does not wait.

    Raises:
        ProblemError: an attention mask that is not [batch, tokens], where one of four dimensions does not come here; or
            a model that computes attention by itself, and would read the mask in another way; or one of that kind with
            attention classes of a user's own that `use_regard` has not seen.
        RefusalError: in `sharded_masks`, for a model that computes with its masks.
    """
    _check(config, attention_mask)
    model_type = getattr(config, "model_type", "")
    make_dense, function = COMPUTE_WITH_MASKS.get(model_type), mask_function or _DEFAULT
    if not is_compiling():  # dynamo cannot trace these
        latest.set(None)  # a pass begins: the one before may have failed in front of its attention
        if (make := _sharded.get()) is not None:
            _check_shardable(model_type, make_dense)
            return make(function, batch_size, q_length, kv_length, device, use_vmap, attention_mask)
    if make_dense is not None or _is_traced(q_offset, attention_mask, device):
        called: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        called |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask, "device": device}
        called |= {"mask_function": function, "use_vmap": use_vmap, "allow_is_causal_skip": False}
        return _dense(model_type, called, kwargs)
    shape = batch_size, 1, q_length, kv_length
    if mask_function is causal_mask_function and attention_mask is None and type(q_offset) is int:  # most calls
        return LayerMask(Causal(), shape, q_offset - kv_offset, device, dropped=kv_offset)
    if q_length == 1 and (step := _of_step(function, shape, q_offset, kv_offset, attention_mask, use_vmap, device)):
        return step
    first = int(q_offset)
    request = MaskRequest(function, batch_size, q_length, kv_length, first, kv_offset, attention_mask, use_vmap, device)
    return LayerMask(to_mask(request), shape, request.offset, device, attention_mask, dropped=kv_offset)


def _check(config: Any, attention_mask: Tensor | None) -> None:
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ProblemError(
            f"attention_mask is {list(attention_mask.shape)}: expected [batch, tokens], or four dimensions, [batch, "
            "heads, queries, keys]."
        )
    if attends_by_itself(type(config).__module__) and not is_known_to_ask(id(config)):
        raise ProblemError(
            f'attn_implementation="regard" with {type(config).__name__}: models of this kind compute attention in '
            "their own file and never ask transformers' AttentionInterface. Make the model without this argument; if "
            "it is a part of another model, or has attention classes of your own, which ask, call use_regard(model) "
            "with the whole."
        )


def _check_shardable(model_type: str, make_dense: Callable[..., Any] | None) -> None:
    if make_dense is not None:  # such a model would read the tokens of other ranks in its own code
        raise RefusalError(
            f"a {model_type} model in context_parallel: it computes with its mask, over the keys of all tokens, before "
            "attention does. Run this call in one process, outside of the context."
        )


def _dense(model_type: str, called: dict[str, Any], more: dict[str, Any]) -> Any:
    """The mask of transformers: as a model that computes with it expects it, else as bools.

    Args:
        model_type: of the model.
        called: the arguments of `mask` that every function of transformers takes.
        more: the dtype, and whether a mask that hides nothing may be left out.
    """
    make = COMPUTE_WITH_MASKS.get(model_type, eager_mask if model_type in ADD_THEIR_MASK else None)
    return sdpa_mask(**called) if make is None else make(**more | called)


def _of_step(
    function: Predicate,
    shape: tuple[int, int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    use_vmap: bool,
    device: torch.device | str,
) -> LayerMask | None:
    """The mask of one query for each row on a GPU, made without a read on the host; None if there is none."""
    (batch, *_, keys), by_tensor = shape, isinstance(q_offset, Tensor)
    if not (q_offset.is_cuda if isinstance(q_offset, Tensor) else padding is not None and padding.is_cuda):
        return None
    offset = q_offset - kv_offset  # a new tensor: the cache increases its own

    def request(position: int, padding: Tensor | None) -> MaskRequest:
        return MaskRequest(function, batch, 1, keys, position, kv_offset, padding, use_vmap, device)

    # for a position in a tensor the last one: no window that hides a key at an earlier one is left out
    keep = to_mask(request(kv_offset + keys - 1 if isinstance(q_offset, Tensor) else q_offset, None))
    if not (is_of_step(keep) if by_tensor else is_of_distances(keep)):
        return None
    if padding is None:
        return LayerMask(keep, shape, offset, device, dropped=kv_offset)
    shown = TensorMask(real_keys(padding, keys, kv_offset)[:, None, None].bool())
    keep = shown if keep is None else keep & shown

    def read() -> Mask | None:
        return to_mask(request(int(offset) + kv_offset, padding))

    return LayerMask(keep, shape, offset, device, padding, read, kv_offset)


MakeMask = Callable[..., LayerMask]
"""A function of (mask function, batch, queries, keys, device, use_vmap, padding)."""

_sharded: ContextVar[MakeMask | None] = ContextVar("sharded", default=None)


@contextmanager
def sharded_masks(make: MakeMask) -> Generator[None]:
    """Let `make` make the masks of the models that are called inside, in this thread: `integrate/sharded.py`."""
    token = _sharded.set(make)
    try:
        yield
    finally:
        _sharded.reset(token)


def _is_traced(q_offset: int | Tensor, attention_mask: Tensor | None, device: torch.device | str) -> bool:
    """Whether a mask's arguments have no values yet. `is_tracing` cannot trace a symbolic int.

    It takes 30 us in a pass, and says the same of an int as of no tensor: whether anything is traced, or captured on a
    GPU.
    """
    if is_compiling():
        return True
    if attention_mask is None and type(q_offset) is int and device == _CPU:
        return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - it is documented
    return is_tracing(attention_mask) or (type(q_offset) is not int and is_tracing(q_offset))
