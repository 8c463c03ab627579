"""A checked call of linear attention with all defaults filled in, and its first and last state."""

import sys
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from regard.calls import current_route
from regard.describe.feature import Favor, Feature, NearSoftmax
from regard.describe.traced import refuse_symbol
from regard.describe.whole_number import whole
from regard.errors import ProblemError, RefusalError
from regard.linear import delta, gated, sums
from regard.linear.recurrent import recurrent
from regard.linear.rule import Decay, Delta, Gated, Rule
from regard.linear.segment import Carry, Run
from regard.linear.state import LinearResult, LinearState, check_made_by, check_parts
from regard.plan.checks import check_device, check_tensors
from regard.torch_internals import in_transform
from regard.wide import wide_of

FORMS = ("chunked", "parallel", "recurrent")

UNTRACEABLE = (
    "torch.jit.trace records the operators of torch of one path, and linear_attend chooses its path by the sizes; the "
    "compiled library is no operator of torch. Use torch.compile or torch.export."
)

ROUTED = (
    "linear_attend in context_parallel: it would attend to this rank's tokens alone, as no state passes from rank to "
    "rank. Expected attend, or this call outside of the context."
)


class LinearCall(NamedTuple):
    """The arguments of a call, with all defaults filled in."""

    features: Feature | None
    rule: Rule | None
    causal: bool
    scale: float | None
    normalise: bool
    run: Run  # the form
    chunk: int
    made_by: str | None  # the features and the rule as text; None while torch traces, which cannot format them
    bounded: bool  # runs in segments
    in_place: bool  # neither autograd nor tracing records the steps
    any_form: bool  # no form was chosen
    log_gamma: Tensor | None
    log_gate: Tensor | None
    beta: Tensor | None
    log_decay: Tensor | None  # of the rule, in the dtype of sums


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Feature | None,
    rule: Rule | None,
    causal: bool,
    scale: float | None,
    normalise: bool | None,
    state: LinearState | None,
    form: str | None,
    chunk: int,
) -> LinearCall:
    """The call with its defaults filled in. Raises `ProblemError` for invalid arguments."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] - it is documented
        raise RefusalError(UNTRACEABLE)
    if not torch.compiler.is_compiling() and current_route.get() is not None:
        raise RefusalError(ROUTED)
    check_tensors(q, k, v)
    _check_qk_dim(q, k)
    _check_kinds(features, rule, state)
    if state is not None:
        check_parts(state)
    _check_options(causal, normalise, form)
    chunk = whole(chunk, "chunk", least=1)
    size = k.shape[3] if features is None else features.size(k.shape[3])
    if rule is not None:
        rule.check(k.shape[0], k.shape[1], k.shape[2], size)
        check_device(rule, q)
    if normalise is None:
        normalise = features is not None and not isinstance(rule, Delta)
    _check_together(features, rule, scale, normalise)
    name = form or ("recurrent" if k.shape[2] == 1 else "chunked")
    graph, traced = _is_recorded((q, k, v), rule, state), torch.compiler.is_compiling()
    bounded, in_place = not traced and name != "parallel", not (graph or traced or in_transform())
    run = _run_of(name, rule)
    made_by = None if traced else _made_by(features, rule, scale, k.shape[3])
    return LinearCall(
        *(features, rule, causal, scale, normalise, run, chunk, made_by, bounded, in_place, form is None),
        *_lowered(rule, k),
    )


def _made_by(features: Feature | None, rule: Rule | None, scale: float | None, dim: int) -> str:
    """What a state depends on: the features, their scale (without features, only queries are scaled), the rule."""
    own = f", scale {scale or dim**-0.5:g}" if isinstance(features, NearSoftmax) and dim else ""
    return f"features={features!r}{own}, {'no rule' if rule is None else type(rule).__name__}"


def _is_recorded(qkv: tuple[Tensor, Tensor, Tensor], rule: Rule | None, state: LinearState | None) -> bool:
    """Whether autograd records the call."""
    tensors = [*qkv, *(() if rule is None else rule.tensors())]
    tensors += [] if state is None else [t for t in (state.S, state.z, state.log_scale) if t is not None]
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _check_qk_dim(q: Tensor, k: Tensor) -> None:
    if q.shape[3] != k.shape[3]:
        raise ProblemError(
            f"q has qk_dim {q.shape[3]} and k {k.shape[3]}: their features are multiplied, so expected equal sizes."
        )


def _check_options(causal: object, normalise: object, form: object) -> None:
    if not isinstance(causal, bool):
        raise ProblemError(f"causal is {causal!r}: expected True or False.")
    if not isinstance(normalise, bool | None):
        raise ProblemError(f"normalise is {normalise!r}: expected True, False or None.")
    if form is not None and (not isinstance(form, str) or form not in FORMS):
        raise ProblemError(f"form={form!r}: expected one of {', '.join(FORMS)}, or None.")


def _check_kinds(features: object, rule: object, state: object) -> None:
    for name, given, kind in (("features", features, Feature), ("rule", rule, Rule), ("state", state, LinearState)):
        if given is not None and not isinstance(given, kind):
            if isinstance(given, LinearResult):
                raise ProblemError(f"{name} is a LinearResult, the output and the state: take its .state.")
            what = type(given).__name__ if isinstance(given, Tensor) else repr(given)
            raise ProblemError(f"{name} is {what}: expected a {kind.__name__} or None, see regard.linear.")
    if rule is not None and not isinstance(rule, Decay | Gated | Delta):
        raise ProblemError(f"rule is {rule!r}: expected Decay, Gated, Delta, or None.")


def _check_together(features: Feature | None, rule: Rule | None, scale: object, normalise: bool) -> None:
    """Raise `ProblemError` for arguments that exclude each other."""
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= sys.float_info.max
    ):
        refuse_symbol("scale", scale, "multiply q and k by its square root and pass scale=1")
        raise ProblemError(f"scale is {scale!r}: expected a finite number above 0, or None.")
    if normalise and isinstance(rule, Delta):
        raise ProblemError(
            "normalise=True with Delta: Delta replaces the value of a key, and there is no sum to divide by; leave it "
            "out."
        )
    if normalise and features is None:
        raise ProblemError(
            "normalise=True with features=None: plain dot products may be negative, so their sum may be 0; leave it "
            "out, or use positive features, such as Elu1()."
        )
    if is_split(features) and isinstance(rule, Gated | Delta):
        raise ProblemError(f"{features!r} with {rule!r}: expected Decay or no rule, or other features.")
    if is_split(features) and not normalise:
        raise ProblemError(
            f"{features!r} without normalisation: its weights grow with exp(|q|^2) and would overflow; leave "
            "normalise out."
        )


def is_split(features: Feature | None) -> TypeGuard[Favor]:
    """Whether exponents of features are kept apart, by `Favor.split`: not where a subclass has a `map` of its own."""
    return isinstance(features, Favor) and type(features).map is Favor.map


def _run_of(form: str, rule: Rule | None) -> Run:
    if form == "recurrent":
        return recurrent
    module = gated if isinstance(rule, Gated) else delta if isinstance(rule, Delta) else sums
    return module.chunked if form == "chunked" else module.parallel


def _lowered(rule: Rule | None, k: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """log_gamma, log_gate, beta and log_decay of the rule, in the dtype of sums."""
    kind = wide_of(k.dtype)
    if isinstance(rule, Decay):
        return rule.log(kind, k.device), None, None, None
    if isinstance(rule, Gated):
        return None, rule.log_gate.to(kind), None, None
    if isinstance(rule, Delta):
        return None, None, rule.beta.to(kind), None if rule.log_decay is None else rule.log_decay.to(kind)
    return None, None, None, None


def first_carry(call: LinearCall, k: Tensor, v: Tensor, state: LinearState | None) -> Carry:
    """The state to start from: `state`, checked, or zeros."""
    size = k.shape[3] if call.features is None else call.features.size(k.shape[3])
    shape, compute = (*k.shape[:2], size), wide_of(k.dtype)
    split = is_split(call.features)
    if state is None:
        top = k.new_full(k.shape[:2], -torch.inf, dtype=compute) if split else None
        return Carry(k.new_zeros(*shape, v.shape[3] + call.normalise, dtype=compute), top)
    if state.S.shape != (*shape, v.shape[3]):
        raise ProblemError(
            f"the state has S {list(state.S.shape)}, and this call needs {[*shape, v.shape[3]]}: [batch, kv_heads, "
            "features, v_dim]; it must come from a call with the same sizes and features."
        )
    if (state.z is not None) != call.normalise or (state.log_scale is not None) != split:
        raise ProblemError(
            f"the state is one {state.kind}, and this call makes one {'with' if call.normalise else 'without'} z, "
            f"{'with' if split else 'without'} log_scale; it must come from a call with the same features and rule."
        )
    check_made_by(state.made_by, call.made_by)
    if state.S.device != k.device:
        raise ProblemError(f"the state is on {state.S.device} and k on {k.device}: they must be on one device.")
    matrix = state.S if state.z is None else torch.cat([state.S, state.z[..., None]], dim=3)
    return Carry(matrix.to(compute), None if state.log_scale is None else state.log_scale.to(compute))


def last_state(call: LinearCall, carry: Carry, before: LinearState | None) -> LinearState:
    """The state that the call returns."""
    adds = call.rule is None and (before is None or before.adds)
    if not call.normalise:
        return LinearState(carry.matrix, None, carry.top, adds, call.made_by)
    return LinearState(carry.matrix[..., :-1], carry.matrix[..., -1], carry.top, adds, call.made_by)
