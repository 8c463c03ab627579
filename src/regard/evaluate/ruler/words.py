"""RULER's words: the ten common ones of a numbered list, and the three most frequent ones of a coded text."""

import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from regard.errors import ProblemError
from regard.evaluate.haystack import MOBY_DICK, read
from regard.evaluate.prompts import Prompt
from regard.evaluate.ruler.task import RulerTask, Text

LONG = 4096
"""Tokens from which common words are repeated 30 times and others 3 times; 6 and 1 below."""


@dataclass(frozen=True)
class CommonWords(RulerTask):
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
        example = f"{COMMON.before}{shown}{COMMON.question} {COMMON.begun} {self.listed(first)}"
        return Text(COMMON._replace(before=f"{example}\n{COMMON.before}"), asked, tuple(answers))

    def listed(self, answers: Sequence[str]) -> str:
        return _listed(answers)


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
class FrequentWords(RulerTask):
    """RULER's fwe: the three most frequent of coded words, whose counts follow a zeta distribution."""

    name: ClassVar[str] = "fwe"
    new_tokens: ClassVar[int] = 50

    def least(self) -> int:
        return 60  # so that the fourth word is there once, and the third more often

    def make(self, units: int, by: random.Random, length: int) -> Text:
        """Units are words."""
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < max(10, length // 50):
            vocabulary["".join(by.choices(string.ascii_lowercase, k=6))] = None
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
