"""Questions about one of many documents, by the position of that document; and recall of tokens for small models."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from regard.errors import ProblemError
from regard.evaluate import prompts
from regard.evaluate.models import Model
from regard.evaluate.retrieval import DEPTHS
from regard.evaluate.task import SPARE, Question, generator, prompt_parts


class Document(NamedTuple):
    """A title and a text."""

    title: str
    text: str


class Asked(NamedTuple):
    """A question, its answers, the document that has one of them, and others."""

    question: str
    answers: tuple[str, ...]
    gold: Document
    others: Sequence[Document]


@dataclass(frozen=True)
class Documents:
    """A question about one of many documents, by the position of that document: lost in the middle.

    Attributes:
        documents: numbers of documents.
        depths: positions of the document with the answer, as shares: 0 is the first, 1 the last.
        samples: questions of each number and position.
        questions: a file of questions in the format of Liu et al.: a JSON object in each line, with `question`,
            `answers`, and `ctxs`: `title`, `text`, `isgold` (`hasanswer` where none has it). None: lives of invented
            people, each question about one.
        chat: whether the prompt is a question in the model's chat template.

    The answer is right if one of `answers` is in the text that the model generates.
    """

    name: ClassVar[str] = "documents"
    axes: ClassVar[tuple[str, ...]] = ("depth", "documents")
    source: ClassVar[str] = "Liu et al. 2023, Lost in the Middle, arXiv:2307.03172, section 2"

    documents: tuple[int, ...] = (10, 20, 30)
    depths: tuple[float, ...] = DEPTHS
    samples: int = 10
    seed: int = 0
    questions: str | None = None
    chat: bool = False

    def examples(self, model: Model) -> Iterator[Question]:
        """The examples by number of documents, then by question; neighbours share the documents before the answer's."""
        asked = None if self.questions is None else read_questions(self.questions)
        for count, sample in itertools.product(self.documents, range(self.samples)):
            one = invented(generator(self, f"{count}/{sample}"), count) if asked is None else _of(asked, sample, count)
            for depth in self.depths:
                place = round(depth * (count - 1))
                order = [*one.others[:place], one.gold, *one.others[place : count - 1]]
                context = BEFORE + "\n".join(
                    f"Document [{i}](Title: {each.title}) {each.text}" for i, each in enumerate(order, 1)
                )
                before, close = prompt_parts(model.tokenizer, self.chat, context)
                prompt = prompts.Prompt("", f"\n\nQuestion: {one.question}", "Answer:", "\n")
                question, _ = prompts.question_and_target(model.tokenizer, prompt, "", close)
                yield Question(
                    f"{count}/{depth:g}/{sample}", {"documents": count, "depth": depth}, tuple(before),
                    tuple(question), (), one.answers, _new_tokens(model, one.answers), any_answer=True,
                )  # fmt: skip


NEW_TOKENS = 24
"""Tokens that are generated at least."""


def _new_tokens(model: Model, answers: Sequence[str]) -> int:
    """The tokens to generate: the longest answer has room."""
    return max(NEW_TOKENS, SPARE + max(len(model.tokenizer.encode_after(f" {answer}")) for answer in answers))


BEFORE = (
    "Write a high-quality answer for the given question using only the provided search results (some of which might be "
    "irrelevant).\n\n"
)


def read_questions(file: str) -> list[Asked]:
    """The questions of a file.

    Raises:
        ProblemError: it cannot be read, it is empty, or a line is no question with a document that has the answer.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")  # a JSON text may have other line ends
    except FileNotFoundError:
        raise ProblemError(f"there is no file {file}.") from None
    except OSError as error:
        raise ProblemError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ProblemError(f"{file} cannot be read: {error}.") from None
    asked = [_asked(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not asked:
        raise ProblemError(f"{file} has no questions: expected a JSON object with a question in each line.")
    return asked


def _asked(line: str, where: str) -> Asked:
    try:
        found: Any = json.loads(line)
        documents = [Document(_text(each["title"]), _text(each["text"])) for each in found["ctxs"]]
        marked = (i for key in ("isgold", "hasanswer") for i, each in enumerate(found["ctxs"]) if each.get(key))
        gold = next(marked)
        others = documents[:gold] + documents[gold + 1 :]
        return Asked(_text(found["question"]), _answers(found["answers"]), documents[gold], others)
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ProblemError(
            f"{where}: expected a JSON object with question, answers and ctxs of title, text and isgold, one of them "
            f"true ({type(error).__name__}: {error})."
        ) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _answers(values: Any) -> tuple[str, ...]:
    """The answers, which are looked for in what the model generates: an empty one would be in every text."""
    if not isinstance(values, list) or not values or not all(_text(each).strip() for each in cast("list[Any]", values)):
        raise TypeError(f"answers is {values!r}, no list of one or more texts that are not empty")
    return tuple(cast("list[str]", values))


def _of(asked: Sequence[Asked], sample: int, count: int) -> Asked:
    if sample >= len(asked):
        raise ProblemError(f"there are {len(asked)} questions: give --samples {len(asked)} or fewer.")
    if len(asked[sample].others) < count - 1:
        raise ProblemError(f"question {sample + 1} has {len(asked[sample].others) + 1} documents: give fewer.")
    return asked[sample]


# ---- invented people ------------------------------------------------------------------------------------------------

_FIRST = """
Ada Bruno Clara Dmitri Elena Farid Greta Hugo Ines Jonas Karla Leon Mira Nils Olga Pavel Rosa Samir Tilda Ugo Vera Wim
Yara Zeno"""
_LAST = """
Abel Brandt Castell Dorn Eriksen Falk Grieg Hartmann Ivanov Jansen Keller Lindqvist Moreau Novak Okafor Petrov Quist
Rossi Sandoval Tanaka Ulrich Varga Weber Ximenes Yilmaz Zeller"""
_CITIES = """
Aberdeen Antwerp Bergen Bologna Bristol Cork Dresden Florence Gdansk Geneva Ghent Granada Graz Hamburg Helsinki Krakow
Leipzig Lille Lisbon Lyon Malaga Marseille Naples Nice Oslo Porto Prague Riga Rotterdam Seville Sofia Tallinn Trieste
Turin Utrecht Valencia Vilnius Warsaw Zagreb Zurich"""
_WORK = """
baker botanist carpenter chemist composer gardener geologist glassblower historian journalist lawyer
librarian painter pharmacist photographer pilot sculptor surgeon tailor teacher translator watchmaker"""
FIRST, LAST, CITIES, WORK = (tuple(each.split()) for each in (_FIRST, _LAST, _CITIES, _WORK))


def invented(by: random.Random, count: int) -> Asked:
    """Lives of `count` people with different names, and the question where one of them, and no other, was born.

    >>> one = invented(random.Random(0), 3)
    >>> one.answers[0] in one.gold.text, any(one.answers[0] in other.text for other in one.others)
    (True, False)
    """
    everybody = [f"{first} {last}" for first in FIRST for last in LAST]
    if count > len(everybody):
        raise ProblemError(
            f"there are {len(everybody)} invented people and {count} documents: give fewer, or a file of questions."
        )
    names = by.sample(everybody, count)
    answer, *cities = by.sample(CITIES, len(CITIES))
    lives = [_life(name, answer if not i else by.choice(cities), cities, by) for i, name in enumerate(names)]
    return Asked(f"In which city was {names[0]} born?", (answer,), lives[0], lives[1:])


def _life(name: str, born: str, cities: Sequence[str], by: random.Random) -> Document:
    year, moved, last = by.randint(1850, 1930), by.choice(cities), name.rsplit(maxsplit=1)[-1]
    work, other = by.sample(WORK, 2)
    text = (
        f"{name} was born in {born} in {year}. Trained as a {work}, {last} moved to {moved} in {year + 23} and later "
        f"worked there as a {other}."
    )
    return Document(name, text)


# ---- tokens ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recall:
    """Keys and values that are single tokens, k1 v1 k2 v2 ..., and the value of one key: no tokenizer is needed.

    Attributes:
        vocabulary: keys are the tokens of its first half, values those of the second.
        pairs: numbers of pairs.
        depths: positions of the queried pair, as shares of the list: 0 is the first pair, 1 the last.
        samples: examples of each number and position.
    """

    name: ClassVar[str] = "recall"
    axes: ClassVar[tuple[str, ...]] = ("depth", "pairs")
    source: ClassVar[str] = "Arora et al. 2023, Zoology, arXiv:2312.04927, section 3: associative recall"

    vocabulary: int = 256
    pairs: tuple[int, ...] = (8, 16, 32)
    depths: tuple[float, ...] = DEPTHS
    samples: int = 10
    seed: int = 0

    def examples(self, model: Model) -> Iterator[Question]:
        """The examples by number of pairs; the positions of one sample share the whole context."""
        half = self.vocabulary // 2
        if max(self.pairs) > half:
            raise ProblemError(f"{max(self.pairs)} keys of {half}: give a larger --vocabulary, or fewer --pairs.")
        for pairs, sample in itertools.product(self.pairs, range(self.samples)):
            by = generator(self, f"{pairs}/{sample}")
            keys, values = by.sample(range(half), pairs), by.choices(range(half, 2 * half), k=pairs)
            context = tuple(itertools.chain.from_iterable(zip(keys, values, strict=True)))
            for depth in self.depths:
                place = round(depth * (pairs - 1))
                cell: dict[str, int | float | str] = {"pairs": pairs, "depth": depth}
                yield Question(f"{pairs}/{depth:g}/{sample}", cell, context, (keys[place],), (values[place],))
