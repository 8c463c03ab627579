"""The front door: `attend`, `attend_state` and `explain`."""

from dataclasses import replace
from importlib import import_module
from typing import Any, cast, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.compiler import is_compiling

from regard.arrays import A, Array, as_array_like, as_tensor, is_array
from regard.backend.contract import Backend
from regard.calls import active_observers, current_observers, current_route, pass_to_observers, run_route
from regard.cost.machine import Machine
from regard.cost.machines import THIS, find_machine
from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.score import Score
from regard.describe.score_function import ScoreFunction
from regard.describe.suggestions import suggest_keywords
from regard.dispatch import ready
from regard.dispatch.choose import Plan, choose
from regard.dispatch.execute import execute
from regard.dispatch.plan_cache import prepare
from regard.dispatch.step import step
from regard.dispatch.traced_call import attend_traced, is_counted
from regard.errors import ProblemError, RefusalError
from regard.plan.checks import check_readable
from regard.plan.pose import capability_of, pose
from regard.plan.problem import Problem, is_first_of
from regard.plan.request import Request
from regard.state import State
from regard.storage.stored import StoredTensor
from regard.torch_internals import is_any_autocast_enabled, is_lazy_zero, skip_frames
from regard.wide import autocast_dtype


@overload
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
    backend: str | Backend | None = None,
) -> Float[Tensor, "batch heads queries v_dim"]: ...
@overload
def attend(
    q: A,
    k: Any,
    v: Any,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    dropout: float = 0.0,
    offset: Any = None,
    backend: str | Backend | None = None,
) -> A: ...
@suggest_keywords
def attend(
    q: Float[Tensor, "batch heads queries qk_dim"] | Array,
    k: Float[Tensor, "batch kv_heads keys qk_dim"] | StoredTensor | Array,
    v: Float[Tensor, "batch kv_heads keys v_dim"] | StoredTensor | Array,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " heads"] | Array | None = None,
    dropout: float = 0.0,
    offset: int | Tensor | Array | None = None,
    backend: str | Backend | None = None,
) -> Float[Tensor, "batch heads queries v_dim"] | Array:
    """Attention: `softmax(scale * q k^T, over the keys that the mask keeps) @ v`.

    In order: `s = scale * q . k`; softcap `c * tanh(s / c)`; `+ bias`; what the mask hides gets no weight; softmax
    over the keys, with a further column `sink[head]` that takes weight and gives no value; dropout; `@ v`. Vaswani et
    al. 2017, arXiv:1706.03762, §3.2.

    A query that may see no key gives 0, and gradients of 0. Masked keys and values never affect the result, even if
    they are NaN. The backends `native`, `triton` and `sdpa` can be differentiated once, `backend="reference"` any
    number of times.

    Args:
        q: [batch, heads, queries, qk_dim]. A tensor, or an array of NumPy, JAX or another library with `__dlpack__` or
            `__array__`: then k and v are arrays as well (and sink and offset may be), and so is the output, without
            gradients. Masks and biases take tensors only.
        k: [batch, kv_heads, keys, qk_dim]; kv_heads decides between MHA, GQA and MQA. heads is a whole multiple of
            kv_heads, and query head h uses key head `h // (heads // kv_heads)`; nothing is repeated in memory.
        v: [batch, kv_heads, keys, v_dim]. In place of k and v, what a cache's `append` gave: also pages and codes.
        mask: which query may see which key; None for all.
        bias: what is added to the scores; None for nothing.
        score: how q and k are compared; None for their dot product.
        scale: None for `qk_dim ** -0.5`, and for 1 with another score than the dot product.
        softcap: the cap c, above 0; None for none. Gemma Team 2024, arXiv:2408.00118, §2.
        sink: a logit per head, [heads]; None for none. See `State.with_sink`.
        dropout: the probability that a weight is dropped, drawn from torch's generator.
        offset: position of the first query, where keys start at 0; None puts the last query at the last key. An integer
            tensor of one element is read when the call runs: a graph of `torch.compile` then serves every position. An
            integer tensor [batch] has the position of the first query of each row, as in a batch of sequences that
            have different numbers of tokens; `KeyLengths` hides keys that a row does not have. One query under
            `Causal()` with an offset on a GPU does not make the host wait, so a CUDA graph can capture it.
        backend: a backend by name, or one of your own (`regard.extend.Backend`), which runs or raises; None lets regard
            choose, and `explain` shows why.

    Returns:
        [batch, heads, queries, v_dim], of the type of q.

    Raises:
        ProblemError: the call makes no sense; a keyword of another library (`KeywordError`, which says what to write).
        RefusalError: no backend, or not the one that you chose, can run it.

    >>> import torch
    >>> from regard import attend, Causal, Window, Prefix
    >>> q, k, v = torch.randn(1, 8, 64, 16), torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    >>> attend(q, k, v, mask=Causal() & (Window(32) | Prefix(4))).shape
    torch.Size([1, 8, 64, 16])
    """
    column: Any = sink
    if not isinstance(q, Tensor):
        return _attend_arrays(
            Request(cast(Any, q), k, v, mask, bias, score, scale, softcap, column, dropout, offset, backend)
        )
    key = None
    is_plain = score is None and type(dropout) is float and dropout == 0.0
    if is_plain and not is_compiling() and not current_observers.get() and current_route.get() is None:
        key, out = ready.run(q, k, v, mask, scale, softcap, offset, backend, bias, sink)
        if out is not None:
            return out
    return attend_not_ready(
        Request(q, cast(Any, k), cast(Any, v), mask, bias, score, scale, softcap, column, dropout, offset, backend), key
    )


def attend_not_ready(request: Request, key: ready.AnyKey | None) -> Tensor:
    """The output of a call over tensors that `ready.run` did not run, and the key that it gave.

    For callers that have called `ready.run`: to call it again would read the content of the mask twice.
    """
    if is_any_autocast_enabled():
        q, k, v = cast_by_autocast(request.q, request.k, request.v)
        request = request._replace(q=q, k=k, v=v)
    return _run(request, key).out


KINDS = ("cpu", "cuda", "mps", "xpu")
"""The kinds of devices that `explain` takes."""


@suggest_keywords
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
    backend: str | Backend | None = None,
) -> State:
    """Attention over these keys as a `State`: `.out` and `.lse`, which merges with states over other keys by `|`.

    The arguments and errors are those of `attend`. The keys of a part start at position 0, as everywhere: `offset` is
    then the position of the first query relative to the first key of the part.

    >>> import torch
    >>> from regard import attend, attend_state, Causal
    >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    >>> early = attend_state(q, k[:, :, :4], v[:, :, :4], mask=Causal(), offset=0)
    >>> late = attend_state(q, k[:, :, 4:], v[:, :, 4:], mask=Causal(), offset=-4)
    >>> torch.allclose((early | late).out, attend(q, k, v, mask=Causal()), atol=1e-6)
    True
    """
    if is_any_autocast_enabled():
        q, k, v = cast_by_autocast(q, k, v)
    return _run(Request(q, k, v, mask, bias, score, scale, softcap, None, 0.0, offset, backend, lse=True))


@suggest_keywords
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
    backend: str | Backend | None = None,
    device: str | torch.device | None = None,
) -> Plan:
    """What `attend` would run with these arguments, why, and what it costs; nothing is computed.

    q, k and v may be meta tensors (`torch.empty(..., device="meta")`): then the plan is for this machine, its GPU if
    it has one, or for `device`: a kind ("cpu", "cuda", "mps", "xpu"), or a kind and a machine that `regard cost` knows
    ("cuda:h100"), whose limits then give the least time. `print` shows the problem, the backend, which ones were not
    chosen and why, the tiles, GFLOP and MiB.

    >>> import torch
    >>> from regard import explain, Causal, Window
    >>> q, k = torch.empty(1, 32, 4096, 128, device="meta"), torch.empty(1, 8, 4096, 128, device="meta")
    >>> plan = explain(q, k, k, mask=Causal() & Window(512))
    >>> plan.backend, plan.schedule.pairs, plan.flops
    ('native', 62922752, 32216449024)
    >>> explain(q, k, k, mask=Causal() & Window(512), device="cuda:h100").backend
    'triton'
    """
    if is_any_autocast_enabled():
        q, k, v = cast_by_autocast(q, k, v)
    request = Request(q, k, v, mask, bias, score, scale, softcap, sink, dropout, offset, backend)
    if _has_dtensors(request):
        raise RefusalError(
            "explain of DTensors: attend computes with the tensors of each rank, in a ring where tokens are sharded. "
            "Expected q.to_local(), k.to_local() and v.to_local(), for the plan of this rank's own block."
        )
    problem, operands = pose(request.resolved())
    if problem.storage is None and not (problem.transformed or problem.opaque):
        problem = replace(problem, values_in_keys=is_first_of(operands.v, operands.k))
    problem, machine = _on_device(problem, device)
    plan = choose(problem, operands, backend)
    return plan if machine is None else replace(plan, machine=machine)


def _on_device(problem: Problem, device: str | torch.device | None) -> tuple[Problem, Machine | None]:
    """The problem on the device that a plan is for, and the machine if one is named."""
    if device is None:
        if problem.device != "meta":
            return problem, None
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif problem.device != "meta":
        raise ProblemError(
            f'device is for tensors on meta, and these are on {problem.device}: pass q.to("meta"), k.to("meta") and '
            f'v.to("meta"), or leave device={str(device)!r} out for a plan on {problem.device}.'
        )
    kind, _, name = str(device).partition(":")
    if kind not in KINDS:
        raise ProblemError(
            f"device {device!r} is not known: expected one of {', '.join(KINDS)}, or one with a machine, such as "
            "cuda:h100."
        )
    index = int(name) if name.isdecimal() else None
    machine = find_machine(name) if name and index is None else None
    if machine is not None and machine.device not in ("", kind):
        raise ProblemError(
            f"device {device!r}: {machine.title} is no device of {kind}: expected {machine.device}:{machine.name}."
        )
    is_here = machine is None or machine.name in THIS
    return replace(problem, device=kind, capability=capability_of(kind, index) if is_here else None), machine


def _attend_arrays(request: Request) -> Any:
    """The output of a call whose q is no tensor, as an array of its kind."""
    for name in ("k", "v"):
        if is_array(request.q) and isinstance(getattr(request, name), Tensor):
            raise ProblemError(
                f"q is {type(request.q).__name__}: expected a tensor, as {name} is, or arrays for all of q, k and v."
            )
    names = ("q", "k", "v", "sink", "offset")
    tensors: dict[str, Any] = {name: as_tensor(name, getattr(request, name)) for name in names}
    for name in ("scale", "softcap"):  # such as `1 / np.sqrt(np.float32(64))`
        if is_array(number := getattr(request, name)) and np.ndim(number) == 0:
            tensors[name] = as_tensor(name, number).item()
    with torch.no_grad():
        out = _run(request._replace(**tensors)).out
    return as_array_like(request.q, out)


def _run(request: Request, key: ready.AnyKey | None = None) -> State:
    """The state of a call: of an operator where torch traces, else of the kernel that the plan says.

    Args:
        key: under which the call is kept as a ready one.
    """
    if _has_dtensors(request):
        return import_module("regard.parallel.placement").attend_placed(request)  # only who has DTensors needs it
    if is_compiling():
        return attend_traced(request)
    request = _without_lazy_zeros(request)
    if (route := current_route.get()) is not None:
        return run_route(route, request)
    observers = active_observers()
    if is_counted() and not observers and _passes_operator(request.bias):
        return attend_traced(request)
    if not observers and (state := step(request)) is not None:
        return state
    prepared = prepare(request._replace(lse=True), observed=True) if observers else prepare(request)
    if prepared is None:
        return attend_traced(request)
    plan, operands = prepared
    plan, state = execute(plan, operands, request.backend)
    if key is not None:
        ready.keep(key, request.mask, request.offset, request.bias, plan, operands)
    return pass_to_observers(observers, request, plan, operands, state) if observers else state


skip_frames(_run)  # where torch.compile breaks the graph, it would compile what plans the call


def _without_lazy_zeros(request: Request) -> Request:
    """The request with memory for zeros that have none, which kernels, torch's too, would read at address 0."""
    if not any(map(is_lazy_zero, (request.q, request.k, request.v, request.sink))):
        return request
    given: dict[str, Any] = {name: getattr(request, name) for name in ("q", "k", "v", "sink")}
    return request._replace(**{name: t.clone() for name, t in given.items() if is_lazy_zero(t)})


def _has_dtensors(request: Request) -> bool:
    """Whether some of q, k and v are DTensors: by the name, as torch imports their class late."""
    return "DTensor" in {type(t).__name__ for t in request[:3]}


def _passes_operator(bias: object) -> bool:
    """Whether a bias passes through the operator: a function of the score does not, and its steps are counted apart."""
    return not isinstance(bias, ScoreFunction) or bias.can_be_serialized()


def cast_by_autocast(
    q: Tensor, k: Tensor | StoredTensor, v: Tensor | StoredTensor
) -> tuple[Tensor, Tensor | StoredTensor, Tensor | StoredTensor]:
    """q, k and v in the dtype of `torch.autocast`, where it is on, except float64; as torch's own attention does."""
    tensors: tuple[Any, ...] = (q, k, v)
    if not all(isinstance(t, Tensor | StoredTensor) for t in tensors):
        return q, k, v
    dtype = autocast_dtype(q.device.type)
    if dtype is None:
        return q, k, v
    for name, t in (("q", q), ("k", k), ("v", v)):
        if isinstance(t, Tensor):  # not all that pose refuses can be converted
            check_readable(name, t)
    return tuple(t.to(dtype) if t.dtype.is_floating_point and t.dtype != torch.float64 else t for t in tensors)
