"""Calls of `attend` and `attend_state` in this thread: who observes them, changes their outputs, computes them."""

import reprlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor
from torch.compiler import is_compiling

from regard.describe.bias import Bias
from regard.describe.by_row import row_starts
from regard.describe.mask import Mask
from regard.describe.score import Score
from regard.dispatch.choose import Plan
from regard.errors import ProblemError, RefusalError
from regard.plan.checks import row_offsets
from regard.plan.lower import gathered
from regard.plan.problem import Operands
from regard.plan.request import Request
from regard.state import State


@dataclass(frozen=True, eq=False)
class Call:
    """One call, as observers get it: the tensors and specs that were computed with, the plan, and the results.

    `mask` and `bias` are bound to the sizes of the call; `scale` and `offset` have their defaults filled in; `out`
    includes the sink, `lse` does not. `dropped` tokens of the text are no longer among the keys: the cache of a module
    dropped them; if `has_gaps`, not only the first ones. Query i is at position offset + i among the keys, and
    dropped + offset + i in the text; where each batch row has an offset of its own, `starts` has these, and `offset`
    is 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    score: Score | None
    scale: float
    softcap: float | None
    sink: Tensor | None
    dropout: float
    offset: int
    plan: Plan
    out: Tensor
    lse: Tensor
    dropped: int = 0
    starts: tuple[int, ...] | None = None
    has_gaps: bool = False


Observers = tuple["_Observer", ...]
"""Functions that get each call, in the order of entering; where one returns a tensor, it replaces the output."""

current_observers: ContextVar[Observers] = ContextVar("observers", default=())
"""Some may have ended, in a context that was copied before that: `active_observers` drops them."""


class _Observer:
    """An observer; `seen` is None once its block has ended, and `replaces` whether it may replace outputs."""

    def __init__(self, seen: Callable[[Call], Tensor | None], *, replaces: bool) -> None:
        self.seen: Callable[[Call], Tensor | None] | None = seen
        self.replaces = replaces

    def __call__(self, call: Call) -> Tensor | None:
        return None if self.seen is None else self.seen(call)


def active_observers() -> Observers:
    """The observers whose blocks have not ended."""
    if not (found := current_observers.get()):
        return found
    active = tuple(each for each in found if each.seen is not None)
    if len(active) < len(found):
        current_observers.set(active)
    return active


@contextmanager
def observe_calls(observer: Callable[[Call], None]) -> Generator[None]:
    """Pass each call of `attend` and `attend_state` made inside, in this thread, to `observer`.

    Calls that torch traces are not passed, as they are not run. Calls that an observer makes itself have no observers,
    except in a block that it enters.

    Raises:
        ProblemError: `observer` is no function.

    >>> import torch
    >>> from regard import attend
    >>> q = torch.randn(1, 2, 3, 8)
    >>> with observe_calls(lambda call: print(call.plan.backend, tuple(call.lse.shape))):
    ...     _ = attend(q, q, q)
    native (1, 2, 3)
    """
    _check_function(observer, "observe_calls", "observer")

    def observe(call: Call) -> None:
        observer(call)

    with _entered(observe, replaces=False):
        yield


@contextmanager
def replace_outputs(change: Callable[[Call], Tensor]) -> Generator[None]:
    """Replace the output of each call of `attend` made inside, in this thread, by what `change` returns.

    For ablating heads, or weighting them. `change` returns [batch, heads, queries, v_dim] in the dtype of `call.out`:
    the output of each head before any output projection mixes the heads. Latent attention uses its expanded form
    unless `absorbed=True` is passed. Gradients flow through it. Observers and changes run in the order in which they
    were entered, and each sees the output as those before left it. Outputs of `attend_state`, of parts that are
    merged later, are replaced as well. Calls that torch traces are not. Calls that `change` makes itself are not
    either: it may compute a call again, such as with another mask.

    Raises:
        ProblemError: `change` is no function, or returns another shape or dtype.

    >>> import torch
    >>> from regard import attend
    >>> q = torch.ones(1, 2, 3, 8)
    >>> with replace_outputs(lambda call: call.out * torch.tensor([1.0, 0.0])[:, None, None]):
    ...     attend(q, q, q)[0, :, 0, 0]
    tensor([1., 0.])
    """
    _check_function(change, "replace_outputs", "change")
    with _entered(change, replaces=True):
        yield


def _check_function(value: object, taker: str, argument: str) -> None:
    if not callable(value):
        raise ProblemError(f"{taker}({argument}={reprlib.repr(value)}): expected a function that takes a Call.")


def are_outputs_replaced() -> bool:
    """Whether `replace_outputs` replaces the output of a call made now, and expects that of each head, [.., v_dim].

    Latent attention then runs in its expanded form: the outputs of the absorbed one are latents.
    """
    return not is_compiling() and any(each.replaces for each in active_observers())


_dropped: ContextVar[tuple[int, bool]] = ContextVar("dropped", default=(0, False))
"""`Call.dropped` and `Call.has_gaps`."""


def after_dropped(tokens: int, has_gaps: bool = False) -> AbstractContextManager[None]:
    """Within the block, `tokens` tokens of the text are no longer among the keys: `Call.dropped` and `Call.has_gaps`.

    For modules whose caches drop tokens. Calls that torch traces have no observers, so there it does nothing.
    """
    return nullcontext() if is_compiling() or not tokens else _entered_dropped(tokens, has_gaps)


@contextmanager
def _entered_dropped(tokens: int, has_gaps: bool) -> Generator[None]:
    token = _dropped.set((tokens, has_gaps))
    try:
        yield
    finally:
        _dropped.reset(token)


Route = Callable[[Request], State]
"""What computes a call elsewhere; of its state, `attend` reads `out`, which has the sink already."""

current_route: ContextVar[Route | None] = ContextVar("route", default=None)


@contextmanager
def route_calls(route: Route) -> Generator[None]:
    """Let `route` compute each call of `attend` and `attend_state` made inside, in this thread.

    For sequences that are sharded over ranks (`regard.parallel.context_parallel`). Calls that `route` makes itself are
    computed here. Calls that torch traces are not routed.
    """
    token = current_route.set(route)
    try:
        yield
    finally:
        current_route.reset(token)


def run_route(route: Route, request: Request) -> State:
    """The state of a call from `route`, whose own calls are not routed."""
    token = current_route.set(None)
    try:
        return route(request)
    finally:
        current_route.reset(token)


@contextmanager
def _entered(observer: Callable[[Call], Tensor | None], *, replaces: bool) -> Generator[None]:
    """Pass calls to the observer inside. Blocks may be left in another order than the reverse of entering.

    They may also be left in another context, as generators are.
    """
    entry = _Observer(observer, replaces=replaces)
    try:  # also round the entering, as Ctrl-C may come in the middle of it
        current_observers.set((*active_observers(), entry))
        yield
    finally:
        entry.seen = None
        active_observers()


@contextmanager
def _unobserved() -> Generator[None]:
    """Within the block outer observers are inactive; an observer that the block adds and keeps is active afterwards."""
    before = active_observers()
    current_observers.set(())
    try:
        yield
    finally:
        current_observers.set((*before, *current_observers.get()))


def check_unobserved(function: str) -> None:
    """Raise `RefusalError` inside of `observe_calls` and `replace_outputs`: the function makes no `Call`."""
    if active_observers():
        raise RefusalError(
            f"{function} inside of observe_calls or replace_outputs: a rank has only some of the queries and keys, so "
            "there is no call to observe. Call it outside, or attend in one process."
        )


def pass_to_observers(observers: Observers, request: Request, plan: Plan, operands: Operands, state: State) -> State:
    """The state with the output that the observers leave."""
    o, p = gathered(operands), plan.problem
    starts = row_offsets(request.offset, request.q) or row_starts(o.mask, o.bias, p.queries)
    dropped, has_gaps = _dropped.get()
    call = Call(
        o.q, o.k, o.v, o.mask, o.bias, request.score, p.scale, p.softcap, o.sink, p.dropout, p.offset, plan, state.out,
        state.lse, dropped, starts, has_gaps,
    )  # fmt: skip
    with _unobserved(), _entered_dropped(0, False) if dropped else nullcontext():  # their calls are calls of their own
        for observer in observers:
            if (out := observer(call)) is not None:
                call = replace(call, out=_fitting(out, call.out))
    return State(call.out, state.lse)


def _fitting(out: Tensor, before: Tensor) -> Tensor:
    is_tensor = isinstance(cast(object, out), Tensor)
    if not is_tensor or out.shape != before.shape or out.dtype != before.dtype:
        given = f"{list(out.shape)} {out.dtype}" if is_tensor else type(out).__name__
        raise ProblemError(
            f"an output was replaced by {given}: expected {list(before.shape)} {before.dtype}, as `call.out` is."
        )
    return out
