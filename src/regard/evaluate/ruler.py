"""RULER's tasks: Hsieh et al. 2024, arXiv:2404.06654. Prompts, counts and scores are those that it publishes.

| task | hidden | expected |
|---|---|---|
| `niah_single_1`, `_2`, `_3` | one number in noise; one in a book; one UUID in a book | its value |
| `niah_multikey_1`, `_2`, `_3` | four keys in a book; as many as fit, of numbers; of UUIDs | the value of one |
| `niah_multivalue`, `niah_multiquery` | one key with four values; four keys | all four |
| `vt` | a chain of five variables, assigned one to the next, in noise | the variables with a value |
| `cwe` | ten common words among others in a numbered list | the ten |
| `fwe` | words drawn from a zeta distribution | the three most frequent |

A prompt with the tokens to generate is as long as fits in the length. The model generates greedily, and the score is
the share of the answers in its text, whatever their case. A book that is too short is repeated.

What differs from RULER: the book is Moby-Dick, where RULER takes essays that are not free; words are drawn from lists
of this package or from the book, where RULER takes those of the package wonderwords; all keys of a text are different;
the example before the text of `vt` and `cwe` is the same for all samples.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, cast

from regard.errors import ProblemError
from regard.evaluate import prompts
from regard.evaluate.haystack import MOBY_DICK, NOISE, read, sentences, sentences_setting
from regard.evaluate.models import Model
from regard.evaluate.prompts import Prompt
from regard.evaluate.task import Question, generator, prompt_parts

FILLED = 0.95
"""The share of a length that the longest text has at least."""

DEPTHS = [round(100 * i / 39) for i in range(40)]
"""Places of needles in a book, in percent of its sentences."""


class Text(NamedTuple):
    """A prompt as text: the texts around it, its context, and the answers."""

    prompt: Prompt
    context: str
    answers: tuple[str, ...]


Make = Callable[[int, random.Random], Text]
"""Makes a text from a number of units (sentences, words) and a generator."""


@dataclass(frozen=True)
class _Ruler:
    """A task of RULER.

    Attributes:
        lengths: tokens of prompt and generated text at most.
        samples: examples of each length.
        chat: whether the prompt is a question in the model's chat template.
    """

    name: ClassVar[str]
    axes: ClassVar[tuple[str, ...]] = ("length",)
    source: ClassVar[str] = "RULER: Hsieh et al. 2024, arXiv:2404.06654"
    new_tokens: ClassVar[int] = 128

    lengths: tuple[int, ...] = (512, 1024, 2048)
    samples: int = 10
    seed: int = 0
    chat: bool = False

    def make(self, units: int, by: random.Random, length: int) -> Text:
        """A text of this number of units."""
        raise NotImplementedError

    def least(self) -> int:
        """The units of the shortest text."""
        return 1

    def most(self, length: int) -> int:
        """The units of the longest text; a unit is one token or more."""
        return length

    def few(self, length: int) -> int:
        """The units up to which a text is made of a few words, or of a book that is read once."""
        return self.most(length)

    def examples(self, model: Model) -> Iterator[Question]:
        """By length."""
        for length in self.lengths:
            units = self._units(model, length)
            for sample in range(self.samples):
                name = f"{length}/{sample}"
                yield self._fitting(model, length, units, name)

    def _units(self, model: Model, length: int) -> int:
        """The most units that fit in a length."""

        def tokens(units: int) -> int:
            return self._tokens(model, self.make(units, generator(self, f"{length}"), length)) + self.new_tokens

        def fits(units: int) -> bool:
            return tokens(units) <= length

        found, few, most = self.least(), self.few(length), self.most(length)
        if not fits(found):
            raise self._does_not_fit(length)
        found = _largest(found, few, fits)
        if few <= found < most:
            found = _largest(found, most, fits)
        if found == most and (longest := tokens(found)) < FILLED * length:
            more = ", or a --haystack of more words" if hasattr(self, "haystack") else ""
            raise ProblemError(
                f"{self.name} has {longest:,} tokens at most, as it has no more different words, and is to have "
                f"{length:,}: give shorter --lengths{more}."
            )
        return found

    def _does_not_fit(self, length: int) -> ProblemError:
        """The error for a length that is too short for a text."""
        return ProblemError(f"{self.name} does not fit in {length} tokens: give longer --lengths.")

    def _tokens(self, model: Model, text: Text) -> int:
        context, question = self._ids(model, text)
        return len(context) + len(question)

    def _ids(self, model: Model, text: Text) -> tuple[list[int], list[int]]:
        context, close = prompt_parts(model.tokenizer, self.chat, text.prompt.before + text.context)
        question, _ = prompts.question_and_target(model.tokenizer, text.prompt, "", close)
        return context, question

    def _fitting(self, model: Model, length: int, units: int, name: str) -> Question:
        """An example; where its words have more tokens than those that were counted, it has fewer units."""
        while True:
            text = self.make(units, generator(self, name), length)
            context, question = self._ids(model, text)
            if len(context) + len(question) + self.new_tokens <= length:
                break
            if units <= self.least():
                raise self._does_not_fit(length)
            units -= max(1, units // 50)
        cell: dict[str, int | float | str] = {"length": length}
        return Question(
            name, cell, tuple(context), tuple(question), (), text.answers, new_tokens=self.new_tokens
        )  # fmt: skip


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits; `least` does.

    >>> _largest(1, 100, lambda units: units**2 < 50)
    7
    """
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


# ---- needles --------------------------------------------------------------------------------------------------------


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
class _Niah(_Ruler):
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

# ---- variables ------------------------------------------------------------------------------------------------------

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HOPS = 4


@dataclass(frozen=True)
class VariableTracking(_Ruler):
    """RULER's vt: the variables of a chain of assignments in noise, after one example with its answer."""

    name: ClassVar[str] = "vt"
    new_tokens: ClassVar[int] = 30

    def least(self) -> int:
        return 2

    def make(self, units: int, by: random.Random, length: int) -> Text:
        """Units are lines of noise."""
        shown = chain(15 if length >= 1024 else 5, 3, random.Random(0))  # noqa: S311  names of 3 letters
        asked = chain(units, 5, by)
        example = f"{shown.prompt.before}{shown.context}{shown.prompt.question} {shown.prompt.begun} "
        before = f"{example}{' '.join(shown.answers)}\n\n\n{asked.prompt.before}"
        return Text(asked.prompt._replace(before=before), asked.context, asked.answers)


def chain(lines: int, letters: int, by: random.Random) -> Text:
    """Noise with a chain of assignments: `VAR ABC = 12345`, `VAR DEF = VAR ABC` ..."""
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(by.choices(LETTERS, k=letters))] = None
    variables, value = list(names), by.randint(10000, 99998)
    links = [f"VAR {variables[0]} = {value}"]
    links += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(variables)]
    noise = [f"{NOISE}\n"] * lines
    if len(noise) <= len(links):  # the noise of few lines is split into its sentences
        noise = [f"{part}." if part.strip() else part for line in noise for part in line.split(".")]
    for i, place in enumerate(sorted(by.sample(range(len(noise)), len(links)))):
        noise.insert(place + i, links[i])
    context = " ".join(noise).replace(". \n", ".\n")
    prompt = Prompt(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{HOPS + 1} variables are assgined the value {value}, they are:",  # as RULER spells it
    )
    return Text(prompt, context, tuple(variables))


# ---- words ----------------------------------------------------------------------------------------------------------

LONG = 4096
"""Tokens from which common words are repeated 30 times and others 3 times; 6 and 1 below."""


@dataclass(frozen=True)
class CommonWords(_Ruler):
    """RULER's cwe: the ten words of a numbered list that appear most often, after one example with its answer.

    Attributes:
        haystack: the book that the words are of: `moby-dick`, or a file.
    """

    name: ClassVar[str] = "cwe"
    new_tokens: ClassVar[int] = 120

    haystack: str = MOBY_DICK

    def least(self) -> int:
        return 10

    def most(self, length: int) -> int:
        return min(length, len(words(self.haystack)))

    def make(self, units: int, by: random.Random, length: int) -> Text:
        """Units are different words."""
        known, is_long = words(self.haystack), length >= LONG
        if len(known) < 40:
            raise ProblemError(
                f"the text {self.haystack} has {len(known)} words of 4 to 10 letters: give a longer one."
            )
        fixed = random.Random(0)  # noqa: S311  no secret
        shown, first = numbered(known, 40 if is_long else 20, (10, 3) if is_long else (3, 1), fixed)
        asked, answers = numbered(known, units, (30, 3) if is_long else (6, 1), by)
        example = f"{COMMON.before}{shown}{COMMON.question} {COMMON.begun} {_listed(first)}"
        return Text(COMMON._replace(before=f"{example}\n{COMMON.before}"), asked, tuple(answers))


COMMON = Prompt(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n",
    "\nQuestion: What are the 10 most common words in the above list?",
    "Answer: The top 10 words that appear most often in the list are:",
)


def numbered(known: Sequence[str], count: int, repeats: tuple[int, int], by: random.Random) -> tuple[str, list[str]]:
    """(a numbered list of different words, the ten common ones); both kinds are repeated."""
    chosen = by.sample(known, count)
    common = chosen[:10]
    found = common * repeats[0] + chosen[10:] * repeats[1]
    by.shuffle(found)
    return _listed(found), common


def _listed(items: Sequence[str]) -> str:
    return " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))


@lru_cache(maxsize=2)
def words(name: str) -> tuple[str, ...]:
    """The words of a book of 4 to 10 lower-case letters, each once, by the alphabet."""
    return tuple(sorted(set(re.findall(r"(?<![\w'-])[a-z]{4,10}(?![\w'-])", read(name)))))


@dataclass(frozen=True)
class FrequentWords(_Ruler):
    """RULER's fwe: the three most frequent of coded words, whose counts follow a zeta distribution."""

    name: ClassVar[str] = "fwe"
    new_tokens: ClassVar[int] = 50

    def least(self) -> int:
        return 60  # so that the fourth word is there once, and the third more often

    def make(self, units: int, by: random.Random, length: int) -> Text:
        """Units are words."""
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < max(10, length // 50):
            vocabulary["".join(by.choices(LETTERS.lower(), k=6))] = None
        ranked = ["...", *list(vocabulary)[1:]]  # the most frequent one is noise
        counts = [int(units * rank**-ALPHA / ZETA) for rank in range(1, len(ranked) + 1)]
        found = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
        by.shuffle(found)
        return Text(FREQUENT, " ".join(found), tuple(ranked[1:4]))


ALPHA, ZETA = 2.0, 1.6449340668482264
"""The exponent of the zeta distribution, and zeta(2)."""

FREQUENT = Prompt(
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. ",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?",
    "Answer: According to the coded text above, the three most frequently appeared words are:",
)

RULER = {**NIAH, "vt": VariableTracking, "cwe": CommonWords, "fwe": FrequentWords}
