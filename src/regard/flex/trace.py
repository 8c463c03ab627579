"""What a `mask_mod` or `score_mod` of FlexAttention computes, as a term (`describe/term.py`).

The function is called once, with positions that are tensors of one element, as FlexAttention's `vmap` shows them to it,
while a dispatch mode records the operators that touch them. So it does not matter how the function is written, nor what
it is called: closures, helpers and classes are seen through. Captured tensors are recorded themselves, not their
elements, so gradients reach them.

A function that does more than a term says is *opaque*: it uses an operator that is not known to work element by
element, or a `torch.autograd.Function` of its own. Then `element_by_element` calls it as FlexAttention does, for every
pair.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.describe.mask import Positions, as_tensors
from regard.describe.term import Captured, Constant, Op, Term, Variable
from regard.errors import ProblemError
from regard.flex.outside_derivatives import mapped_mask
from regard.torch_internals import DispatchMode, FakeTensor, FunctionalTensor, is_mapped

Mod = Callable[..., Tensor]

MOST_NODES = 1000
"""The most nodes of a term; a function with more is opaque."""

ELEMENTWISE = frozenset({
    "abs", "acos", "add", "asin", "atan", "atan2", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil",
    "clamp", "clamp_max", "clamp_min", "copysign", "cos", "cosh", "div", "elu", "eq", "erf", "erfc", "exp", "exp2",
    "expm1", "floor", "floor_divide", "fmod", "ge", "gelu", "gt", "hardtanh", "isfinite", "isinf", "isnan", "le",
    "leaky_relu", "lerp", "log", "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or",
    "logical_xor", "lt", "maximum", "minimum", "mul", "ne", "neg", "pow", "reciprocal", "relu", "remainder", "round",
    "rsqrt", "rsub", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt", "sub", "tan", "tanh", "trunc",
    "where", "xlogy", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__",
})  # fmt: skip
"""Operators that compute each element of their result from one element of each operand."""

SAME = frozenset({"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"})
"""Operators whose result has the elements of their operand. `detach` alone stops gradients, and stays in the term."""

MAKING = frozenset({
    "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
    "scalar_tensor", "zeros", "zeros_like",
})  # fmt: skip
"""Operators that read no element of their operands."""


FILLING: dict[str, int | float] = {
    "full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0,
    "zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0,
}  # fmt: skip
"""Operators of `MAKING` by what the elements are: a float, or the position of the argument that says it."""


class Traced(NamedTuple):
    """What a function does.

    Attributes:
        term: its result; None if the function is opaque.
        uses: which of b, h, q, k and score its result depends on; of an opaque function at least these.
        captured: the tensors that it reads, besides its arguments.
        dtype: of its result; None if the result is no tensor.
    """

    term: Term | None
    uses: frozenset[str]
    captured: tuple[Tensor, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Value:
    """What is known of a tensor: its term, or a table of which some leading axes are indexed."""

    term: Term | None
    uses: frozenset[str]


def is_traced(tensor: Tensor) -> bool:
    """Whether torch traces the tensor, so that it has no elements to read."""
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def trace(mod: Mod, names: str, device: torch.device, score: Tensor | None = None) -> Traced:
    """Trace a function of the positions `names`, and of a score before them where one is given.

    Args:
        names: one letter per position, "bhqk".
        score: a tensor of one element, of the type that scores have.

    Raises:
        ProblemError: the function reads a tensor without elements, on the meta device.
        RefusalError: it reads a tensor that `torch.vmap` maps over.
    """
    zeros = {name: torch.zeros((), dtype=torch.int64, device=device) for name in names}
    arguments = (
        zeros if score is None else {"score": score.detach().requires_grad_() * 1, **zeros}
    )  # no leaf: it may be written in place
    if not hasattr(DispatchMode, "__enter__"):  # this torch lacks it
        return Traced(None, frozenset(arguments), ())
    recorder = _Recorder(arguments)
    with torch.enable_grad(), recorder, IndexByTensor():
        result = mod(*arguments.values())
    _check_captured(recorder, "mask_mod" if score is None else "score_mod", device)
    if isinstance(cast(object, result), Tensor) and is_mapped(result):
        raise mapped_mask()  # inside torch.func a score_mod is not traced
    captured = tuple(tensor for tensor, _ in recorder.captured.values())
    if recorder.is_read or not isinstance(cast(object, result), Tensor):
        return Traced(None, frozenset(arguments), captured)
    value = recorder.value(result)
    captured = tuple(tensor for tensor, _ in recorder.captured.values())
    if value.term is None or value.term.size > MOST_NODES or result.ndim or _has_own_gradient(result, captured):
        return Traced(None, value.uses, captured, result.dtype)
    return Traced(value.term, value.uses, captured, result.dtype)


def _check_captured(recorder: "_Recorder", name: str, device: torch.device) -> None:
    empty = next((t for t, _ in recorder.captured.values() if t.is_meta), None)
    if empty is not None and device.type != "meta":
        raise ProblemError(
            f"the {name} reads a tensor {list(empty.shape)} on the meta device, which has no elements: make it on "
            f"{device}."
        )


class IndexByTensor(TorchFunctionMode):
    """`table[i, j]` of tensors of one element is an operator here; torch would read them as ints of Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_position, index)) and all(type(i) is int or _is_position(i) for i in index):
                device = next(i.device for i in index if isinstance(i, Tensor))
                whole = [i if isinstance(i, Tensor) else torch.tensor(i, device=device) for i in index]
                return torch.ops.aten.index.Tensor(args[0], whole)
        return func(*args, **(kwargs or {}))


def _is_position(index: object) -> bool:
    return isinstance(index, Tensor) and not index.ndim and index.dtype in (torch.int64, torch.int32)


class _Recorder(DispatchMode):
    """Records each operator on the tensors that come from the arguments."""

    def __init__(self, arguments: dict[str, Tensor]) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, _Value]] = {
            id(tensor): (tensor, _Value(Variable(name), frozenset({name}))) for name, tensor in arguments.items()
        }
        self.captured: dict[int, tuple[Tensor, _Value]] = {}
        self.made: dict[int, tuple[Tensor, float | None]] = {}  # by the function; elements if known
        self.views: dict[int, Tensor] = {}  # tensors that are views or have views
        self.is_read = False  # the function takes a position as a number of Python, or writes through a view

    def value(self, tensor: Tensor) -> _Value:
        """What is known of a tensor; one that does not come from the arguments is captured, or a constant."""
        if id(tensor) in self.known:
            return self.known[id(tensor)][1]
        if id(tensor) in self.captured:
            return self.captured[id(tensor)][1]
        if tensor.is_meta and id(tensor) in self.made:  # forward mode tries operators on such tensors
            return _Value(None, frozenset())
        made = None if tensor.ndim else self._made_value(tensor)
        if made is not None:
            return _Value(Constant(made, str(tensor.dtype).removeprefix("torch.")), frozenset())
        self.captured[id(tensor)] = tensor, _Value(Captured(tensor), frozenset())
        return self.captured[id(tensor)][1]

    def _made_value(self, tensor: Tensor) -> float | None:
        """The element of a tensor that the function made; None if it did not, or if that is not known."""
        if id(tensor) not in self.made:
            return None
        return self.made[id(tensor)][1] if is_traced(tensor) else tensor.item()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = list(_tensors([args, kwargs]))
        name = func.overloadpacket.__name__
        if func.is_view:
            self.views.update({id(t): t for t in [*operands, *_tensors(result)]})
        if name in MAKING or all(id(t) in self.made for t in operands):
            filled = _filled(name, args)
            self.made.update({id(t): (t, filled) for t in _tensors(result)})
        elif any(id(t) in self.known for t in operands):
            written = _tensors(result) if func._schema.is_mutable else ()
            self.is_read = self.is_read or not isinstance(result, Tensor) or any(map(self._is_shared, written))
            self._record(func, name, args, kwargs, operands, result)
        return result

    def _is_shared(self, tensor: Tensor) -> bool:
        """Whether another tensor of the function has the same memory, so that a write changes that one as well."""
        if is_traced(tensor):
            return id(tensor) in self.views
        place = tensor.untyped_storage().data_ptr()
        others = [t for found in (self.made, self.known, self.captured) for t, _ in found.values()]
        return any(t is not tensor and t.untyped_storage().data_ptr() == place for t in others)

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, operands: list[Tensor], result: Any) -> None:
        values = [self.value(t) for t in operands]
        uses = frozenset[str]().union(*(value.uses for value in values))
        in_place = func._schema.is_mutable
        plain = name.removesuffix("_") if in_place else name
        for tensor in _tensors(result):
            term = None if any(v.term is None for v in values) else self._term(plain, args, kwargs, tensor)
            self.known[id(tensor)] = tensor, _Value(term, uses)

    def _term(self, name: str, args: Any, kwargs: Any, result: Tensor) -> Term | None:
        """The term of a result; None for what is opaque."""
        dtype = str(result.dtype).removeprefix("torch.")
        if name == "index":
            return self._indexed(args[0], args[1], dtype)
        if name == "select" and args[1] == 0:
            return self._indexed(args[0], [args[2]], dtype)
        if result.ndim:
            return None
        if name == "_to_copy":
            return Op("to", dtype, self._operand(args[0]))
        if name in SAME:
            return Op("detach", dtype, self._operand(args[0])) if name == "detach" else self._operand(args[0])
        if name == "masked_fill":
            return Op("where", dtype, self._operand(args[1]), self._operand(args[2]), self._operand(args[0]))
        rounding, alpha = kwargs.get("rounding_mode"), kwargs.get("alpha", 1)
        if name in ("add", "sub", "rsub") and len(args) == 3:
            args, alpha = args[:2], args[2]
        if name == "div" and rounding in ("floor", "trunc"):
            name, kwargs = {"floor": "floor_divide", "trunc": "div_trunc"}[rounding], {}
        if name not in {*ELEMENTWISE, "div_trunc"} or set(kwargs) - {"alpha"} or len(args) > 5:
            return None
        terms = [None if arg is None else self._operand(arg) for arg in args]
        if name == "clamp":
            return _clamped(dtype, terms)
        if any(term is None for term in terms):
            return None
        if alpha != 1:
            scaled = 0 if name == "rsub" else 1  # b - alpha * a, and a + alpha * b
            terms[scaled] = Op("mul", dtype, cast(Term, terms[scaled]), Constant(known_number(alpha)))
        return Op(name, dtype, *cast(Any, terms))

    def _operand(self, value: Any) -> Term:
        if isinstance(value, Tensor):
            return cast(Term, self.value(value).term)
        return Constant(known_number(value))

    def _indexed(self, table: Tensor, index: list[Any], dtype: str) -> Term | None:
        """`table[index]`, also where the table is itself an indexed table; None where a slice is among them."""
        if any(i is None for i in index):
            return None
        term = self._operand(table)
        before = term.children() if isinstance(term, Op) and term.name == "index" else (term,)
        after = [self._operand(i) for i in index]
        if not isinstance(before[0], Captured) or len(before) + len(after) > 5:
            return None
        return Op("index", dtype, *before, *after)


def _filled(name: str, args: Any) -> float | None:
    """The number that each element of a new tensor is; None if that is not known."""
    value = FILLING.get(name)
    return known_number(args[value]) if isinstance(value, int) else value


def known_number(value: Any) -> Any:
    """The number itself of a float that torch.compile traces as a symbol: for another one it compiles again."""
    return float(value) if isinstance(value, torch.SymFloat) else value


def _clamped(dtype: str, terms: list[Term | None]) -> Term | None:
    value, low, high = (*terms, None, None)[:3]
    found = cast(Term, value)
    if low is not None:
        found = Op("clamp_min", dtype, found, low)
    return found if high is None else Op("clamp_max", dtype, found, high)


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for each in cast("list[Any]", nested):
            yield from _tensors(each)
    elif isinstance(nested, dict):
        yield from _tensors(list(cast("dict[str, Any]", nested).values()))


def _has_own_gradient(result: Tensor, captured: tuple[Tensor, ...]) -> bool:
    """Whether a `torch.autograd.Function` is on the way from the arguments: its backward is not that of a term."""
    stops = {t.grad_fn for t in captured}
    seen, todo = set[object](), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen or node in stops:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        todo += [each for each, _ in node.next_functions]
    return False


def element_by_element(mod: Mod, *positions: Positions) -> Tensor:
    """The function of each element of tensors that broadcast, as FlexAttention's `vmap` calls it."""
    tensors = torch.broadcast_tensors(*as_tensors(*positions))
    with IndexByTensor():
        flat = torch.vmap(mod)(*(t.reshape(-1) for t in tensors))
    return flat.reshape(tensors[0].shape)
