"""torch's fused kernels, for what it computes without building a mask or a bias, and means as we do.

It knows one mask, the causal triangle with its corner at the top left. Everything else it takes only as a full
[queries, keys] tensor, and computes every hidden pair, so regard uses it for nothing else.

On CUDA torch chooses among cuDNN's kernel, flash attention and others where there is no mask. Under the causal mask,
and where the log-sum-exp is returned, regard calls the operators of the first two (`sdpa_cuda.py`). On a CPU
the kernel is called directly (`aten::_scaled_dot_product_flash_attention_for_cpu`, the same op in torch 2.11 to
2.15), since it gives the log-sum-exp and never becomes torch's own fallback, which materialises all scores.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backend.contract import MAX_GRID, Backend, Kernel
from regard.backend.triton import Triton, is_decoding
from regard.describe.mask_by_rule import Causal
from regard.plan.lower import Lowering, Step, gather, pack, prepare_score
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State
from regard.torch_internals import (
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_attention_for_cpu,
)

LARGEST_FUSED_DIM = 256
"""The largest head dimension of torch's fused kernels for CUDA."""

FUSED_DIMS = 8
"""The head dimensions of cuDNN's kernel and of flash attention are multiples of this."""

HALF = (torch.bfloat16, torch.float16)
"""The types that both take."""


def repair(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """Say what is computed twice: torch's kernels let NaN and inf of hidden keys through."""
    if problem.mask is None or not _calls_operators(problem):
        return problem, None
    return problem, Step("repair", "rows that are not finite are computed again by the kernels of triton")


@dataclass(frozen=True)
class Sdpa(Backend):
    """torch's fused attention: its kernel for CPUs, and on CUDA the one that torch chooses."""

    name: str = "sdpa"
    tile: int = 128
    lowerings: tuple[Lowering, ...] = (gather, prepare_score, pack, repair)
    hides_by_zero: bool = True
    any_length: bool = True

    def leaks(self, problem: Problem) -> bool:
        return problem.device == "cpu" and super().leaks(problem)

    def refusals(self, problem: Problem) -> list[str]:
        p, own = problem, _calls_operators(problem)
        found = {
            "this version of torch lacks its kernel": p.device == "cpu" and flash_attention_for_cpu is None,
            f"it is used on cpu and cuda, and the tensors are on {p.device}": p.device not in ("cpu", "cuda"),
            "this version of torch lacks its kernels for a causal mask and the log-sum-exp on cuda": own
            and None in (cudnn_attention, cudnn_attention_backward, flash_attention, flash_attention_backward),
            "on cuda, under a mask or with the log-sum-exp, its kernels take float16 and bfloat16, not "
            f"{_name(p.dtype)}": own and p.dtype not in HALF,
            f"on cuda, under a mask or with the log-sum-exp, its kernels take heads of a multiple of {FUSED_DIMS} "
            f"dimensions, not {p.qk_dim}": own and p.qk_dim % FUSED_DIMS != 0,
            f"on cuda its kernels know the causal mask of as many keys as queries, not of {p.keys:,} and "
            f"{p.queries:,}": own and p.mask is not None and p.keys != p.queries,
            "on cuda it gives no log-sum-exp of few queries, for which triton has kernels": own
            and p.mask is None
            and is_decoding(p),
            "a tensor is lazily negated, or of a class with a __torch_dispatch__ of its own": own and p.opaque,
            "on cuda float64 makes torch build all scores": p.device == "cuda" and p.dtype == torch.float64,
            f"on cuda heads of more than {LARGEST_FUSED_DIM} dimensions make torch build all scores": (
                p.device == "cuda" and p.qk_dim > LARGEST_FUSED_DIM
            ),
            "on cuda float32 with shared key heads makes torch build all scores": (  # until pytorch/pytorch#191085
                p.device == "cuda" and p.dtype == torch.float32 and p.heads != p.kv_heads
            ),
            f"on cuda float32 heads of {p.qk_dim} dimensions, no multiple of 4, make torch build all scores": (
                p.device == "cuda" and p.dtype == torch.float32 and p.qk_dim % 4 != 0
            ),
            f"on cuda its kernels take at most {MAX_GRID:,} batch rows and heads": (
                p.device == "cuda" and max(p.batch, p.heads) > MAX_GRID
            ),
            f"mask {p.mask} would be built in full, [queries, keys], and every hidden pair computed": not _known(p),
            "a bias would be built in full for every head": p.bias is not None,
            f"the score {p.score} is not known to it": p.score is not None,
            "it has no softcap": p.softcap is not None,
            "dropout makes torch build all scores": p.dropout > 0,
            f"qk_dim {p.qk_dim} and v_dim {p.v_dim} differ, which makes torch build all scores": p.qk_dim != p.v_dim,
            "its log-sum-exp, which a State, a sink and observers need, has no gradient": (
                p.device == "cpu" and p.grad and (p.lse or p.sink)
            ),
            "it rounds its output before a sink can be folded in": p.sink and p.dtype in HALF,
            "it has no vmap or forward-mode derivative": p.transformed,
            f"it hides keys before it multiplies by scale, which must then be above 0 and is {p.scale}": (
                p.mask is not None and p.scale <= 0
            ),
            "a size is 0": 0 in (p.batch, p.heads, p.queries, p.keys, p.qk_dim),
        }
        reasons = [reason for reason, applies in found.items() if applies]
        return reasons or (_refused_repair(p) if own else [])

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        if _calls_operators(problem):
            from regard.backend.sdpa_cuda import RepairedKernel

            return RepairedKernel(problem, schedule)
        return partial(_run, problem)


def _run(problem: Problem, operands: Operands) -> State:
    causal = problem.mask is not None
    if problem.device == "cuda":
        out = F.scaled_dot_product_attention(
            operands.q, operands.k, operands.v, scale=problem.scale, enable_gqa=problem.heads != problem.kv_heads
        )
        return State(out, torch.full(out.shape[:3], torch.nan, device=out.device))  # nobody reads it
    q, k = _apart(operands.q, problem.qk_dim), _apart(operands.k, problem.qk_dim)
    out, lse = flash_attention_for_cpu(q, k, operands.v, 0.0, causal, scale=problem.scale)
    state = State(out, lse)
    return state if operands.sink is None else State(state.with_sink(operands.sink), lse)


def _apart(t: Tensor, dim: int) -> Tensor:
    """The tensor of heads of `dim` elements, copied if its tokens overlap in memory.

    torch's kernel gives garbage for queries one element apart, and raises an error for gradients in bfloat16.
    """
    return t.contiguous() if 0 < t.stride(2) < dim else t


def _calls_operators(problem: Problem) -> bool:
    """Whether torch's own attention would let hidden NaN through, or would not return what the call needs."""
    return problem.device == "cuda" and (problem.mask is not None or problem.lse or problem.sink)


def _refused_repair(problem: Problem) -> list[str]:
    """Why triton's kernels cannot compute again what is not finite, for a problem that is else not refused."""
    return [f"triton's kernels must repair what it lets through: {reason}" for reason in Triton().refusals(problem)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _known(problem: Problem) -> bool:
    """Whether the mask hides nothing, or is the triangle that the kernel knows."""
    return problem.mask is None or (problem.mask.kind is Causal and problem.offset == 0)
