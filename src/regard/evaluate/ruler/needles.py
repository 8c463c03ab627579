"""RULER's needles: numbers or UUIDs by their keys, in noise, in a book, or among other needles."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

from regard.evaluate import prompts
from regard.evaluate.haystack import MOBY_DICK, NOISE, sentences, sentences_setting
from regard.evaluate.ruler.task import RulerTask, Text

DEPTHS = [round(100 * i / 39) for i in range(40)]
"""Places of needles in a book, in percent of its sentences."""

FEW_KEYS = 1200
"""Needles of a haystack of needles whose keys are of 80 words, at most: 30,000 tokens."""

MOST_KEYS = 36000
"""Needles of a haystack of needles whose keys are of 400 words, at most: 800,000 tokens."""


class NeedleKind(NamedTuple):
    """What is hidden where: as RULER's `synthetic.yaml` has it."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


@dataclass(frozen=True)
class _Niah(RulerTask):
    """Needles in noise, or among needles."""

    kind: ClassVar[NeedleKind]

    def least(self) -> int:
        return self.kind.keys * self.kind.values

    def make(self, units: int, by: random.Random, length: int) -> Text:
        """Units are sentences."""
        kind = self.kind
        keys, others = self._keys(units, by)
        values = [[prompts.draw(kind.value, by) for _ in range(kind.values)] for _ in keys]
        needles = [prompts.needle(kind.value, key, v) for key, own in zip(keys, values, strict=True) for v in own]
        by.shuffle(needles)
        context = self._context(units, needles, others, by)
        asked = by.sample(range(len(keys)), kind.queries)
        prompt = prompts.niah(kind.value, [keys[i] for i in asked], kind.values)
        return Text(prompt, context, tuple(value for i in asked for value in values[i]))

    def _keys(self, units: int, by: random.Random) -> tuple[list[str], list[str]]:
        """The keys of the needles, and those of a haystack of needles: all different, so that a value is one key's."""
        count, is_hay = self.kind.keys, self.kind.haystack == "needles"
        is_many = is_hay and self.kind.key == "words" and units > FEW_KEYS
        found = prompts.distinct("many words" if is_many else self.kind.key, count + units * is_hay, by)
        return found[:count], found[count:]

    def most(self, length: int) -> int:
        is_words = self.kind.haystack == "needles" and self.kind.key == "words"
        return min(length, MOST_KEYS) if is_words else length

    def few(self, length: int) -> int:
        return min(length, FEW_KEYS) if self.kind.haystack == "needles" else length

    def _context(self, units: int, needles: Sequence[str], others: Sequence[str], by: random.Random) -> str:
        """The needles in this number of other lines."""
        value = self.kind.value
        if self.kind.haystack == "noise":
            hay = [NOISE] * units
        else:
            hay = [prompts.needle(value, key, prompts.draw(value, by)) for key in others[:units]]
        for place, needle in zip(sorted(by.sample(range(units), len(needles)), reverse=True), needles, strict=True):
            hay.insert(place, needle)
        return "\n".join(hay)


@dataclass(frozen=True)
class _NiahInBook(_Niah):
    """Needles in a book.

    Attributes:
        haystack: the book: `moby-dick`, or a file.
    """

    haystack: str = MOBY_DICK

    def of_text(self) -> dict[str, int]:
        """Its sentences, for results."""
        return sentences_setting(self.haystack)

    def few(self, length: int) -> int:
        return min(length, len(sentences(self.haystack)))

    def _context(self, units: int, needles: Sequence[str], others: Sequence[str], by: random.Random) -> str:
        book = sentences(self.haystack)
        return in_book([book[i % len(book)] for i in range(units)], needles, by)


def in_book(hay: Sequence[str], needles: Sequence[str], by: random.Random) -> str:
    """The needles between sentences, at different ones of 40 depths.

    >>> in_book(["One.", "Two."], ["Needle."], random.Random(1))
    'Needle. One. Two.'
    """
    places = sorted(int(len(hay) * depth / 100) for depth in by.sample(DEPTHS, len(needles)))
    parts, last = list[str](), 0
    for place, needle in zip(places, needles, strict=True):
        parts += [*hay[last:place], needle]
        last = place
    return " ".join([*parts, *hay[last:]])


def _niah(name: str, kind: NeedleKind) -> type[_Niah]:
    """The task of that name."""
    what = f"{kind.keys * kind.values} of {kind.value} in {kind.haystack}, {kind.queries * kind.values} asked for"
    members = {"name": name, "kind": kind, "__doc__": f"RULER's {name}: {what}.", "__module__": __name__}
    base = _NiahInBook if kind.haystack == "book" else _Niah
    made = type("".join(part.title() for part in name.split("_")), (base,), members)
    return cast("type[_Niah]", dataclass(frozen=True)(made))


NIAH = {
    name: _niah(name, kind)
    for name, kind in {
        "niah_single_1": NeedleKind("noise"),
        "niah_single_2": NeedleKind("book"),
        "niah_single_3": NeedleKind("book", value="uuids"),
        "niah_multikey_1": NeedleKind("book", keys=4),
        "niah_multikey_2": NeedleKind("needles"),
        "niah_multikey_3": NeedleKind("needles", key="uuids", value="uuids"),
        "niah_multivalue": NeedleKind("book", values=4),
        "niah_multiquery": NeedleKind("book", keys=4, queries=4),
    }.items()
}
