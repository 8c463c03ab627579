"""FlexAttention under `torch.compile`: any mask and bias on CUDA, and forward without gradients on CPU.

The `BlockMask` comes from our schedule, not from `create_block_mask`, which evaluates all pairs: FULL and PARTIAL tiles
become its blocks, and in PARTIAL tiles the kernel looks up the schedule's bits. A bias is a vector over q - k per head,
or a tensor. So the compiled function takes tensors alone, knows no mask by name, and serves every length: on CUDA there
is one for each `Form`, and torch compiles it again only where a size is 1, or queries are one tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backend.contract import MAX_GRID, Backend, Kernel
from regard.backend.flex_blocks import Blocks, blocks
from regard.machine import python_header, torch_compiler, torch_compilers
from regard.plan.distance import split_by_distance, table, vectors
from regard.plan.lower import Lowering, add_biases, gather, prepare_score
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State
from regard.torch_internals import compiling_for_any_length

Modify = Callable[..., Tensor]

FORMS = 256
"""Compiled functions that are kept; on a CPU, one for each form and sizes."""

VARIANTS = 64
"""How many variants of a form torch may compile (types, gradients, sizes of 1); it raises an error beyond."""


@dataclass(frozen=True)
class Flex(Backend):
    """torch's FlexAttention.

    Attributes:
        compiler: the `backend` of `torch.compile`.
    """

    name: str = "flex"
    tile: int = 128
    lowerings: tuple[Lowering, ...] = (gather, prepare_score, add_biases)
    hides_by_zero: bool = True
    compiler: Any = "inductor"

    def refusals(self, problem: Problem) -> list[str]:
        p, cpu = problem, problem.device == "cpu"
        found = {
            f"it compiles for cpu and cuda, and the tensors are on {p.device}": p.device not in ("cpu", "cuda"),
            "it has no float64": p.dtype == torch.float64,
            "it has no dropout": p.dropout > 0,
            f"the score {p.score} is not known to it": p.score is not None,
            f"the function of the score in {p.bias} is not known to it": p.changes_scores,
            "it has no gradients on cpu": cpu and p.grad,
            "it has no log-sum-exp on cpu, which a State, a sink and observers need": cpu and (p.lse or p.sink),
            "it has no vmap or forward-mode derivative": p.transformed,
            f"it needs 16 dimensions on cuda, and has {p.qk_dim} and {p.v_dim}": not cpu
            and min(p.qk_dim, p.v_dim) < 16,
            f"on cuda its kernels take at most {MAX_GRID:,} batch rows and heads": not cpu
            and max(p.batch, p.heads) > MAX_GRID,
            "a size is 0": 0 in (p.batch, p.heads, p.queries, p.keys, p.qk_dim, p.v_dim),
        }
        lacking = _lacking() if cpu else None
        return [reason for reason, applies in found.items() if applies] + ([lacking] if lacking else [])

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        return partial(_run, problem, schedule, self.compiler)


class Form(NamedTuple):
    """What a function is compiled for."""

    tile: int
    scale: float
    softcap: float | None
    shared: bool  # key heads, among query heads
    lse: bool


def _run(problem: Problem, schedule: Schedule, compiler: Any, operands: Operands) -> State:
    q, k, v, p = operands.q, operands.k, operands.v, problem
    wants_lse = p.lse or p.sink
    form = Form(schedule.tile, p.scale, p.softcap, p.heads != p.kv_heads, wants_lse)
    # on cpu a kernel per length: inductor's template for it does not compile with symbolic lengths (torch 2.13)
    sizes = (p.batch, p.queries, p.keys) if p.device == "cpu" else None
    tables = None if p.mask is None else blocks(schedule, q.device)
    of_distance, others = split_by_distance(operands.bias)
    bias = table(others, operands)
    bias = None if bias is None else bias.float()  # its gradient is summed in float32
    distances = vectors(of_distance, p, operands)
    if distances is not None:  # no part of a longer vector: torch compiles again where one begins at element 0 or 1
        distances = distances.clone(memory_format=torch.contiguous_format)
    with compiling_for_any_length(VARIANTS):
        out, lse = _compiled(form, sizes, compiler)(q, k, v, tables, distances, bias)
    if not wants_lse:
        return State(out, torch.full(q.shape[:3], torch.nan, device=q.device))  # nobody reads it
    state = State(out, lse)
    return state if operands.sink is None else State(state.with_sink(operands.sink), state.lse)


@cache
def _lacking() -> str | None:
    """The requirement of torch.compile on CPU that this machine does not meet; None if it meets all."""
    if torch_compiler() is None:
        names = " or ".join(torch_compilers())
        lacks = f"finds no {names} (the variable CXX names another)" if names else "the variable CXX is empty: unset it"
        return f"torch.compile needs a C++ compiler on cpu, and {lacks}"
    if python_header() is None:
        return "torch.compile needs Python.h on cpu (Debian: the package python3-dev)"
    return None


@lru_cache(maxsize=FORMS)
def _compiled(form: Form, sizes: tuple[int, ...] | None, compiler: Any) -> Callable[..., Any]:
    """The compiled function of a form: for every length, or on a CPU for these sizes."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    # constants of the graph, where dynamic=True would make symbols of them; torch 2.11 cannot unpack a NamedTuple
    constants = torch.compiler.assume_constant_result(lambda: tuple(form))
    call: Any = flex_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, tables: Blocks | None, vectors: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        tile, scale, softcap, shared, lse = constants()
        adds = _adds(k.shape[2], vectors, bias)
        block_mask = None
        if tables is not None:
            sizes = q.shape[2], k.shape[2]
            block_mask = BlockMask(sizes, *tables.kv, *tables.q, BLOCK_SIZE=(tile, tile), mask_mod=_kept(tile, tables))
        score_mod = None if softcap is None and not adds else _score_mod(softcap, adds)
        aux = AuxRequest(lse=True) if lse else None
        # torch's kernel for few queries of one batch row has one block for all queries of a key head, and raises an
        # error where the block is larger than a tile (torch 2.11 to 2.13)
        decodes = q.shape[2] == 1 and q.shape[1] <= tile * k.shape[1]
        options = {"BACKEND": "AUTO" if decodes else "TRITON"}
        result = call(q, k, v, score_mod, block_mask, scale, shared, kernel_options=options, return_aux=aux)
        return (result[0], result[1].lse) if lse else (result, None)

    # code of its own: torch keeps what it compiled by code, and limits how much
    own = FunctionType(attend.__code__.replace(), attend.__globals__, "attend", None, attend.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=sizes is None, backend=compiler)


def _kept(tile: int, tables: Blocks) -> Modify:
    """The `mask_mod`, which looks up bits."""
    number, patterns = tables.number, tables.patterns
    batches, heads = (int(size > 1) for size in number.shape[:2])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return patterns[number[b * batches, h * heads, q // tile, k // tile], q % tile, k % tile]

    return mask_mod


def _score_mod(softcap: float | None, adds: list[Modify]) -> Modify:
    """Softcap, then bias, as a `score_mod`."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        for add in adds:
            score = score + add(b, h, q, k)
        return score

    return score_mod


def _adds(keys: int, vectors: Tensor | None, bias: Tensor | None) -> list[Modify]:
    """What a bias adds, by the indices of a pair."""
    adds: list[Modify] = []
    if vectors is not None:
        adds.append(lambda b, h, q, k: vectors[h, q - k + keys - 1])
    if bias is not None:
        batches, heads, rows, columns = (int(size > 1) for size in bias.shape)
        adds.append(lambda b, h, q, k: bias[b * batches, h * heads, q * rows, k * columns])
    return adds
