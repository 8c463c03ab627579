"""A word: one frozen value of a description (a mask, a bias, a score), and the two forms it takes besides itself.

- Its **outline** is the same value with every tensor and function replaced by a ticket: hashable, comparable,
  printable, and it keeps nothing alive. Plans are cached by outlines.
- Its **spelling** is a JSON text, a list of tensors and a list of ints, which may be symbolic while torch traces: what
  passes through a torch operator, which takes nothing else.

Words are frozen dataclasses, made with `@word`; equal outlines are equal words, so words that carry tensors are
compared by the identity of those tensors.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from torch import Tensor

from regard.describe.tensors import Ticket, ticket

W = TypeVar("W", bound="type[Word]")


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A word without its tensors.

    ```
    >>> from regard import Causal, Window
    >>> (Causal() & Window(4)).outline().text
    'Causal() & Window(left=4)'

    ```
    """

    name: str
    parts: tuple[Any, ...]
    _hash: int | None = field(default=None, init=False)  # kept, as every call looks its plan up by outlines

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Outline) and self.name == other.name and self.parts == other.parts)

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash((self.name, self.parts)))
        return cast(int, self._hash)

    @property
    def is_constant(self) -> bool:
        """Whether nothing in the word can change: it carries no tensor and no function."""
        return not any(
            isinstance(part, Ticket) or (isinstance(part, Outline) and not part.is_constant) for part in self.parts
        )

    @property
    def text(self) -> str:
        """How the word is printed."""
        return Word.named(self.name).written(self.parts)

    def __repr__(self) -> str:
        return self.text


class Word:
    """The root of masks, biases and scores. Subclasses are made with `@word` and are final or abstract."""

    _named: ClassVar[dict[str, "type[Word]"]] = {}
    _fields: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def named(name: str) -> "type[Word]":
        """The class of the words of that name, as an outline has it."""
        return Word._named[name]

    def outline(self) -> Outline:
        """This word with its tensors replaced by tickets. Made once for a word that is constant."""
        kept = self.__dict__.get("_outline")
        if kept is not None:
            return kept
        made = Outline(type(self).__name__, tuple(_outlined(part) for part in self.parts()))
        if made.is_constant:
            self.__dict__["_outline"] = made
        return made

    def parts(self) -> tuple[Any, ...]:
        """The values of the fields, in order."""
        return tuple(getattr(self, name) for name in self._fields)

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

    def spell(self, tensors: list[Tensor], numbers: list[int]) -> str:
        """The word as JSON, its tensors and ints appended to the lists; `unspell` reads it. Floats keep every bit."""
        parts = [_spelled(part, tensors, numbers) for part in self.parts()]
        return "[" + ", ".join(['"' + type(self).__name__ + '"', *parts]) + "]"

    def is_known(self) -> bool:
        """Whether this and the words in it were made with `@word`."""
        if "_known" not in self.__dict__:
            self.__dict__["_known"] = self._named.get(type(self).__name__) is type(self) and all(
                part.is_known() for part in self.parts() if isinstance(part, Word)
            )
        return self.__dict__["_known"]

    def tensors(self) -> list[Tensor]:
        """The tensors that the word carries, in the order of its spelling."""
        found: list[Tensor] = []
        for part in self.parts():
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, Word):
                found.extend(part.tensors())
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and self.outline() == other.outline()

    def __hash__(self) -> int:
        return hash(self.outline())

    def __repr__(self) -> str:
        return self.outline().text


@dataclass_transform(frozen_default=True, eq_default=False)
def word(cls: W) -> W:
    """Make a class a word: a frozen dataclass, compared and printed by its outline, unspelled by its name."""
    made = dataclass(frozen=True, eq=False, repr=False)(cls)
    made._fields = tuple(f.name for f in dataclasses.fields(cast(Any, made)))  # pyright: ignore[reportPrivateUsage]
    Word._named[cls.__name__] = made  # pyright: ignore[reportPrivateUsage]
    return made


def unspell(text: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Word:
    """The word that `Word.spell` wrote.

    >>> from regard import Window
    >>> tensors, numbers = [], []
    >>> Window(4).spell(tensors, numbers), numbers
    ('["Window", {"number": 0}, null]', [4])
    >>> unspell('["Window", {"number": 0}, null]', tensors, numbers)
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
            return Word.named(name)(*map(read, parts))
        return node

    return read(json.loads(text))


def _spelled(part: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    if isinstance(part, Word):
        return part.spell(tensors, numbers)
    if isinstance(part, Tensor):
        tensors.append(part)
        return '{"tensor": ' + str(len(tensors) - 1) + "}"
    if isinstance(part, tuple):
        inner = [_spelled(p, tensors, numbers) for p in cast("tuple[Any, ...]", part)]
        return '{"tuple": [' + ", ".join(inner) + "]}"
    if part is None:
        return "null"
    if isinstance(part, bool):
        return "true" if part else "false"
    if isinstance(part, float):
        return '{"float": "' + part.hex() + '"}'  # every bit; of the texts of a float, the one that torch can trace
    numbers.append(part)
    return '{"number": ' + str(len(numbers) - 1) + "}"


def _outlined(part: Any) -> Any:
    if isinstance(part, Word):
        return part.outline()
    return ticket(part) if isinstance(part, Tensor) or callable(part) else part
