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
from regard.bench.torch_way import Way, absence, ways
from regard.dispatch.choose import Plan
from regard.dispatch.plan_cache import forget

BACKWARD = 2.5
"""FLOPs of a backward pass, in those of a forward pass: five products for two. Dao 2023, arXiv:2307.08691, §4.1."""


@dataclass(frozen=True)
class Limit:
    """What bounds a case: `kind` is "products" or "stream", `work` the FLOPs or bytes that are needed at least."""

    kind: str
    work: float
    measure: Measure


@dataclass(frozen=True)
class Result:
    """What was measured of a case; medians over the rounds, ratios taken within each.

    Attributes:
        name, dtype, threads: of the case.
        engine: what ran.
        rounds: how many; `cut` says that Ctrl-C ended them.
        seconds: of one call.
        pairs: of query and key that are kept, over all batch rows and heads.
        flops: of those pairs, and of the backward pass if there was one.
        bound: "products" or "stream", whichever limits the case; None where the limit is not known.
        limit: the machine's, in FLOP/s or bytes/s.
        share: of that limit.
        torch_seconds, ratio, torch_share: torch's time, its time by ours, its share of the limit; None where torch was
            not measured.
        torch_way: how the call was said to torch, or why it was not.
        cost: time for each kept pair, by that of the case beside it; None without one.
    """

    name: str
    dtype: str
    threads: int
    engine: str
    rounds: int
    cut: bool
    seconds: float
    pairs: int
    flops: float
    bound: str | None
    limit: float | None
    share: float | None
    torch_seconds: float | None
    ratio: float | None
    torch_share: float | None
    torch_way: str
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
    """Measure a case, and in the same rounds torch, the machine's limit, and the case `beside` it.

    Ctrl-C ends it after one round or more, and is raised before.
    """
    threads = case.threads or threads
    with on_threads(threads), torch.set_grad_enabled(case.backward):
        made = _Made.of(case, dtype)
        measures = {"ours": timed(made.ours())}
        way, theirs = _fastest(made)
        limit = _limit(made, threads, seconds=min(0.2, max(0.02, measures["ours"]())))
        other = None if beside is None else _Made.of(beside, dtype)
        measures |= {"torch": theirs} if theirs is not None else {}
        measures |= {"limit": limit.measure} if limit is not None else {}
        measures |= {"beside": timed(other.ours())} if other is not None else {}
        rounds = interleaved(measures, effort, progress)
    return _result(made, threads, rounds, limit, way, other)


@dataclass(frozen=True)
class _Made:
    """A case with its tensors and words, and its plan."""

    case: Case
    dtype: torch.dtype
    copies: list[tuple[Tensor, Tensor, Tensor]]
    words: dict[str, Any]
    plan: Plan

    @staticmethod
    def of(case: Case, dtype: torch.dtype) -> "_Made":
        copies, words = case.copies(dtype), case.words(dtype)
        return _Made(case, dtype, copies, words, explain(*copies[0], **words))

    @property
    def flops(self) -> float:
        return self.plan.flops * (1 + BACKWARD * self.case.backward)

    def ours(self) -> Callable[[], object]:
        """The call by regard."""
        words = self.words

        def anew(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forget()
            return attend(q, k, v, **words)

        return self.run(anew if self.case.anew else lambda q, k, v: attend(q, k, v, **words))

    def run(self, way: Way) -> Callable[[], object]:
        """The call made in some way: with the next copy, and backwards if the case says so."""
        turns = cycle(self.copies)
        if not self.case.backward:
            return lambda: way(*next(turns))
        flows = torch.randn_like(way(*self.copies[0]))
        return lambda: torch.autograd.grad(way(*(inputs := next(turns))), inputs, flows)


def _fastest(made: _Made) -> tuple[str, Measure | None]:
    """How torch does it fastest, or why it is not measured; and its measurement."""
    reason = absence(made.case, made.dtype, made.words)
    if reason is not None:
        return reason, None
    found = {name: timed(made.run(way)) for name, way in ways(made.case, made.dtype, made.words).items()}
    name = min(found, key=lambda name: found[name]()) if len(found) > 1 else next(iter(found))
    return name, found[name]


def _limit(made: _Made, threads: int, seconds: float) -> Limit | None:
    """Whichever of products and memory takes longer for what is needed at least.

    Products are measured for `seconds`, about as long as the call takes: a busy machine then takes as much of both.
    """
    flops, moved = made.flops, made.plan.bytes
    products, stream = limits.products(made.dtype, threads), limits.stream(threads)
    if products is None or stream is None:
        return None
    if flops / products > moved / stream:
        return Limit("products", flops, lambda: limits.products(made.dtype, threads, seconds) or math.nan)
    return Limit("stream", moved, lambda: limits.stream(threads) or math.nan)


def _result(made: _Made, threads: int, rounds: Rounds, limit: Limit | None, way: str, other: _Made | None) -> Result:
    work = 0.0 if limit is None else limit.work
    pairs, other_pairs = made.plan.schedule.pairs, 0 if other is None else other.plan.schedule.pairs
    return Result(
        name=made.case.name,
        dtype=str(made.dtype).removeprefix("torch."),
        threads=threads,
        engine=made.plan.backend,
        rounds=len(rounds.found),
        cut=rounds.cut,
        seconds=rounds.median(lambda ours: ours, "ours") or math.nan,
        pairs=pairs,
        flops=made.flops,
        bound=limit and limit.kind,
        limit=rounds.median(lambda limit: limit, "limit"),
        share=rounds.median(lambda limit, ours: work / limit / ours, "limit", "ours"),
        torch_seconds=rounds.median(lambda theirs: theirs, "torch"),
        ratio=rounds.median(lambda theirs, ours: theirs / ours, "torch", "ours"),
        torch_share=rounds.median(lambda limit, theirs: work / limit / theirs, "limit", "torch"),
        torch_way=way,
        cost=rounds.median(lambda ours, beside: ours / pairs / (beside / other_pairs), "ours", "beside"),
    )
