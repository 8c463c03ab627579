"""What torch's dispatcher calls for `aten::scaled_dot_product_attention` on the CPU, while regard is on.

The dispatcher is the one place that every caller passes: Python code whatever name it imported, torch's own modules,
C++, every thread, and torch.compile while it traces. Autocast, nested tensors, vmap and other devices are dealt with
before it, by torch as ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, get_num_threads
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function_variadic

from regard.errors import RegardError
from regard.override import report
from regard.override.decide import FEW_QUERIES, SMALL, is_few, is_small, why_torch
from regard.override.mask_content import readable
from regard.torch_internals import (
    attention_of_torch,
    choice_of_torch,
    current_func_transform,
    fused_attention_of_torch,
    is_any_autocast_enabled,
    is_flash_enabled,
    replace_in_torch,
    skip_frames,
)
from regard.torch_signature import attend_as_torch, is_causal_bias

attention_of_functional = F.scaled_dot_product_attention
"""torch's function, which calls the dispatcher."""

FUSED = 1
"""What torch calls its fused kernel, `SDPBackend.FLASH_ATTENTION`."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function, by regard where it is faster; torch's own errors where the arguments are wrong."""
    why = why_torch(query, key, value, attn_mask, dropout_p, is_causal)
    if why is not None and not report.is_on():
        return attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def ours() -> Tensor:
        keeps, added = readable(attn_mask, query.numel() * key.shape[-2], query.dtype)
        out = attend_as_torch(query, key, value, added, 0.0, is_causal, scale, enable_gqa, "native", keeps)
        return _in_torchs_layout(out, query)

    def theirs() -> Tensor:
        return attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    out = None
    if why is None:
        try:
            out = ours()
        except RegardError as error:
            why = str(error).splitlines()[0]
    if report.is_on() and query.ndim > 1:
        for row in report.count(query.shape, key.shape[-2], query, why, _kind(attn_mask, is_causal, out)):
            row.time(ours, theirs)
    return theirs() if out is None else out


_passed: dict[tuple[object, ...], str | None] = {}
"""Why a call is passed on at once to the fused kernel, by all that this depends on; None for other calls."""

FORMS = 1024
"""The most calls of which this is known."""


def small_first(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.scaled_dot_product_attention` itself, with a short way to torch's kernel for small calls.

    The way from torch's dispatcher to Python and back takes 3 us, and 25 us where other code was run in between: too
    much for the smallest models. So a call that torch runs faster, since it is small or has few queries, goes to the
    fused kernel at once, if torch would choose that. One key says so: between other code each function takes 2 us.
    """
    if has_torch_function_variadic(query, key, value, attn_mask):
        return _overridden(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if (
        attn_mask is None
        and not (dropout_p or enable_gqa or is_dynamo_compiling() or is_any_autocast_enabled())
        and type(query) is type(key) is type(value) is Tensor
        and fused_attention_of_torch is not None
        and current_func_transform() is None
    ):
        try:
            form = (
                query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype,
                key.dtype, value.dtype, query.is_cpu, key.is_cpu, value.is_cpu, is_causal, is_flash_enabled(),
                get_num_threads(),
            )  # fmt: skip
        except RuntimeError:  # of tensors without strides
            form = None
        why = form and (_passed[form] if form in _passed else _why_at_once(form, query, key, value))
        if why:
            if report.is_on():
                report.count(query.shape, key.shape[2], query, why, ", causal" if is_causal else "")
            return fused_attention_of_torch(query, key, value, 0.0, is_causal, scale=scale)[0]
    return attention_of_functional(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _overridden(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """A call for the `__torch_function__` of a tensor's class or of a mode, with arguments as callers write them."""
    options: dict[str, Any] = {
        "attn_mask": attn_mask, "dropout_p": dropout_p or None, "is_causal": is_causal or None, "scale": scale,
        "enable_gqa": enable_gqa or None,
    }  # fmt: skip
    options = {name: given for name, given in options.items() if given is not None}
    if is_dynamo_compiling():
        if is_causal_bias(attn_mask):  # compares with `torch.nn.functional`, which no traced code may write to
            return type(attn_mask)._dispatch(query, key, value, **options)
        return attention_of_functional(query, key, value, **options)
    with short_way.left():
        return attention_of_functional(query, key, value, **options)


class _ShortWay:
    """Whether `torch.nn.functional` has `small_first`.

    It has torch's function while a call is overridden. For code in `__torch_function__` finds out what is called by
    `func is torch.nn.functional.scaled_dot_product_attention`, as that of `torch.nn.attention.bias` does, or looks it
    up in a table of what had that name when it was imported.

    Attributes:
        is_on: whether it is to have `small_first`.
        overridden: how many overridden calls are being run, in all threads.
    """

    is_on = False
    overridden = 0

    def __init__(self) -> None:
        self._lock = Lock()

    def turn(self, on: bool) -> None:
        """Install or remove it."""
        with self._lock:
            self.is_on = on
            replace_in_torch(attention_of_functional, small_first if on else attention_of_functional, F)
            self._settle()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Have torch's function there."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self.overridden += more
            self._settle()

    def _settle(self) -> None:
        short = self.is_on and not self.overridden
        F.scaled_dot_product_attention = small_first if short else attention_of_functional


short_way = _ShortWay()


def _why_at_once(form: tuple[object, ...], query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """What `_passed` remembers."""
    sizes = (*query.shape, *key.shape, *value.shape)
    if len(query.shape) != 4 or len(key.shape) != 4 or any(type(n) is not int for n in sizes):
        return None  # torch.jit traces sizes as tensors
    if not (query.is_cpu and key.is_cpu and value.is_cpu):
        return None
    queries, keys = query.shape[2], key.shape[2]
    why = SMALL if is_small(query.numel() * keys, queries, keys, query.dtype) else None
    if why is None and is_few(queries, query.dtype):
        why = FEW_QUERIES
    if why and choice_of_torch(query, key, value, None, 0.0, form[-3]) != FUSED:
        why = None
    if len(_passed) >= FORMS:
        _passed.clear()
    _passed[form] = why
    return why


def _kind(mask: Tensor | None, causal: bool, out: Tensor | None) -> str:
    """The mask, and whether gradients flow, for a report."""
    masked = ", causal" if causal else "" if mask is None else ", bool mask" if mask.dtype == torch.bool else ", bias"
    return masked + (", gradients" if out is not None and out.requires_grad else "")


def _in_torchs_layout(out: Tensor, query: Tensor) -> Tensor:
    """The output token by token in memory where the query is, since programs call `.transpose(1, 2).view(...)` on it.

    Only the operator of a traced graph does not do so.
    """
    if out.ndim != 4 or out.shape[3] != query.shape[3]:
        return out.contiguous()
    if query.stride(1) < query.stride(2) and out.stride(1) > out.stride(2):
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out


def attention_below_autograd(*arguments: object, **options: object) -> Tensor:
    """The same where autograd is not asked: in inference mode, and inside of an operator with its own derivative."""
    with torch.no_grad():
        return attention(*arguments, **options)  # pyright: ignore[reportArgumentType]


for _kernel in (attention, attention_below_autograd, small_first):
    skip_frames(_kernel)
