"""A word: one frozen value of a description (a mask, a bias, a score), and the two forms it takes besides itself.

- Its **outline** is the same value with every tensor and function replaced by a ticket of its content: hashable,
  comparable, printable, and it keeps nothing alive. Plans are cached by outlines.
- Its **spelling** is a JSON text, a list of tensors and a list of ints, which may be symbolic while torch traces: what
  passes through a torch operator, which takes nothing else.

Words are frozen dataclasses, made with `@word`; equal outlines are equal words. A word is known by its class itself,
not by the name of the class: the name is for spelling only.
"""

import dataclasses
import itertools
import json
import reprlib
from collections.abc import Hashable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from regard.describe.content import Unknown, content, values
from regard.describe.tensors import ContentKey, content_key, form

W = TypeVar("W", bound="type[Spec]")


_PLAIN = frozenset({bool, float, int, str, type(None)})
"""Types of fields that are the same in an outline."""


_REMEMBERED = ("_fingerprint", "_known")
"""Attributes in which a word remembers what is made of it."""


class _Kind(ref["type[Spec]"]):
    """A class of words, as outlines have it: a class may hold tensors, and an outline keeps nothing alive.

    Attributes:
        name: of the class.
        is_own: whether regard wrote it; what others write is known by its content, too.
    """

    __slots__ = ("is_own", "name")

    is_own: bool
    name: str

    @classmethod
    def of(cls, kind: "type[Spec]") -> "_Kind":
        made = cls(kind)
        made.name, made.is_own = kind.__name__, kind.__module__.startswith("regard.")
        return made


class Fingerprint:
    """A word without its tensors.

    Attributes:
        parts: the values of the fields, in order; outlines for words, tickets for tensors and functions.

    ```
    >>> from regard import Causal, Window
    >>> (Causal() & Window(4)).fingerprint().text
    'Causal() & Window(left=4)'

    ```
    """

    __slots__ = ("_behaviour", "_hash", "_kind", "is_constant", "parts")

    def __init__(self, kind: "type[Spec]", parts: tuple[Any, ...], more: dict[str, Any] | None = None) -> None:
        self.parts = parts
        self._kind = kind._kind  # pyright: ignore[reportPrivateUsage]
        self._behaviour: Hashable = () if self._kind.is_own else content([kind, more])  # more: besides the fields
        self._hash: int | None = None  # kept, as every call looks its plan up by outlines
        self.is_constant: bool = self._kind.is_own and all(map(_is_constant, parts))
        """Whether nothing in the word can change: it carries no tensor and no function, and regard wrote its class."""

    @property
    def kind(self) -> "type[Spec]":
        """The class of the word."""
        kind = self._kind()
        assert kind is not None, f"the class {self._kind.name} is gone"
        return kind

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Fingerprint)
            and self._kind is other._kind
            and self.parts == other.parts
            and self._behaviour == other._behaviour
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self._kind, self.parts, self._behaviour))
        return self._hash

    @property
    def can_be_kept(self) -> bool:
        """Whether the outline tells when the word changes; if not, nothing may be kept for it."""
        return self.is_constant or (not isinstance(self._behaviour, Unknown) and all(map(_tells, self.parts)))

    @property
    def text(self) -> str:
        """How the word is printed."""
        kind = self._kind()
        return f"{self._kind.name}(...)" if kind is None else kind.written(self.parts)

    def __repr__(self) -> str:
        return self.text


class Spec:
    """The root of masks, biases and scores. Subclasses are made with `@word` and are final or abstract."""

    _serialized: ClassVar[WeakValueDictionary[str, "type[Spec]"]] = WeakValueDictionary()
    _fields: ClassVar[tuple[str, ...]] = ()
    _serial_name: ClassVar[str] = ""
    _kind: ClassVar[_Kind]

    def fingerprint(self) -> Fingerprint:
        """This word with its tensors and functions replaced by tickets of their content.

        Made once for a word that is constant.
        """
        kept = self.__dict__.get("_fingerprint")
        if kept is not None:
            return kept
        parts = tuple([p if type(p) in _PLAIN else _outlined(p) for p in self.parts()])
        made = Fingerprint(type(self), parts, self._more())
        if made.is_constant:
            self.__dict__["_fingerprint"] = made
        return made

    def form(self) -> Fingerprint:
        """The outline with only type and shape of each tensor: a plan depends on no more of biases and scores."""
        return Fingerprint(type(self), tuple([_formed(part) for part in self.parts()]), self._more())

    def parts(self) -> tuple[Any, ...]:
        """The values of the fields, in order."""
        return tuple([getattr(self, name) for name in self._fields])

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        """A word of these parts as it is written in Python, defaults left out, tensors as type and shape."""
        fields = dataclasses.fields(cast(Any, cls))
        given = (
            f"{f.name}={part!r}"
            for f, part in zip(fields, parts, strict=True)
            if f.default is dataclasses.MISSING or part is not f.default
        )
        return f"{cls.__name__}({', '.join(given)})"

    def serialize(self, tensors: list[Tensor], numbers: list[int]) -> str:
        """The spec as JSON, tensors and ints appended to the lists; `deserialize` reads it. Floats keep every bit."""
        parts = [_serialized(part, tensors, numbers) for part in self.parts()]
        return "[" + ", ".join(['"' + self._serial_name + '"', *parts]) + "]"

    def can_be_serialized(self) -> bool:
        """Whether its fields say all that it is, and a spelling has a form for each."""
        return not self._more() and all(map(_can_be_serialized, self.parts()))

    def _more(self) -> dict[str, Any]:
        """What a word of others has besides its fields, such as what its `__post_init__` made of them."""
        if self._kind.is_own:
            return {}
        return {name: held for name, held in self.__dict__.items() if name not in self._fields + _REMEMBERED}

    def is_known(self) -> bool:
        """Whether this and the words in it were made with `@word`."""
        if "_known" not in self.__dict__:
            self.__dict__["_known"] = "_serial_name" in type(self).__dict__ and all(
                part.is_known() for part in self.parts() if isinstance(part, Spec)
            )
        return self.__dict__["_known"]

    def tensors(self) -> list[Tensor]:
        """The tensors that the word carries, in the order of its spelling."""
        found: list[Tensor] = []
        for part in self.parts():
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, Spec):
                found.extend(part.tensors())
        return found

    def __getstate__(self) -> dict[str, Any]:
        """The fields: what else is kept beside them is made anew, and refers to classes of this process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_fingerprint", "_known")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        return self.fingerprint().text


@dataclass_transform(frozen_default=True, eq_default=False)
def spec(cls: W) -> W:
    """Make a class a word: a frozen dataclass, compared and printed by its outline, unspelled by its name.

    Classes of one name, as a notebook makes them whose cell is run again, are spelled apart.
    """
    made = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    kind = _Kind.of(made)
    plain = cls.__name__ if kind.is_own else f"{cls.__module__}.{cls.__qualname__}"
    spellings = (plain if not i else f"{plain}#{i}" for i in itertools.count())
    name = next(name for name in spellings if name not in Spec._serialized)  # pyright: ignore[reportPrivateUsage]
    made._fields = tuple(f.name for f in dataclasses.fields(cast(Any, made)))  # pyright: ignore[reportPrivateUsage]
    made._serial_name, made._kind = name, kind  # pyright: ignore[reportPrivateUsage]
    Spec._serialized[name] = made  # pyright: ignore[reportPrivateUsage]
    return made


def deserialize(text: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Spec:
    """The word that `Spec.serialize` wrote.

    >>> from regard import Window
    >>> tensors, numbers = [], []
    >>> Window(4).serialize(tensors, numbers), numbers
    ('["Window", {"number": 0}, null]', [4])
    >>> deserialize('["Window", {"number": 0}, null]', tensors, numbers)
    Window(left=4)
    """

    def read(node: Any) -> Any:
        if isinstance(node, dict):
            ((kind, value),) = cast("dict[str, Any]", node).items()
            if kind == "float":
                return float.fromhex(value)
            return {"tensor": tensors, "number": numbers}[kind][value] if kind != "tuple" else tuple(map(read, value))
        if isinstance(node, list):
            name, *parts = cast("list[Any]", node)
            return Spec._serialized[name](*map(read, parts))  # pyright: ignore[reportPrivateUsage]
        return node

    return read(json.loads(text))


def _serialized(part: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    if isinstance(part, Spec):
        return part.serialize(tensors, numbers)
    if isinstance(part, Tensor):
        tensors.append(part)
        return '{"tensor": ' + str(len(tensors) - 1) + "}"
    if isinstance(part, tuple):
        inner = [_serialized(p, tensors, numbers) for p in cast("tuple[Any, ...]", part)]
        return '{"tuple": [' + ", ".join(inner) + "]}"
    if part is None:
        return "null"
    if isinstance(part, bool):
        return "true" if part else "false"
    if isinstance(part, float):
        return '{"float": "' + part.hex() + '"}'  # every bit; of the texts of a float, the one that torch can trace
    numbers.append(part)
    return '{"number": ' + str(len(numbers) - 1) + "}"


def _can_be_serialized(part: Any) -> bool:
    if isinstance(part, Spec):
        return part.can_be_serialized()
    if type(part) is tuple:
        return all(map(_can_be_serialized, cast("tuple[Any, ...]", part)))
    return part is None or isinstance(part, bool | int | float | str | torch.SymInt | Tensor)


def _outlined(part: Any) -> Any:
    if isinstance(part, Spec):
        return part.fingerprint()
    return content_key(part) if isinstance(part, Tensor) else _described(part)


def _formed(part: Any) -> Any:
    if isinstance(part, Spec):
        return part.form()
    return form(part) if isinstance(part, Tensor) else _described(part)


def _described(part: Any) -> Any:
    """A ticket for what may change or hold tensors, such as a function or a list; the rest as it is."""
    if _never_changes(part):
        return part
    is_named = isinstance(part, type | FunctionType | BuiltinFunctionType)
    return ContentKey(content(part), part.__name__ if is_named else reprlib.repr(part))


def _never_changes(part: Any) -> bool:
    if type(part) is tuple:
        return all(map(_never_changes, cast("tuple[Any, ...]", part)))
    return type(part) in _PLAIN or isinstance(part, torch.dtype | torch.device | torch.SymInt)


def _is_constant(part: Any) -> bool:
    if type(part) in _PLAIN:
        return True
    return part.is_constant if isinstance(part, Fingerprint) else not isinstance(part, ContentKey)


def _tells(part: Any) -> bool:
    """Whether a part of an outline tells when it changes."""
    return (
        part.can_be_kept if isinstance(part, Fingerprint) else not isinstance(getattr(part, "content", None), Unknown)
    )


def _kept_outline(part: Spec) -> Fingerprint | None:
    fingerprint = part.fingerprint()
    return fingerprint if fingerprint.can_be_kept else None


values[Spec] = _kept_outline
