"""What a function does, as a value: its code, and the content of all that the code reads.

A mask function is pure: its result follows from its arguments, its code, and what the code reads besides: closure,
defaults, module globals, attributes of objects, and the same of each function that it calls. `content` follows all of
these and makes a hashable value of them; equal values mean that the function does the same. So a plan that is kept for
a function is used again only while nothing that the function reads has changed.

Objects are followed as a whole, modules only as far as any code of the walk names their attributes. No code of the
user runs meanwhile: what an object has is read by Python's own descriptors, past its `__getattr__` and `__iter__`.

What cannot be followed is `Untraceable`, and nothing may be kept for it: objects of C extensions, generators, what
`functools.lru_cache` keeps, `eval`, `getattr`, clocks and random numbers. Python's own library, numpy, torch and regard
are taken as constant.
"""

import dis
import marshal
import sys
import types
from builtins import __dict__ as builtin_names
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property, lru_cache, partial
from importlib.util import resolve_name
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from regard.describe.tensors import ClassRef, Untraceable, content_key, is_without_data

LIBRARIES = sys.stdlib_module_names | {"numpy", "regard", "torch"}
"""Packages that do not change while a program runs."""

CLOCKS = {"datetime", "gc", "importlib", "inspect", "os", "random", "secrets", "time"}
"""Modules whose functions give another answer at each call, or read what is outside of Python or of the code."""

OPAQUE = {"__import__", "dir", "eval", "exec", "getattr", "globals", "input", "locals", "open", "vars"}
"""Built-in functions that read what the code does not name."""

OPAQUE_ATTRIBUTES = {
    "__globals__", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
}  # fmt: skip
"""Attributes that read what the code does not name, and methods that draw random numbers."""

OPAQUE_OF_LIBRARIES = {
    "numpy": {"random"},
    "operator": {"attrgetter", "methodcaller"},
    "sys": {"_getframe", "modules"},
    "torch": {
        "bernoulli", "dropout", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like",
        "randn", "randn_like", "randperm",
    },
}  # fmt: skip
"""Functions and modules of libraries that do so."""

MOST = 10_000
"""Objects that are followed for one function; one that reads more is not kept."""

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None), type(...)})
_CONSTANT = (torch.device, torch.dtype, torch.layout, torch.memory_format, np.dtype)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_METHODS = (types.ClassMethodDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType)
_ANNOTATIONS = {"__annotations__", "__annotate__", "__annotate_func__", "__doc__"}
_PASSIVE = _ANNOTATIONS | {
    "__dict__", "__module__", "__weakref__", "__slots__", "_abc_impl",
    "_kind",  # of `regard.describe.spec`
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__firstlineno__", "__static_attributes__",
    "__orig_bases__", "__parameters__", "__type_params__",
}  # fmt: skip
_MAKING = {"__init__", "__new__"}
"""What only code that makes an instance runs; the instances that there are have their state, which is followed."""

_FIELD_OF_NAMEDTUPLE = type(vars(NamedTuple("_Pair", [("a", int)]))["a"])
_IS_HEAP = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`: a class made while the program runs, as all of Python are

values: dict[type, Callable[[Any], Hashable]] = {}
"""Types whose instances say their content themselves; None where they cannot. `regard.describe.spec` adds its own."""


class _UnfollowableError(Exception):
    """The code reads something whose content cannot be followed."""


def content(thing: object) -> Hashable:
    """What a function, or any object, is by content; `Untraceable` if that cannot be followed.

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


class _Reads(NamedTuple):
    """What a code object names, its inner functions included; a relative module begins with dots."""

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]


_NAMED_BY = {
    "LOAD_GLOBAL": 0, "LOAD_NAME": 0, "LOAD_FROM_DICT_OR_GLOBALS": 0,
    "LOAD_ATTR": 1, "LOAD_METHOD": 1, "LOAD_SUPER_ATTR": 1, "IMPORT_FROM": 1,
    "IMPORT_NAME": 2,
}  # fmt: skip
"""The field of `_Reads` that the argument of an instruction belongs to."""


@lru_cache(maxsize=1024)
def _reads(code: types.CodeType) -> _Reads:
    own: tuple[set[str], ...] = set(), set(), set()
    loaded: list[Any] = [0, 0]  # the last two: before a module is imported, how many dots, and the names in it
    for step in dis.get_instructions(code):
        if step.opname in _NAMED_BY:
            dots = "." * loaded[0] if step.opname == "IMPORT_NAME" else ""
            own[_NAMED_BY[step.opname]].add(dots + step.argval)
        elif step.opname.startswith("LOAD_"):
            loaded = [loaded[1], step.argval]
    inner = [_reads(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return _Reads(*(frozenset().union(*sets) for sets in zip(own, *inner, strict=True)))


_ELEMENTS: dict[type, Callable[[Any], Any]] = {
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
"""What Python's own classes hold besides `__dict__` and member descriptors, whatever a subclass says of itself."""

_FOLLOWED = frozenset({
    *_ELEMENTS, object, set, frozenset, range, slice, partial, property, staticmethod, classmethod, types.MethodType,
    defaultdict,
})  # fmt: skip
"""Classes not written in Python whose instances hold nothing else."""


_BARE = frozenset({OrderedDict, dict, list, tuple, deque, set, frozenset})
"""Those without attributes."""


def _members(kind: type) -> list[Any]:
    return [member for member in vars(kind).values() if type(member) is types.MemberDescriptorType]


_MEMBERS = {kind: _members(kind) for kind in _FOLLOWED}


class _Walk:
    """One walk over what a function reads."""

    def __init__(self) -> None:
        self._met: dict[object, int] = {}
        self._alive: list[object] = []  # an id is another's once its object is gone
        self._names: set[str] = set()  # attributes that the code of the walk names
        self._modules: list[types.ModuleType] = []
        self._kinds: list[type] = []  # of instances
        self._roots: set[str] = set()  # libraries
        self._is_making = False  # whether the code may make an instance of the class of another

    def whole(self, x: object) -> Hashable:
        """The content of x, and of what its code reads of modules, which is known once all of the code is."""
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
            return _short(marshal.dumps(x, 2))  # it tells 1, 1.0 and True apart, and 0.0 from -0.0
        if id(x) in self._met:
            return "met", self._met[id(x)]
        self._met[id(x)] = len(self._met)
        self._alive.append(x)
        if len(self._alive) > MOST:
            raise _UnfollowableError
        return kind.__qualname__, self._inside(x, kind)

    def _inside(self, x: Any, kind: type) -> Hashable:
        for known, value in values.items():
            if issubclass(kind, known):  # not isinstance: it would ask the object
                if (made := value(x)) is None:
                    raise _UnfollowableError
                return (made, self._of_instance(kind), self.of(_attributes(x))) if known is Tensor else made
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
        if kind is np.ufunc and getattr(np, x.__name__, None) is x:  # others may be made of functions
            return x.__name__
        if kind is cached_property:  # it may have a lock
            return self.of(x.func)
        if kind is _FIELD_OF_NAMEDTUPLE:
            return self.of(x.__reduce__()[1])
        return self._object(x, kind)

    def _object(self, x: Any, kind: type) -> Hashable:
        """A container, with its elements, or an instance of a class written in Python, with its attributes."""
        base = next(base for base in kind.__mro__ if base in _FOLLOWED)
        members = _MEMBERS[base]
        if kind is not base:
            slots = [slot for owner in kind.__mro__ if owner.__flags__ & _IS_HEAP for slot in _members(owner)]
            if not _is_written_in_python(kind, base, len(slots)):
                raise _UnfollowableError
            members = members + slots
        elements: Hashable = None
        if base in (set, frozenset):  # sets of equal content may have different sizes
            elements = frozenset(Counter(self._each(base.__iter__(x))).items())
        elif base in _ELEMENTS:
            elements = self._elements(_ELEMENTS[base](x))
        elif base is defaultdict:
            elements = self._elements(_ELEMENTS[dict](x))
        if base in _BARE and kind is base:
            return elements
        own = _attributes(x)
        return self._of_instance(kind), elements, self._each([own, *[_member(m, x) for m in members]])

    def _of_instance(self, kind: type) -> Hashable:
        """The class of an instance, but for what only makes instances."""
        key = "instance", id(kind)
        if key in self._met:
            return "met", self._met[key]
        self._met[key] = len(self._met)
        self._alive.append(kind)
        if _is_library_class(kind):
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
        cells = [_cell(cell) for cell in f.__closure__ or ()]
        given = (f.__defaults__, f.__kwdefaults__, f.__dict__)
        own = self._each((*cells, *(x or None for x in given)))
        if self._is_library(f.__globals__.get("__name__")):  # `__module__` may be copied from what it wraps
            return f.__code__, own
        reads = _reads(f.__code__)
        self._names |= reads.attributes
        self._is_making |= "type" in reads.variables or "__class__" in reads.attributes
        if not OPAQUE_ATTRIBUTES.isdisjoint(reads.attributes):
            raise _UnfollowableError
        return f.__code__, own, self._variables(f.__globals__, reads)

    def _variables(self, module: dict[str, Any], reads: _Reads) -> Hashable:
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
        """A class: itself, and all that its body holds, as far as it is not a library's."""
        return self._library_name(kind) if _is_library_class(kind) else self._body(kind, set())

    def _body(self, kind: type, unread: set[str]) -> Hashable:
        bodies = [vars(base) for base in kind.__mro__ if not _is_library_class(base)]
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
        """What is compiled, or a library's, is known by its name."""
        module = thing.__module__ or "builtins"
        if not self._is_library(module) or thing.__name__ in OPAQUE_OF_LIBRARIES.get(_root(module), ()):
            raise _UnfollowableError
        return module, thing.__qualname__

    def _is_library(self, module: str | None) -> bool:
        root = _root(module)
        if root in CLOCKS:
            raise _UnfollowableError
        if root not in LIBRARIES:
            return False
        self._roots.add(root)
        return True


def _array(array: Any) -> Hashable:
    if array.dtype.hasobject or type(array) not in (np.ndarray, np.memmap):  # a masked array holds more than elements
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


def _cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty: the function that would fill it has not come so far
        return types.CellType


def _attributes(x: Any) -> object:
    try:
        own = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None
    if not _ANNOTATIONS.isdisjoint(own):
        own = {name: value for name, value in own.items() if name not in _ANNOTATIONS}
    return own or None


def _member(member: Any, x: Any) -> object:
    try:
        return member.__get__(x)
    except AttributeError:  # a slot that is not filled
        return types.MemberDescriptorType


def _short(data: bytes) -> bytes:
    return data if len(data) <= 64 else xxh3_128_digest(data)


def _root(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _is_library_class(kind: type) -> bool:
    """Whether a library has it under its name; what `dataclasses.make_dataclass` makes has such a name, too."""
    module = vars(kind).get("__module__", "builtins") if kind.__flags__ & _IS_HEAP else "builtins"
    if _root(module) not in LIBRARIES:
        return False
    if not kind.__flags__ & _IS_HEAP:
        return True
    found: Any = sys.modules.get(module)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is kind


def _is_written_in_python(kind: type, base: type, slots: int) -> bool:
    """Whether all that its instances hold, besides what `base` holds, is in `__dict__` and in its slots."""
    has_dict = kind.__dictoffset__ > 0 or (kind.__itemsize__ and kind.__dictoffset__)  # else it is before the object
    words = slots + bool(has_dict) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ == base.__itemsize__ and kind.__basicsize__ <= base.__basicsize__ + 8 * words
