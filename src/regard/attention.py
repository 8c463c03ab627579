"""The front door: `attend`, `attend_state`, `explain`, and the one place where calls can be watched."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.elsewhere import refuse_keywords
from regard.describe.mask import Mask
from regard.describe.score import Score
from regard.dispatch.choose import Plan, choose
from regard.dispatch.execute import execute
from regard.dispatch.operator import attend_traced, is_counted
from regard.dispatch.plan_cache import prepare
from regard.errors import ProblemError
from regard.plan.lower import gathered
from regard.plan.problem import Operands, check_offset, check_readable, opened, pose
from regard.state import State
from regard.storage.stored import StoredTensor
from regard.torch_internals import is_any_autocast_enabled


@dataclass(frozen=True, eq=False)
class Call:
    """What a watcher is told of one call: the tensors and words as they were run, the plan, and the results.

    `mask` and `bias` stand in the call (their rows know their positions); `scale` and `offset` are numbers; `out` is
    with the sink, `lse` without.
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


Watchers = tuple[Callable[[Call], Tensor | None], ...]
"""What is told of each call, in the order of entering; a tensor takes the place of the output."""

_watchers: ContextVar[Watchers] = ContextVar("watchers", default=())


@contextmanager
def observe_calls(tell: Callable[[Call], None]) -> Generator[None]:
    """Tell `tell` of each call of `attend` and `attend_state` made inside, in this thread.

    Calls that torch traces are not told, as they are not run.

    >>> import torch
    >>> from regard import attend
    >>> q = torch.randn(1, 2, 3, 8)
    >>> with observe_calls(lambda call: print(call.plan.backend, tuple(call.lse.shape))):
    ...     _ = attend(q, q, q)
    native (1, 2, 3)
    """

    def told(call: Call) -> None:
        tell(call)

    with _entered(told):
        yield


@contextmanager
def replace_outputs(change: Callable[[Call], Tensor]) -> Generator[None]:
    """Let `change` say what each call of `attend` made inside gives, in this thread: to ablate heads, or weigh them.

    What it returns, [batch, heads, queries, v_dim] in the type of `call.out`, is what the caller of `attend` gets: the
    output of each head before any output projection mixes them. Gradients flow through it. Watchers and changes come in
    the order in which they were entered, and each sees the output as those before left it. Calls of `attend_state` are
    altered as well: outputs of parts, which merge by their weights. Calls that torch traces are not.

    Raises:
        ProblemError: what it returns has another shape or type.

    >>> import torch
    >>> from regard import attend
    >>> q = torch.ones(1, 2, 3, 8)
    >>> with replace_outputs(lambda call: call.out * torch.tensor([1.0, 0.0])[:, None, None]):
    ...     attend(q, q, q)[0, :, 0, 0]
    tensor([1., 0.])
    """
    with _entered(change):
        yield


@contextmanager
def _entered(watcher: Callable[[Call], Tensor | None]) -> Generator[None]:
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def attend(
    q: Float[Tensor, "batch heads queries qk_dim"],
    k: Float[Tensor, "batch kv_heads keys qk_dim"] | StoredTensor,
    v: Float[Tensor, "batch kv_heads keys v_dim"] | StoredTensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    offset: int | Tensor | None = None,
    backend: str | None = None,
    **unknown: None,  # whatever it is, it is refused, by a message that knows what others call things
) -> Float[Tensor, "batch heads queries v_dim"]:
    """Attention: `softmax(scale * q k^T, over the keys that the mask keeps) @ v`.

    In order: `s = scale * q . k`; softcap `c * tanh(s / c)`; `+ bias`; what the mask hides gets no weight; softmax
    over the keys, with a further column `sink[head]` that takes weight and gives no value; dropout; `@ v`. Vaswani et
    al. 2017, arXiv:1706.03762, §3.2.

    A query that may see no key gives 0, and gradients of 0. What is masked is never read into a result, be it NaN.
    The compiled engine and torch's fused kernel can be differentiated once, `backend="reference"` any number of times.

    Args:
        q: [batch, heads, queries, qk_dim].
        k: [batch, kv_heads, keys, qk_dim]; heads is a whole multiple of kv_heads, and query head h uses key head
            `h // (heads // kv_heads)` (MHA, GQA and MQA are this number; nothing is repeated in memory).
        v: [batch, kv_heads, keys, v_dim]. In place of k and v, what a cache's `append` gave: also pages and codes.
        mask: which query may see which key; None for all.
        bias: what is added to the scores; None for nothing.
        score: how q and k are compared; None for their dot product.
        scale: None for `qk_dim ** -0.5`.
        softcap: the cap c, above 0; None for none. Gemma Team 2024, arXiv:2408.00118, §2.
        sink: a logit per head, [heads]; None for none. See `State.with_sink`.
        dropout: the probability that a weight is dropped, drawn from torch's generator.
        offset: position of the first query, where keys start at 0; None puts the last query at the last key. An integer
            tensor of one element is read when the call runs: a graph of `torch.compile` then serves every position.
        backend: an engine by name, which runs or raises; None lets regard choose, and `explain` tells how.

    Returns:
        [batch, heads, queries, v_dim], of the type of q.

    Raises:
        ProblemError: the call makes no sense; a keyword of another library (`KeywordError`, which says what to write).
        RefusalError: no engine, or not the one named, can run it.

    >>> import torch
    >>> from regard import attend, Causal, Window, Prefix
    >>> q, k, v = torch.randn(1, 8, 64, 16), torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    >>> attend(q, k, v, mask=Causal() & (Window(32) | Prefix(4))).shape
    torch.Size([1, 8, 64, 16])
    """
    if unknown:
        refuse_keywords(attend, unknown)
    if is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    prepared = None if _is_traced() else prepare(
        q, k, v, mask=mask, bias=bias, score=score, scale=scale, softcap=softcap, sink=sink, dropout=dropout,
        offset=offset, backend=backend, lse=bool(_watchers.get()),
    )  # fmt: skip
    if prepared is None:
        return attend_traced(
            q, k, v, mask=mask, bias=bias, score=score, scale=scale, softcap=softcap, sink=sink, dropout=dropout,
            offset=offset, backend=backend, lse=False,
        ).out  # fmt: skip
    plan, operands = prepared
    plan, state = execute(plan, operands, backend)
    watchers = _watchers.get()
    return _told(watchers, operands, score, plan, state) if watchers else state.out


def attend_state(
    q: Float[Tensor, "batch heads queries qk_dim"],
    k: Float[Tensor, "batch kv_heads keys qk_dim"] | StoredTensor,
    v: Float[Tensor, "batch kv_heads keys v_dim"] | StoredTensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    offset: int | Tensor | None = None,
    backend: str | None = None,
    **unknown: None,  # whatever it is, it is refused, by a message that knows what others call things
) -> State:
    """Attention over these keys as a `State`: `.out` and `.lse`, which merges with states over other keys by `|`.

    The arguments and errors are those of `attend`. The keys of a part start at position 0 as everywhere: say with
    `offset` where the queries stand as seen from the part's first key.

    >>> import torch
    >>> from regard import attend, attend_state, Causal
    >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    >>> early = attend_state(q, k[:, :, :4], v[:, :, :4], mask=Causal(), offset=0)
    >>> late = attend_state(q, k[:, :, 4:], v[:, :, 4:], mask=Causal(), offset=-4)
    >>> torch.allclose((early | late).out, attend(q, k, v, mask=Causal()), atol=1e-6)
    True
    """
    if unknown:
        refuse_keywords(attend_state, unknown)
    if is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    prepared = None if _is_traced() else prepare(
        q, k, v, mask=mask, bias=bias, score=score, scale=scale, softcap=softcap, sink=None, dropout=0.0, offset=offset,
        backend=backend, lse=True,
    )  # fmt: skip
    if prepared is None:
        return attend_traced(
            q, k, v, mask=mask, bias=bias, score=score, scale=scale, softcap=softcap, sink=None, dropout=0.0,
            offset=offset, backend=backend, lse=True,
        )  # fmt: skip
    plan, operands = prepared
    plan, state = execute(plan, operands, backend)
    watchers = _watchers.get()
    return State(_told(watchers, operands, score, plan, state), state.lse) if watchers else state


def explain(
    q: Float[Tensor, "batch heads queries qk_dim"],
    k: Float[Tensor, "batch kv_heads keys qk_dim"] | StoredTensor,
    v: Float[Tensor, "batch kv_heads keys v_dim"] | StoredTensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    offset: int | Tensor | None = None,
    backend: str | None = None,
    **unknown: None,  # whatever it is, it is refused, by a message that knows what others call things
) -> Plan:
    """What `attend` would run with these arguments, why, and what it costs; nothing is computed.

    q, k and v may be meta tensors (`torch.empty(..., device="meta")`): then the plan is for this machine, its GPU if
    it has one. `print` shows the problem, the engine, who was passed over and why, the tiles, GFLOP and MiB.

    >>> import torch
    >>> from regard import explain, Causal, Window
    >>> q, k = torch.empty(1, 32, 4096, 128, device="meta"), torch.empty(1, 8, 4096, 128, device="meta")
    >>> plan = explain(q, k, k, mask=Causal() & Window(512))
    >>> plan.backend, plan.schedule.pairs, plan.flops
    ('native', 62922752, 32216449024)
    """
    if unknown:
        refuse_keywords(explain, unknown)
    if is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    offset = None if offset is None else check_offset(offset)
    k, v, mask, stored = opened(k, v, mask, bias, offset)
    problem, operands = pose(
        q, k, v, mask=mask, bias=bias, score=score, scale=scale, softcap=softcap, sink=sink, dropout=dropout,
        offset=offset, lse=False, stored=stored,
    )  # fmt: skip
    if problem.device == "meta":
        problem = replace(problem, device="cuda" if torch.cuda.is_available() else "cpu")
    return choose(problem, operands, backend)


def _autocast(
    q: Tensor, k: Tensor | StoredTensor, v: Tensor | StoredTensor
) -> tuple[Tensor, Tensor | StoredTensor, Tensor | StoredTensor]:
    """The three in the type that `torch.autocast` asks for, where it is on; as torch's own attention does."""
    whatever: tuple[Any, ...] = (q, k, v)
    if not all(isinstance(t, Tensor | StoredTensor) for t in whatever) or not torch.amp.is_autocast_available(
        q.device.type
    ):
        return q, k, v
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    for name, t in (("q", q), ("k", k), ("v", v)):
        if isinstance(t, Tensor):  # not all that pose refuses can be converted
            check_readable(name, t)
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _is_traced() -> bool:
    """Whether the call is to be seen by torch as one operator: it is traced, or counted and watched by nobody else."""
    return torch.compiler.is_compiling() or (is_counted() and not _watchers.get())


def _told(watchers: Watchers, operands: Operands, score: Score | None, plan: Plan, state: State) -> Tensor:
    """The output, once all have been told of the call."""
    o, p = operands, plan.problem
    numbers = (p.scale, p.softcap, o.sink, p.dropout, p.offset)
    o = gathered(o)
    call = Call(o.q, o.k, o.v, o.mask, o.bias, score, *numbers, plan, state.out, state.lse)
    for watcher in watchers:
        if (out := watcher(call)) is not None:
            call = replace(call, out=_fitting(out, call.out))
    return call.out


def _fitting(out: Tensor, before: Tensor) -> Tensor:
    if out.shape != before.shape or out.dtype != before.dtype:
        raise ProblemError(
            f"an output was altered to {list(out.shape)} {out.dtype}: expected {list(before.shape)} {before.dtype}, "
            "as `call.out` is."
        )
    return out
