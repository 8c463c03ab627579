"""Our own kernels for GPUs, in Triton: every mask, bias and type of 16 or 32 bits, from the same schedule as on a CPU.

Programs walk the schedule's tiles: hidden ones are not computed, FULL ones need no mask, and in PARTIAL ones the bits
of the schedule decide. So a kernel knows no mask by name, is compiled once for all masks and lengths, and counts in
`explain` what it computes. The kernels are in `regard/gpu/`.

Where the environment has TRITON_INTERPRET=1, Triton runs the kernels on a CPU, by numpy: so they are tested without a
GPU.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from os import environ
from typing import Any, cast

import torch
from torch import Tensor

from regard.backend.contract import Backend, Kernel, refuse_batched, second_derivative
from regard.gpu.call import LARGEST_DECODED_DIM, LARGEST_DIM, Call, Inputs
from regard.plan.checks import Saved
from regard.plan.distance import line, split_by_distance, table, vectors
from regard.plan.lower import Lowering, Step, add_biases, gather, gathered, pack, prepare_score, rotate
from regard.plan.problem import Operands, Problem, Sizes
from regard.plan.schedule import Schedule
from regard.plan.tiling import cached_schedule
from regard.state import State
from regard.torch_internals import leave_out_of_graphs

MOST_ROWS = 64
"""Query rows of a key head, its heads times the queries, up to which keys are read where they are stored."""

MOST_LARGE_ROWS = 1024
"""The same for larger heads than `LARGEST_DIM`, such as the latents of MLA, for which no other kernel is."""

OLDEST = (8, 0)
"""Compute capability that the kernels need."""

TILE = 128


def is_decoding(problem: Problem) -> bool:
    """Whether it has few query rows, and nothing that the kernels of decoding lack."""
    p, largest = problem, max(problem.qk_dim, problem.v_dim)
    most = MOST_ROWS if largest <= LARGEST_DIM else MOST_LARGE_ROWS
    few = p.queries * p.heads <= most * p.kv_heads and p.queries <= TILE and largest <= LARGEST_DECODED_DIM
    return few and not p.grad and not p.dropout and p.score is None


def gather_unless_decoding(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """`gather`, unless the kernels of decoding read what is stored."""
    return (problem, None) if is_decoding(problem) else gather(problem, tiles)


@dataclass(frozen=True)
class Triton(Backend):
    """Kernels in Triton."""

    name: str = "triton"
    tile: int = TILE
    lowerings: tuple[Lowering, ...] = (gather_unless_decoding, rotate, prepare_score, pack, add_biases)
    hides_by_zero: bool = False
    any_mask: bool = True

    def refusals(self, problem: Problem) -> list[str]:
        p, cpu, absent = problem, problem.device == "cpu", _absence()
        major, minor = p.capability or OLDEST
        found = {
            f"it compiles for cuda, and the tensors are on {p.device}": p.device not in ("cpu", "cuda"),
            "on cpu it needs Triton's interpreter: set TRITON_INTERPRET=1 before regard is imported": cpu
            and not is_interpreted(),
            f"it needs a GPU of compute capability 8.0 or newer, and this one has {major}.{minor}": not cpu
            and (major, minor) < OLDEST,
            "it has no float64": p.dtype == torch.float64,
            f"the score {p.score} is not known to it": p.score is not None,
            f"the function of the score in {p.bias} is not known to it": p.changes_scores,
            "it has no vmap or forward-mode derivative": p.transformed,
            "a tensor is lazily negated, or of a class with a __torch_dispatch__ of its own": p.opaque,
            f"heads have at most {LARGEST_DIM} dimensions (decoding: {LARGEST_DECODED_DIM}, with up to "
            f"{MOST_LARGE_ROWS} query rows for each key head), and here {p.qk_dim} and {p.v_dim}": not is_decoding(p)
            and max(p.qk_dim, p.v_dim) > LARGEST_DIM,
            "a size is 0": 0 in (p.batch, p.heads, p.queries, p.keys, p.qk_dim, p.v_dim),
        }
        return ([absent] if absent else []) + [reason for reason, applies in found.items() if applies]

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        return _Kernel(problem, schedule)


def decode_seen(
    problem: Problem, schedule: Schedule, operands: Operands, intervals: Tensor | None, shown: Tensor | None
) -> State | None:
    """The state of a call of one query for each row, from what is on the GPU alone; None if the kernels cannot read it.

    Args:
        problem: without mask and bias, decoding (`is_decoding`), and not refused.
        operands: keys and values, in tensors or stored; of stored ones a row has those up to its end.
        intervals: the keys that a row sees, int64 [intervals, 2, batch], on the device of q; None: all.
        shown: those of them that no mask hides, bool [batch or 1, keys], on the device of q; None: all.
    """
    from regard.gpu.few_rows import Seen, decode

    sink = None if operands.sink is None else operands.sink.float().contiguous()
    inputs = Inputs(operands.q, operands.k, operands.v, sink, None, None)
    call, seen = Call(schedule, problem.scale, problem.softcap, 0.0, 0), Seen(intervals, shown)
    found = decode(call, inputs, operands.stored, seen)
    return None if found is None else State(*found)


def is_interpreted() -> bool:
    """Whether Triton will run kernels in its interpreter; known without importing Triton."""
    return environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


@cache
def _absence() -> str | None:
    """Why there is no Triton; None if it is there."""
    return None if find_spec("triton") else "Triton is not installed: pip install 'regard[gpu]'"


class _Kernel:
    """The kernels for one form of problems: sizes, offset, mask and bias are taken from the operands.

    Other sizes may need other kernels, so `regard.dispatch.plan_cache` passes on calls that are decoding as well, or
    are not as well.
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.decodes = is_decoding(problem)
        self.latest: tuple[Sizes, Schedule] | None = None

    def __call__(self, operands: Operands) -> State:
        return self._state(operands, None)

    def resume(self, operands: Operands, state: State, *, is_part: bool = False) -> State:
        """The state, as if it had just been computed: differentiable in the operands."""
        return self._state(operands, state, is_part)

    def _state(self, operands: Operands, state: State | None, is_part: bool = False) -> State:
        from regard.gpu.launch import run

        p = self.problem
        inputs, is_line = self._inputs(operands)
        seed = operands.drawn_seed() if p.dropout else 0
        call = Call(self._schedule(operands), p.scale, p.softcap, p.dropout, seed, is_part, is_line)
        if self.decodes:
            from regard.gpu.few_rows import decode

            found = decode(call, inputs, operands.stored)
            if found is None:  # keys and values are not stored side by side
                found = decode(call, self._inputs(gathered(operands))[0], None)
            assert found is not None
            return State(*found)
        if operands.stored is not None:
            inputs, _ = self._inputs(gathered(operands))
        if not p.grad:
            return State(*run(call, inputs))
        return State(*cast("tuple[Tensor, Tensor]", _Attention.apply(call, state, *inputs)))

    def _schedule(self, o: Operands) -> Schedule:
        """The tiles of a call; all layers of a model have those of the first one."""
        key, latest = o.key, self.latest
        if key is None or (self.decodes and self.problem.mask is None):  # the kernels of decoding then read no tiles
            return self.schedule
        if latest is not None and latest[0] == key:
            return latest[1]
        tiles = cached_schedule(o.mask, o.sizes, TILE)
        if key.mask is None or key.mask.is_constant:
            self.latest = key, tiles
        return tiles

    def _inputs(self, o: Operands) -> tuple[Inputs, bool]:
        """The inputs, and whether their bias by distance is a line."""
        sink = None if o.sink is None else o.sink.float().contiguous()
        of_distance, others = split_by_distance(o.bias)
        bias = table(others, o)
        if bias is not None and bias.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            bias = bias.float()
        by_line = None if self.decodes else line(of_distance, o)
        distance = vectors(of_distance, self.problem, o) if by_line is None else by_line
        return Inputs(o.q, o.k, o.v, sink, distance, bias), by_line is not None


class _Attention(torch.autograd.Function):
    """(out, lse), differentiated by kernels; with a state, it returns that state."""

    @staticmethod
    def forward(ctx: Any, call: Any, state: State | None, *parts: Tensor | None) -> tuple[Tensor, Tensor]:
        from regard.gpu.launch import run

        inputs = Inputs(*cast(Any, parts))
        out, lse = run(call, inputs) if state is None else (state.out.detach(), state.lse.detach())
        ctx.save_for_backward(*parts, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.saved = call, Saved.of(parts)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[2:]
        saved = ctx.saved.given_back(ctx.saved_tensors, distance_learns=wanted[4])
        found = _Gradient.apply(ctx.call, wanted, *grads, *saved)
        return None, None, *cast("tuple[Any, ...]", found)


leave_out_of_graphs(_Attention.backward)


class _Gradient(torch.autograd.Function):
    """The gradients of `_Attention`, which have no derivatives themselves."""

    @staticmethod
    def forward(
        ctx: Any, call: Any, wanted: tuple[bool, ...], dout: Tensor | None, dlse: Tensor | None, *saved: Any
    ) -> tuple[Any, ...]:
        from regard.gpu.gradients import gradients

        refuse_batched("triton", dout, dlse)
        *parts, out, lse = saved
        return gradients(call, Inputs(*cast(Any, parts)), wanted, State(out, lse), dout, dlse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise second_derivative("triton")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        raise second_derivative("triton")
