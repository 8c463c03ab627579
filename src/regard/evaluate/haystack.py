"""Texts that needles are hidden in, as tokens with the ends of their sentences.

| name | what |
|---|---|
| `moby-dick` | Melville 1851, public domain (`corpus.py`); other works use Paul Graham's essays, which are not free |
| `noise` | "The grass is green. The sky is blue. ...", repeated: Mohtashami and Jaggi 2023, arXiv:2305.16300 |
| a file | any text |
"""

import bisect
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from regard.errors import ProblemError
from regard.evaluate.corpus import text_of
from regard.evaluate.tokens import Tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
MOBY_DICK = "moby-dick"
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'“])")
OF_ANY_SCRIPT = re.compile(r"(?<=[.!?…؟۔।])\s+|(?<=[。！？])\s*(?=.)")
"""Sentences of texts in which few begin with a letter from A to Z."""

LONGEST = 2500
"""Characters of a sentence, at most; the longest one of Moby-Dick has 2,331. Longer ones are cut into `PARTS`."""
PARTS = re.compile(r"\S.{0,149}(?!\S)|\S{150}")
"""A sentence: up to 150 characters of whole words, which is the mean length of a sentence of Moby-Dick."""


@dataclass(frozen=True)
class Haystack:
    """Tokens of a text. `ends` are the counts of tokens at which a sentence is complete, from 0 on."""

    tokens: Sequence[int]
    ends: Sequence[int]

    def cut(self, length: int, depth: float) -> int:
        """The end of a sentence at or before this share of the first `length` tokens.

        >>> Haystack(range(10), [0, 4, 7, 10]).cut(8, 0.9)
        7
        """
        return self.ends[bisect.bisect_right(self.ends, round(length * depth)) - 1]


def haystack(name: str, tokenizer: Tokenizer, tokens: int) -> Haystack:
    """The first tokens of a haystack by its name, or of a file, as they follow another text.

    Raises:
        ProblemError: the text cannot be read, or is too short.
    """
    found, ends = list[int](), [0]
    for sentence in _sentences(name, tokens):
        found += tokenizer.encode_after(f" {sentence}" if found else sentence)
        ends.append(len(found))
        if len(found) >= tokens:
            return Haystack(found, ends)
    raise ProblemError(
        f"the text {name} has {len(found):,} tokens, and a haystack of {tokens:,} is needed: give a longer one, or "
        "shorter --lengths."
    )


def _sentences(name: str, tokens: int) -> Sequence[str]:
    """Sentences, with white space as single spaces. The noise is repeated as often as `tokens` can need it."""
    if name == "noise":
        return _split(NOISE) * (tokens // 5 + 1)
    return sentences(name)


def sentences(name: str) -> tuple[str, ...]:
    """The sentences of a text, with white space as single spaces."""
    return _split(read(name))


def sentences_setting(name: str) -> dict[str, int]:
    """The number of sentences as a setting of the results, if the text is not split by `SENTENCE` alone; else empty."""
    found = sentences(name)
    return {} if found == tuple(SENTENCE.split(_line(read(name)))) else {"sentences": len(found)}


@lru_cache(maxsize=2)
def _split(text: str) -> tuple[str, ...]:
    """Sentences of a text, in any script; where it has none, parts of about their length.

    >>> _split("One is here. Two is there."), _split("один здесь. два там. три везде."), _split("一在这。二在那。三。")
    (('One is here.', 'Two is there.'), ('один здесь.', 'два там.', 'три везде.'), ('一在这。', '二在那。', '三。'))
    """
    line = _line(text)
    found, others = SENTENCE.split(line), OF_ANY_SCRIPT.split(line)
    if len(others) > 2 * len(found):
        found = others
    parts = (PARTS.findall(each) if len(each) > LONGEST else [each] for each in found)
    return tuple(itertools.chain.from_iterable(parts))


def _line(text: str) -> str:
    """The text with white space as single spaces."""
    return " ".join(text.split())


@lru_cache(maxsize=2)
def read(name: str) -> str:
    """The text of that name, or of a file."""
    return NOISE if name == "noise" else text_of(None if name == MOBY_DICK else name)


def digest(name: str) -> str:
    """A digest of the text, for results."""
    return hashlib.sha256(read(name).encode()).hexdigest()[:16]


def digest_of_file(name: str) -> str:
    """A digest of the content of a file, for results.

    Raises:
        ProblemError: the file cannot be read.
    """
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        raise ProblemError(f"there is no file {name}.") from None
    except OSError as error:
        raise ProblemError(f"{name} cannot be read: {error.strerror}.") from None
