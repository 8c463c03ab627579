"""From a plan to the state: run the kernel, on data that it cannot carry past the mask.

Some backends hide a key by multiplying with a weight of 0, and 0 * NaN is NaN. Before such a backend runs under a mask,
keys and values are checked. Those with NaN or inf are replaced by zeros, which changes no bit of the rows that do not
see them; the rows that do are computed by the next backend, one that selects instead of multiplying.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from regard.backend.contract import Backend
from regard.describe.not_a_spec import received
from regard.dispatch.choose import BACKENDS, Plan, choose, refusal_message
from regard.errors import ProblemError, RefusalError
from regard.plan.checks import is_finite
from regard.plan.lower import gathered
from regard.plan.problem import Operands, Problem
from regard.state import State
from regard.torch_internals import is_any_autocast_enabled
from regard.wide import wide_of

LEAKS = "keys, values or (where gradients flow) queries hold NaN or inf, which it would carry past the mask"

BUILT_IN = frozenset(map(type, BACKENDS.values()))
"""The classes of regard's own backends; what others return is checked."""


def execute(plan: Plan, operands: Operands, backend: str | Backend | None) -> tuple[Plan, State]:
    """The plan that ran and its state.

    Args:
        backend: what the caller chose.

    Raises:
        RefusalError: the backend of the caller, or every backend, refuses, for reasons of the data.
        ProblemError: a backend of a user returned no state of the call.
    """
    if plan.problem.storage is None:
        operands = gathered(operands)
    if not plan.is_careful or _clean(plan.problem, operands):
        return plan, _run(plan, operands)
    if backend is not None:
        raise RefusalError(refusal_message(plan.posed, {plan.backend: [LEAKS]}, plan.chosen))
    exact = choose(plan.posed, operands, None, without=((plan.backend, LEAKS),))
    if plan.problem.grad and not is_finite(operands.q):
        return exact, _run(exact, operands)
    operands = operands._replace(lse=True)  # both states are merged
    bad = ~(_finite_rows(operands.k) & _finite_rows(operands.v))
    cleaned = operands._replace(k=operands.k.masked_fill(bad, 0), v=operands.v.masked_fill(bad, 0))
    touched = _sees(exact, operands, bad)
    whole, dirty = _run(plan, cleaned), _run(exact, operands)
    return exact, State(
        torch.where(touched[..., None], dirty.out, whole.out), torch.where(touched, dirty.lse, whole.lse)
    )


@contextmanager
def drawing(plan: Plan, operands: Operands, seed: int | None) -> Generator[Operands]:
    """The operands of a call whose dropout draws from a seed; None: from torch's generator.

    A backend of a user draws from torch's generators, which get this seed and are then as before. They are those of
    the process, so other threads must not draw meanwhile.
    """
    if seed is None or type(plan.chosen) in BUILT_IN:
        yield operands._replace(seed=seed)
        return
    device = operands.q.device  # others are left alone: to save the state of a GPU is to begin to use it
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        elif device.type != "cpu":
            torch.get_device_module(device.type).manual_seed(seed)
        yield operands


def _run(plan: Plan, operands: Operands) -> State:
    if is_any_autocast_enabled():
        with torch.autocast(plan.problem.device, enabled=False):  # the types are settled; products keep theirs
            state = plan.run(operands)
    else:
        state = plan.run(operands)
    if type(plan.chosen) not in BUILT_IN:
        _check_state(plan.backend, operands, state)
    return state


def _check_state(backend: str, operands: Operands, state: object) -> None:
    """Raise `ProblemError` unless what a backend of a user returned is the state of a call."""
    rows = tuple(operands.q.shape[:3])
    out, wide = (*rows, operands.v.shape[3]), wide_of(operands.q.dtype)
    expected = (operands.q.dtype, out, wide, rows)
    if not isinstance(state, State) or not all(isinstance(cast(object, t), Tensor) for t in (state.out, state.lse)):
        found = received(state)
    elif (state.out.dtype, state.out.shape, state.lse.dtype, state.lse.shape) != expected:
        found = f"State of out {_form(state.out)} and lse {_form(state.lse)}"
    else:
        return
    raise ProblemError(
        f"The backend {backend!r} returned {found}: expected a State of out {operands.q.dtype} {list(out)} and lse "
        f"{wide} {list(rows)}."
    )


def _form(t: Tensor) -> str:
    return f"{t.dtype} {list(t.shape)}"


def _clean(problem: Problem, operands: Operands) -> bool:
    """Whether nothing can leak: keys and values are finite, and queries too where gradients of keys take them in."""
    return is_finite(operands.k) and is_finite(operands.v) and (not problem.grad or is_finite(operands.q))


def _finite_rows(t: Tensor) -> Tensor:
    return torch.isfinite(t).all(dim=3, keepdim=True)


def _sees(plan: Plan, operands: Operands, bad: Tensor) -> Tensor:
    """Which queries see a bad key, [batch, heads, queries]: their mean of `bad`, found by attention itself."""
    with torch.no_grad():
        q, k = (torch.zeros_like(t[..., :1]) for t in (operands.q, operands.k))
        problem = replace(
            plan.problem,
            qk_dim=1,
            k_dim=1,
            v_dim=1,
            bias=None,
            score=None,
            score_dim=1,
            softcap=None,
            scale=1.0,
            sink=False,
            dropout=0.0,
            grad=False,
        )
        mean = operands._replace(q=q, k=k, v=bad.to(q.dtype), bias=None, sink=None, score=None)
        return _run(replace(plan, problem=problem, steps=()), mean).out[..., 0] > 0
