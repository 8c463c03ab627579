"""`pose`: check a request and split it into problem and operands. Every error of input is raised here."""

import torch
from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.content import reads_dual
from regard.describe.mask import CallSizes
from regard.describe.score import Dot, Score
from regard.describe.spec import bound_to
from regard.describe.tensors import has_tangent
from regard.plan.checks import (
    check_device,
    check_has_data,
    check_numbers,
    check_offset,
    check_sink,
    check_specs,
    check_tensors,
    has_own_operators,
)
from regard.plan.problem import Operands, Problem, Storage, is_pairwise
from regard.plan.request import Request
from regard.storage.stored import StoredTensor
from regard.torch_internals import current_func_transform, in_transform

LARGEST = torch.finfo(torch.float32).max
"""A softcap beyond it caps nothing: scores are in float32, where it would be inf, and s / inf * inf is NaN."""


def pose(request: Request) -> tuple[Problem, Operands]:
    """The problem and the operands of a request.

    Raises:
        ProblemError: an argument of the call is wrong.
    """
    q, k, v, mask, bias, score, scale, softcap, sink, dropout, offset, _, lse, stored = request
    check_tensors(q, k, v)
    (batch, heads, queries, qk_dim), (kv_heads, keys), v_dim = q.shape, k.shape[1:3], v.shape[3]
    check_specs(mask, bias, score)
    if mask is not None:
        check_has_data(mask)
    compared = score or Dot()
    score_dim = compared.dim(qk_dim, k.shape[3])
    score = None if type(compared) is Dot else bound_to(compared, heads, kv_heads)
    check_numbers(scale, softcap, dropout)
    check_sink(sink, heads, q)
    offset = keys - queries if offset is None else check_offset(offset)
    sizes = CallSizes(batch, heads, queries, keys, offset)
    mask, bias = None if mask is None else bound_to(mask, sizes), None if bias is None else bound_to(bias, sizes)
    specs = [spec for spec in (bias, score) if spec is not None]
    for spec in specs:
        check_device(spec, q)
    tensors = (q, k, v, *([] if sink is None else [sink]), *(t for spec in specs for t in spec.tensors()))
    transformed = _is_transformed(tensors, specs, stored)
    opaque = not transformed and any(has_own_operators(t) or t.is_neg() for t in tensors)
    problem = Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        qk_dim=qk_dim,
        k_dim=k.shape[3],
        v_dim=v_dim,
        dtype=q.dtype,
        device=q.device.type,
        mask=None if mask is None else mask.fingerprint(),
        bias=None if bias is None else bias.form(),
        score=None if score is None else score.form(),
        score_dim=score_dim,
        scale=compared.default_scale(qk_dim) if scale is None else float(scale),
        softcap=None if softcap is None or softcap > LARGEST else float(softcap),
        sink=sink is not None,
        dropout=float(dropout),
        offset=offset,
        grad=torch.is_grad_enabled() and _learns(tensors, specs),
        lse=lse,
        transformed=transformed,
        non_contiguous=() if transformed or opaque else _non_contiguous(*((q,) if stored else (q, k, v))),
        opaque=opaque,
        storage=None if stored is None else Storage.of(*stored),
        pairwise=() if bias is None else tuple(i for i, term in enumerate(bias.terms()) if is_pairwise(term)),
        capability=capability_of(q.device.type, q.device.index),
    )
    return problem, Operands(q, k, v, mask, bias, sink, score, stored, offset)


def _learns(tensors: tuple[Tensor, ...], specs: list[Bias | Score]) -> bool:
    return any(t.requires_grad for t in tensors) or any(spec.may_learn() for spec in specs)


def capability_of(kind: str, index: int | None) -> tuple[int, int] | None:
    """The compute capability of a device of this machine; None where it has none, as all but GPUs of NVIDIA.

    Args:
        kind: of device, "cuda" for example.
        index: among the GPUs; None for the current one.
    """
    if kind != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    if index is None:
        index = torch.cuda.current_device()
    return torch.cuda.get_device_capability(index) if index < torch.cuda.device_count() else None


def _non_contiguous(*tensors: Tensor) -> tuple[str, ...]:
    """Which of q, k and v, in this order, have a last dimension (of 2 or more) whose stride is not 1."""
    return tuple(name for name, t in zip("qkv", tensors, strict=False) if t.stride(3) != 1 and t.shape[3] > 1)


def _is_transformed(
    tensors: tuple[Tensor, ...], specs: list[Bias | Score], stored: tuple[StoredTensor, StoredTensor] | None
) -> bool:
    if current_func_transform() is not None:
        return True
    if not in_transform():
        return False
    parts = () if stored is None else (part.data for t in stored for part in t.parts)
    return any(map(has_tangent, (*tensors, *parts))) or any(map(_may_read_dual, specs))


def _may_read_dual(spec: Bias | Score) -> bool:
    """Whether the methods of a user's class may read a tensor with a tangent, such as a weight of a module."""
    return not spec.has_own_classes() and reads_dual([type(spec), spec.__dict__]) is not False
