"""The plan cache: from the arguments of a call straight to its plan.

A plan depends on sizes, types, flags and specs, never on elements of q, k and v. So a call that equals an earlier one
in all of these takes the plan of that call, and no check is made again. Calls that differ only in their `Sizes` share
one plan where the backend can: under every mask (`Backend.any_mask`), or where the mask hides nothing
(`Backend.any_length`). So a decoding loop makes one plan, not one for each token. On a GPU the backend depends on more
than the form, so there each `Kind` of call has its plan.
"""

from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor

from regard import native
from regard.describe.bias import Bias
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import CallSizes, Mask, is_made_of
from regard.describe.mask_by_rule import Causal, Dilated, Prefix, Window
from regard.describe.score import Dot
from regard.describe.spec import bound_to
from regard.describe.tensors import is_without_data, unchanged
from regard.dispatch import ready
from regard.dispatch.choose import Plan, choose, forget_plans
from regard.dispatch.cuda_order import Kind, kind_of_call
from regard.errors import RefusalError
from regard.plan.checks import check_has_data, check_offset, check_specs
from regard.plan.lower import hides_nothing
from regard.plan.pose import pose
from regard.plan.problem import Operands, Sizes
from regard.plan.request import Request
from regard.torch_internals import in_transform
from regard.torch_versions import warn_of_untested

K = TypeVar("K")
V = TypeVar("V")

KEPT = 256
"""Forms of calls in the cache, and sizes of each. They have no plan and no tensor: `choose.py` keeps plans."""

OF_ANY_CALL = (Causal, Window, Prefix, Dilated)
"""Masks that fit every call and are the same in all; `Global` raises an error where a position is not in the call."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A call made before: its plan, and its mask and bias as they are bound to its sizes, if they are constant."""

    plan: ref[Plan]
    mask: Mask | None
    bias: Bias | None


UNTRACEABLE = (
    "torch.jit.trace records the operators of torch of one path, and attend chooses its path by sizes and mask; its "
    "kernels are no operators of torch. Use torch.compile or torch.export."
)

_Alike: TypeAlias = "dict[Sizes | Fingerprint | Kind | None, _Known]"

_calls: dict[object, _Alike] = {}
"""Plans by form, then by sizes; or for any sizes, by the mask where it depends on positions alone, and under None
without a mask or for other masks. Where the plan depends on the kind of call, by that, and under None is one of
these."""

_lock = Lock()


def prepare(request: Request, *, observed: bool = False) -> tuple[Plan, Operands] | None:
    """`pose` and `choose` in one, from the cache where the call is known; None if the tensors have no data.

    Args:
        observed: whether the plan will be looked at, so that its sizes must be those of the call.

    Raises:
        ProblemError: an argument of the call is wrong.
        RefusalError: the backend of the caller, or every backend, refuses; or torch.jit traces the call.
    """
    if request.offset is not None and is_without_data(request.offset):
        return None
    if not (request.offset is None and type(request.k) is type(request.v) is Tensor):  # else it is resolved
        request = request.resolved()
    key = None if observed or in_transform() else request.key()
    if key is not None:
        form, sizes = key
        try:
            alike = _calls.get(form)
        except TypeError:  # an argument that is not hashable is wrong, and `pose` or `choose` say so
            alike = key = None
        if alike is not None:
            known = alike.get(sizes) or _of_other_sizes(alike, request, sizes)
            if known is not None and (plan := known.plan()) is not None:
                return plan, _operands(request, known, plan, sizes)
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] - it is documented; no call is known then
        raise RefusalError(UNTRACEABLE)
    if is_without_data(request.q) or is_without_data(request.k) or is_without_data(request.v):
        return None
    with unchanged():
        problem, operands = pose(request)
        plan = choose(problem, operands, request.backend)
    if plan.passed_over.get("native") == [native.absence()]:  # nothing else was against it
        native.warn_of_absence()
    warn_of_untested()
    if key is None:
        return plan, operands
    _put_call(*key, plan, operands)
    return plan, operands._replace(key=key[1])


def forget() -> None:
    """Forget every call, plan and schedule, as in a process that has made no call: to measure what a new plan costs."""
    with _lock:
        _calls.clear()
    ready.forget()
    forget_plans()


def _of_other_sizes(alike: _Alike, request: Request, sizes: Sizes) -> _Known | None:
    """The plan for other sizes, if it serves these; from then on it is the plan of these."""
    known, content, mask, bias = alike.get(None), sizes.mask, request.mask, request.bias
    if known is None or not sizes.queries or not sizes.keys or sizes.keys != sizes.values:
        return None
    if (plan := known.plan()) is None:
        return None
    if sizes.offset is not None:
        check_offset(sizes.offset)
    by_kind = plan.kind is not None
    if bias is None and not by_kind and (fixed := alike.get(content)) is not None:
        return fixed
    call = _call_sizes(request)
    if mask is not None and content is not None:
        check_specs(mask, None, None)
        if not content.is_constant:
            check_has_data(mask)
        mask = bound_to(mask, call)
    if by_kind:
        known = alike.get(kind_of_call(plan.posed, mask, call))
        if known is None or (plan := known.plan()) is None:
            return None
    elif not plan.is_for_any_mask and not (mask is None or hides_nothing(mask, call)):
        return None
    bias = None if bias is None else bound_to(bias, call)
    is_constant = content is None or content.is_constant
    known = _Known(known.plan, mask if is_constant else None, _constant(bias))
    is_fixed = is_constant and plan.is_for_any_mask and mask is not None and is_made_of(mask, OF_ANY_CALL)
    with _lock:
        _put(alike, content if is_fixed and bias is None and not by_kind else sizes, known)
    return known


def _operands(request: Request, known: _Known, plan: Plan, sizes: Sizes) -> Operands:
    q, k, v, mask, bias, score, _, _, sink, _, offset, _, lse, stored = request
    if mask is not None:
        mask = known.mask
        if mask is None and (plan.is_for_any_mask or plan.problem.mask is not None):
            mask = bound_to(cast(Mask, request.mask), _call_sizes(request))
    if bias is not None:
        bias = known.bias if known.bias is not None else bound_to(bias, _call_sizes(request))
    if type(score) is Dot:
        score = None
    offset = sizes.keys - sizes.queries if offset is None else offset
    fields = q, k, v, mask, bias, sink, score, stored, offset, sizes, lse, None
    return tuple.__new__(Operands, fields)  # `Operands` itself would take 0.2 us longer, of some 15 of a tiny call


def _call_sizes(request: Request) -> CallSizes:
    (batch, heads, queries, _), keys = request.q.shape, request.k.shape[2]
    return CallSizes(batch, heads, queries, keys, keys - queries if request.offset is None else request.offset)


def _put_call(form: object, sizes: Sizes, plan: Plan, operands: Operands) -> None:
    with _lock:
        alike = _calls.pop(form, {})
        _put(_calls, form, alike)
        _put(alike, sizes, _Known(ref(plan), _constant(operands.mask), _constant(operands.bias)))
        if plan.is_for_any_mask or plan.is_for_any_length:
            alike[None] = _Known(ref(plan), None, None)
            if plan.kind is not None:
                alike[plan.kind] = alike[None]


S = TypeVar("S", Mask, Bias)


def _constant(spec: S | None) -> S | None:
    """The spec if it has neither tensors nor functions."""
    return spec if spec is not None and spec.fingerprint().is_constant else None


def _put(kept: dict[K, V], key: K, value: V) -> None:
    """Put a value into a dict of about `KEPT`; the oldest goes where there are too many, but none for other sizes."""
    while len(kept) >= KEPT:
        kept.pop(next(each for each in kept if each is not None and not isinstance(each, Kind)))
    kept[key] = value
