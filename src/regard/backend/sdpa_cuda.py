"""torch's fused kernels for CUDA by their own operators, which give the log-sum-exp, under a causal mask or none.

They let NaN and inf of hidden keys through, as they hide by a weight of 0. So our own kernels read what they computed,
and compute the rows again in which something is not finite (`regard/gpu/repair.py`), forward and backward.

Which kernel runs is decided at each call, as torch does: it depends on settings of the process, such as those of
`torch.nn.attention.sdpa_kernel` and deterministic algorithms. Where torch can use none, ours compute the call.
"""

from functools import cache
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from regard.backend.contract import refuse_batched, second_derivative
from regard.gpu.call import Call, Inputs
from regard.gpu.gradients import gradients
from regard.gpu.launch import run
from regard.gpu.repair import repair, repair_gradients
from regard.gpu.tokens import is_aligned
from regard.plan.checks import Saved
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.plan.tiling import cached_schedule
from regard.state import State
from regard.torch_internals import (
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
    leave_out_of_graphs,
    resolve_lazy,
)

CUDNN_CHIPS = (9, 10)
"""Major compute capabilities on which cuDNN's kernel is faster than flash attention; torch prefers it there, too."""

CUDNN_OF_ANY_LENGTH = 91501
"""The version of cuDNN from which on lengths need not be multiples of 128 (pytorch/pytorch#169849)."""

Name = Literal["cudnn", "flash"]


class Fused(NamedTuple):
    """What a call of torch's kernels has besides its tensors."""

    name: Name
    causal: bool
    scale: float


class RepairedKernel:
    """The kernels for one form of problems; sizes and offset are taken from the operands."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule

    def __call__(self, operands: Operands) -> State:
        return self._state(operands, None)

    def resume(self, operands: Operands, state: State, *, is_part: bool = False) -> State:
        """The state, as if it had just been computed: differentiable in the operands."""
        return self._state(operands, state, is_part)

    def _state(self, o: Operands, state: State | None, is_part: bool = False) -> State:
        p = self.problem
        call = Call(self._schedule(o), p.scale, None, 0.0, 0, is_part)
        name = usable(p, o.q, o.k, o.v)
        fused = None if name is None else Fused(name, p.mask is not None, p.scale)
        if p.grad:
            return State(*cast("tuple[Tensor, Tensor]", _Attention.apply(call, fused, state, o.q, o.k, o.v)))
        return _forward(call, fused, o.q, o.k, o.v)[0]

    def _schedule(self, o: Operands) -> Schedule:
        """The tiles of a call: without a mask one plan serves every length."""
        if o.key is None or self.problem.mask is not None:
            return self.schedule
        return cached_schedule(None, o.sizes, self.schedule.tile)


def usable(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Name | None:
    """Which of torch's kernels computes this call; None if it can use none now."""
    if not all(map(is_aligned, (q, k, v))):
        return None
    shared = problem.heads != problem.kv_heads
    form = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, problem.mask is not None, shared)
    if _prefers_cudnn(problem, q, k) and torch.backends.cuda.can_use_cudnn_attention(form):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(form) else None


def _prefers_cudnn(problem: Problem, q: Tensor, k: Tensor) -> bool:
    if problem.capability is None or problem.capability[0] not in CUDNN_CHIPS:
        return False
    return q.shape[2] % 128 == k.shape[2] % 128 == 0 or (torch.backends.cudnn.version() or 0) >= CUDNN_OF_ANY_LENGTH


def _forward(call: Call, fused: Fused | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[State, int]:
    """The state of a call, and how many axes the log-sum-exp of the kernel has."""
    inputs = Inputs(q, k, v, None, None, None)
    if fused is None:
        return State(*run(call, inputs)), 3
    if fused.name == "cudnn":
        out, lse, *_ = cudnn_attention(q, k, v, None, True, 0.0, fused.causal, False, scale=fused.scale)
    else:
        out, lse, *_ = flash_attention(q, k, v, 0.0, fused.causal, False, scale=fused.scale)
    state = State(out, lse.reshape(q.shape[:3]).contiguous())
    repair(call, inputs, state)
    return state, lse.ndim


def _backward(
    call: Call,
    fused: Fused,
    inputs: Inputs,
    wanted: tuple[bool, bool, bool],
    state: State,
    dout: Tensor,
    lse_axes: int,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v; None where nobody wants one."""
    q, k, v = inputs[:3]
    out, lse = state.out, state.lse[..., None] if lse_axes == 4 else state.lse
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # what dropout would draw from
    sizes, drops = (None, None, q.shape[2], k.shape[2]), (unused, unused)
    if fused.name == "cudnn":
        out, dout = (_laid_out_as(q, t) for t in (out, dout))
        rest = (*drops, None, *sizes, 0.0, fused.causal)
        found = cudnn_attention_backward(dout, q, k, v, out, lse, *rest, scale=fused.scale)
    else:
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        rest = (*sizes, 0.0, fused.causal, *drops)
        found = flash_attention_backward(dout, q, k, v, out, lse, *rest, scale=fused.scale)
    grads = tuple(grad if is_wanted else None for grad, is_wanted in zip(found, wanted, strict=True))
    repair_gradients(call, inputs, State(out, state.lse), dout, grads)
    return grads


def _laid_out_as(q: Tensor, t: Tensor) -> Tensor:
    """A tensor of the shape of q in the layout of memory that torch gives an output.

    torch keeps a plan of cuDNN by the strides of q, k and v: those of other tensors must follow from them.
    """
    strides = torch.empty_like(q, device="meta").stride()
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


@cache
def _cudnn_lse_axes() -> int:
    """How many axes the log-sum-exp of cuDNN's kernel has in this version of torch."""
    t = torch.empty(1, 1, 2, 8, dtype=torch.bfloat16, device="meta")
    return cudnn_attention(t, t, t, None, True, 0.0, False, False)[1].ndim


class _Attention(torch.autograd.Function):
    """(out, lse), differentiated by torch's kernels and ours; with a state, it returns that state."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, fused: Fused | None, state: State | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        if state is None:
            state, ctx.lse_axes = _forward(call, fused, q, k, v)
            out, lse = state.out, state.lse
        else:
            out, lse = state.out.detach(), state.lse.detach()
            ctx.lse_axes = _cudnn_lse_axes() if fused is not None and fused.name == "cudnn" else 3
        ctx.save_for_backward(q, k, v, None, None, None, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.fused, ctx.saved = call, fused, Saved.of((q, k, v, None, None, None))
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved.given_back(ctx.saved_tensors, distance_learns=False)
        wanted = ctx.needs_input_grad[3:]
        found = _Gradient.apply(ctx.call, ctx.fused, ctx.lse_axes, wanted, *grads, *saved)
        return None, None, None, *cast("tuple[Any, ...]", found)


leave_out_of_graphs(_Attention.backward)


class _Gradient(torch.autograd.Function):
    """The gradients of `_Attention`, which have no derivatives themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        fused: Fused | None,
        lse_axes: int,
        wanted: tuple[bool, bool, bool],
        dout: Tensor | None,
        dlse: Tensor | None,
        *saved: Any,
    ) -> tuple[Any, ...]:
        refuse_batched("sdpa", dout, dlse)
        *parts, out, lse = saved
        inputs, state = Inputs(*cast("Any", parts)), State(out, lse.contiguous())
        if fused is None or dout is None or dlse is not None:  # torch's kernels take no gradient of lse
            return gradients(call, inputs, (*wanted, False, False, False), state, dout, dlse)[:3]
        return _backward(call, fused, inputs, wanted, state, resolve_lazy(dout), lse_axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise second_derivative("sdpa")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        raise second_derivative("sdpa")
