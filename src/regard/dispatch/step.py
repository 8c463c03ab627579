"""A step of decoding of which the host reads nothing: its position, or which keys a row sees, is on the GPU.

So all that the host does is the same in every step, and a CUDA graph can capture it (docs/gpu.md). Three kinds of call
are such a step, of one query for each row:

- with an offset in a tensor, under a mask of positions such as `Causal() & (Window(1024) | Prefix(4))`;
- over stored keys and values that have their lengths in a tensor (`StoredTensor.lengths`), under `Causal()` or no mask;
- with a mask tensor [batch, 1, 1, keys], such as the padding of a batch, alone or `&` such a mask of positions. It may
  be added to the two others. To know it by its content, as other calls do, the host would read it in each step.

Other calls with an offset, lengths or a mask in a tensor read it on the host, as their tiles depend on it.
"""

from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from regard.backend.triton import Triton, decode_seen, is_decoding
from regard.describe.interval import Edge, Interval
from regard.describe.mask import And, CallSizes, Mask, is_made_of
from regard.describe.mask_by_rule import Causal, Prefix, Window
from regard.describe.mask_by_table import TensorMask
from regard.describe.spec import bound_to
from regard.plan.checks import check_offset, check_offset_tensor, check_specs
from regard.plan.lower import hides_nothing
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

T = TypeVar("T", Mask, Tensor)

MOST = 2
"""Intervals of a mask that the kernels read."""


def step(request: Request) -> State | None:
    """The state of one query for each row, without reads on the host; None if the call is another one.

    Raises:
        ProblemError: an argument of the call is wrong.
    """
    q, k, v, offset = request.q, request.k, request.v, request.offset
    is_stored = isinstance(k, StoredTensor) and isinstance(v, StoredTensor)
    if not (is_stored or isinstance(offset, Tensor) or type(request.mask) in (TensorMask, And)):  # most calls
        return None
    if request.backend not in (None, "triton") or request.bias is not None or request.score is not None:
        return None
    if request.dropout or not all(map(_is_plain, (q,) if is_stored else (q, k, v))) or q.shape[2] != 1 or not q.is_cuda:
        return None
    check_specs(request.mask, request.bias, request.score)
    rest, shown = _parted(request.mask, q.shape[0], k.shape[2])
    if is_stored and (k.lengths is not None or v.lengths is not None):
        return _by_lengths(request, rest, shown)
    if isinstance(offset, Tensor):
        return None if is_stored or not offset.is_cuda else _by_offset(request, rest, shown)
    return None if shown is None else _by_tensor(request, rest, shown)


def _is_plain(t: object) -> bool:
    """Whether it is a tensor of four axes; `pose` raises the error where it should be."""
    return isinstance(t, Tensor) and not t.is_nested and t.ndim == 4


def _parted(mask: Mask | None, batch: int, keys: int) -> tuple[Mask | None, Tensor | None]:
    """(the rest of a mask, the keys that its tensors show, bool [batch or 1, keys])."""
    if type(mask) is TensorMask and mask.mask.is_cuda:
        rows, heads, queries, columns = (1,) * (4 - mask.mask.ndim) + tuple(mask.mask.shape)
        if rows in (1, batch) and (heads, queries, columns) == (1, 1, keys):
            return None, mask.mask.reshape(rows, keys)
    if type(mask) is And:
        (a, shown_a), (b, shown_b) = _parted(mask.a, batch, keys), _parted(mask.b, batch, keys)
        if shown_a is not None or shown_b is not None:
            return _both(a, b), _both(shown_a, shown_b)
    return mask, None


def _both(a: T | None, b: T | None) -> T | None:
    return b if a is None else a if b is None else cast(T, a & b)


def _by_offset(request: Request, rest: Mask | None, shown: Tensor | None) -> State | None:
    """One query at the position `offset`, a tensor [1] or [batch], over keys in tensors."""
    q, offset = request.q, request.offset
    check_offset_tensor(offset, q.shape[0])
    if not offset.numel():
        return None
    sizes = CallSizes(q.shape[0], q.shape[1], 1, request.k.shape[2], 0)
    if rest is None and shown is not None:
        return _run(*_posed(request), None, shown)
    union = _intervals(rest, sizes)
    if union is None:
        return None
    first = offset.reshape(-1).to(torch.int64).expand(q.shape[0])
    return _run(*_posed(request), torch.stack([_seen(x, first, sizes.keys) for x in union]), shown)


def _by_lengths(request: Request, rest: Mask | None, shown: Tensor | None) -> State | None:
    """One query at the last key of each row, over stored keys and values whose rows have lengths on the GPU."""
    k, v = request.k, request.v
    if request.offset is not None or k.lengths is not v.lengths or k.rotated != v.rotated:
        return None
    if not k.lengths.is_cuda or not (rest is None or type(rest) is Causal) or (k.is_ring and shown is not None):
        return None
    return _run(*_posed(request), None, shown)


def _by_tensor(request: Request, rest: Mask | None, shown: Tensor) -> State | None:
    """One query at a position that the host knows, over keys in tensors or stored, some of them hidden by a tensor."""
    q, k, v, offset = request.q, request.k, request.v, request.offset
    if isinstance(k, StoredTensor) and k.rotated != v.rotated:
        return None
    offset = k.shape[2] - 1 if offset is None else check_offset(offset)
    sizes = CallSizes(q.shape[0], q.shape[1], 1, k.shape[2], offset)
    if rest is None or (is_made_of(rest, OF_POSITIONS) and hides_nothing(rest, sizes)):
        return _run(*_posed(request), None, shown)
    union = _intervals(rest, sizes)
    if union is None:
        return None
    first = torch.full((q.shape[0],), offset, dtype=torch.int64, device=q.device)
    return _run(*_posed(request), torch.stack([_seen(x, first, sizes.keys) for x in union]), shown)


def _posed(request: Request) -> tuple[Problem, Operands]:
    """The problem without mask and offset, and its operands; keys and values may be stored."""
    request, k, v = request._replace(mask=None, offset=None), request.k, request.v
    if not isinstance(k, StoredTensor):
        return pose(request)
    problem, operands = pose(request._replace(k=k.placeholder, v=v.placeholder))
    problem = replace(problem, non_contiguous=tuple({"q"} & {*problem.non_contiguous}))  # the others are no tensors
    return problem, operands._replace(stored=(k, v))


def _run(problem: Problem, operands: Operands, intervals: Tensor | None, shown: Tensor | None) -> State | None:
    """The state; None if the kernels do not take the call. `intervals` are int64 [intervals, 2, batch]."""
    if problem.non_contiguous or not is_decoding(problem) or _TRITON.refusals(problem):
        return None
    is_rotated = operands.stored is not None and operands.stored[0].rotated
    if is_rotated:
        operands = operands._replace(q=hadamard(operands.q))
    sizes = CallSizes(problem.batch, problem.heads, 1, problem.keys, problem.offset)
    shown = None if shown is None else shown.to(operands.q.device)  # a model may be on several
    state = decode_seen(problem, cached_schedule(None, sizes, _TRITON.tile), operands, intervals, shown)
    return state if state is None or not is_rotated else State(hadamard(state.out), state.lse)


def _intervals(mask: Mask | None, sizes: CallSizes) -> list[Interval] | None:
    """The intervals of a mask, whose edges are numbers; None if the kernels cannot have them."""
    if mask is None or not is_made_of(mask, OF_POSITIONS):
        return None
    union = bound_to(mask, sizes).intervals(sizes)
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
