"""A step of decoding whose position is in a tensor on the GPU: the kernels read it there, and the host does not wait.

So all that the host does is the same in every step, and a CUDA graph can capture it (docs/gpu.md). Two kinds of call
are such a step, of one query for each row:

- with an offset in a tensor, under a mask of positions such as `Causal() & (Window(1024) | Prefix(4))`;
- over stored keys and values that have their lengths in a tensor (`StoredTensor.lengths`), under `Causal()` or no mask.

Other calls with an offset or lengths in a tensor read it on the host, as their tiles depend on it.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from regard.backend.triton import Triton, decode_seen, is_decoding
from regard.describe.interval import Edge, Interval
from regard.describe.mask import CallSizes, Mask, is_made_of
from regard.describe.mask_by_rule import Causal, Prefix, Window
from regard.plan.checks import check_offset_tensor, check_specs
from regard.plan.pose import pose
from regard.plan.problem import Operands, Problem
from regard.plan.request import Request
from regard.plan.tiling import cached_schedule
from regard.state import State
from regard.storage.hadamard import hadamard
from regard.storage.stored import StoredTensor

_TRITON = Triton()

OF_POSITIONS = (Causal, Window, Prefix)
"""Masks whose intervals depend on the position of the query alone."""

MOST = 2
"""Intervals of a mask that the kernels read."""


def step(request: Request) -> State | None:
    """The state of one query for each row, from a position on the GPU; None if the call is another one.

    Raises:
        ProblemError: an argument of the call is wrong.
    """
    offset, q = request.offset, request.q
    by_lengths = isinstance(request.k, StoredTensor) and isinstance(request.v, StoredTensor)
    if not by_lengths and not (isinstance(offset, Tensor) and offset.is_cuda):  # most calls
        return None
    if request.backend not in (None, "triton") or not isinstance(cast(object, q), Tensor) or q.ndim != 4:
        return None
    if q.shape[2] != 1 or request.bias is not None or request.score is not None or request.dropout:
        return None
    return _by_lengths(request) if by_lengths else _by_offset(request)


def _by_offset(request: Request) -> State | None:
    """One query at the position `offset`, a tensor [1] or [batch], over keys in tensors."""
    q, k, v, mask, offset = request.q, request.k, request.v, request.mask, request.offset
    if not all(isinstance(t, Tensor) and t.ndim == 4 for t in (k, v)) or not offset.numel():
        return None
    check_specs(mask, request.bias, request.score)
    sizes = CallSizes(q.shape[0], q.shape[1], 1, k.shape[2], 0)
    union = _intervals(mask, sizes)
    if union is None:
        return None
    check_offset_tensor(offset, q.shape[0])
    problem, operands = pose(request._replace(mask=None, offset=None))
    first = offset.reshape(-1).to(torch.int64).expand(problem.batch)
    return _run(problem, operands, torch.stack([_seen(x, first, problem.keys) for x in union]))


def _by_lengths(request: Request) -> State | None:
    """One query at the last key of each row, over stored keys and values whose rows have lengths on the GPU."""
    k, v, mask = request.k, request.v, request.mask
    if request.offset is not None or k.lengths is not v.lengths or k.rotated != v.rotated:
        return None
    if k.lengths is None or not k.lengths.is_cuda or not (mask is None or type(mask) is Causal):
        return None
    problem, operands = pose(request._replace(k=k.placeholder, v=v.placeholder, mask=None))
    problem = replace(problem, non_contiguous=tuple({"q"} & {*problem.non_contiguous}))  # the others are no tensors
    q = hadamard(operands.q) if k.rotated else operands.q
    state = _run(problem, operands._replace(q=q, stored=(k, v)), None)
    return state if state is None or not k.rotated else State(hadamard(state.out), state.lse)


def _run(problem: Problem, operands: Operands, seen: Tensor | None) -> State | None:
    if problem.non_contiguous or not is_decoding(problem) or _TRITON.refusals(problem):
        return None
    sizes = CallSizes(problem.batch, problem.heads, 1, problem.keys, problem.offset)
    return decode_seen(problem, cached_schedule(None, sizes, _TRITON.tile), operands, seen)


def _intervals(mask: Mask | None, sizes: CallSizes) -> list[Interval] | None:
    """The intervals of a mask, whose edges are numbers; None if the kernels cannot have them."""
    if mask is None or not is_made_of(mask, OF_POSITIONS):
        return None
    union = mask.bind(sizes).intervals(sizes)
    if union is None or not 0 < len(union) <= MOST:
        return None
    return union if all(edge is None or isinstance(edge, int) for x in union for edge in x) else None


def _seen(x: Interval, first: Tensor, keys: int) -> Tensor:
    """The first key of an interval and one past the last, for queries at the positions `first`: [2, batch]."""
    low = torch.zeros_like(first) if x.left is None else first + _number(x.left)
    high = torch.full_like(first, keys) if x.right is None else first + _number(x.right)
    start, stop = max(0, _number(x.start or 0)), keys if x.stop is None else min(keys, _number(x.stop))
    return torch.stack([low.clamp(min=start), high.clamp(max=stop)])


def _number(edge: Edge) -> int:
    return cast(int, edge)
