"""Expressions of positions, such as `(q - k <= 128) & (ids[q] == ids[k])`: what a traced mask or score function does.

A term is a tree of torch's operators over the positions b, h, q and k (and the score), constants and captured tensors.
It is evaluated by the same operators, on tensors that broadcast. As it is a spec, it has a fingerprint, prints as
Python, and can be serialised.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from regard.describe.spec import Spec, spec

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floor_divide": "//", "remainder": "%", "ge": ">=", "gt": ">",
    "le": "<=", "lt": "<", "eq": "==", "ne": "!=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
    "logical_and": "&", "logical_or": "|", "pow": "**",
}  # fmt: skip
"""Operators of torch that print as operators of Python."""


class Term(Spec):
    """An expression of positions; abstract."""

    @cached_property
    def uses(self) -> frozenset[str]:
        """The names of the variables in it."""
        return frozenset().union(*(child.uses for child in self.children()))

    @cached_property
    def size(self) -> int:
        """Nodes of the tree."""
        return 1 + sum(child.size for child in self.children())

    def children(self) -> tuple["Term", ...]:
        """The terms that it is made of."""
        return ()


@spec
class Variable(Term):
    """A position, "b", "h", "q" or "k", or the "score"."""

    name: str

    @cached_property
    def uses(self) -> frozenset[str]:
        return frozenset((self.name,))

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return parts[0]


@spec
class Constant(Term):
    """A number. With a dtype it is a tensor of one element, else a number of Python: torch promotes the two apart."""

    value: bool | int | float
    dtype: str = ""

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return repr(parts[0])


@spec
class Captured(Term):
    """A tensor that the function has captured: a scalar, or a table that `index` looks up."""

    tensor: Tensor

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return repr(parts[0])


@spec
class Op(Term):
    """An operator of torch, `torch.ops.aten.name`, of up to five terms; `dtype` is the type of its result."""

    name: str
    dtype: str
    a: Term
    b: Term | None = None
    c: Term | None = None
    d: Term | None = None
    e: Term | None = None

    def children(self) -> tuple[Term, ...]:
        return tuple(term for term in (self.a, self.b, self.c, self.d, self.e) if term is not None)

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        name, dtype, *terms = parts
        shown = [str(term) for term in terms if term is not None]
        if name == "index":
            return f"{shown[0]}[{', '.join(shown[1:])}]"
        if name in INFIX and len(shown) == 2:
            return f"({shown[0]} {INFIX[name]} {shown[1]})"
        return f"{dtype if name == 'to' else name}({', '.join(shown)})"


def each(term: Term) -> Iterator[Term]:
    """The nodes of a term."""
    yield term
    for child in term.children():
        yield from each(child)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name."""
    return cast(torch.dtype, getattr(torch, name))


def evaluate(term: Term, values: Mapping[str, Tensor]) -> Tensor:
    """The value of a term, broadcast over the values of its variables; differentiable.

    >>> q, k = Variable("q"), Variable("k")
    >>> evaluate(Op("ge", "bool", q, k), {"q": torch.tensor([[0], [1]]), "k": torch.tensor([[0, 1]])}).tolist()
    [[True, False], [True, True]]
    """
    device = next((value.device for value in values.values()), torch.device("cpu"))
    found = _evaluate(term, values, {}, device)
    if isinstance(found, Tensor):
        return found
    return torch.full((1,), found, device=device)


def _evaluate(term: Term, values: Mapping[str, Tensor], known: dict[int, Any], device: torch.device) -> Any:
    if id(term) in known:
        return known[id(term)]
    if isinstance(term, Variable):
        found: Any = values[term.name]
    elif isinstance(term, Constant):
        found = torch.full((1,), term.value, dtype=dtype_of(term.dtype), device=device) if term.dtype else term.value
    elif isinstance(term, Captured):
        found = term.tensor.to(device)
        found = found[None] if not found.ndim else found  # one axis, so that it takes part in the promotion of types
    else:
        op = cast(Op, term)
        found = _apply(op, [_evaluate(child, values, known, device) for child in op.children()])
    known[id(term)] = found
    return found


def _apply(op: Op, values: list[Any]) -> Any:
    dtype = dtype_of(op.dtype)
    if op.name == "to":
        return values[0].to(dtype)
    if op.name == "index":
        return values[0][tuple(values[1:])]
    if op.name == "div_trunc":
        return torch.div(*values, rounding_mode="trunc")
    found = getattr(torch.ops.aten, op.name)(*values)
    return found if found.dtype == dtype else found.to(dtype)
