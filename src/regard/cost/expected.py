"""The time of a call on a CPU as its limits and the measured efficiency of regard's kernels give it.

The roofline is a limit that no kernel reaches. Three things keep ours below it, each a number read off the tables of
docs/performance (zen5.md): kernels reach a share of the peak on FULL tiles; a PARTIAL tile takes longer than a FULL one,
as its mask is applied; and with few queries products and reads do not overlap, and products reach less.

    many queries   t = start + max(4 d (full + partial_cost * partial) / (share * peak), bytes / bandwidth)
    few queries    t = start + 4 d pairs / (few_share * peak) + bytes / bandwidth

`full` and `partial` are pairs in tiles of the schedule; FLOPs of a backward pass are 2.5 times those of the forward pass.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from regard.cost.machine import Machine

FEW = 16
"""Queries up to which the kernels of few queries run."""

BACKWARD = 2.5
"""FLOPs of the backward pass, in those of the forward pass. Dao 2023, arXiv:2307.08691, §4.1."""

START = 20e-6
"""Seconds from the call to the kernel, of a call that was made before."""


@dataclass(frozen=True)
class Efficiency:
    """What the kernels reach of a machine's limits.

    Attributes:
        share: of the peak, on FULL tiles.
        partial_cost: time of a PARTIAL tile, in that of a FULL one.
        few_share: of the peak, for few queries.
    """

    share: float
    partial_cost: float
    few_share: float


EFFICIENCY = {"float32": Efficiency(0.84, 1.7, 0.4), "bfloat16": Efficiency(0.77, 2.3, 0.4)}
"""By type: medians over the rows `dense`, `causal` and `window` of the section Prompts, and over those of Decoding."""


class Tiled(Protocol):
    """A plan: its problem, its tiles, and the bytes it moves at least. `regard.Plan` is one."""

    @property
    def problem(self) -> Any: ...  # noqa: D102 - sizes and dtype
    @property
    def schedule(self) -> Any: ...  # noqa: D102 - tiles and pairs
    @property
    def bytes(self) -> int: ...  # noqa: D102


def expected_seconds(plan: Tiled, machine: Machine, *, backward: bool = False) -> float:
    """The expected time of a call in seconds, on a CPU by the compiled kernels.

    Args:
        machine: its limits, measured with the threads of the call.
        backward: whether the gradients are computed as well.
    """
    p, s = plan.problem, plan.schedule
    dtype = str(p.dtype).removeprefix("torch.")
    e, peak = EFFICIENCY.get(dtype, EFFICIENCY["float32"]), machine.peak(dtype)
    per_pair, passes = 2 * (p.score_dim + p.v_dim), 1 + BACKWARD * backward
    reading = plan.bytes * passes / machine.bandwidth
    if p.queries <= FEW:
        return START + s.pairs * per_pair / (e.few_share * peak) + reading
    partial = min(s.covered, s.tiles[1] * s.tile * min(s.tile, p.queries))
    pairs = s.covered + (e.partial_cost - 1) * partial
    return START + max(passes * pairs * per_pair / (e.share * peak), reading)
