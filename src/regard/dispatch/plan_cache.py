"""Calls that are known again: from the arguments straight to the plan.

A plan depends on sizes, types, flags and specs, never on elements of q, k and v. So where all of these are as in an
earlier call, the plan is that call's, and no check need be made again. Of calls that differ only in their numbers of
queries and keys, all those in which nothing is hidden share one plan, if the backend can (`Backend.any_length`): so a
decoding loop makes one plan, not one for each token.
"""

from dataclasses import dataclass
from threading import Lock
from typing import TypeVar, cast
from weakref import ref

from regard import native
from regard.describe.bias import Bias
from regard.describe.mask import CallSizes, Mask
from regard.describe.score import Dot
from regard.describe.tensors import is_without_data, unchanged
from regard.dispatch.choose import Plan, choose, forget_plans
from regard.plan.checks import in_transform
from regard.plan.lower import hides_nothing
from regard.plan.pose import pose, pose_like
from regard.plan.problem import Operands
from regard.plan.request import Request, Sizes

K = TypeVar("K")
V = TypeVar("V")

KEPT = 256
"""Forms of calls that are remembered, and sizes of each. They hold no plan and no tensor: `choose.py` keeps plans."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A call made before: its plan, and its mask and bias as they are bound to its sizes if they are constant."""

    plan: ref[Plan]
    mask: Mask | None
    bias: Bias | None


_calls: dict[object, dict[Sizes | None, _Known]] = {}
"""By form, then by sizes; under None, the plan for every length."""

_lock = Lock()


def prepare(request: Request, *, observed: bool = False) -> tuple[Plan, Operands] | None:
    """`pose` and `choose` in one, from memory where the call is known; None if the tensors have no data.

    Args:
        observed: whether the plan will be looked at, so that its sizes must be those of the call.

    Raises:
        ProblemError: anything about the call that makes no sense.
        RefusalError: the backend of the caller, or every backend, refuses.
    """
    like = None
    if request.offset is not None and is_without_data(request.offset):
        return None
    request = request.resolved()
    key = None if observed or in_transform() else request.key()
    if key is not None:
        form, sizes = key
        try:
            alike = _calls.get(form)
        except TypeError:  # what is not hashable is wrong, and `pose` or `choose` say so
            alike = key = None
        if alike is not None:
            known = alike.get(sizes) or _of_any_length(alike, request, sizes)
            if known is not None and (plan := known.plan()) is not None:
                return plan, _operands(request, known, plan)
            like = _plan_like(alike, request, sizes)
    if is_without_data(request.q) or is_without_data(request.k) or is_without_data(request.v):
        return None
    with unchanged():
        problem, operands = pose(request) if like is None else pose_like(like.asked, request)
        plan = choose(problem, operands, request.backend)
    if plan.passed_over.get("native") == [native.absence()]:  # nothing else was against it
        native.warn_of_absence()
    if key is not None:
        _remember(*key, plan, operands)
    return plan, operands


def forget() -> None:
    """Forget every call, plan and schedule, as in a process that has made no call: to measure what a new plan costs."""
    with _lock:
        _calls.clear()
    forget_plans()


def _of_any_length(alike: dict[Sizes | None, _Known], request: Request, sizes: Sizes) -> _Known | None:
    """What serves every length, if it serves these."""
    known, (queries, keys, values, _) = alike.get(None), sizes
    if known is None or not queries or not keys or keys != values:
        return None
    if request.mask is None:
        return known
    batch, heads = request.q.shape[:2]
    offset = keys - queries if request.offset is None else request.offset
    call = CallSizes(batch, heads, queries, keys, offset)
    if not hides_nothing(request.mask.bind(call), call):
        return None
    with _lock:
        _put(alike, sizes, known)
    return known


def _plan_like(alike: dict[Sizes | None, _Known], request: Request, sizes: Sizes) -> Plan | None:
    """A plan of a call that differs in sizes alone, whose checks need not be made again."""
    if request.bias is not None or request.score is not None or sizes[1] != sizes[2]:
        return None
    return next((plan for known in reversed(tuple(alike.values())) if (plan := known.plan()) is not None), None)


def _operands(request: Request, known: _Known, plan: Plan) -> Operands:
    mask, bias, score = request.mask, request.bias, request.score
    if mask is not None:
        mask = known.mask if known.mask is not None or plan.problem.mask is None else mask.bind(_call_sizes(plan))
    if bias is not None:
        bias = known.bias if known.bias is not None else bias.bind(_call_sizes(plan))
    if score is not None and isinstance(score, Dot):
        score = None
    return Operands(request.q, request.k, request.v, mask, bias, request.sink, score, request.stored)


def _call_sizes(plan: Plan) -> CallSizes:
    p = plan.problem
    return CallSizes(p.batch, p.heads, p.queries, p.keys, p.offset)


def _remember(form: object, sizes: Sizes, plan: Plan, operands: Operands) -> None:
    mask, bias = (None if spec is None or not spec.fingerprint().is_constant else spec for spec in operands[3:5])
    with _lock:
        alike = _calls.pop(form, {})
        _put(_calls, form, alike)
        _put(alike, sizes, _Known(ref(plan), cast("Mask | None", mask), cast("Bias | None", bias)))
        if plan.is_for_any_length:
            alike[None] = _Known(ref(plan), None, None)


def _put(kept: dict[K, V], key: K, value: V) -> None:
    """Keep a value; the first one put in goes where there are too many."""
    while len(kept) >= KEPT:
        kept.pop(next(iter(kept)), None)
    kept[key] = value
