"""torch's fused kernels, for what it computes without building a mask or a bias, and means as we do.

It knows one mask, the causal triangle with its corner at the top left. Everything else it takes only as a full
[queries, keys] tensor, and computes every hidden pair, so regard uses it for nothing else.

On CUDA torch chooses among cuDNN's kernel, flash attention and others; they are used where there is no mask. On a CPU
the kernel is called directly (`aten::_scaled_dot_product_flash_attention_for_cpu`, the same op in torch 2.11 to
2.15), since it gives the log-sum-exp and never becomes torch's own fallback, which materialises all scores.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backend.contract import MAX_GRID, Backend, Kernel
from regard.describe.mask_by_rule import Causal
from regard.plan.lower import Lowering, gather, pack, prepare_score
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State
from regard.torch_internals import flash_attention_for_cpu

LARGEST_FUSED_DIM = 256
"""The largest head dimension of torch's fused kernels for CUDA."""


@dataclass(frozen=True)
class Sdpa(Backend):
    """torch's fused attention: its kernel for CPUs, and on CUDA the one that torch chooses."""

    name: str = "sdpa"
    tile: int = 128
    lowerings: tuple[Lowering, ...] = (gather, prepare_score, pack)
    hides_by_zero: bool = True
    any_length: bool = True

    def refusals(self, problem: Problem) -> list[str]:
        p = problem
        found = {
            "this version of torch lacks its kernel": p.device == "cpu" and flash_attention_for_cpu is None,
            f"it is used on cpu and cuda, and the tensors are on {p.device}": p.device not in ("cpu", "cuda"),
            "on cuda its kernels let NaN and inf of hidden keys through": p.device == "cuda" and p.mask is not None,
            "on cuda it gives no log-sum-exp, which a State, a sink and observers need": (
                p.device == "cuda" and (p.lse or p.sink)
            ),
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
            "its log-sum-exp, which a State, a sink and observers need, has no gradient": p.grad and (p.lse or p.sink),
            "it rounds its output before a sink can be folded in": p.sink
            and p.dtype in (torch.bfloat16, torch.float16),
            "it has no vmap or forward-mode derivative": p.transformed,
            f"it hides keys before it multiplies by scale, which must then be above 0 and is {p.scale}": (
                p.mask is not None and p.scale <= 0
            ),
            "a size is 0": 0 in (p.batch, p.heads, p.queries, p.keys, p.qk_dim),
        }
        return [reason for reason, applies in found.items() if applies]

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
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


def _known(problem: Problem) -> bool:
    """Whether the mask hides nothing, or is the triangle that the kernel knows."""
    return problem.mask is None or (problem.mask.kind is Causal and problem.offset == 0)
