"""What the tasks of RULER have in common: a prompt of the most units (sentences, words) that fit in a length."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from regard.errors import ProblemError
from regard.evaluate import prompts
from regard.evaluate.models import Model
from regard.evaluate.prompts import Prompt
from regard.evaluate.task import Question, generator, prompt_parts

FILLED = 0.95
"""The share of a length that the longest text has at least."""


class Text(NamedTuple):
    """A prompt as text: the texts around it, its context, and the answers."""

    prompt: Prompt
    context: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class RulerTask:
    """A task of RULER.

    Attributes:
        new_tokens: tokens that are generated at least: as many as RULER generates.
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
        """A text of this number of units (sentences, words)."""
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
        """The examples by length."""
        for length in self.lengths:
            units = self._units(model, length)
            for sample in range(self.samples):
                name = f"{length}/{sample}"
                yield self._fitting(model, length, units, name)

    def _units(self, model: Model, length: int) -> int:
        """The most units that fit in a length."""

        def tokens(units: int) -> int:
            return self._tokens(model, self.make(units, generator(self, f"{length}"), length))

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
        """The tokens of the prompt and those to generate."""
        context, question = self._ids(model, text)
        return len(context) + len(question) + self._new_tokens(model, text)

    def _new_tokens(self, model: Model, text: Text) -> int:
        """The tokens to generate: in bytes and small vocabularies, all answers may need more than RULER generates."""
        return max(self.new_tokens, len(model.tokenizer.encode_after(f" {self.listed(text.answers)}")))

    def listed(self, answers: Sequence[str]) -> str:
        """The answers as a model may list them."""
        return ", ".join(answers)

    def _ids(self, model: Model, text: Text) -> tuple[list[int], list[int]]:
        context, close = prompt_parts(model.tokenizer, self.chat, text.prompt.before + text.context)
        question, _ = prompts.question_and_target(model.tokenizer, text.prompt, "", close)
        return context, question

    def _fitting(self, model: Model, length: int, units: int, name: str) -> Question:
        """An example with `units` units, or with fewer if its prompt is longer than the length allows."""
        while True:
            text = self.make(units, generator(self, name), length)
            context, question = self._ids(model, text)
            new_tokens = self._new_tokens(model, text)
            if len(context) + len(question) + new_tokens <= length:
                break
            if units <= self.least():
                raise self._does_not_fit(length)
            units -= max(1, units // 50)
        cell: dict[str, int | float | str] = {"length": length}
        return Question(name, cell, tuple(context), tuple(question), (), text.answers, new_tokens)


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits; `least` does.

    >>> _largest(1, 100, lambda units: units**2 < 50)
    7
    """
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
