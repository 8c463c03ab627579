"""The fingerprint of a spec: the spec without its tensors. Plans are cached by fingerprints.

A fingerprint has the class of the spec and the values of its fields, with a `ContentKey` in place of each tensor and
function. It is hashable, comparable and printable, and keeps no tensor and no class alive.
"""

import functools
import reprlib
from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch

from regard.describe.content import Untraceable, content
from regard.describe.tensors import ContentKey

if TYPE_CHECKING:
    from regard.describe.spec import Spec

PLAIN = frozenset({bool, float, int, str, type(None)})
"""Types of fields that a fingerprint has unchanged."""

INTERNED = 1024
"""Fingerprints of constant specs that are kept, so that a mask written in a call costs a look-up and not a new key.

Their fields are ints, None and such specs, whose equal values are the same: True equals 1, and -0.0 equals 0.0."""

interned: "dict[tuple[type[Spec], tuple[Any, ...]], Fingerprint]" = {}

constants: "dict[tuple[Any, ...], tuple[Fingerprint, tuple[Fingerprint, ...]]]" = {}
"""The same by class and fields, with the addresses of fingerprints in place of specs; these are kept alive beside it.

Hashing and comparing such a key runs no Python, so a mask written in a call costs 1 to 2 us less."""


class KindRef(ref["type[Spec]"]):
    """A weak reference to the class of a spec: a class may have tensors, and a fingerprint keeps nothing alive.

    Attributes:
        name: of the class.
        is_own: whether the class is one of regard's; of other classes the content is part of the fingerprint, too.
    """

    __slots__ = ("is_own", "name")

    is_own: bool
    name: str

    @classmethod
    def of(cls, kind: "type[Spec]") -> "KindRef":
        made = cls(kind)
        made.name, made.is_own = kind.__name__, kind.__module__.startswith("regard.")
        return made


class Fingerprint:
    """A spec without its tensors.

    Attributes:
        parts: the values of the fields, in order; fingerprints of specs, content keys of tensors and functions.

    ```
    >>> from regard import Causal, Window
    >>> (Causal() & Window(4)).fingerprint().text
    'Causal() & Window(left=4)'

    ```
    """

    __slots__ = ("_behaviour", "_hash", "_kind", "is_constant", "is_registered", "parts")

    def __init__(self, kind: "type[Spec]", parts: tuple[Any, ...], more: dict[str, Any] | None = None) -> None:
        self.parts = parts
        self._kind = kind._kind  # pyright: ignore[reportPrivateUsage]
        self._behaviour: Hashable = () if self._kind.is_own else content([kind, more])  # more: besides the fields
        self._hash: int | None = None  # cached, as every call looks up its plan by fingerprints
        self.is_constant: bool = self._kind.is_own and all(map(_is_constant, parts))
        """Whether nothing in the spec can change: no tensor, no function, and a class of regard."""
        self.is_registered: bool = kind._made is kind and all(  # pyright: ignore[reportPrivateUsage]
            part.is_registered for part in parts if type(part) is Fingerprint
        )
        """Whether the classes of the spec and of those in it were made with `@spec`."""

    @property
    def kind(self) -> "type[Spec]":
        """The class of the spec."""
        kind = self._kind()
        assert kind is not None, f"the class {self._kind.name} is gone"
        return kind

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Fingerprint)
            and self._kind is other._kind
            and self.is_registered == other.is_registered
            and self.parts == other.parts
            and self._behaviour == other._behaviour
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self._kind, self.parts, self._behaviour))
        return self._hash

    @property
    def is_cacheable(self) -> bool:
        """Whether the fingerprint changes whenever the spec does; if not, nothing may be cached by it."""
        return self.is_constant or (
            not isinstance(self._behaviour, Untraceable) and all(map(_is_cacheable, self.parts))
        )

    def contents(self) -> list[ContentKey]:
        """The content keys of the tensors and functions in the spec, in order."""
        found: list[ContentKey] = []
        for part in self.parts:
            if isinstance(part, Fingerprint):
                found += part.contents()
            elif isinstance(part, ContentKey):
                found.append(part)
        return found

    @property
    def text(self) -> str:
        """The spec in printed form."""
        kind = self._kind()
        return f"{self._kind.name}(...)" if kind is None else kind.written(self.parts)

    def __repr__(self) -> str:
        return self.text


def intern(kind: "type[Spec]", parts: tuple[Any, ...]) -> Fingerprint:
    """The fingerprint of a constant spec, kept for the next call."""
    made = Fingerprint(kind, parts)
    if len(interned) >= INTERNED:
        interned.clear()
    return interned.setdefault((kind, parts), made)


def part_key(part: Any) -> Any:
    """A field that is no spec and no tensor, as part of a fingerprint.

    A content key for what may change or have tensors, such as a function or a list; other values unchanged.
    """
    if _never_changes(part):
        return part
    return ContentKey(content(part), _text_of(part))


def _text_of(part: Any) -> str:
    """What is printed for it: without an address, as ranks of a process group compare it."""
    if isinstance(part, type | FunctionType | BuiltinFunctionType):
        return part.__name__
    if isinstance(part, MethodType):
        return _text_of(part.__func__)
    if isinstance(part, functools.partial):
        return f"partial({_text_of(cast(Any, part).func)})"
    return type(part).__name__ if type(part).__repr__ is object.__repr__ else reprlib.repr(part)


def _never_changes(part: Any) -> bool:
    if type(part) is tuple:
        return all(map(_never_changes, cast("tuple[Any, ...]", part)))
    return type(part) in PLAIN or isinstance(part, torch.dtype | torch.device | torch.SymInt)


def _is_constant(part: Any) -> bool:
    if type(part) in PLAIN:
        return True
    if type(part) is tuple:
        return all(map(_is_constant, cast("tuple[Any, ...]", part)))
    return part.is_constant if isinstance(part, Fingerprint) else not isinstance(part, ContentKey)


def _is_cacheable(part: Any) -> bool:
    """Whether a part of a fingerprint changes whenever the spec does."""
    if type(part) is tuple:
        return all(map(_is_cacheable, cast("tuple[Any, ...]", part)))
    return (
        part.is_cacheable
        if isinstance(part, Fingerprint)
        else not isinstance(getattr(part, "content", None), Untraceable)
    )
