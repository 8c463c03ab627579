"""The time of a call on a CPU as its limits and the efficiency of regard's kernels give it.

The roofline is a limit that no kernel reaches. Three things keep ours below it: kernels reach a share of the peak on
FULL tiles; a PARTIAL tile takes another time than a FULL one, as its mask is applied; and with few queries products and
reads do not overlap, and products reach less.

    many queries   t = start + max(4 d (full + partial_cost * partial) / (share * peak), bytes / bandwidth)
    few queries    t = start + 4 d pairs / (few_share * peak) + bytes / bandwidth

`full` and `partial` are pairs in tiles of the schedule. A backward pass computes five products, three over `qk_dim` and
two over `v_dim`, and the forward pass two: where the dims are equal that is 2.5 times the FLOPs. On a machine whose
`gradient_share` was not measured they run at the share of the forward pass: in docs/performance the passes together
take 3.0 to 3.8 times as long as the forward pass alone, and here 3.5 times.
A pair takes time for its exponential too, whatever d is, so `share` grows with d: it is measured at 64 and 128 dims
(`share` and `wide_share`), between and beyond which time is linear in d. With AMX (bfloat16) exponentials and traffic
between the caches take longer than the products: the shares are about 0.17 and 0.22. The backward pass has a share of
its own (`gradient_share`).

The numbers are measured with the limits (`regard.bench.this_machine`), on five calls.
"""

from typing import Any, Protocol, runtime_checkable

from regard.cost.machine import Efficiency, Machine
from regard.cost.work import Parts, Work

FEW = 16
"""Queries up to which the kernels of few queries run."""

BACKWARD = 2.5
"""FLOPs of the backward pass, in those of the forward pass, where `qk_dim` is `v_dim`. Dao 2023, arXiv:2307.08691,
§4.1."""

START = 20e-6
"""Seconds from the call to the kernel, of a call that was made before."""

EFFICIENCY = {"float32": Efficiency(0.84, 1.7, 0.4), "bfloat16": Efficiency(0.77, 2.3, 0.4)}
"""The efficiency of a machine on which it was not measured: by type, from the rows `dense`, `causal`, `window` and
`decode` of docs/performance/zen5.md. They are shares of the peak of vector products, not of AMX."""


@runtime_checkable
class Planned(Protocol):
    """What a plan says: its sizes, its tiles, and the least bytes it moves. `regard.Plan` is one."""

    @property
    def problem(self) -> Any: ...
    @property
    def schedule(self) -> Any: ...
    @property
    def bytes(self) -> int: ...


def expected_seconds(plan: Planned, machine: Machine, *, backward: bool = False) -> float:
    """The expected time of a call in seconds, on a CPU by the compiled kernels.

    Args:
        machine: its limits, measured with the threads of the call.
        backward: whether the gradients are computed as well.
    """
    p, s = plan.problem, plan.schedule
    dtype = str(p.dtype).removeprefix("torch.")
    known = {**EFFICIENCY, **(machine.efficiency or {})}
    e, peak = known.get(dtype, known["float32"]), machine.peak(dtype)
    per_pair, passes = 2 * (p.score_dim + p.v_dim), 1 + BACKWARD * backward
    reading = plan.bytes * passes / machine.bandwidth
    of_backward = 2 * (3 * p.score_dim + 2 * p.v_dim) * backward
    if p.queries <= FEW:
        return START + s.pairs * (per_pair + of_backward) / (e.few_share * peak) + reading
    pairs = s.covered + (e.partial_cost - 1) * partial_pairs(s, p.queries)
    work = forward_work(e, per_pair)
    work += of_backward / e.gradient_share if e.gradient_share else work * of_backward / per_pair
    return START + max(pairs * work / peak, reading)


def forward_work(e: Efficiency, flops: float) -> float:
    """FLOPs that take as long at the peak as one pair with this many FLOPs of products takes in the kernels.

    >>> e = Efficiency(share=0.25, partial_cost=1.0, few_share=0.1, wide_share=0.4)
    >>> [forward_work(e, 4 * d) for d in (64, 128, 256)]  # 256 / 0.25, 512 / 0.4, and as much more for each 64 dims
    [1024.0, 1280.0, 1792.0]
    """
    narrow, wide = 4 * 64 / e.share, 4 * 128 / (e.wide_share or e.share)
    exponential = max(0.0, 2 * narrow - wide)
    return exponential + (narrow - exponential) * flops / (4 * 64)


def expected_pass(parts: Parts, machine: Machine, dtype: str, *, is_step: bool) -> float | None:
    """The expected time of a pass of a model: each part at the shares that were measured of its kind.

    Attention as above, its PARTIAL tiles as FULL ones and its heads of 128 dims; products with weights at their share
    of the peak or, where they take longer to read, of the bandwidth; states at the roofline.

    Args:
        is_step: whether the pass has one query for each batch row.

    Returns:
        None where the shares of this type were not measured.
    """
    e = (machine.efficiency or {}).get(dtype)
    if e is None or e.linear_share is None or e.stream_share is None:
        return None
    peak, bandwidth = machine.peak(dtype), machine.bandwidth
    linear, stream = e.linear_share * peak, e.stream_share * bandwidth

    def seconds(name: str, work: Work) -> float:
        if name == "recurrent":
            return machine.seconds(work.flops, work.moved, dtype)
        if name != "attention":
            return max(work.flops / linear, work.moved / stream)
        if is_step:
            return work.flops / (e.few_share * peak) + work.moved / bandwidth
        return max(work.flops / ((e.wide_share or e.share) * peak), work.moved / bandwidth)

    return sum(seconds(name, work) for name, work in parts.each.items())


def partial_pairs(schedule: Any, queries: int) -> int:
    """Pairs in PARTIAL tiles, kept or not."""
    return min(schedule.covered, schedule.tiles[1] * schedule.tile * min(schedule.tile, queries))
