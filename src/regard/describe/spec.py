"""Specs: masks, biases and scores as frozen values, with a fingerprint and a serialised form.

Specs are frozen dataclasses, made with `@spec`; specs with equal fingerprints (`fingerprint.py`) are equal. The class
itself is part of the fingerprint. The name of the class is used in the serialised form (`serialized.py`) only.
"""

import dataclasses
import functools
import inspect
import itertools
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import torch
from torch import Tensor

from regard.describe.content import reads_learned, values
from regard.describe.fingerprint import INTERNED, PLAIN, Fingerprint, KindRef, constants, intern, interned, part_key
from regard.describe.serialized import CALLED, classes, is_serialized_as_it_is, serialize_value
from regard.describe.suggestions import refuse_arguments, suggest_keywords
from regard.describe.tensors import content_key, form
from regard.errors import ProblemError, RefusalError
from regard.torch_internals import DYNAMO_LISTS_ATTRIBUTES

W = TypeVar("W", bound="type[Spec]")
S = TypeVar("S", bound="Spec")
T = TypeVar("T")

_CACHED = ("_fingerprint", "_registered")
"""Attributes of a spec that are caches."""


class Spec:
    """The root of masks, biases and scores. Subclasses are made with `@spec`.

    Those of regard are final or abstract. Where regard knows more of a class than its methods say, such as that a
    `Causal` is an attribute of ONNX's operator, it asks `type(mask) is Causal`: a user's subclass may be anything.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _arguments: ClassVar[frozenset[str]] = frozenset()
    """The fields that are no `field(init=False)`."""
    _is_rerun: ClassVar[bool] = False
    """Whether `__post_init__` may derive attributes, and takes no arguments (of an `InitVar`)."""
    _derived: ClassVar[frozenset[str]] = frozenset()
    """The attributes that are computed from others when they are first asked for."""
    _serial_name: ClassVar[str] = ""
    _made: ClassVar["type[Spec] | None"] = None
    """The class that `@spec` made; a subclass without `@spec` inherits that of another class."""
    _kind: ClassVar[KindRef]
    is_combined: ClassVar[bool] = False
    """Whether operators make it of other specs (`a & b`), and no caller names its fields."""
    __array_ufunc__: ClassVar[None] = None  # so numpy leaves `array & mask` to the mask

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._kind = KindRef.of(cls)  # also without `@spec`: it is printed before it is refused

    def fingerprint(self) -> Fingerprint:
        """This spec with a content key in place of each tensor and function; computed once for a constant spec."""
        kept = self.__dict__.get("_fingerprint")
        if kept is not None:
            return kept
        found: list[Any] = []  # `list[Any]()` takes 0.3 us
        is_exact = self._kind.is_own
        for name in self._fields:  # one loop without functions: a mask written in a call comes here each time
            part = getattr(self, name)
            if part is not None and type(part) is not int:
                if isinstance(part, Spec):
                    part = part.fingerprint()
                    is_exact = is_exact and part.is_constant
                else:
                    part, is_exact = part if type(part) in PLAIN else _fingerprint_part(part), False
            found.append(part)
        kind, parts = type(self), tuple(found)
        if is_exact:
            made = interned.get((kind, parts)) or intern(kind, parts)
        else:
            made = Fingerprint(kind, parts, self._more())
        if made.is_constant:
            self.__dict__["_fingerprint"] = made
        return made

    def constant(self) -> Fingerprint | None:
        """The fingerprint of a constant spec; None for others, without a look at their tensors and functions."""
        kept = self.__dict__.get("_fingerprint")
        if kept is not None:
            return kept
        if not self._kind.is_own:
            return None
        found: list[Any] = [type(self)]
        for name in self._fields:
            part = getattr(self, name)
            if part is not None and type(part) is not int:
                if not isinstance(part, Spec):
                    return self.fingerprint() if type(part) in PLAIN else None
                part = part.constant()
                if part is None:
                    return None
                part = (id(part),)
            found.append(part)
        key = tuple(found)
        made, _ = constants.get(key) or self._keep_constant(key)
        self.__dict__["_fingerprint"] = made
        return made

    def _keep_constant(self, key: tuple[Any, ...]) -> tuple[Fingerprint, tuple[Fingerprint, ...]]:
        """The fingerprint, and those whose addresses are in the key: while it is kept, no other has their addresses."""
        addressed = tuple([part.fingerprint() for part in self.parts() if isinstance(part, Spec)])
        if len(constants) >= INTERNED:
            constants.clear()
        return constants.setdefault(key, (self.fingerprint(), addressed))

    def form(self) -> Fingerprint:
        """The fingerprint with type and shape of each tensor only: a plan depends on no more of biases and scores."""
        return Fingerprint(type(self), tuple([_form_part(part) for part in self.parts()]), self._more())

    def parts(self) -> tuple[Any, ...]:
        """The values of the fields, in order."""
        return tuple([getattr(self, name) for name in self._fields])

    @classmethod
    def of_parts(cls, parts: Iterable[Any], *, has_attributes: bool = False) -> Self:
        """The spec whose fields have these values, in order.

        No constructor of a user's class runs, as it may change its arguments, unless it has attributes to derive.
        """
        fields = dict(zip(cls._fields, parts, strict=True))
        if cls._kind.is_own or has_attributes:
            return cls(**{name: x for name, x in fields.items() if name in cls._arguments})  # some are keyword-only
        return _made_of(cls, fields)

    def with_fields(self, **fields: Any) -> Self:
        """This spec with other values of some fields. No constructor runs, as a subclass may have one of its own.

        The `__post_init__` of a user's class derives its attributes again. If it changes the fields themselves, they
        and the attributes stay as they are: it would change the fields twice.

        >>> from regard import Window
        >>> Window(8).with_fields(left=4)
        Window(left=4)
        """
        made = self._copy(fields)
        if not self._is_rerun or (_lists_attributes() and self._arguments.issuperset(made.__dict__)):
            return made
        derived = made._copy({})
        cast(Any, derived).__post_init__()
        is_same = all(_is_same(getattr(made, name), getattr(derived, name)) for name in self._arguments)
        return derived if is_same else made

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """This spec with `change` of each of its tensors, those of the specs in it as well."""

        def changed(part: Any) -> Any:
            if isinstance(part, Tensor):
                return change(part)
            if isinstance(part, tuple):
                return map_tuple(changed, cast("tuple[Any, ...]", part))
            return part.with_tensors(change) if isinstance(part, Spec) else part

        return self.with_fields(**{name: changed(x) for name, x in self.__dict__.items() if name not in self._derived})

    def _copy(self, changed: dict[str, Any]) -> Self:
        if _lists_attributes():
            kept = {name: x for name, x in self.__dict__.items() if name not in self._derived}
        else:
            kept = {name: getattr(self, name) for name in self._fields}
        return _made_of(type(self), kept | changed)

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        """A spec of these parts as Python code, without defaults, with type and shape in place of tensors."""
        fields = dataclasses.fields(cast(Any, cls)) if dataclasses.is_dataclass(cls) else ()  # none without `@spec`
        fields = (
            f"{f.name}={part!r}"
            for f, part in zip(fields, parts, strict=True)
            if repr(part) != repr(f.default)  # a float that was read from a file is another object
        )
        return f"{cls.__name__}({', '.join(fields)})"

    def serialize(self, tensors: list[Tensor], ints: list[int]) -> str:
        """The spec as JSON, tensors and ints appended to the lists; `deserialize` reads it. Floats keep every bit."""
        parts = [_serialize_part(part, tensors, ints) for part in self.parts()]
        name = self._serial_name + (CALLED if self.has_attributes() else "")
        return "[" + ", ".join(['"' + name + '"', *parts]) + "]"

    def has_attributes(self) -> bool:
        """Whether it has, or in a trace may have, attributes besides its fields, which a user's constructor derives."""
        if self._kind.is_own:
            return False
        if not _lists_attributes():
            return True
        return not self._derived.union(self._fields).issuperset(self.__dict__)

    def can_be_serialized(self) -> bool:
        """Whether the spec has no attributes but fields, and each field can be serialised."""
        if not (self._kind.is_own or _lists_attributes()):
            return False  # it may have more attributes
        return not self._more() and all(_passes(part, Spec.can_be_serialized) for part in self.parts())

    @classmethod
    def is_own(cls) -> bool:
        """Whether the class is one of regard's."""
        return cls._kind.is_own

    def has_own_classes(self) -> bool:
        """Whether its class, and those of the specs in it, are all regard's."""
        return self._kind.is_own and all(map(_has_own_classes, self.parts()))

    def may_learn(self) -> bool:
        """Whether a gradient may be wanted of what it reads: of its tensors, and of what else a user's class reads.

        True of a user's class where that cannot be followed.
        """
        if any(t.requires_grad for t in self.tensors()):
            return True
        return not self.has_own_classes() and self.reads_learned() is not False

    def reads_learned(self) -> bool | None:
        """Whether its methods, or objects in its fields, read a tensor that learns; None where that is not known."""
        return reads_learned([type(self), self.__dict__])

    def has_plain_fields(self) -> bool:
        """Whether each field of it, and of the specs in it, can be serialised."""
        return all(_passes(part, Spec.has_plain_fields) for part in self.parts())

    def _more(self) -> dict[str, Any]:
        """The attributes besides the fields, of a class that is not regard's: `__post_init__` may have set them."""
        if self._kind.is_own:
            return {}
        return {name: value for name, value in self.__dict__.items() if name not in self._fields + _CACHED}

    def is_registered(self) -> bool:
        """Whether the classes of this spec and of the specs in it were made with `@spec`."""
        if "_registered" not in self.__dict__:
            self.__dict__["_registered"] = self.unregistered() is None
        return self.__dict__["_registered"]

    def unregistered(self) -> "type[Spec] | None":
        """The class of this spec, or else of the first spec in it, that was not made with `@spec`; None if all were."""
        if self._made is not type(self):
            return type(self)
        for part in _members(self.parts()):
            if isinstance(part, Spec) and (found := part.unregistered()) is not None:
                return found
        return None

    def tensors(self) -> list[Tensor]:
        """The tensors in the spec, in the order of its serialised form."""
        found: list[Tensor] = []
        for part in _members(self.parts()):
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, Spec):
                found.extend(part.tensors())
        return found

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the caches, which refer to classes of this process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_fingerprint", "_registered")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        if torch.compiler.is_dynamo_compiling():  # torch.compile cannot trace a fingerprint
            return f"{type(self).__name__}(...)"
        return self.fingerprint().text


@dataclass_transform(frozen_default=True, eq_default=False)
def spec(cls: W) -> W:
    """Make a class a spec: a frozen dataclass, compared and printed by its fingerprint, deserialised by its name.

    Classes of the same name get different names in the serialised form: a notebook defines one whenever its cell runs.

    Raises:
        ProblemError: a field has the name of a method or attribute that every mask, bias or score has; it is no class
            of a mask, bias or score, or one that is a spec already.
    """
    _check_decorated(cls)
    made = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    _check_names(made)
    if not made.is_combined:
        is_empty = not dataclasses.fields(cast(Any, made)) and not hasattr(made, "__post_init__")
        made.__init__ = refuse_arguments(made.__init__) if is_empty else suggest_keywords(made.__init__)
    kind = KindRef.of(made)
    plain = cls.__name__ if kind.is_own else f"{cls.__module__}.{cls.__qualname__}"
    names = (plain if not i else f"{plain}#{i}" for i in itertools.count())
    name = next(name for name in names if name not in classes)
    made._fields = tuple(f.name for f in dataclasses.fields(cast(Any, made)))  # pyright: ignore[reportPrivateUsage]
    made._serial_name, made._kind, made._made = name, kind, made  # pyright: ignore[reportPrivateUsage]
    computed = {n for base in made.__mro__ for n, x in vars(base).items() if isinstance(x, functools.cached_property)}
    made._derived = frozenset({*_CACHED, *computed})  # pyright: ignore[reportPrivateUsage]
    given = frozenset(f.name for f in dataclasses.fields(cast(Any, made)) if f.init)
    made._arguments = given  # pyright: ignore[reportPrivateUsage]
    made._is_rerun = not kind.is_own and _has_plain_post_init(made)  # pyright: ignore[reportPrivateUsage]
    classes[name] = made
    return made


def bound_to(spec: S, *sizes: Any) -> S:
    """`spec.bind(*sizes)` of a mask, bias or score.

    Raises:
        ProblemError: it returned no spec: the call would run without the mask, bias or score.
    """
    bound = cast(Any, spec).bind(*sizes)
    if not isinstance(bound, Spec):
        raise ProblemError(
            f"bind of {type(spec).__name__} returned {bound!r}: expected a spec, such as self or super().bind(sizes)."
        )
    return cast(S, bound)


def _has_plain_post_init(made: type[Spec]) -> bool:
    """Whether the class has a `__post_init__` without arguments."""
    derive = getattr(made, "__post_init__", None)
    return derive is not None and len(inspect.signature(derive).parameters) == 1


def _check_decorated(cls: object) -> None:
    """Raise `ProblemError` unless `@spec` can make a spec of it."""
    if not isinstance(cls, type):
        given = getattr(cls, "__name__", None) or reprlib.repr(cls)
        raise ProblemError(f"spec({given}): expected a class. Write @spec above the class of a mask or bias.")
    if not issubclass(cls, Spec):
        raise ProblemError(f"@spec above {cls.__name__}: expected a class derived from Mask, Bias or Score.")
    if cls.__dict__.get("_made") is cls:
        raise ProblemError(f"@spec above {cls.__name__}, which is a spec already: write it once.")


def _check_names(made: type[Spec]) -> None:
    """Raise `ProblemError` if a field would hide a method or attribute that the class inherits from regard."""
    inherited = [base for base in made.__mro__[1:] if base.__module__.startswith("regard.")]
    for name in (f.name for f in dataclasses.fields(cast(Any, made))):
        if owner := next((base for base in inherited if _is_used(base, name)), None):
            raise ProblemError(
                f"the field {name!r} of {made.__name__} would hide {owner.__name__}.{name}, which regard uses: name it "
                "otherwise."
            )


def _is_used(base: type, name: str) -> bool:
    """Whether regard uses an attribute of one of its classes, and it is no field, whose default may be inherited."""
    return (name in vars(base) or name in _CACHED) and name not in getattr(base, "_fields", ())


def map_tuple(change: Callable[[Any], Any], part: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tuple of the same kind with `change` of each member.

    >>> map_tuple(str, (1, 2))
    ('1', '2')
    """
    changed = [change(member) for member in part]
    return type(part)(*changed) if hasattr(part, "_fields") else tuple(changed)  # a NamedTuple has them


def _made_of(kind: type[T], attributes: dict[str, Any]) -> T:
    """An object of the class with these attributes; no constructor runs."""
    made = object.__new__(kind)
    if _lists_attributes():
        made.__dict__.update(attributes)
    else:
        for name, value in attributes.items():
            object.__setattr__(made, name, value)
    return made


def _lists_attributes() -> bool:
    """Whether `__dict__` can be read and written: torch 2.11 cannot compile that."""
    return DYNAMO_LISTS_ATTRIBUTES or not torch.compiler.is_compiling()


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values of a field are one object, equal plain values, or tuples of such.

    >>> _is_same((1, "a"), (1, "a")), _is_same(torch.zeros(2), torch.zeros(2))
    (True, False)
    """
    if type(a) is tuple and type(b) is tuple:
        pair = cast("tuple[Any, ...]", a), cast("tuple[Any, ...]", b)
        return len(pair[0]) == len(pair[1]) and all(map(_is_same, *pair))
    return a is b or (type(a) in PLAIN and type(a) is type(b) and a == b)


def _members(parts: tuple[Any, ...]) -> list[Any]:
    """The parts of a spec, with the members of a tuple in its place."""
    found: list[Any] = []
    for part in parts:
        if isinstance(part, tuple):
            found += _members(cast("tuple[Any, ...]", part))
        else:
            found.append(part)
    return found


def _serialize_part(part: Any, tensors: list[Tensor], ints: list[int]) -> str:
    if isinstance(part, Spec):
        return part.serialize(tensors, ints)
    if isinstance(part, Tensor):
        tensors.append(part)
        return '{"tensor": ' + str(len(tensors) - 1) + "}"
    if isinstance(part, tuple):
        if type(part) is not tuple:
            raise RefusalError(
                f"a {type(part).__name__} in a mask or bias cannot pass through torch.compile, torch.export or a "
                "dispatch mode such as torch's FLOP counter: give its members as a plain tuple."
            )
        inner = [_serialize_part(p, tensors, ints) for p in cast("tuple[Any, ...]", part)]
        return '{"tuple": [' + ", ".join(inner) + "]}"
    return serialize_value(part, ints)


def _passes(part: Any, spec_passes: "Callable[[Spec], bool]") -> bool:
    """Whether a field can be serialised, where each spec in it passes."""
    if isinstance(part, Spec):
        return spec_passes(part)
    if type(part) is tuple:
        return all(_passes(each, spec_passes) for each in cast("tuple[Any, ...]", part))
    return is_serialized_as_it_is(part)


def _has_own_classes(part: Any) -> bool:
    """Whether the specs in a field are of classes of regard's."""
    if type(part) is tuple:
        return all(map(_has_own_classes, cast("tuple[Any, ...]", part)))
    return not isinstance(part, Spec) or part.has_own_classes()


def _fingerprint_part(part: Any) -> Any:
    if isinstance(part, Spec):
        return part.fingerprint()
    return content_key(part) if isinstance(part, Tensor) else part_key(part)


def _form_part(part: Any) -> Any:
    if isinstance(part, Spec):
        return part.form()
    if type(part) is tuple:
        return tuple(map(_form_part, cast("tuple[Any, ...]", part)))
    return form(part) if isinstance(part, Tensor) else part_key(part)


def _cacheable_fingerprint(part: Spec) -> Fingerprint | None:
    fingerprint = part.fingerprint()
    return fingerprint if fingerprint.is_cacheable else None


values[Spec] = _cacheable_fingerprint
