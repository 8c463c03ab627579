"""The content of a function as a hashable value: its code, and the content of all that the code reads.

A mask function is pure: its result depends on its arguments, its code, and what else the code reads: closure, defaults,
module globals, attributes of objects, and the same for each function that it calls. `content` follows all of these and
makes one hashable value of them; functions of equal value compute the same. So a cached plan of a function is used
again only while nothing that the function reads has changed.

Objects are followed as a whole; of a module, only the attributes that some code of the walk names. No code of the user
runs meanwhile: the state of an object is read by Python's own descriptors (`object_state.py`). `code_reads.py` finds
the names that a code object reads.

What cannot be followed is `Untraceable`, and no plan may be cached for it: objects of C extensions, generators,
functions under `functools.lru_cache`, `eval`, `getattr`, clocks and random generators. Python's own library, numpy,
torch and regard are taken as constant.
"""

import marshal
import sys
import types
from builtins import __dict__ as builtin_names
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from importlib.util import resolve_name
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from regard.describe.code_reads import (
    CLOCKS,
    LIBRARIES,
    OPAQUE,
    OPAQUE_ATTRIBUTES,
    OPAQUE_OF_LIBRARIES,
    Reads,
    is_library_class,
    reads_of,
    root_package,
)
from regard.describe.object_state import (
    ANNOTATIONS,
    ELEMENTS,
    IS_HEAP,
    KNOWN_BASES,
    MEMBERS,
    WITHOUT_ATTRIBUTES,
    has_python_state,
    read_attributes,
    read_cell,
    read_slot,
    slots,
)
from regard.describe.tensors import ClassRef, Untraceable, content_key, has_tangent, is_without_data

MOST = 10_000
"""The most objects that are followed for one function; a function that reads more is `Untraceable`."""

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None), type(...)})
_CONSTANT = (torch.device, torch.dtype, torch.layout, torch.memory_format, np.dtype)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_METHODS = (types.ClassMethodDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType)
_PASSIVE = ANNOTATIONS | {
    "__dict__", "__module__", "__weakref__", "__slots__", "_abc_impl",
    "_kind",  # of `regard.describe.spec.Spec`
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__firstlineno__", "__static_attributes__",
    "__orig_bases__", "__parameters__", "__type_params__",
}  # fmt: skip
_MAKING = {"__init__", "__new__"}
"""Methods that only run when an instance is made; of an existing instance the state is followed instead."""

_FIELD_OF_NAMEDTUPLE = type(vars(NamedTuple("_Pair", [("a", int)]))["a"])

CACHES_OF_SPECS = ("_fingerprint", "_registered")
"""Attributes of a spec that follow from its fields."""

values: dict[type, Callable[[Any], Hashable]] = {}
"""The content of an instance, by type; None where it cannot be compared. `regard.describe.spec` adds an entry."""


class _UnfollowableError(Exception):
    """The code reads something whose content cannot be followed."""


def content(thing: object) -> Hashable:
    """The content of a function or any other object; `Untraceable` if it cannot be followed.

    >>> def mask(limit):
    ...     return lambda b, h, q, k: k < limit
    >>> content(mask(3)) == content(mask(3)), content(mask(3)) == content(mask(4))
    (True, False)
    >>> isinstance(content(iter([3])), Untraceable)
    True
    """
    try:
        return _Walk().whole(thing)
    except (_UnfollowableError, RecursionError):
        return Untraceable()


def reads_learned(thing: object) -> bool | None:
    """Whether a function or any other object reads a tensor that requires a gradient; None if it cannot be followed.

    >>> def times(weight):
    ...     return lambda x: weight * x
    >>> reads_learned(times(torch.ones(3, requires_grad=True))), reads_learned(times(2)), reads_learned(iter([3]))
    (True, False, None)
    """
    return _reads(thing, lambda t: t.requires_grad)


def reads_dual(thing: object) -> bool | None:
    """Whether a function or any other object reads a tensor that has a tangent; None if it cannot be followed."""
    return _reads(thing, has_tangent)


def _reads(thing: object, is_sought: Callable[[Tensor], bool]) -> bool | None:
    walk = _Walk(is_sought)
    try:
        walk.whole(thing)
    except (_UnfollowableError, RecursionError):
        return None
    return walk.reads_sought


class _Walk:
    """One walk over all that a function reads."""

    def __init__(self, is_sought: Callable[[Tensor], bool] | None = None) -> None:
        self._is_sought = is_sought
        self._met: dict[object, int] = {}
        self._alive: list[object] = []  # Python reuses the id of an object that is gone
        self._names: set[str] = set()  # attributes that the code of the walk names
        self._modules: list[types.ModuleType] = []
        self._kinds: list[type] = []  # of instances
        self._roots: set[str] = set()  # libraries
        self.reads_sought = False  # whether a tensor is one of those sought
        self._is_making = False  # whether the code may make an instance of the class of another object

    def whole(self, x: object) -> Hashable:
        """The content of x, and of the module attributes that its code reads: known after all of the code is walked."""
        found: list[Hashable] = [self.of(x)]
        read: set[tuple[int, str]] = set()
        while True:
            kinds, self._kinds = (self._kinds, []) if self._is_making else ([], self._kinds)
            reached = [(place, name) for place, m in enumerate(self._modules) for name in self._names & vars(m).keys()]
            unread = sorted(set(reached) - read)
            if not unread and not kinds:
                break
            read.update(unread)
            found += [(place, name, self.of(vars(self._modules[place])[name])) for place, name in unread]
            found += [self.of(kind) for kind in kinds]
        if self._modules and "__dict__" in self._names:
            raise _UnfollowableError
        if any(
            root in self._roots and not self._names.isdisjoint(names) for root, names in OPAQUE_OF_LIBRARIES.items()
        ):
            raise _UnfollowableError
        return tuple(found)

    def of(self, x: Any) -> Hashable:
        kind = type(x)
        if kind in _ATOMS:
            return _short(marshal.dumps(x, 2))  # the bytes differ for 1, 1.0 and True, and for 0.0 and -0.0
        if id(x) in self._met:
            return "met", self._met[id(x)]
        self._met[id(x)] = len(self._met)
        self._alive.append(x)
        if len(self._alive) > MOST:
            raise _UnfollowableError
        return kind.__qualname__, self._inside(x, kind)

    def _inside(self, x: Any, kind: type) -> Hashable:
        for known, value in values.items():
            if issubclass(kind, known):  # not isinstance, which reads `__class__` of the object
                if (made := value(x)) is None:
                    raise _UnfollowableError
                if known is not Tensor:
                    return made if self._is_sought is None else (made, self._of_spec(x, kind))
                self.reads_sought = self.reads_sought or (self._is_sought is not None and self._is_sought(x))
                return made, self._of_instance(kind), self.of(read_attributes(x))
        if issubclass(kind, _CONSTANT):
            return x
        if kind is types.FunctionType:
            return self._function(x)
        if issubclass(kind, type):
            return self._class(x)
        if issubclass(kind, types.ModuleType):
            return self._module(x)
        if kind is types.BuiltinFunctionType:
            return self._builtin(x)
        if kind in _METHODS:
            return self._library_name(x.__objclass__), x.__name__
        if kind is np.ufunc and getattr(np, x.__name__, None) is x:  # another ufunc may be made of a Python function
            return x.__name__
        if kind is cached_property:  # it may have a lock
            return self.of(x.func)
        if kind is _FIELD_OF_NAMEDTUPLE:
            return self.of(x.__reduce__()[1])
        return self._object(x, kind)

    def _of_spec(self, x: Any, kind: type) -> Hashable:
        """All that a spec, or an array of numpy, reads besides what makes up its content."""
        own = cast("dict[str, Any]", read_attributes(x) or {})
        return self._each((kind, *(value for name, value in own.items() if name not in CACHES_OF_SPECS)))

    def _object(self, x: Any, kind: type) -> Hashable:
        """A container, with its elements, or an instance of a class written in Python, with its attributes."""
        base = next(base for base in kind.__mro__ if base in KNOWN_BASES)
        members = MEMBERS[base]
        if kind is not base:
            own_slots = [slot for owner in kind.__mro__ if owner.__flags__ & IS_HEAP for slot in slots(owner)]
            if not has_python_state(kind, base, len(own_slots)):
                raise _UnfollowableError
            members = members + own_slots
        elements: Hashable = None
        if base in (set, frozenset):  # sets of equal content may have different sizes
            elements = frozenset(Counter(self._each(base.__iter__(x))).items())
        elif base in ELEMENTS:
            elements = self._elements(ELEMENTS[base](x))
        elif base is defaultdict:
            elements = self._elements(ELEMENTS[dict](x))
        if base in WITHOUT_ATTRIBUTES and kind is base:
            return elements
        own = read_attributes(x)
        return self._of_instance(kind), elements, self._each([own, *[read_slot(m, x) for m in members]])

    def _of_instance(self, kind: type) -> Hashable:
        """The content of the class of an instance, without the methods that only make instances."""
        key = "instance", id(kind)
        if key in self._met:
            return "met", self._met[key]
        self._met[key] = len(self._met)
        self._alive.append(kind)
        if is_library_class(kind):
            return self._library_name(kind)
        self._kinds.append(kind)
        return self._body(kind, _MAKING)

    def _elements(self, elements: Iterable[Any]) -> Hashable:
        if type(elements) in _ATOMS:
            return self.of(elements)
        listed = list(elements)
        if _ATOMS.issuperset(map(type, listed)):  # 1,000 elements take 20 us
            return _short(marshal.dumps(listed, 2))
        return self._each(listed)

    def _each(self, things: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple([self.of(thing) for thing in things])

    def _function(self, f: types.FunctionType) -> Hashable:
        cells = [read_cell(cell) for cell in f.__closure__ or ()]
        attributes = (f.__defaults__, f.__kwdefaults__, f.__dict__)
        own = self._each((*cells, *(x or None for x in attributes)))
        if self._is_library(f.__globals__.get("__name__")):  # a wrapper may have copied `__module__`
            return f.__code__, own
        reads = reads_of(f.__code__)
        self._names |= reads.attributes
        self._is_making |= "type" in reads.variables or "__class__" in reads.attributes
        if not OPAQUE_ATTRIBUTES.isdisjoint(reads.attributes):
            raise _UnfollowableError
        return f.__code__, own, self._variables(f.__globals__, reads)

    def _variables(self, module: dict[str, Any], reads: Reads) -> Hashable:
        found: list[tuple[str, Hashable]] = []
        for name in sorted(reads.variables):
            if name in module:
                found.append((name, self.of(module[name])))
            elif name in OPAQUE or name not in builtin_names:
                raise _UnfollowableError
        for name in sorted(reads.modules):
            imported = sys.modules.get(resolve_name(name, module.get("__package__") or module.get("__name__", "")))
            if imported is None:
                raise _UnfollowableError
            found.append((name, self.of(imported)))
        return tuple(found)

    def _module(self, module: types.ModuleType) -> Hashable:
        name = vars(module).get("__name__")
        if sys.modules.get(name or "") is module and self._is_library(name):
            return name
        if type(module) is not types.ModuleType:
            raise _UnfollowableError
        self._modules.append(module)
        return name, self.of(vars(module).get("__getattr__"))

    def _class(self, kind: type) -> Hashable:
        """The class itself, and the content of its body if it is not a class of a library."""
        return self._library_name(kind) if is_library_class(kind) else self._body(kind, set())

    def _body(self, kind: type, unread: set[str]) -> Hashable:
        bodies = [vars(base) for base in kind.__mro__ if not is_library_class(base)]
        read = [
            (name, self.of(value))
            for body in bodies
            for name, value in body.items()
            if name not in _PASSIVE and name not in unread and type(value) not in _DESCRIPTORS
        ]
        return ClassRef(kind), self._of_instance(type(kind)), tuple(read)

    def _builtin(self, f: Any) -> Hashable:
        owner = f.__self__
        if owner is None or type(owner) is types.ModuleType or f.__module__:
            return self._library_name(f)
        return f.__qualname__, self.of(owner)

    def _library_name(self, thing: Any) -> Hashable:
        """The name, which identifies what is compiled or belongs to a library."""
        module = thing.__module__ or "builtins"
        if not self._is_library(module) or thing.__name__ in OPAQUE_OF_LIBRARIES.get(root_package(module), ()):
            raise _UnfollowableError
        return module, thing.__qualname__

    def _is_library(self, module: str | None) -> bool:
        root = root_package(module)
        if root in CLOCKS:
            raise _UnfollowableError
        if root not in LIBRARIES:
            return False
        self._roots.add(root)
        return True


def _array(array: Any) -> Hashable:
    if array.dtype.hasobject or type(array) not in (np.ndarray, np.memmap):  # a subclass may have more state
        return None
    return array.dtype, array.shape, xxh3_128_digest(np.ascontiguousarray(array).view(_raw(array.dtype)).data)


def _raw(dtype: Any) -> Any:
    return np.dtype(("V", dtype.itemsize)) if dtype.kind in "mM" else dtype


def _tensor(tensor: Tensor) -> Hashable:
    if is_without_data(tensor):
        return None
    made = content_key(tensor)
    return None if isinstance(made.content, Untraceable) else made


values |= {Tensor: _tensor, np.ndarray: _array, np.generic: lambda x: _array(np.asarray(x))}


def _short(data: bytes) -> bytes:
    return data if len(data) <= 64 else xxh3_128_digest(data)
