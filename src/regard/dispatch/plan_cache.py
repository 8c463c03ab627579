"""Calls that are known again: from the arguments straight to the plan.

Posing a problem and choosing its engine looks at sizes, types, flags and words, and never at elements of q, k and v.
So when all that it looks at is as it was in an earlier call, the plan is that call's, and no check need be made again.
A key is a tuple of all of it: making and finding it costs 3 us. Posing, and choosing a plan that is kept, cost 30; a
new plan costs some 300.
"""

from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from regard import native
from regard.describe.bias import Bias
from regard.describe.mask import CallSizes, Mask
from regard.describe.score import Dot, Score
from regard.describe.spec import Spec
from regard.describe.tensors import is_without_data, unchanged
from regard.dispatch.choose import Plan, choose, forget_plans
from regard.plan.problem import Operands, check_offset, in_transform, opened, pose
from regard.storage.stored import StoredTensor

KEPT = 1024
"""Calls that are remembered. They hold no plan and no tensor: a plan goes when `regard.dispatch.choose` lets it go."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A call made before: its plan, and its words as they stand in the call if they are constant."""

    plan: ref[Plan]
    mask: Mask | None
    bias: Bias | None


_calls: dict[Any, _Known] = {}
_lock = Lock()


def prepare(
    q: Tensor,
    k: Tensor | StoredTensor,
    v: Tensor | StoredTensor,
    *,
    mask: Mask | None,
    bias: Bias | None,
    score: Score | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout: float,
    offset: int | Tensor | None,
    backend: str | None,
    lse: bool,
) -> tuple[Plan, Operands] | None:
    """`pose` and `choose` in one, by memory where the call is known; None if the tensors have no data to compute with.

    Raises:
        ProblemError: anything about the call that makes no sense.
        RefusalError: the named engine, or every engine, refuses.
    """
    if isinstance(offset, Tensor):
        if is_without_data(offset):
            return None
        offset = check_offset(offset)
    k, v, mask, stored = opened(k, v, mask, bias, offset)
    try:
        key = None if in_transform() else (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            (q.is_cpu and k.is_cpu and v.is_cpu) or (q.device, k.device, v.device),
            q.__class__, k.__class__, v.__class__, q.is_neg(), k.is_neg(), v.is_neg(),
            q.layout, k.layout, v.layout,
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            None if mask is None else _of_mask(mask), None if bias is None else _of_tensors(bias),
            None if score is None else _of_tensors(score), None if sink is None else _of_tensor(sink),
            scale, scale.__class__, softcap, softcap.__class__, dropout, dropout.__class__, offset, offset.__class__,
            backend, lse, None if stored is None else (stored[0].plan_key, stored[1].plan_key),
        )  # fmt: skip
        known = _calls.get(key)
    except (AttributeError, RuntimeError, TypeError):  # `pose` will say what is wrong
        key = known = None
    if known is not None and (plan := known.plan()) is not None:
        if mask is not None:
            mask = known.mask if known.mask is not None else mask.bind(_call_sizes(plan))
        if bias is not None:
            bias = known.bias if known.bias is not None else bias.bind(_call_sizes(plan))
        return plan, Operands(q, k, v, mask, bias, sink, None if isinstance(score, Dot) else score, stored)
    if is_without_data(q) or is_without_data(k) or is_without_data(v):
        return None
    with unchanged():
        problem, operands = pose(
            q, k, v, mask=mask, bias=bias, score=score, scale=scale, softcap=softcap, sink=sink, dropout=dropout,
            offset=offset, lse=lse, stored=stored,
        )  # fmt: skip
        plan = choose(problem, operands, backend)
    if plan.passed_over.get("native") == [native.absence()]:  # nothing else was against it
        native.warn_of_absence()
    if key is not None:
        _remember(key, plan, operands)
    return plan, operands


def forget() -> None:
    """Forget every call, plan and schedule, as in a process that has made no call: to measure what a new plan costs."""
    with _lock:
        _calls.clear()
    forget_plans()


def _of_mask(mask: Mask) -> Any:
    if not mask.is_known() or not (fingerprint := mask.fingerprint()).can_be_kept:
        raise TypeError
    return fingerprint


def _of_tensors(word: Spec) -> Any:
    """A bias or score: a plan depends on the types, sizes and gradients of its tensors, and on no element."""
    if not word.is_known() or not (form := word.form()).can_be_kept:
        raise TypeError
    return form, *(_of_tensor(t) for t in word.tensors())


def _of_tensor(t: Tensor) -> Any:
    wants = t.requires_grad and torch.is_grad_enabled()
    return t.shape, t.dtype, t.device, t.__class__, t.is_neg(), t.layout, wants


def _call_sizes(plan: Plan) -> CallSizes:
    p = plan.problem
    return CallSizes(p.batch, p.heads, p.queries, p.keys, p.offset)


def _remember(key: Any, plan: Plan, operands: Operands) -> None:
    o, asked = operands, plan.asked
    mask = o.mask if asked.mask is not None and asked.mask.is_constant else None
    bias = o.bias if asked.bias is not None and asked.bias.is_constant else None
    with _lock:
        while len(_calls) >= KEPT:
            _calls.pop(next(iter(_calls)))
        _calls[key] = _Known(ref(plan), mask, bias)
