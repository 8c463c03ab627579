"""A case measured: regard, torch and the machine's limit in the same rounds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from regard.attention import attend, explain
from regard.bench import limits
from regard.bench.case import Case
from regard.bench.rounds import Effort, Measure, Rounds, interleaved, on_threads, timed
from regard.bench.torch_calls import TorchCall, refusal, torch_calls
from regard.cost.attention import gradient_flops
from regard.dispatch.choose import Plan
from regard.dispatch.plan_cache import forget


@dataclass(frozen=True)
class Limit:
    """The bound of a case: `kind` is "products" or "stream", `work` the least FLOPs or bytes."""

    kind: str
    work: float
    measure: Measure


@dataclass(frozen=True)
class Result:
    """The measurements of a case: medians over the rounds, of ratios within each round.

    Attributes:
        name, dtype, threads: of the case.
        backend: name of the backend.
        rounds, interrupted: number of rounds, and whether Ctrl-C ended them.
        seconds: time of one call.
        pairs: visible pairs of query and key, over all batch rows and heads.
        flops: FLOPs of those pairs, including the backward pass.
        bound: "products" or "stream", whichever limits the case; None where the limit is not known.
        limit: limit of the machine, in FLOP/s or bytes/s.
        share: share of the limit that is reached.
        torch_seconds, ratio, torch_share: torch's time, torch's time / ours, torch's share of the limit; None where
            torch is not measured.
        torch_call: the arguments of torch's call, or why it is not measured.
        cost: time per visible pair, divided by that of the reference case; None without one.
    """

    name: str
    dtype: str
    threads: int
    backend: str
    rounds: int
    interrupted: bool
    seconds: float
    pairs: int
    flops: float
    bound: str | None
    limit: float | None
    share: float | None
    torch_seconds: float | None
    ratio: float | None
    torch_share: float | None
    torch_call: str
    cost: float | None

    @property
    def rate(self) -> float:
        """FLOP/s over the kept pairs."""
        return self.flops / self.seconds


def measure(
    case: Case,
    dtype: torch.dtype,
    threads: int,
    effort: Effort,
    *,
    beside: Case | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Measure a case, and in the same rounds torch, the machine's limit, and the reference case `beside`.

    Ctrl-C ends the measurement after at least one round, and is raised before that.
    """
    threads = case.threads or threads
    with on_threads(threads), torch.set_grad_enabled(case.backward):
        own = _Prepared.of(case, dtype)
        measures = {"ours": timed(own.ours())}
        torch_call, theirs = _fastest(own)
        limit = _limit(own, threads, seconds=min(0.2, max(0.02, measures["ours"]())))
        other = None if beside is None else _Prepared.of(beside, dtype)
        measures |= {"torch": theirs} if theirs is not None else {}
        measures |= {"limit": limit.measure} if limit is not None else {}
        measures |= {"beside": timed(other.ours())} if other is not None else {}
        rounds = interleaved(measures, effort, progress)
    return _result(own, threads, rounds, limit, torch_call, other)


@dataclass(frozen=True)
class _Prepared:
    """A case with its tensors, the other arguments of `attend`, and its plan."""

    case: Case
    dtype: torch.dtype
    copies: list[tuple[Tensor, Tensor, Tensor]]
    options: dict[str, Any]
    plan: Plan

    @staticmethod
    def of(case: Case, dtype: torch.dtype) -> "_Prepared":
        copies, options = case.copies(dtype), case.options(dtype)
        return _Prepared(case, dtype, copies, options, explain(*copies[0], **options))

    @property
    def flops(self) -> float:
        p = self.plan.problem
        gradients = gradient_flops(self.plan.schedule, qk_dim=p.score_dim, v_dim=p.v_dim) if self.case.backward else 0
        return self.plan.flops + gradients

    def ours(self) -> Callable[[], object]:
        """regard's call."""
        options = self.options

        def with_new_plan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forget()
            return attend(q, k, v, **options)

        return self.run(with_new_plan if self.case.new_plan else lambda q, k, v: attend(q, k, v, **options))

    def run(self, call: TorchCall) -> Callable[[], object]:
        """The call on the next copy of the inputs, with gradients if the case has them."""
        turns = cycle(self.copies)
        if not self.case.backward:
            return lambda: call(*next(turns))
        dout = torch.randn_like(call(*self.copies[0]))
        return lambda: torch.autograd.grad(call(*(inputs := next(turns))), inputs, dout)


def _fastest(own: _Prepared) -> tuple[str, Measure | None]:
    """The name of torch's fastest call and its measurement, or why torch is not measured and None."""
    reason = refusal(own.case, own.dtype, own.options)
    if reason is not None:
        return reason, None
    calls = torch_calls(own.case, own.dtype, own.options)
    measures = {name: timed(own.run(call)) for name, call in calls.items()}
    name = min(measures, key=lambda name: measures[name]()) if len(measures) > 1 else next(iter(measures))
    return name, measures[name]


def _limit(own: _Prepared, threads: int, seconds: float) -> Limit | None:
    """The limit that takes longer: the products, or reading and writing memory.

    Products are measured for `seconds`, about as long as the call: other load on the machine then slows both alike.
    """
    flops, moved = own.flops, own.plan.bytes
    products, stream = limits.products(own.dtype, threads), limits.stream(threads)
    if products is None or stream is None:
        return None
    if flops / products > moved / stream:
        return Limit("products", flops, lambda: limits.products(own.dtype, threads, seconds) or math.nan)
    return Limit("stream", moved, lambda: limits.stream(threads) or math.nan)


def _result(
    own: _Prepared, threads: int, rounds: Rounds, limit: Limit | None, torch_call: str, other: _Prepared | None
) -> Result:
    work = 0.0 if limit is None else limit.work
    pairs, other_pairs = own.plan.schedule.pairs, 0 if other is None else other.plan.schedule.pairs
    return Result(
        name=own.case.name,
        dtype=str(own.dtype).removeprefix("torch."),
        threads=threads,
        backend=own.plan.backend,
        rounds=len(rounds.rounds),
        interrupted=rounds.interrupted,
        seconds=rounds.median(lambda ours: ours, "ours") or math.nan,
        pairs=pairs,
        flops=own.flops,
        bound=limit and limit.kind,
        limit=rounds.median(lambda limit: limit, "limit"),
        share=rounds.median(lambda limit, ours: work / limit / ours, "limit", "ours"),
        torch_seconds=rounds.median(lambda theirs: theirs, "torch"),
        ratio=rounds.median(lambda theirs, ours: theirs / ours, "torch", "ours"),
        torch_share=rounds.median(lambda limit, theirs: work / limit / theirs, "limit", "torch"),
        torch_call=torch_call,
        cost=rounds.median(lambda ours, beside: ours / pairs / (beside / other_pairs), "ours", "beside"),
    )
