"""What a function does, as a value: its code, and the content of all that the code reads.

A mask function is pure: its result follows from its arguments, its code, and what the code reads besides: closure,
defaults, module globals, attributes of objects, and the same of each function that it calls. `content` follows all of
these and makes a hashable value of them; equal values mean that the function does the same. So a plan that is kept for
a function is used again only while nothing that the function reads has changed.

What cannot be followed is `Unknown`, and nothing may be kept for it: objects of C extensions, generators, `eval`,
`getattr`, clocks and random numbers. Python's own library, numpy, torch and regard are taken as constant.
"""

import dis
import marshal
import sys
import types
from builtins import __dict__ as builtin_names
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from regard.describe.tensors import is_without_data, ticket

LIBRARIES = sys.stdlib_module_names | {"numpy", "regard", "torch"}
"""Packages that do not change while a program runs."""

CLOCKS = {"datetime", "os", "random", "secrets", "time"}
"""Modules whose functions give another answer at each call, or read what is outside of Python."""

OPAQUE = {"__import__", "dir", "eval", "exec", "getattr", "globals", "input", "locals", "open", "vars"}
"""Built-in functions that read what the code does not name."""

MOST = 10_000
"""Objects that are followed for one function; one that reads more is not kept."""

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None), type(...)})
_CONSTANT = (torch.device, torch.dtype, torch.layout, torch.memory_format, range)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_METHODS = (types.ClassMethodDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType)
_PASSIVE = {"__annotations__", "__dict__", "__doc__", "__module__", "__weakref__", "__slots__", "_abc_impl"} | {
    "_kind",  # of `regard.describe.word`
    "__init__", "__new__", "__repr__", "__setattr__", "__delattr__",  # they make the state, which is followed
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__firstlineno__", "__static_attributes__",
}  # fmt: skip
_CACHED = type(lru_cache(len))

values: dict[type, Callable[[Any], Hashable]] = {}
"""Types whose instances say their content themselves; None where they cannot. `regard.describe.word` adds its own."""


class Unknown:
    """The content of what cannot be followed: equal to no other, so nothing that is kept for it is found again."""


class _UnfollowableError(Exception):
    """Something is read whose content cannot be told."""


def content(thing: object) -> Hashable:
    """What a function, or any object, is by content; `Unknown` if that cannot be followed.

    >>> def mask(limit):
    ...     return lambda b, h, q, k: k < limit
    >>> content(mask(3)) == content(mask(3)), content(mask(3)) == content(mask(4))
    (True, False)
    >>> isinstance(content(iter([3])), Unknown)
    True
    """
    try:
        return _Walk().of(thing, frozenset())
    except (_UnfollowableError, RecursionError):
        return Unknown()


class _Reads(NamedTuple):
    """What a code object names, its inner functions included."""

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]


_NAMED_BY = {
    "LOAD_GLOBAL": 0, "LOAD_NAME": 0, "LOAD_FROM_DICT_OR_GLOBALS": 0,
    "LOAD_ATTR": 1, "LOAD_METHOD": 1, "IMPORT_FROM": 1,
    "IMPORT_NAME": 2,
}  # fmt: skip
"""The field of `_Reads` that the argument of an instruction belongs to."""


@lru_cache(maxsize=1024)
def _reads(code: types.CodeType) -> _Reads:
    own: tuple[set[str], ...] = set(), set(), set()
    for step in dis.get_instructions(code):
        if step.opname in _NAMED_BY:
            own[_NAMED_BY[step.opname]].add(step.argval)
    inner = [_reads(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return _Reads(*(frozenset().union(*sets) for sets in zip(own, *inner, strict=True)))


class _Walk:
    """One walk over what a function reads. `names` are the attributes that the code at hand asks its modules for."""

    def __init__(self) -> None:
        self._met: dict[object, int] = {}
        self._alive: list[object] = []  # an id is another's once its object is gone

    def of(self, x: Any, names: frozenset[str]) -> Hashable:
        kind = type(x)
        if kind in _ATOMS:
            return _short(marshal.dumps(x, 2))  # it tells 1, 1.0 and True apart, and 0.0 from -0.0
        key = (id(x), names) if kind is types.ModuleType else id(x)
        if key in self._met:
            return "met", self._met[key]
        self._met[key] = len(self._met)
        self._alive.append(x)
        if len(self._alive) > MOST:
            raise _UnfollowableError
        return kind.__qualname__, self._inside(x, kind, names)

    def _inside(self, x: Any, kind: type, names: frozenset[str]) -> Hashable:
        for known, value in values.items():
            if isinstance(x, known):
                if (said := value(x)) is None:
                    raise _UnfollowableError
                return said
        if isinstance(x, _CONSTANT):
            return x
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, type):
            return self._class(x)
        if isinstance(x, types.ModuleType):
            return self._module(x, names)
        if isinstance(x, types.MethodType):
            return self.of(x.__func__, names), self.of(x.__self__, names)
        if isinstance(x, partial):
            return self._each((x.func, x.args, x.keywords, vars(x)), names)
        if isinstance(x, types.BuiltinFunctionType):
            return self._builtin(x, names)
        if isinstance(x, _METHODS):
            return _library_name(x.__objclass__), x.__name__
        if isinstance(x, np.ufunc):
            return x.__name__
        if isinstance(x, _CACHED):
            return self.of(x.__wrapped__, names)
        if isinstance(x, staticmethod | classmethod):
            return self.of(x.__func__, names)
        if isinstance(x, property):
            return self._each((x.fget, x.fset), names)
        return self._object(x, kind, names)

    def _object(self, x: Any, kind: type, names: frozenset[str]) -> Hashable:
        """A container, with its elements, or an instance of a class written in Python, with its attributes."""
        elements: Hashable = None
        if isinstance(x, dict):
            items = cast("dict[Any, Any]", x)
            elements = self._elements(items.keys(), names), self._elements(items.values(), names)
        elif isinstance(x, list | tuple | deque):
            elements = self._elements(x, names)
        elif isinstance(x, set | frozenset):
            elements = frozenset(self._each(x, names))
        elif not _is_written_in_python(kind):
            raise _UnfollowableError
        own = [getattr(x, "__dict__", None), *(getattr(x, name, None) for name in _slots(kind))]
        return self.of(kind, names), elements, self._each(own, names)

    def _elements(self, elements: Iterable[Any], names: frozenset[str]) -> Hashable:
        listed = list(elements)
        if _ATOMS.issuperset(map(type, listed)):  # 1,000 numbers take 20 us
            return _short(marshal.dumps(listed, 2))
        return self._each(listed, names)

    def _each(self, things: Iterable[Any], names: frozenset[str]) -> tuple[Hashable, ...]:
        return tuple([self.of(thing, names) for thing in things])

    def _function(self, f: types.FunctionType) -> Hashable:
        reads = _reads(f.__code__)
        cells = [_cell(cell) for cell in f.__closure__ or ()]
        given = (f.__defaults__, f.__kwdefaults__, f.__dict__)
        own = self._each((*cells, *(x or None for x in given)), reads.attributes)
        return f.__code__, own, None if _is_library(f.__module__) else self._variables(f.__globals__, reads)

    def _variables(self, module: dict[str, Any], reads: _Reads) -> Hashable:
        found: list[tuple[str, Hashable]] = []
        for name in sorted(reads.variables):
            if name in module:
                found.append((name, self.of(module[name], reads.attributes)))
            elif name in OPAQUE or name not in builtin_names:
                raise _UnfollowableError
        for name in sorted(reads.modules):
            if name not in sys.modules:
                raise _UnfollowableError
            found.append((name, self.of(sys.modules[name], reads.attributes)))
        return tuple(found)

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> Hashable:
        if _is_library(module.__name__):
            return module.__name__
        read = sorted(names & vars(module).keys())
        return module.__name__, tuple([(name, self.of(vars(module)[name], names)) for name in read])

    def _class(self, kind: type) -> Hashable:
        """A class: itself, and all that its body holds, as far as it is not a library's."""
        if _is_library(kind.__module__):
            return _library_name(kind)
        bodies = [vars(base) for base in kind.__mro__ if not _is_library(base.__module__)]
        read = [
            (name, self.of(value, frozenset()))
            for body in bodies
            for name, value in body.items()
            if name not in _PASSIVE and not isinstance(value, _DESCRIPTORS)
        ]
        return ref(kind), tuple(read)  # a class that is gone is never equal to one that has its address

    def _builtin(self, f: Any, names: frozenset[str]) -> Hashable:
        owner = f.__self__
        if isinstance(owner, types.ModuleType | type | None):
            return _library_name(f)
        return f.__qualname__, self.of(owner, names)


def _array(array: Any) -> Hashable:
    if array.dtype.hasobject:
        return None
    return array.dtype.str, array.shape, xxh3_128_digest(np.ascontiguousarray(array).data)


def _tensor(tensor: Tensor) -> Hashable:
    return None if is_without_data(tensor) else ticket(tensor)


values |= {Tensor: _tensor, np.ndarray: _array, np.generic: lambda x: _array(np.asarray(x))}


def _cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty: the function that would fill it has not come so far
        return types.CellType


def _short(data: bytes) -> bytes:
    return data if len(data) <= 64 else xxh3_128_digest(data)


def _is_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    if root in CLOCKS:
        raise _UnfollowableError
    return root in LIBRARIES


def _library_name(thing: Any) -> Hashable:
    """What is compiled, or a library's, is known by its name."""
    if not _is_library(thing.__module__ or "builtins"):
        raise _UnfollowableError
    return thing.__module__, thing.__qualname__


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in {"__dict__", "__weakref__"}]


def _is_written_in_python(kind: type) -> bool:
    """Whether all that its instances hold is in `__dict__` and `__slots__`: no more memory belongs to one than that."""
    words = len(_slots(kind)) + bool(kind.__dictoffset__) + bool(kind.__weakrefoffset__)
    return kind.__itemsize__ == 0 and kind.__basicsize__ <= object.__basicsize__ + 8 * words
