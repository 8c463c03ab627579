"""The limits of the machine at hand and what the kernels reach of them, measured for `regard cost --machine this`.

The best of several rounds counts, of kernels and of limits: other load only makes them slower.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from regard import Causal, Window, attend, explain
from regard.bench import limits
from regard.bench.case import Case
from regard.bench.linear_rates import Sizes, linear_rates
from regard.bench.rounds import Effort, Measure, interleaved
from regard.bench.this_gpu import Cuda, measure_gpu
from regard.cost.expected import BACKWARD, START, partial_pairs
from regard.cost.machine import Efficiency, Machine
from regard.cost.this_machine import fast_memory, identity, store_this_machine, stored_at
from regard.errors import ProblemError
from regard.native import absence, available

TYPES = (torch.float32, torch.bfloat16)
"""Types that are measured; float16 is computed as float32 here."""

EFFORT = Effort(seconds=1.5, least=10)
"""How long each type is measured."""

LINEAR = Sizes(rows=256, dim=1024, weights=24, wide=2560)
"""Matrix products that a processor takes a few milliseconds for; the weights are read anew each time."""

CALLS = 12
"""Calls in a round, of which the fastest counts: the first ones fill the caches of the processor."""

TILES = Case("dense", 512, 512)
WIDE = Case("dense, 128 dims", 512, 512, dim=128)
EDGES = Case("window", 1024, 1024, mask=lambda: Causal() & Window(256))
FEW = Case("few queries", 1, 1024, heads=32, kv_heads=8, dim=128, mask=Causal)


def measure_this_machine(name: str = "this") -> Machine:
    """Measure the machine in a few seconds, store what was found, and return it.

    Args:
        name: "this" for the GPU where torch has one, else the processor; "this-cpu" for the processor.

    Raises:
        ProblemError: the compiled library, which measures a processor, is missing.
    """
    has_gpu = name == "this" and torch.cuda.is_available()
    machine = measure_gpu(Cuda()) if has_gpu else measure_processor(name)
    store_this_machine(machine)
    return machine


def measure_processor(name: str) -> Machine:
    """The limits of the processor, and what kernels reach of them."""
    if not available():
        raise ProblemError(f"this machine cannot be measured: {absence()} Name another one with --machine.")
    peaks, found, streams = dict[str, float](), dict[str, Efficiency](), list[float]()
    for dtype in TYPES:
        key = str(dtype).removeprefix("torch.")
        peaks[key], found[key], bandwidth = measure_efficiency(dtype, torch.get_num_threads(), EFFORT)
        streams.append(bandwidth)
    bandwidth = max(streams)
    for dtype in TYPES:
        key = str(dtype).removeprefix("torch.")
        flops, stream = linear_rates(dtype, "cpu", elapsed, LINEAR)
        found[key] = replace(
            found[key], linear_share=min(1.0, flops / peaks[key]), stream_share=min(1.0, stream / bandwidth)
        )
    return Machine(
        name=name,
        title=f"this processor: {identity().partition(';')[0]}",
        source=f"measured here: {stored_at(name)}",
        flops=peaks,
        bandwidth=bandwidth,
        memory=limits.MEMORY,
        fast_memory=fast_memory(),
        efficiency=found,
    )


def elapsed(call: Callable[[], object]) -> float:
    """Seconds of a call on the processor."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_efficiency(dtype: torch.dtype, threads: int, effort: Effort) -> tuple[float, Efficiency, float]:
    """(FLOP/s of products, what the kernels reach of them, bytes/s of memory) on torch's threads."""
    heads = 2 * threads  # every thread has work, and a call is short
    tiles, wide, edges_case = (replace(case, heads=heads, kv_heads=heads) for case in (TILES, WIDE, EDGES))
    with torch.no_grad():
        calls = {case.name: _call(case, dtype) for case in (tiles, wide, edges_case, FEW)}
        measures: dict[str, Measure] = {
            **calls,
            "gradients": _gradients(tiles, dtype),
            "products": lambda: limits.best_products(dtype, threads),
            "stream": lambda: limits.best_stream(threads),
        }
        rounds = interleaved(measures, effort).rounds
    full = _flops(tiles, dtype)[0]
    inside, edges = _flops(edges_case, dtype)
    few = _flops(FEW, dtype)[0]

    peak, bandwidth = (max(one[name] for one in rounds) for name in ("products", "stream"))

    def share_of(work: float, name: str) -> float:
        seconds = min(one[name] for one in rounds)
        return min(1.0, work / peak / max(seconds - START, seconds / 2))

    share = share_of(full, tiles.name)
    spent = share * inside / share_of(inside, edges_case.name)  # FLOPs of FULL tiles in the time of that call
    efficiency = Efficiency(
        share=share,
        partial_cost=max(0.5, (spent - inside) / edges),
        few_share=share_of(few, FEW.name),
        wide_share=share_of(_flops(wide, dtype)[0], wide.name),
        gradient_share=share_of(BACKWARD * full, "gradients"),
    )
    return peak, efficiency, bandwidth


def _call(case: Case, dtype: torch.dtype) -> Measure:
    (q, k, v), options = case.tensors(dtype), case.options(dtype)

    def seconds() -> float:
        start = time.perf_counter()
        attend(q, k, v, **options)
        return time.perf_counter() - start

    return lambda: min(seconds() for _ in range(CALLS))


def _gradients(case: Case, dtype: torch.dtype) -> Measure:
    inputs, options = replace(case, backward=True).tensors(dtype), case.options(dtype)
    dout = torch.randn_like(inputs[0])

    def seconds() -> float:
        with torch.enable_grad():
            out = attend(*inputs, **options)
        return elapsed(lambda: torch.autograd.grad(out, inputs, dout))

    return lambda: min(seconds() for _ in range(CALLS))


def _flops(case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """FLOPs of the pairs in (FULL tiles, PARTIAL tiles); for few queries (of the kept pairs, 0)."""
    plan = explain(*case.tensors(dtype), **case.options(dtype))
    each, s = 4 * case.dim, plan.schedule
    if case.queries == 1:
        return each * s.pairs, 0.0
    edges = partial_pairs(s, case.queries)
    return each * (s.covered - edges), each * edges
