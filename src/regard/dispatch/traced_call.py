"""A call of `attend` as one call of the operator that torch sees (`operator.py`): its specs are taken apart here.

A call that is not traced does not pass here: its kernel runs directly, which costs less, and which the reference can
differentiate twice. Only where a dispatch mode is on does it pass here, so that torch's FLOP counter sees it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from regard.describe.bias import Bias, Sum, TensorBias, values_of
from regard.describe.by_row import bias_by_row, mask_by_row
from regard.describe.mask import And, CallSizes, Mask, Not, Or
from regard.describe.mask_by_table import TensorMask
from regard.describe.mask_function import MaskFunction
from regard.describe.spec import bound_to
from regard.describe.tensors import is_without_data
from regard.dispatch.choose import BACKENDS, check_backend
from regard.dispatch.onnx_form import in_onnx, is_exporting_to_onnx
from regard.dispatch.operator import attend_operator
from regard.errors import ProblemError, RefusalError
from regard.plan.checks import (
    check_numbers,
    check_offset,
    check_offset_tensor,
    check_sink,
    check_specs,
    check_tensors,
)
from regard.plan.request import Request, stored_pair
from regard.state import State
from regard.storage.stored import StoredTensor
from regard.torch_internals import dispatch_modes, is_mapped
from regard.wide import wide_of

S = TypeVar("S", Mask, Bias)


def is_counted() -> bool:
    """Whether a dispatch mode is on, as torch's FLOP counter is: it is shown the call as one operator."""
    return dispatch_modes() > 0


def attend_traced(request: Request) -> State:
    """The state of a call, its `out` with the sink, as one operator; its specs are taken apart while torch traces."""
    q, k, v, mask, bias, score, scale, softcap, sink, dropout, offset, backend, lse, _ = request
    check_specs(mask, bias, score)
    check_numbers(scale, softcap, dropout)
    backend = _name(backend)
    if isinstance(offset, Tensor):
        check_offset_tensor(offset, q.shape[0])
        if offset.device.type == "meta" != q.device.type:
            raise ProblemError(f"offset is on the meta device and q on {q.device}: expected an offset with elements.")
    elif offset is not None and not torch.compiler.is_compiling() and not isinstance(offset, torch.SymInt):
        offset = check_offset(offset)
    if isinstance(k, StoredTensor) or isinstance(v, StoredTensor):  # an operator takes tensors
        mask, bias, (stored_k, stored_v) = stored_pair(k, v, mask, bias, offset)
        k, v = stored_k.dense(), stored_v.dense()
    check_tensors(q, k, v)
    check_sink(sink, q.shape[1], q)
    if is_exporting_to_onnx():
        return in_onnx(request._replace(k=k, v=v, mask=mask, offset=offset))
    carried: list[Tensor] = []
    numbers: list[int] = []
    start = k.shape[2] - q.shape[2] if offset is None else offset
    if mask is not None:
        mask = _tabulated(mask, q, k.shape[2], cast("int | Tensor", start))
    if bias is not None:
        bias = _tabulated_bias(bias, q, k.shape[2], cast("int | Tensor", start))
    mask_text = "" if mask is None else mask.serialize(carried, numbers)
    bias_text = "" if bias is None else bias.serialize(carried, numbers)
    score_text = "" if score is None else score.serialize(carried, numbers)
    if isinstance(start, Tensor):  # as an int it would become a constant of the graph
        carried.append(start)
        start = None
    seed = torch.randint(1 << 62, (), device="cpu") if dropout else None
    return State(
        *attend_operator(
            _mapped_like(q, carried), k, v, sink, carried, numbers, mask_text, bias_text, score_text, scale, softcap,
            dropout, seed, start, backend, lse,
        )
    )  # fmt: skip


def _mapped_like(q: Tensor, carried: Sequence[Tensor]) -> Tensor:
    """q, mapped over by vmap where one of the tensors is: torch does not look into a list that is optional."""
    for t in carried:
        if is_mapped(t):
            q = q + t.new_zeros((), dtype=q.dtype, device=q.device)
    return q


def _name(backend: Any) -> str | None:
    """The name by which an operator takes a backend."""
    check_backend(backend)
    if backend is None or isinstance(backend, str):
        return backend
    registered = BACKENDS.get(backend.name)
    if registered is not backend and registered != backend:
        raise RefusalError(
            f"The backend {backend.name!r} is an object, and a traced call takes names: call "
            "regard.extend.register_backend(backend) once, before."
        )
    return backend.name


def _tabulated(mask: Mask, q: Tensor, keys: int, start: int | Tensor) -> Mask:
    """The mask with each `MaskFunction` evaluated: functions cannot pass through an operator. User specs too."""
    if type(mask) is And or type(mask) is Or:
        return type(mask)(_tabulated(mask.a, q, keys, start), _tabulated(mask.b, q, keys, start))
    if type(mask) is Not:
        return Not(_tabulated(mask.a, q, keys, start))
    if not isinstance(mask, MaskFunction) and mask.can_be_serialized():
        return mask
    if type(mask).bind is not Mask.bind:
        mask, start = _bound(mask, q, keys, start, mask_by_row)
    return TensorMask(mask.keep(*_positions(q, keys, start)))


def _tabulated_bias(bias: Bias, q: Tensor, keys: int, start: int | Tensor) -> Bias:
    """The bias with each user's term evaluated that cannot pass through an operator."""
    if type(bias) is Sum:
        return Sum(_tabulated_bias(bias.a, q, keys, start), _tabulated_bias(bias.b, q, keys, start))
    if bias.is_own() or bias.has_plain_fields():
        return bias
    if type(bias).bind is not Bias.bind:
        bias, start = _bound(bias, q, keys, start, bias_by_row)
    values = values_of(bias, *_positions(q, keys, start))
    return TensorBias(values if values.is_floating_point() else values.to(wide_of(q.dtype)))


def _positions(q: Tensor, keys: int, start: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch rows, heads, and positions of queries and keys, which broadcast to [batch, heads, queries, keys]."""
    batch, heads, queries = (torch.arange(size, device=q.device) for size in q.shape[:3])
    row = queries[:, None] + _by_row(start)
    return batch[:, None, None, None], heads[:, None, None], row, torch.arange(keys, device=q.device)


def _bound(
    term: S, q: Tensor, keys: int, start: int | Tensor, by_row: Callable[[S, tuple[int, ...]], S | None]
) -> tuple[S, int | Tensor]:
    """A mask or bias in this call, and the position of the first query for it."""
    sizes = CallSizes(q.shape[0], q.shape[1], q.shape[2], keys, 0)
    if not isinstance(start, Tensor):
        return bound_to(cast(Any, term), sizes._replace(offset=start)), start
    if not torch.compiler.is_compiling() and not is_without_data(start):
        first = tuple(start.expand(q.shape[0]).tolist())
        return bound_to(cast(Any, by_row(term, first)), sizes), 0
    if bound_to(cast(Any, term), sizes) is not term:
        raise RefusalError(
            f"{term!r} with an offset that is a tensor, in a call that torch traces: its `bind` needs the offset as a "
            "number. Give offset as an int, or call attend outside of torch.compile, or put all that it needs into "
            "its fields and define no `bind`."
        )
    return term, start


def _by_row(start: int | Tensor) -> int | Tensor:
    """The position of the first query, or of that of each batch row, [batch, 1, 1, 1]."""
    return start[:, None, None, None] if isinstance(start, Tensor) and start.numel() != 1 else start
