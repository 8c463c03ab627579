"""A step of decoding whose position is in a tensor on the GPU: the kernels read it there, and the host does not wait.

So all that the host does is the same in every step, and a CUDA graph can capture it (docs/gpu.md). Other calls with an
offset in a tensor read it on the host, as their tiles depend on it.
"""

import torch
from torch import Tensor

from regard.backend.triton import Triton, decode_until, is_decoding
from regard.describe.mask import CallSizes
from regard.describe.mask_by_rule import Causal
from regard.plan.checks import check_offset_tensor, check_specs
from regard.plan.pose import pose
from regard.plan.request import Request
from regard.plan.tiling import cached_schedule
from regard.state import State

_TRITON = Triton()


def step(request: Request) -> State | None:
    """The state of one query for each row under `Causal()`; None if the call is another one.

    Args:
        request: with keys and values in tensors, and an offset in a tensor, [1] or [batch].

    Raises:
        ProblemError: an argument of the call is wrong.
    """
    q, k, v, mask, bias, score, _, _, _, dropout, offset, backend, _, _ = request
    if not isinstance(offset, Tensor) or not offset.is_cuda or backend not in (None, "triton"):
        return None
    if not all(isinstance(t, Tensor) and t.ndim == 4 for t in (q, k, v)) or q.shape[2] != 1 or not offset.numel():
        return None
    check_specs(mask, bias, score)
    if type(mask) is not Causal or bias is not None or score is not None or dropout:
        return None
    check_offset_tensor(offset, q.shape[0])
    problem, operands = pose(request._replace(mask=None, offset=None))
    if problem.non_contiguous or not is_decoding(problem) or _TRITON.refusals(problem):
        return None
    sizes = CallSizes(problem.batch, problem.heads, 1, problem.keys, problem.offset)
    ends = (offset.reshape(-1).to(torch.int64) + 1).clamp(0, problem.keys).expand(problem.batch).contiguous()
    return decode_until(problem, cached_schedule(None, sizes, _TRITON.tile), operands, ends)
