"""FlexAttention under `torch.compile`: any mask and bias on CUDA, and forward without gradients on CPU.

The `BlockMask` comes from our schedule, not from `create_block_mask`, which evaluates all pairs: FULL and PARTIAL tiles
become its blocks, and in PARTIAL tiles the kernel looks up the schedule's bits. So one compiled kernel serves every
mask. A bias is a vector over k - q per head, or a tensor; each of these forms has its own kernel.
"""

import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.backend.contract import Backend, Kernel
from regard.describe.bias import Bias
from regard.plan.lower import Lowering, gather, prepare_score
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State
from regard.torch_internals import recompile_limit

Modify = Callable[..., Tensor]

KERNELS = 64
"""Variants that dynamo may compile; beyond its default of 8 it falls back to a dense, unfused path."""


@dataclass(frozen=True)
class Flex(Backend):
    """torch's FlexAttention."""

    name: str = "flex"
    tile: int = 128
    lowerings: tuple[Lowering, ...] = (gather, prepare_score)
    hides_by_zero: bool = True

    def refusals(self, problem: Problem) -> list[str]:
        p, cpu = problem, problem.device == "cpu"
        found = {
            f"it compiles for cpu and cuda, and the tensors are on {p.device}": p.device not in ("cpu", "cuda"),
            "it has no float64": p.dtype == torch.float64,
            "it has no dropout": p.dropout > 0,
            f"the score {p.score} is not known to it": p.score is not None,
            f"the function of the score in {p.bias} is not known to it": p.changes_scores,
            "it has no gradients on cpu": cpu and p.grad,
            "it has no log-sum-exp on cpu, which a State and a sink need": cpu and (p.lse or p.sink),
            "it has no vmap or forward-mode derivative": p.transformed,
            f"it needs 16 dimensions on cuda, and has {p.qk_dim} and {p.v_dim}": not cpu
            and min(p.qk_dim, p.v_dim) < 16,
            "a size is 0": 0 in (p.batch, p.heads, p.queries, p.keys, p.qk_dim, p.v_dim),
        }
        lacking = _lacking() if cpu else None
        return [reason for reason, applies in found.items() if applies] + ([lacking] if lacking else [])

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        return partial(_run, problem, schedule)


def _run(problem: Problem, schedule: Schedule, operands: Operands) -> State:
    q, k, v = operands.q, operands.k, operands.v
    block_mask = None if problem.mask is None else _block_mask(schedule, q.device)
    score_mod = _score_mod(problem, operands.bias, q.device)
    shared = problem.heads != problem.kv_heads
    wants_lse = problem.lse or problem.sink
    with recompile_limit(KERNELS):
        result = _compiled(q.device.type)(
            q, k, v, score_mod, block_mask, problem.scale, shared, _aux() if wants_lse else None
        )
    if not wants_lse:
        return State(result, torch.full(q.shape[:3], torch.nan, device=q.device))  # nobody asked for it
    state = State(result[0], result[1].lse)
    return state if operands.sink is None else State(state.with_sink(operands.sink), state.lse)


@cache
def _lacking() -> str | None:
    """The requirement of torch.compile on CPU that this machine does not meet; None if it meets all."""
    compilers = ("g++", "clang++", "c++")
    if not any(shutil.which(name) for name in compilers):
        return f"torch.compile needs a C++ compiler on cpu, and none of {', '.join(compilers)} is on the path"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "torch.compile needs Python.h on cpu (Debian: the package python3-dev)"
    return None


@cache
def _compiled(device: str) -> Callable[..., Any]:
    # on cpu a kernel per length: inductor's template for it does not compile with symbolic lengths (torch 2.13)
    return torch.compile(_attend, fullgraph=True, dynamic=False if device == "cpu" else None)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Modify | None, block_mask: Any, scale: float, shared: bool, aux: Any
) -> Any:
    from torch.nn.attention import flex_attention

    attend: Any = flex_attention.flex_attention
    return attend(q, k, v, score_mod, block_mask, scale, enable_gqa=shared, return_aux=aux)


def _aux() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _block_mask(schedule: Schedule, device: torch.device) -> Any:
    """The schedule as a `BlockMask`: FULL and PARTIAL key tiles of each query tile, and the bits of PARTIAL tiles."""
    from torch.nn.attention.flex_attention import BlockMask

    full, partial, number = (x.to(device) for x in _tables(schedule))
    patterns = torch.cat([schedule.pattern(i)[None] for i in range(len(schedule.patterns))] or [_no_bits(schedule)]).to(
        device
    )
    tile, batches, heads = schedule.tile, *schedule.maps
    several_batches, several_heads = int(batches > 1), int(heads > 1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return patterns[number[b * several_batches, h * several_heads, q // tile, k // tile], q % tile, k % tile]

    counts = [listed.sum(dim=3, dtype=torch.int32) for listed in (partial, full)]
    order = [
        listed.to(torch.int8).argsort(dim=3, descending=True, stable=True).to(torch.int32) for listed in (partial, full)
    ]
    return BlockMask.from_kv_blocks(
        counts[0], order[0], counts[1], order[1], tile, mask_mod, seq_lengths=(schedule.queries, schedule.keys)
    )


def _tables(schedule: Schedule) -> tuple[Tensor, Tensor, Tensor]:
    """(full, partial) as bool and the index of the pattern as int32, each [maps, maps, query tiles, key tiles]."""
    rows, across = schedule.maps[0] * schedule.maps[1] * schedule.query_tiles, -(-schedule.keys // schedule.tile)
    full, partial = (torch.zeros(rows, across, dtype=torch.bool, device="cpu") for _ in range(2))
    number = torch.zeros(rows, across, dtype=torch.int32, device="cpu")
    for row in range(rows):
        for run in schedule.runs(row):
            full[row, run.start // schedule.tile : -(-run.stop // schedule.tile)] = True
        for patch in schedule.patches(row):
            partial[row, patch.start // schedule.tile] = True
            number[row, patch.start // schedule.tile] = patch.pattern
    shape = (*schedule.maps, schedule.query_tiles, across)
    return full.view(shape), partial.view(shape), number.view(shape)


def _no_bits(schedule: Schedule) -> Tensor:
    return torch.zeros(1, schedule.tile, schedule.tile, dtype=torch.bool, device="cpu")


def _score_mod(problem: Problem, bias: Bias | None, device: torch.device) -> Modify | None:
    """Softcap, then bias, as a `score_mod`; None if there is neither."""
    cap = problem.softcap
    adds = [] if bias is None else [_added(problem, term, device) for term in bias.terms()]
    if cap is None and not adds:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if cap is None else cap * torch.tanh(score / cap)
        for add in adds:
            score = score + add(b, h, q, k)
        return score

    return score_mod


def _added(problem: Problem, bias: Bias, device: torch.device) -> Modify:
    """A bias as a look-up by the indices of query and key: in a vector over k - q per head, or in a tensor."""
    bias = bias.widened(torch.float32)  # its gradient is summed in float32
    h = torch.arange(problem.heads, device=device)
    if bias.per_distance():
        first = 1 - problem.queries  # the least k - q, from 0, with q counted from the first query of the call
        distance = torch.arange(first, problem.keys, device=device) - problem.offset
        vector = bias.value(0, h[:, None], 0, distance).to(torch.float32)
        return lambda b, h, q, k: vector[h, k - q - first]
    b, q = torch.arange(problem.batch, device=device), torch.arange(problem.queries, device=device) + problem.offset
    k = torch.arange(problem.keys, device=device)
    table = bias.value(b[:, None, None, None], h[:, None, None], q[:, None], k)
    table = table.expand(problem.batch, problem.heads, problem.queries, problem.keys)
    return lambda b, h, q, k: table[b, h, q, k]
