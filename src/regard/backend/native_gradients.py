"""Gradients of `native`: the functions that autograd knows, and the call of the library that computes them.

They are recomputed from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135, §3.1), so nothing is kept for them but the
output. Rows whose log-sum-exp is too far from 0 for that are computed in native_far_rows.py.
"""

from collections.abc import Mapping
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from regard import native_calls
from regard.backend.contract import refuse_batched, second_derivative
from regard.backend.native_far_rows import Rows, far_rows
from regard.backend.native_inputs import (
    GRADIENTS,
    LSE,
    SIZES,
    TENSORS,
    THREADS,
    TILES,
    WORKSPACE,
    Inputs,
    in_place,
    tensor_fields,
    write_inputs,
)
from regard.backend.native_tiles import Tiles
from regard.huge_pages import advise_huge_pages
from regard.plan.checks import Saved
from regard.plan.problem import Problem
from regard.state import State
from regard.torch_internals import is_ordinary, leave_out_of_graphs, resolve_lazy
from regard.wide import wide_of


class Wanted(NamedTuple):
    """Which inputs want a gradient."""

    q: bool
    k: bool
    v: bool
    sink: bool
    distance: bool
    bias: bool


class DifferentiableKernel(Protocol):
    """What computes a call whose gradients are asked for: the kernel of native.py."""

    gradients: "Gradients"

    def compute(self, inputs: Inputs, tiles: Tiles, offset: int, seed: int, /) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ...


class Call(NamedTuple):
    """What a call is besides the tensors that may learn; one argument, as `apply` looks at each.

    Attributes:
        is_part: whether `state` is of other keys as well, so that its log-sum-exp does not tell of far rows.
        state: what was computed, None if nothing was.
    """

    kernel: DifferentiableKernel
    tiles: Tiles
    offset: int
    seed: int
    is_part: bool
    state: State | None


class Gradients:
    """The library's gradients for one problem, of any sizes, offset, mask and bias."""

    def __init__(self, problem: Problem, fields: Mapping[str, float]) -> None:
        """Take the fields of the library's struct that are the same in each call."""
        self.problem, self.wide, self.fields = problem, wide_of(problem.dtype), fields

    @cached_property
    def backward(self) -> tuple[native_calls.Entry, bytes]:
        """What computes gradients, and its struct without what differs from call to call."""
        entry = _entry()
        return entry, entry.packed(self.fields)

    def compute(
        self, call: Call, inputs: Inputs, wanted: Wanted, state: State, dout: Tensor, dlse: Tensor | None
    ) -> Inputs:
        """The gradients of the inputs of a call that gave `state`; those of biases and sink if wanted, else None."""
        far = None if call.is_part else far_rows(state, dout, dlse)
        if far is None:
            return self._from_lse(call, inputs, wanted, state, dout, dlse)
        keep = partial(call.tiles.keep, keys=inputs.k.shape[2], offset=call.offset)
        with torch.autocast("cpu", enabled=False):  # that of the caller of `backward`
            more = Rows(self.problem, inputs, keep, call.seed).gradients(far, dout, dlse)
        dout, dlse = dout.masked_fill(far[..., None], 0), None if dlse is None else dlse.masked_fill(far, 0)
        without = State(state.out, state.lse.masked_fill(far, -torch.inf))  # their weights may be inf, and 0 * inf NaN
        found = self._from_lse(call, inputs, wanted, without, dout, dlse)
        sums = [a if a is None or b is None else (a + b).to(a.dtype) for a, b in zip(found[:6], more, strict=True)]
        return Inputs(*cast(Any, sums))

    def _from_lse(
        self, call: Call, i: Inputs, wanted: Wanted, state: State, dout: Tensor, dlse: Tensor | None
    ) -> Inputs:
        """The same where no log-sum-exp is far from 0."""
        dq, dk, dv = _memory_like(i.q), _memory_like(i.k), _memory_like(i.v)
        if not state.lse.numel():
            return Inputs(dq.zero_(), dk.zero_(), dv.zero_(), _zeros(i.sink), _zeros(i.distance), _zeros(i.bias))
        ddistance = _zeros(i.distance) if wanted.distance else None
        dbias = _zeros(i.bias, self.wide) if wanted.bias else None
        delta = torch.empty_like(state.lse)
        backward, packed = self.backward
        struct = backward.opened(packed)
        queries, keys = i.q.shape[2], i.k.shape[2]
        struct[TENSORS] = (*tensor_fields(i.q), *tensor_fields(i.k), *tensor_fields(i.v), *tensor_fields(state.out))
        struct[LSE], struct[THREADS], struct[SIZES] = state.lse.data_ptr(), torch.get_num_threads(), (queries, keys)
        struct[TILES] = call.tiles.fields(queries, call.offset)
        write_inputs(struct, i, call.seed)
        struct[GRADIENTS] = (
            *tensor_fields(dout), _address(dlse), *tensor_fields(dq), *tensor_fields(dk), *tensor_fields(dv),
            delta.data_ptr(), _address(ddistance), _address(dbias), *((0, 0, 0, 0) if dbias is None else dbias.shape),
        )  # fmt: skip
        backward.run_with_workspace(struct, WORKSPACE)
        dsink = _sink_gradient(cast(Tensor, i.sink), state.lse, delta) if wanted.sink else None
        return Inputs(dq, dk, dv, dsink, ddistance, None if dbias is None else dbias.to(cast(Tensor, i.bias).dtype))


class Attention(torch.autograd.Function):
    """(out, lse), differentiated by the library; with a state, it returns that state."""

    @staticmethod
    def forward(ctx: Any, call: Call, *parts: Tensor | None) -> tuple[Tensor, Tensor]:
        kernel, tiles, offset, seed, _, state = call
        if state is None:
            out, lse = kernel.compute(Inputs(*cast(Any, parts)), tiles, offset, seed)
        else:
            out, lse = state.out.detach(), state.lse.detach()
        ctx.save_for_backward(*parts, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.saved = call if state is None else call._replace(state=None), Saved.of(parts)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wanted = Wanted(*ctx.needs_input_grad[1:])
        saved = ctx.saved.given_back(ctx.saved_tensors, distance_learns=wanted.distance)
        may_be_differentiated = torch.is_grad_enabled() or not is_ordinary()
        gradients = _Gradient.apply if may_be_differentiated else _gradients
        found: Any = gradients(ctx.call, wanted, *grads, *saved)
        return None, *found


leave_out_of_graphs(Attention.backward)


def _gradients(call: Call, wanted: Wanted, dout: Tensor | None, dlse: Tensor | None, *saved: Any) -> Inputs:
    """The gradients of `Attention`."""
    gradients = call.kernel.gradients
    *parts, out, lse = saved
    refuse_batched("native", dout, dlse)
    dout = torch.zeros_like(out) if dout is None else resolve_lazy(dout)
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    dlse = None if dlse is None else resolve_lazy(dlse).contiguous()
    inputs = Inputs(*parts)
    if inputs.bias is not None:
        inputs = inputs._replace(bias=in_place(inputs.bias, wanted.bias, gradients.wide))
    return gradients.compute(call, inputs, wanted, State(out, lse), dout, dlse)


class _Gradient(torch.autograd.Function):
    """The gradients where somebody may ask for their derivatives, which they do not have."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        return _gradients(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise second_derivative("native")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        raise second_derivative("native")


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[heads]: minus the sink's share of the softmax, times delta, summed over the rows that see a key.

    Args:
        delta: [batch, heads, queries], sum(dout * out).
    """
    share = torch.sigmoid(sink[:, None] - lse)  # of a sink of +inf 1, where its logarithm and lse's would give NaN
    return -torch.where(lse == -torch.inf, 0.0, share * delta).sum(dim=(0, 2))


@cache
def _entry() -> native_calls.Entry:
    return native_calls.Entry("regard_backward", native_calls.GRADIENT)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _memory_like(t: Tensor) -> Tensor:
    """Memory for a gradient, head by head.

    Token by token the rows that a tile writes are far apart: an attention layer's forward and backward took 1.03 to
    1.06 of the time where one projection makes q, k and v, 0.98 to 1.04 where three do (Intel Xeon with AMX).
    """
    memory = torch.empty_like(t, memory_format=torch.contiguous_format)
    advise_huge_pages(memory)
    return memory


def _zeros(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if t is None else torch.zeros(t.shape, dtype=dtype or t.dtype, device="cpu")
