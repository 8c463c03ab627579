"""Masks and biases from a line of text: `Causal() & Window(512)`, as in Python.

The text is parsed, never evaluated: only regard's masks and biases, `& | ~ +`, numbers and lists are accepted.
"""

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from regard.cli.expression_names import unknown
from regard.cli.quoted import quoted
from regard.describe.bias import Alibi, Bias, T5Bias, TensorBias
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal, Dilated, Global, KeyLengths, Prefix, Window
from regard.describe.mask_by_table import Blocks, Documents, TensorMask, Tree
from regard.describe.spec import Spec
from regard.errors import ProblemError

W = TypeVar("W", bound=Spec)

MASKS: tuple[type[Spec], ...] = (
    Causal,
    Window,
    Prefix,
    KeyLengths,
    Documents,
    Global,
    Dilated,
    Blocks,
    Tree,
    TensorMask,
)
BIASES: tuple[type[Spec], ...] = (Alibi, T5Bias, TensorBias)
SPECS = {kind.__name__: kind for kind in MASKS + BIASES}

TENSORS: dict[type[Spec], torch.dtype] = {
    KeyLengths: torch.int64,
    Prefix: torch.int64,
    Documents: torch.int64,
    Blocks: torch.bool,
    TensorMask: torch.bool,
    Alibi: torch.float32,
    T5Bias: torch.float32,
    TensorBias: torch.float32,
}
"""Classes whose lists become tensors, and the type of the tensor."""

ELEMENTS: dict[torch.dtype, tuple[str, Callable[[object], bool]]] = {
    torch.int64: ("whole numbers", lambda x: type(x) is int),
    torch.bool: ("True, False, 1 or 0", lambda x: isinstance(x, int) and x in (0, 1)),
    torch.float32: ("numbers", lambda x: type(x) in (int, float)),
}
"""What a list may have for each type, in words and as a test: `torch.tensor` would truncate or convert the rest."""

PAIRED: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Add: operator.add,
    ast.Mult: operator.mul,
}
LONGEST = 1 << 24
"""Most elements of a list."""


def mask(text: str) -> Mask:
    """The mask that the text says.

    Raises:
        ProblemError: it is no expression of masks, or a mask refuses its arguments.

    >>> mask("Causal() & (Window(512) | Prefix(4))")
    Causal() & (Window(left=512) | Prefix(size=4))
    """
    return _parse(text, Mask, MASKS)


def bias(text: str) -> Bias:
    """The bias that the text says; errors as of `mask`.

    >>> bias("Alibi(8)")
    Alibi(heads=8)
    """
    return _parse(text, Bias, BIASES)


def _parse(text: str, kind: type[W], known: tuple[type[Spec], ...]) -> W:
    what = kind.__name__.lower()
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except ProblemError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ProblemError(f"{quoted(text)} is no expression: expected a {what}, say {known[0].__name__}().") from None
    if not isinstance(found, kind):
        raise ProblemError(f"{quoted(text)} is no {what}: expected an expression of {_names(known)}.")
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _apply(node, operator.neg, (int, float), _value(operand))
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return _apply(node, operator.invert, (Mask,), _value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in PAIRED:
            return _combine(node, PAIRED[type(op)], _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=named) if name in SPECS:
            return _make(node, SPECS[name], arguments, named)
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ProblemError(unknown(name))
        case _:
            raise ProblemError(
                f"{quoted(ast.unparse(node))} is not understood: expected masks or biases, & | ~ +, numbers, lists."
            )


def _names(kinds: tuple[type[Spec], ...]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _apply(node: ast.expr, op: Callable[[Any], Any], kinds: tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kinds):
        raise ProblemError(f"{quoted(ast.unparse(node))} is not understood: the operator does not take this operand.")
    return op(value)


def _combine(node: ast.expr, op: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    lists = isinstance(a, list) and isinstance(b, list | int) and op in (operator.add, operator.mul)
    if lists and (len(a) * b if isinstance(b, int) else len(a) + len(b)) > LONGEST:
        raise ProblemError(f"{quoted(ast.unparse(node))} makes a list of more than {LONGEST:,} numbers.")
    if not lists and not (isinstance(a, Spec) and isinstance(b, Spec)):
        raise ProblemError(
            f"{quoted(ast.unparse(node))} is not understood: the operator takes two masks, two biases, or lists."
        )
    try:
        return op(a, b)
    except TypeError:
        raise ProblemError(
            f"{quoted(ast.unparse(node))} is not understood: the operator does not take these two."
        ) from None


def _make(node: ast.expr, kind: type[Spec], arguments: list[ast.expr], named: list[ast.keyword]) -> Spec:
    read = lambda part: _tensor(kind, _value(part))  # noqa: E731
    names = [str(part.arg) for part in named]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ProblemError(f"{quoted(ast.unparse(node))} has {twice}= more than once: expected it once.")
    try:
        return kind(*map(read, arguments), **{name: read(part.value) for name, part in zip(names, named, strict=True)})
    except ProblemError:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError) as error:
        raise ProblemError(f"{quoted(ast.unparse(node))} cannot be made: {error}.") from None


def _tensor(kind: type[Spec], value: Any) -> Any:
    if not isinstance(value, list) or kind not in TENSORS:
        return value
    expected, fits = ELEMENTS[TENSORS[kind]]
    for element in _elements(value):
        if not fits(element):
            raise ProblemError(f"a list of {kind.__name__} has {element!r}: expected {expected}.")
    return torch.tensor(value, dtype=TENSORS[kind])


def _elements(values: list[Any]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list):
            yield from _elements(value)
        else:
            yield value
