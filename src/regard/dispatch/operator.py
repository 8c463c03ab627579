"""The operator that torch sees: `regard::attend`, with a schema, a fake kernel, autograd and vmap.

What torch traces (`torch.compile`, `torch.export`, meta and fake tensors) it sees as this one operator, so a graph is
whole whatever engine runs in it. Words pass through it as a text and a list of tensors (`describe/spec.py`). A call
that is not traced does not come here: it runs its engine directly, which costs less, and which the reference can
differentiate twice. Only where a dispatch mode is on does it come here too, so that torch's FLOP counter sees it.

The operator plans when it runs: it reads the tensors of masks, and an offset that is a tensor, on the host. So one
graph serves every step of decoding, and no CUDA graph may be captured around it.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.backend.contract import Resumable
from regard.cost import attention as cost
from regard.describe.bias import Bias
from regard.describe.mask import And, CallSizes, Mask, Not, Or
from regard.describe.mask_by_table import MaskFunction, TensorMask
from regard.describe.score import Dot, Score
from regard.describe.spec import deserialize
from regard.describe.tensors import is_without_data
from regard.dispatch.choose import check_engine
from regard.dispatch.execute import execute
from regard.dispatch.plan_cache import prepare
from regard.errors import RefusalError
from regard.plan.problem import (
    check_numbers,
    check_offset,
    check_offset_tensor,
    check_sink,
    check_tensors,
    check_words,
    handles,
)
from regard.plan.schedule import Schedule
from regard.plan.tiling import schedule
from regard.state import State
from regard.storage.stored import StoredTensor
from regard.torch_internals import dispatch_modes, in_forward_mode

_ARGUMENTS = (  # `carried` are the words' tensors; where offset is None, the last of them is the offset
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor[] carried, SymInt[] numbers, str mask, str bias, str score, "
    "float? scale, float? softcap, float dropout, Tensor? seed, SymInt? offset, str? backend, bool wants_lse"
)

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)

_library = torch.library.Library("regard", "DEF")
_library.define(f"attend({_ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(
    f"attend_backward(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dmore)",
    tags=_TAGS,
)


def is_counted() -> bool:
    """Whether a dispatch mode is on, as torch's FLOP counter is: it is shown the call as one operator."""
    return dispatch_modes() > 0


def attend_traced(
    q: Tensor,
    k: Tensor | StoredTensor,
    v: Tensor | StoredTensor,
    *,
    mask: Mask | None,
    bias: Bias | None,
    score: Score | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout: float,
    offset: int | Tensor | None,
    backend: str | None,
    lse: bool,
) -> State:
    """The state of a call, its `out` with the sink, as one operator; its words are taken apart while torch traces."""
    if in_forward_mode():
        raise RefusalError(
            "forward-mode derivatives (jvp) of a traced call are not known: leave torch.compile out, or differentiate "
            "backward."
        )
    check_words(mask, bias, score)
    check_numbers(scale, softcap, dropout)
    check_engine(backend)
    if isinstance(offset, Tensor):
        check_offset_tensor(offset)
    elif offset is not None and not torch.compiler.is_compiling() and not isinstance(offset, torch.SymInt):
        offset = check_offset(offset)
    if isinstance(k, StoredTensor) or isinstance(v, StoredTensor):  # an operator takes tensors
        mask, (stored_k, stored_v) = handles(k, v, mask, bias, offset)
        k, v = stored_k.dense(), stored_v.dense()
    check_tensors(q, k, v)
    check_sink(sink, q.shape[1], q)
    carried: list[Tensor] = []
    numbers: list[int] = []
    start = k.shape[2] - q.shape[2] if offset is None else offset
    if mask is not None:
        mask = _tabulated(mask, q, k.shape[2], start)
    mask_text = "" if mask is None else mask.serialize(carried, numbers)
    bias_text = "" if bias is None else bias.serialize(carried, numbers)
    score_text = "" if score is None else score.serialize(carried, numbers)
    if isinstance(start, Tensor):  # as an int it would become a constant of the graph
        carried.append(start)
        start = None
    seed = torch.randint(1 << 62, ()) if dropout else None
    return State(
        *torch.ops.regard.attend(
            q, k, v, sink, carried, numbers, mask_text, bias_text, score_text, scale, softcap, dropout, seed, start,
            backend, lse,
        )
    )  # fmt: skip


def _tabulated(mask: Mask, q: Tensor, keys: int, start: int | Tensor) -> Mask:
    """The mask with each `MaskFunction` evaluated: functions cannot pass through an operator. User specs too."""
    if isinstance(mask, And | Or):
        return type(mask)(_tabulated(mask.a, q, keys, start), _tabulated(mask.b, q, keys, start))
    if isinstance(mask, Not):
        return Not(_tabulated(mask.a, q, keys, start))
    if not isinstance(mask, MaskFunction) and mask.can_be_serialized():
        return mask
    batch, heads, queries = (torch.arange(size, device=q.device) for size in q.shape[:3])
    row = queries[:, None] + start
    return TensorMask(
        mask.keep(batch[:, None, None, None], heads[:, None, None], row, torch.arange(keys, device=q.device))
    )


def _run(
    before: State | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, carried: Sequence[Tensor], *rest: Any
) -> State:
    """The state of a call; `before` is what it gave, from which an engine that can do so goes on to its gradients."""
    numbers, mask, bias, score, scale, softcap, dropout, seed, offset, backend, wants_lse = rest
    prepared = prepare(
        q, k, v,
        mask=cast(Mask, deserialize(mask, carried, numbers)) if mask else None,
        bias=cast(Bias, deserialize(bias, carried, numbers)) if bias else None,
        score=_score(score, carried, numbers),
        scale=scale, softcap=softcap, sink=sink, dropout=dropout,
        offset=carried[-1] if offset is None else offset, backend=backend, lse=wants_lse,
    )  # fmt: skip
    assert prepared is not None  # the operator runs on data, or its fake kernel does
    plan, operands = prepared
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(int(seed))
        if before is not None and isinstance(plan.ready, Resumable):
            return plan.ready.resume(plan.changed(operands), before)
        return execute(plan, operands, backend)[1]


def _score(text: str, carried: Sequence[Tensor], numbers: Sequence[int]) -> Score | None:
    return cast(Score, deserialize(text, carried, numbers)) if text else None


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        state = _run(None, q, k, v, *rest)
    return state.out.contiguous(), state.lse.contiguous()


def _attend_fake(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, carried: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v)
    (_score(rest[3], carried, rest[0]) or Dot()).dim(q.shape[3], k.shape[3])
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=lse)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    carried: Sequence[Tensor],
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of q, k, v and of [sink, *carried].

    An engine that can differentiate from `out` and `lse` does; else the call is run again with autograd watching it.
    """
    given = [q, k, v, *([] if sink is None else [sink]), *carried]
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        more = leaves[3:]
        sunk = more.pop(0) if sink is not None else None
        state = _run(State(out, lse), leaves[0], leaves[1], leaves[2], sunk, more, *rest)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        outputs = {state.out: grad_out} | ({state.lse: grad_lse} if rest[-1] else {})
        flowing = {out: grad for out, grad in outputs.items() if out.requires_grad}
        grads = torch.autograd.grad(
            list(flowing), wanted, list(flowing.values()), allow_unused=True, materialize_grads=True
        )
    found = iter(grads)
    flowed = [next(found).contiguous() if leaf.requires_grad else torch.empty_like(leaf) for leaf in leaves]
    return flowed[0], flowed[1], flowed[2], flowed[3:]


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    carried: Sequence[Tensor],
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    given = [q, k, v, *([] if sink is None else [sink]), *carried]
    like = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in given]
    return like[0], like[1], like[2], like[3:]


def _attend_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    return cost.flops(_counted(q, k, *rest), qk_dim=_score_dim(q, k, *rest), v_dim=v.shape[3])


def _backward_flops(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
    out_val: Any = None,
) -> int:
    return cost.gradient_flops(_counted(q, k, *rest), qk_dim=_score_dim(q, k, *rest), v_dim=v.shape[3])


def _counted(q: Tensor, k: Tensor, sink: Tensor | None, carried: Sequence[Tensor], *rest: Any) -> Schedule:
    """The schedule of a call, whose pairs are counted; of all pairs, if the mask's tensors have no data."""
    numbers, text, offset = rest[0], rest[1], rest[8]
    sizes = {"batch": q.shape[0], "heads": q.shape[1], "queries": q.shape[2], "keys": k.shape[2]}
    if not text or any(map(is_without_data, carried)):
        return schedule(None, tile=128, offset=0, **sizes)
    sizes["offset"] = int(carried[-1]) if offset is None else offset
    mask = cast(Mask, deserialize(text, carried, numbers))
    return schedule(mask.bind(CallSizes(**sizes)), tile=128, **sizes)


def _score_dim(q: Tensor, k: Tensor, sink: Tensor | None, carried: Sequence[Tensor], *rest: Any) -> int:
    score = _score(rest[3], carried, rest[0])
    return q.shape[3] if score is None else score.dim(q.shape[3], k.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, carried, *rest = inputs
    ctx.save_for_backward(*output, q, k, v, *([] if sink is None else [sink]), *carried)
    ctx.rest, ctx.sunk, ctx.floats = rest, sink is not None, [t.is_floating_point() for t in carried]


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    out, lse, q, k, v, *more = ctx.saved_tensors
    sink, carried = (more[0], more[1:]) if ctx.sunk else (None, more)
    dq, dk, dv, dmore = torch.ops.regard.attend_backward(
        grad_out, grad_lse, out, lse, q, k, v, sink, carried, *ctx.rest
    )
    dsink, dcarried = (dmore[0], dmore[1:]) if ctx.sunk else (None, dmore)
    flowing = [grad if flows else None for grad, flows in zip(dcarried, ctx.floats, strict=True)]
    numbers, *others = ctx.rest
    nothing = None if numbers else []  # torch takes an empty list for one of tensors
    return dq, dk, dv, dsink, flowing, nothing, *([None] * len(others))


def _mapped(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """vmap: call by call, since words with tensors say other things of other slices."""

    def at(i: int, x: Any, dim: Any) -> Any:
        if isinstance(x, list):
            listed = cast("list[Any]", x)
            return [at(i, y, d) for y, d in zip(listed, dim or [None] * len(listed), strict=True)]
        return x if dim is None else x.select(dim, i)

    calls = [
        torch.ops.regard.attend(*(at(i, x, dim) for x, dim in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return (torch.stack([out for out, _ in calls]), torch.stack([lse for _, lse in calls])), (0, 0)


for _key in ("CPU", "CUDA", "MPS", "XPU"):
    _library.impl("attend", _attend, _key)
    _library.impl("attend_backward", _backward, _key)
torch.library.register_fake("regard::attend", _attend_fake, lib=_library)
torch.library.register_fake("regard::attend_backward", _backward_fake, lib=_library)
torch.library.register_autograd("regard::attend", _differentiate, setup_context=_save, lib=_library)
torch.library.register_vmap("regard::attend", _mapped, lib=_library)
register_flop_formula(torch.ops.regard.attend, get_raw=True)(_attend_flops)
register_flop_formula(torch.ops.regard.attend_backward, get_raw=True)(_backward_flops)
