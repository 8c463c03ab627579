"""What one call of attention costs, from its plan: `regard.explain` makes it, and nothing is computed.

>>> import torch
>>> from regard import Causal, explain
>>> q, k = torch.empty(1, 32, 4096, 128, device="meta"), torch.empty(1, 8, 4096, 128, device="meta")
>>> c = call_cost(explain(q, k, k, mask=Causal()), machine="h100")
>>> c.flops / 1e9, round(c.naive_bytes / c.tiled_bytes, 1)
(137.472507904, 2.5)
"""

from dataclasses import dataclass
from typing import cast

from regard.cost.expected import Planned, expected_seconds
from regard.cost.machine import Machine
from regard.cost.machines import machine_or_none
from regard.cost.products import attention_flops, attention_gradient_flops
from regard.cost.traffic import naive_elements, tiled_elements
from regard.errors import ProblemError


@dataclass(frozen=True)
class CallCost:
    """The cost of one call.

    Attributes:
        pairs: kept pairs of query and key, over all batch rows and heads.
        flops, gradient_flops: of the forward and of the backward pass.
        least_bytes: q, out, and the keys and values that are seen, each once.
        tiled_bytes, naive_bytes: of algorithms 1 and 0 of Dao et al. 2022, arXiv:2205.14135; tiled None without a
            machine, as it depends on the fast memory.
        intensity: FLOPs for each of the least bytes.
        seconds: the roofline of the forward pass; None without a machine.
        expected_seconds: its expected time on a CPU, see `regard.cost.expected`; None where the efficiency of regard's
            kernels was not measured (on a machine other than `this`).
    """

    pairs: int
    flops: int
    gradient_flops: int
    least_bytes: int
    tiled_bytes: int | None
    naive_bytes: int
    intensity: float
    seconds: float | None
    expected_seconds: float | None


def call_cost(plan: Planned, *, machine: Machine | str | None = None) -> CallCost:
    """The cost of the call of a plan.

    Args:
        machine: its limits, or its name; None: no times.

    Raises:
        ProblemError: it is no plan; there is no such machine, or it has no products of the call's type.
    """
    if not isinstance(cast(object, plan), Planned):
        raise ProblemError(f"call_cost takes a plan, and got {type(plan).__name__}: regard.explain(q, k, v) makes one.")
    p, pairs = plan.problem, plan.schedule.pairs
    machine = machine_or_none(machine)
    item, heads = p.dtype.itemsize, p.batch * p.heads
    flops = attention_flops(pairs, p.score_dim, p.v_dim)
    dims = (p.queries, p.keys, p.qk_dim, p.v_dim)
    tiled = None
    if machine is not None:
        each = -(-pairs // max(1, heads))  # of one head, on average
        tiled = heads * tiled_elements(*dims, fast=machine.fast_memory // item, pairs=each) * item
    dtype = str(p.dtype).removeprefix("torch.")
    return CallCost(
        pairs=pairs,
        flops=flops,
        gradient_flops=attention_gradient_flops(pairs, p.score_dim, p.v_dim),
        least_bytes=plan.bytes,
        tiled_bytes=tiled,
        naive_bytes=heads * naive_elements(*dims) * item,
        intensity=flops / plan.bytes if plan.bytes else 0.0,
        seconds=None if machine is None else machine.seconds(flops, plan.bytes, dtype),
        expected_seconds=expected_seconds(plan, machine) if machine and machine.efficiency else None,
    )
