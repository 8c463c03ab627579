"""The state of a Python object: its elements, attributes and slots.

The state is read by Python's own descriptors, past `__getattr__` and `__iter__` of the object's class.
"""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

ANNOTATIONS = {"__annotations__", "__annotate__", "__annotate_func__", "__doc__"}
IS_HEAP = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE` in `type.__flags__`: a class made at run time, as all classes of Python code are."""

ELEMENTS: dict[type, Callable[[Any], Any]] = {
    OrderedDict: lambda x: list(OrderedDict.items(x)),
    dict: lambda x: (list(dict.keys(x)), list(dict.values(x))),
    list: lambda x: tuple(list.__iter__(x)),
    tuple: lambda x: tuple(tuple.__iter__(x)),
    deque: lambda x: (deque.maxlen.__get__(x), list(deque.__iter__(x))),
    float: float.__float__,
    int: int.__int__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    complex: complex.__complex__,
}
"""The elements of Python's own classes, by the methods of the class itself: a subclass may override them."""

KNOWN_BASES = frozenset({
    *ELEMENTS, object, set, frozenset, range, slice, partial, property, staticmethod, classmethod, types.MethodType,
    defaultdict,
})  # fmt: skip
"""Classes not written in Python whose state is elements, `__dict__` and member descriptors, and nothing else."""

WITHOUT_ATTRIBUTES = frozenset({OrderedDict, dict, list, tuple, deque, set, frozenset})
"""Those of `KNOWN_BASES` whose instances have no attributes."""


def slots(kind: type) -> list[Any]:
    """The member descriptors in the body of a class."""
    return [member for member in vars(kind).values() if type(member) is types.MemberDescriptorType]


MEMBERS = {kind: slots(kind) for kind in KNOWN_BASES}


def read_cell(cell: Any) -> object:
    """The value of a closure's cell; a class as a marker if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # the enclosing function has not yet assigned the variable
        return types.CellType


def read_attributes(x: Any) -> object:
    """The `__dict__` of an object without annotations; None if empty or absent."""
    try:
        own = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None
    if not ANNOTATIONS.isdisjoint(own):
        own = {name: value for name, value in own.items() if name not in ANNOTATIONS}
    return own or None


def read_slot(member: Any, x: Any) -> object:
    """The value of a slot; a class as a marker if the slot is not set."""
    try:
        return member.__get__(x)
    except AttributeError:  # the slot is not set
        return types.MemberDescriptorType


def has_python_state(kind: type, base: type, slot_count: int) -> bool:
    """Whether instances add nothing to the state of `base` but `__dict__` and their slots."""
    has_dict = kind.__dictoffset__ > 0 or (kind.__itemsize__ and kind.__dictoffset__)  # else it precedes the object
    pointers = slot_count + bool(has_dict) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ == base.__itemsize__ and kind.__basicsize__ <= base.__basicsize__ + 8 * pointers
