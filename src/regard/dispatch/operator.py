"""The operator that torch sees: `regard::attend`, with a schema, a fake kernel, autograd and vmap.

What torch traces (`torch.compile`, `torch.export`, meta and fake tensors) it sees as this one operator, so a graph is
whole whatever backend runs in it. Specs pass through it as a text and a list of tensors (`describe/serialized.py`).
`traced_call.py` makes a call of it.

Backward differentiates the operator once; what it cannot differentiate (a second time, forward mode, `torch.func`,
several gradients at once) raises `RefusalError`, also in an exported program, which calls the operator by itself.

The operator plans when it runs: it reads the tensors of masks, and an offset that is a tensor, on the host. So one
graph serves every step of decoding, and no CUDA graph may be captured around it.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any, NamedTuple, NoReturn, cast, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.backend.contract import ResumableKernel
from regard.cost import attention as cost
from regard.describe.bias import Bias
from regard.describe.mask import CallSizes, Mask
from regard.describe.score import Dot
from regard.describe.serialized import deserialize
from regard.describe.tensors import has_tangent, is_without_data
from regard.dispatch.execute import drawing, execute
from regard.dispatch.onnx_form import in_onnx
from regard.dispatch.plan_cache import prepare
from regard.errors import RefusalError
from regard.plan.checks import check_tensors
from regard.plan.request import Request
from regard.plan.schedule import Schedule
from regard.plan.tiling import schedule
from regard.state import State
from regard.torch_internals import in_forward_mode, in_func_grad, recording_gradients, resolving_lazy_tensors
from regard.wide import wide_of


class _Arguments(NamedTuple):
    """The arguments of the operator, each with its type in torch's schema language.

    `carried` are the tensors of the specs; where `offset` is None, the last of them is the offset. `numbers` are the
    ints of the specs, and `mask`, `bias` and `score` are their texts, "" for None.

    Lists are optional in the schema, and None is an empty one: programs of AOTInductor pass it instead (torch 2.13).
    """

    q: Annotated[Tensor, "Tensor"]
    k: Annotated[Tensor, "Tensor"]
    v: Annotated[Tensor, "Tensor"]
    sink: Annotated[Tensor | None, "Tensor?"]
    carried: Annotated[Sequence[Tensor], "Tensor[]?"]
    numbers: Annotated[Sequence[int], "SymInt[]?"]
    mask: Annotated[str, "str"]
    bias: Annotated[str, "str"]
    score: Annotated[str, "str"]
    scale: Annotated[float | None, "float?"]
    softcap: Annotated[float | None, "float?"]
    dropout: Annotated[float, "float"]
    seed: Annotated[Tensor | None, "Tensor?"]
    offset: Annotated[int | None, "SymInt?"]
    backend: Annotated[str | None, "str?"]
    wants_lse: Annotated[bool, "bool"]

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> "_Arguments":
        """The arguments that torch calls the operator with."""
        found = cls(*arguments)
        return found._replace(carried=found.carried or (), numbers=found.numbers or ())

    def spec(self, text: str) -> Any:
        """The spec that was serialized to this text, None for an empty one."""
        return deserialize(text, self.carried, self.numbers) if text else None

    def request(self) -> Request:
        """The call that the operator runs."""
        return Request(
            self.q, self.k, self.v, self.spec(self.mask), self.spec(self.bias), self.spec(self.score), self.scale,
            self.softcap, self.sink, self.dropout, self.carried[-1] if self.offset is None else self.offset,
            self.backend, self.wants_lse,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """q, k, v, the sink if there is one, and what is carried."""
        return [self.q, self.k, self.v, *([] if self.sink is None else [self.sink]), *self.carried]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "_Arguments":
        """The same with other tensors, in the order of `tensors`."""
        q, k, v, *more = tensors
        sink = None if self.sink is None else more.pop(0)
        return self._replace(q=q, k=k, v=v, sink=sink, carried=more)


_SCHEMA = ", ".join(
    f"{hint.__metadata__[0]} {name}" for name, hint in get_type_hints(_Arguments, include_extras=True).items()
)

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)

_TRACED = "a call that torch traces or exports, or shows to a dispatch mode such as its FLOP counter,"

_UNTRACED = "leave torch.compile, torch.export or the mode out"


class _Library(torch.library.Library):
    """A library whose operators refuse what autograd cannot differentiate, where torch would raise errors of its own.

    It could also give tangents of 0. `torch.library.register_autograd` registers for the key "Autograd".
    """

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        super().impl(op_name, _refusing(fn) if dispatch_key == "Autograd" else fn, dispatch_key, **options)


def _refusing(differentiated: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, that first refuses what it cannot differentiate."""

    @wraps(differentiated)
    def checked(*arguments: Any, **options: Any) -> Any:
        if _has_any(arguments, has_tangent):
            _refuse("forward-mode derivatives (jvp)")
        if in_func_grad() and _has_any(arguments, _learns):
            _refuse("torch.func.grad")
        return differentiated(*arguments, **options)

    return checked


def _has_any(arguments: Sequence[object], holds: Callable[[Tensor], bool]) -> bool:
    """Whether it holds of a tensor, or of one of a list."""
    return any(
        holds(each) if isinstance(each, Tensor) else _has_any(cast("Sequence[object]", each), holds)
        for each in arguments
        if isinstance(each, Tensor | list | tuple)
    )


def _learns(t: Tensor) -> bool:
    return t.requires_grad and torch.is_grad_enabled()


def _refuse(kind: str) -> NoReturn:
    raise RefusalError(
        f"{kind} of {_TRACED} is not supported: {_UNTRACED}, or differentiate by torch.autograd.grad or backward()."
    )


_library = _Library("regard", "DEF")
_library.define(f"attend({_SCHEMA}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(
    f"attend_backward(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_SCHEMA}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dmore)",
    tags=_TAGS,
)


def attend_in_onnx(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator `regard::attend` in operators that ONNX has: its decomposition for programs that have it already."""
    a = _Arguments.of(arguments)
    state = in_onnx(a.request())
    return state.out, state.lse


def _run(a: _Arguments, before: State | None = None) -> State:
    """The state of a call; `before` is its state of an earlier run, which a resumable kernel differentiates."""
    prepared = prepare(a.request())
    assert prepared is not None  # the operator runs on data, or its fake kernel does
    plan, operands = prepared[0], prepared[1]._replace(lse=True)  # the operator returns it, and differentiates by it
    with drawing(plan, operands, None if a.seed is None else int(a.seed)) as seeded:
        if before is not None and isinstance(plan.kernel, ResumableKernel):
            return plan.kernel.resume(plan.changed(seeded), before)
        return execute(plan, seeded, a.backend)[1]


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    # below autograd, torch cannot tell which tensors have a tangent
    keys = recording_gradients() if in_forward_mode() else resolving_lazy_tensors()
    with torch.no_grad(), keys:
        state = _run(_Arguments.of(arguments))
    q: Tensor = arguments[0]
    by_token = q.stride(1) < q.stride(2)  # as q is, so that a program may view the output as a graph-less call's
    out = state.out.transpose(1, 2).contiguous().transpose(1, 2) if by_token else state.out.contiguous()
    return out, state.lse.contiguous()


def _attend_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loads sympy

    a = _Arguments.of(arguments)
    q, k, v = a.q, a.k, a.v
    check_tensors(q, k, v)
    _score_dim(a)
    batch, heads, queries = q.shape[:3]
    lse = q.new_empty((batch, heads, queries), dtype=wide_of(q.dtype))
    if guard_or_false(q.stride(1) < q.stride(2)):
        return q.new_empty((batch, queries, heads, v.shape[3])).transpose(1, 2), lse
    return q.new_empty((batch, heads, queries, v.shape[3])), lse


def _backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of q, k, v and of [sink, *carried].

    A resumable kernel differentiates from `out` and `lse`; else the call is run again under autograd.
    """
    a = _Arguments.of(arguments)
    with torch.enable_grad(), recording_gradients():
        leaves = [t.detach().requires_grad_(_can_learn(t)) for t in a.tensors()]
        state = _run(a.with_tensors(leaves), State(out, lse))
        _check_learns_by_fields(a, state.out, leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        outputs = {state.out: grad_out} | ({state.lse: grad_lse} if a.wants_lse else {})
        flowing = {out: grad for out, grad in outputs.items() if out.requires_grad}
        grads = torch.autograd.grad(
            list(flowing), wanted, list(flowing.values()), allow_unused=True, materialize_grads=True
        )
    each = iter(grads)
    whole = [_stored(next(each)) if leaf.requires_grad else torch.empty_like(leaf) for leaf in leaves]
    return whole[0], whole[1], whole[2], whole[3:]


def _stored(t: Tensor) -> Tensor:
    """The tensor as graphs read it: its elements in order, conjugated or negated where torch would do so later."""
    return t.resolve_conj().resolve_neg().contiguous()


def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    like = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in _Arguments.of(arguments).tensors()]
    return like[0], like[1], like[2], like[3:]


def _check_learns_by_fields(a: _Arguments, out: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise `RefusalError` where gradients would flow from a user's bias to a tensor that is none of its fields.

    Args:
        out: the output, computed from the leaves.
    """
    bias = cast("Bias | None", a.spec(a.bias))
    if bias is None or all(term.is_own() for term in bias.terms()) or out.grad_fn is None:
        return
    known, seen, left = set(map(id, leaves)), {out.grad_fn}, [out.grad_fn]
    while left:
        step = left.pop()
        reached: Tensor | None = getattr(step, "variable", None)  # of what adds to a leaf's gradient
        if reached is not None and id(reached) not in known:
            raise RefusalError(
                f"{bias!r}: its value reads a tensor {list(reached.shape)} that requires a gradient and is none of its "
                f"fields, such as a weight of a module, so in {_TRACED} no gradient flows to it. Make it a field of "
                "the bias."
            )
        new = [each for each, _ in step.next_functions if each is not None and each not in seen]
        seen.update(new)
        left += new


def _can_learn(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _attend_flops(*arguments: Any, out_val: Any = None) -> int:
    a = _Arguments.of(arguments)
    return cost.flops(_counted(a), qk_dim=_score_dim(a), v_dim=a.v.shape[3])


def _backward_flops(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: Any, out_val: Any = None
) -> int:
    a = _Arguments.of(arguments)
    return cost.gradient_flops(_counted(a), qk_dim=_score_dim(a), v_dim=a.v.shape[3])


def _counted(a: _Arguments) -> Schedule:
    """The schedule of a call, whose pairs are counted; of all pairs, if the mask's tensors have no data."""
    sizes = {"batch": a.q.shape[0], "heads": a.q.shape[1], "queries": a.q.shape[2], "keys": a.k.shape[2]}
    if not a.mask or any(map(is_without_data, a.carried)):
        return schedule(None, tile=128, offset=0, **sizes)
    request = a.request().resolved()
    sizes["offset"] = request.offset
    return schedule(cast(Mask, request.mask).bind(CallSizes(**sizes)), tile=128, **sizes)


def _score_dim(a: _Arguments) -> int:
    return (a.spec(a.score) or Dot()).dim(a.q.shape[3], a.k.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a = _Arguments.of(inputs)
    ctx.save_for_backward(*output, *a.tensors())
    ctx.arguments = a.with_tensors([cast(Any, ...)] * len(a.tensors()))  # the tensors are saved apart
    ctx.floats = [_can_learn(t) for t in a.carried]


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    a = ctx.arguments.with_tensors(tensors)
    dq, dk, dv, dmore = torch.ops.regard.attend_backward(grad_out, grad_lse, out, lse, *a)
    dsink, dcarried = (None, dmore) if a.sink is None else (dmore[0], dmore[1:])
    flowing = [grad if flows else None for grad, flows in zip(dcarried, ctx.floats, strict=True)]
    numbers = None if a.numbers else []  # torch takes an empty list for one of tensors
    return dq, dk, dv, dsink, flowing, numbers, *([None] * (len(a) - 6))


def _refuse_second(ctx: Any, *grads: Any) -> None:
    raise RefusalError(
        f"The gradients of {_TRACED} have no derivatives, and this asks for a second derivative: {_UNTRACED}, and name "
        'backend="reference", which can be differentiated any number of times.'
    )


def _refuse_batched(*arguments: Any) -> None:
    raise RefusalError(
        f"The backward pass of {_TRACED} takes one gradient at a time, and this asks for several at once "
        f"(is_grads_batched, jacobian with vectorize, or vmap): differentiate in a loop, or {_UNTRACED} and use "
        "torch.func.jacrev."
    )


def _mapped(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """vmap: call by call, since a spec with tensors differs from slice to slice."""

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
for _key in ("Batched", "FuncTorchBatched"):
    _library.impl("attend_backward", _refuse_batched, _key)
torch.library.register_autograd("regard::attend", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("regard::attend_backward", _refuse_second, lib=_library)
torch.library.register_vmap("regard::attend", _mapped, lib=_library)
register_flop_formula(torch.ops.regard.attend, get_raw=True)(_attend_flops)
register_flop_formula(torch.ops.regard.attend_backward, get_raw=True)(_backward_flops)

attend_operator = torch.ops.regard.attend
"""`regard::attend`, with the arguments of `_Arguments`."""
