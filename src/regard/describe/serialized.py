"""The serialised form of specs: a JSON text, a list of tensors, and a list of ints (symbolic while torch traces).

A torch operator takes nothing else. `Spec.serialize` writes it, field by field. A spec is a JSON list of the name of
its class and its fields. Tensors and ints are written as their place in the lists, and a float as text of every bit.
"""

import json
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from regard.errors import ProblemError, RefusalError

if TYPE_CHECKING:
    from regard.describe.spec import Spec

classes: "WeakValueDictionary[str, type[Spec]]" = WeakValueDictionary()
"""The classes made with `@spec`, by their names in the serialised form."""

CALLED = "()"
"""Ends the serialised name of a class whose constructor derives attributes."""

_REFUSED = (int, float, str, list, dict, torch.dtype, torch.device, FunctionType)
"""What an operator does not take, where it is no plain number or text; of other types torch says so."""


def serialize_value(part: Any, ints: list[int]) -> str:
    """A field that is no spec, tensor or tuple, as JSON."""
    if part is None:
        return "null"
    if isinstance(part, torch.SymFloat):  # the graph would truncate it to an integer
        raise TypeError("a float that torch.compile traces cannot be part of a mask or bias in a graph: use float(x).")
    if isinstance(part, np.floating):
        part = float(cast(Any, part))
    if isinstance(part, _REFUSED) and not is_serialized_as_it_is(part):
        raise RefusalError(
            f"a {type(part).__name__} in a mask, bias or score cannot pass through torch.compile, torch.export or a "
            "dispatch mode such as torch's FLOP counter: give it as a number, a text or a tensor."
        )
    if type(part) is bool:
        return "true" if part else "false"
    if type(part) is str:
        return '"' + part.replace("\\", r"\\").replace('"', r"\"") + '"'  # torch cannot trace json.dumps
    if type(part) is float:
        return '{"float": "' + part.hex() + '"}'  # every bit; torch cannot trace other texts of a float
    ints.append(cast(int, part))
    return '{"number": ' + str(len(ints) - 1) + "}"


def is_serialized_as_it_is(part: Any) -> bool:
    """Whether `deserialize` gives this value: a member of an `IntEnum` is an int, and would become a plain one."""
    return part is None or type(part) in (bool, int, float, str) or isinstance(part, torch.SymInt | Tensor)


def deserialize(text: str, tensors: Sequence[Tensor], ints: Sequence[int]) -> "Spec":
    """The spec that `Spec.serialize` wrote.

    Raises:
        ProblemError: no class of that name was made in this process, as where a saved graph is loaded.

    >>> from regard import Window
    >>> tensors, ints = [], []
    >>> Window(4).serialize(tensors, ints), ints
    ('["Window", {"number": 0}, null]', [4])
    >>> deserialize('["Window", {"number": 0}, null]', tensors, ints)
    Window(left=4)
    """

    def read(node: Any) -> Any:
        if isinstance(node, dict):
            ((kind, value),) = cast("dict[str, Any]", node).items()
            if kind == "float":
                return float.fromhex(value)
            return {"tensor": tensors, "number": ints}[kind][value] if kind != "tuple" else tuple(map(read, value))
        if isinstance(node, list):
            name, *parts = cast("list[Any]", node)
            return _class(name.removesuffix(CALLED)).of_parts(map(read, parts), has_attributes=name.endswith(CALLED))
        return node

    return read(json.loads(text, strict=False))  # a text may have line breaks


def _class(name: str) -> "type[Spec]":
    found = classes.get(name)
    if found is None:
        raise ProblemError(
            f"a saved graph has a mask, bias or score of the class {name}, which this process does not know: import "
            "the module that defines the class before the graph runs."
        )
    return found
