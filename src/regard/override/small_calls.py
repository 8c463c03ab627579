"""`torch.nn.functional.scaled_dot_product_attention` while regard is on: a short way to torch's kernel for small calls.

The way from torch's dispatcher to Python and back takes 3 us, and 25 us where other code was run in between: too much
for the smallest models. So a call that torch runs faster, since it is small or has few queries, goes to the fused
kernel at once, if torch would choose that.

Between other code each function that Python calls takes 0.3 us, and a layer of the smallest models 200. So calls like
the last ones are known by one function of C++, a guard of torch.compile. It compares the class, dtype, device, sizes,
strides and requires_grad of all three tensors, and the settings of the thread that change what an operator does:
inference mode, autocast, torch.func, dispatch modes. All other calls are known by a key.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, get_num_threads
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function_variadic

from regard.override import report
from regard.override.decide import FEW_QUERIES, SMALL, is_few, is_small
from regard.torch_internals import (
    attention_of_functional,
    choice_of_torch,
    current_func_transform,
    fused_attention_of_torch,
    guard_of,
    is_any_autocast_enabled,
    is_flash_enabled,
    replace_in_torch,
    skip_frames,
)
from regard.torch_signature import is_causal_bias

FUSED = 1
"""What torch calls its fused kernel, `SDPBackend.FLASH_ATTENTION`."""


class _Passed(NamedTuple):
    """A call that is passed on at once.

    Attributes:
        is_like: whether three tensors, in the settings of this thread, are like those of the call.
        causal: its is_causal.
        threads: torch's number of threads.
        tallies: who counted calls then, and `rows` where.
    """

    is_like: Callable[[Tensor, Tensor, Tensor], bool]
    causal: bool
    threads: int
    tallies: report.Tallies
    rows: list[report.Row]


LAST = 4
"""The most calls that are known by a guard: one that does not fit costs 0.2 us."""

_last: tuple[_Passed, ...] = ()
"""The last ones first; replaced as a whole, as other threads read it."""

FORMS = 1024
"""The most calls that are known by a key."""

_reasons: dict[tuple[object, ...], str | None] = {}
"""Why a call is passed on at once to the fused kernel, by all that this depends on; None for other calls."""


def small_first(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's function itself: small calls at once to torch's kernel, others to the dispatcher."""
    if has_torch_function_variadic(query, key, value, attn_mask):
        return _overridden(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if (
        attn_mask is None
        and not (dropout_p or enable_gqa or is_dynamo_compiling())
        and type(query) is type(key) is type(value) is Tensor
        # A nested tensor, also one in torch.func.vmap, would end the process in torch's guard.
        and not (query.is_nested or key.is_nested or value.is_nested)
        and current_func_transform() is None
    ):
        for is_like, causal, threads, tallies, rows in _last:
            if (
                causal is is_causal
                and is_like(query, key, value)
                and is_flash_enabled()
                and threads == get_num_threads()
                and tallies is report.tallies
            ):
                for row in rows:
                    row.calls += 1
                return fused_attention_of_torch(query, key, value, 0.0, is_causal, scale=scale)[0]
        if _is_passed(query, key, value, is_causal):
            return fused_attention_of_torch(query, key, value, 0.0, is_causal, scale=scale)[0]
    return attention_of_functional(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def forget() -> None:
    """Decide about every call anew."""
    global _last  # noqa: PLW0603
    _last = ()
    _reasons.clear()


def _overridden(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """A call for the `__torch_function__` of a tensor's class or of a mode, with arguments as callers write them."""
    options: dict[str, Any] = {
        "attn_mask": attn_mask, "dropout_p": dropout_p or None, "is_causal": is_causal or None, "scale": scale,
        "enable_gqa": enable_gqa or None,
    }  # fmt: skip
    options = {name: argument for name, argument in options.items() if argument is not None}
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
            self._settle()

    @contextmanager
    def left(self) -> Generator[None]:
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
        replace_in_torch(attention_of_functional, small_first, self.is_on and not self.overridden, F)


short_way = _ShortWay()


def _is_passed(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Whether the call goes to the fused kernel at once; then it is counted."""
    if is_any_autocast_enabled():
        return False
    try:
        form = (
            query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype,
            value.dtype, query.is_cpu, key.is_cpu, value.is_cpu, causal, is_flash_enabled(), get_num_threads(),
        )  # fmt: skip
    except RuntimeError:  # of tensors without strides
        return False
    is_new = form not in _reasons
    why = _why_at_once(form, query, key, value, causal) if is_new else _reasons[form]
    if why is None:
        return False
    call = query.shape, key.shape[2], query, why, ", causal" if causal else ""
    tallies = report.tallies
    if tallies:
        report.count(*call)
    rows = report.rows_of(*call)
    if rows is not None and (is_new or sum(each.tallies is tallies for each in _last) < LAST):
        _put_first(query, key, value, causal, tallies, rows)
    return True


def _put_first(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, tallies: report.Tallies, rows: list[report.Row]
) -> None:
    """Know calls like this one by a guard from now on, in place of the oldest call that is known so."""
    global _last  # noqa: PLW0603
    if (is_like := guard_of(query, key, value)) is not None:
        found = _Passed(is_like, causal, get_num_threads(), tallies, rows)
        _last = (found, *(each for each in _last if each.tallies is tallies))[:LAST]


def _why_at_once(form: tuple[object, ...], query: Tensor, key: Tensor, value: Tensor, causal: bool) -> str | None:
    """What `_reasons` remembers."""
    sizes = (*query.shape, *key.shape, *value.shape)
    if len(query.shape) != 4 or len(key.shape) != 4 or any(type(n) is not int for n in sizes):
        return None  # torch.jit traces sizes as tensors
    if not (query.is_cpu and key.is_cpu and value.is_cpu):
        return None
    queries, keys = query.shape[2], key.shape[2]
    why = SMALL if is_small(query.numel() * keys, queries, keys, query.dtype) else None
    if why is None and is_few(queries, query.dtype):
        why = FEW_QUERIES
    try:
        if why and choice_of_torch(query, key, value, None, 0.0, causal) != FUSED:
            why = None
    except (RuntimeError, TypeError):  # a call without elements or with wrong arguments, and no kernel for it
        return None
    if len(_reasons) >= FORMS:
        _reasons.clear()
    _reasons[form] = why
    return why


skip_frames(small_first)
