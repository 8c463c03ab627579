"""The cost of `regard.inspect`: a sweep relative to its attention, and pair measures relative to a forward pass."""

import math
import resource
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.report import table
from regard import Causal, attend, native
from regard.bench.limits import products
from regard.bench.rounds import Effort, interleaved, on_threads, timed
from regard.calls import observe_calls
from regard.inspect import MEASURES, Weights, observe
from regard.inspect.measures import Inputs, compute
from regard.inspect.sweep import sweep

HEADS, KV_HEADS, DIM = 9, 3, 64
"""The sizes of a layer of SmolLM2-135M."""

PICTURE = 192
SWEEP_GOAL = 4096, 2.0
"""Tokens, and the greatest time of a sweep relative to its attention."""

PAIRS = tuple(m for m in MEASURES if m.needs <= {"tokens", "causal"} and m.on != "jittered repeats")
"""Measures that are sums over O(n) pairs."""

LONG_GOAL, PAIRS_GOAL = 300, 25
"""MiB besides q, k and lse; per cent added to a forward pass."""


def observed_call(heads: int, kv_heads: int, tokens: int) -> tuple[Callable[[], object], Weights]:
    """A function that repeats a causal call on random tensors, and the weights of the call."""
    q, k, v = (torch.randn(1, h, tokens, DIM) for h in (heads, kv_heads, kv_heads))
    seen: list[Weights] = []
    with observe_calls(lambda call: seen.append(Weights.of(call))):
        attend(q, k, v, mask=Causal())
    return lambda: attend(q, k, v, mask=Causal()), seen[0]


def whole_sweep(weights: Weights) -> Callable[[], object]:
    """A sweep with everything that it can compute: a picture, and sums along two vectors."""
    along = torch.randn(1, 2, weights.shape[3])
    return lambda: sweep(weights, picture=PICTURE, along=along)


def sweeps(tokens: Sequence[int], effort: Effort, threads: int) -> str:
    """A sweep relative to its attention; the limit is the time of the matrix products alone on this machine."""
    rows: list[tuple[str, ...]] = []
    for count in tokens:
        again, weights = observed_call(HEADS, KV_HEADS, count)
        measures = {"attend": timed(again), "sweep": timed(whole_sweep(weights))}
        if native.available():
            measures["limit"] = lambda: products(torch.float32, threads) or math.nan
        rounds = interleaved(measures, effort)
        ours, theirs = (rounds.median(lambda one: one, name) for name in ("sweep", "attend"))
        ratio = rounds.median(lambda sweep, attend: sweep / attend, "sweep", "attend")
        flops = HEADS * count * (count + 1) * DIM
        share = rounds.median(lambda sweep, limit, flops=flops: flops / sweep / limit, "sweep", "limit")
        cells = (f"{1e3 * (theirs or 0):.1f}", f"{1e3 * (ours or 0):.1f}", f"{ratio or 0:.2f}")
        goal = ("", "") if count != SWEEP_GOAL[0] else (f"≤ {SWEEP_GOAL[1]:g}", reached(ratio, SWEEP_GOAL[1]))
        rows.append((f"{count:,}", *cells, "" if share is None else f"{100 * share:.0f} %", *goal))
    return table(("tokens", "attend, ms", "sweep, ms", "ratio", "products, of the limit", "goal", "reached"), rows)


def reached(found: float | None, most: float) -> str:
    """`yes` or `**no**`."""
    return "yes" if found is not None and found <= most else "**no**"


def long_sweep(tokens: int) -> str:
    """One head of a long text, in its own process: its seconds, and the peak memory besides q, k and lse."""
    with get_context("spawn").Pool(1) as pool:
        seconds, grown = pool.apply(_long, (tokens, torch.get_num_threads()))
    mebibytes = grown / 2**20
    goal = f" (goal: less than {LONG_GOAL}; reached: {reached(mebibytes, LONG_GOAL)})"
    return f"One head, {tokens:,} tokens: {seconds:.1f} s, {mebibytes:.0f} MiB besides q, k and lse{goal}."


def _long(tokens: int, threads: int) -> tuple[float, int]:
    with on_threads(threads):
        whole_sweep(observed_call(1, 1, 256)[1])()  # a warm-up: the first call starts threads and loads code
        _, weights = observed_call(1, 1, tokens)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = timed(whole_sweep(weights))()
        unit = 1 if sys.platform == "darwin" else 1024
        return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


def pair_measures(model: Any, label: str, tokens: int, effort: Effort) -> str:
    """The time that all measures over O(n) pairs add to the forward pass of a model with regard's attention."""
    ids = torch.randint(model.config.vocab_size, (1, tokens))

    def forward() -> Any:
        with torch.no_grad():
            return model(ids, logits_to_keep=1)

    def measured() -> Any:
        with observe(model, lambda look: compute(PAIRS, Inputs(look.weights, ids))) as seen:
            forward()
        return seen

    rounds = interleaved({"forward": timed(forward), "measured": timed(measured)}, effort)
    plain = rounds.median(lambda one: one, "forward")
    more = rounds.median(lambda forward, measured: measured / forward - 1, "forward", "measured")
    added = 100 * (more or 0)
    goal = f" (goal: less than {PAIRS_GOAL} %; reached: {reached(added, PAIRS_GOAL)})"
    return f"{label}, {tokens:,} tokens: forward {plain or 0:.2f} s, all pair measures {added:+.1f} %{goal}."
