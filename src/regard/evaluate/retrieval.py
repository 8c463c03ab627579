"""Needles by length and depth, a pass key in noise, and values of keys in JSON.

```
context    A special magic number is hidden within the following text. ...
           Call me Ishmael. Some years ago ...                         the haystack, up to the depth
           One of the special magic numbers for quiet-harbor is: 4812207.
           ... never mind how long precisely ...                       the rest of it
question   What is the special magic number for quiet-harbor mentioned in the provided text? The special magic number
           for quiet-harbor mentioned in the provided text is
target      4812207
```

The needle's sentences are RULER's (Hsieh et al. 2024, arXiv:2404.06654, appendix B), at chosen depths as in
Kamradt 2023, github.com/gkamradt/LLMTest_NeedleInAHaystack. All examples share the haystack, so what is before a needle
is read once for all that have it at the same depth or deeper.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from regard.errors import ProblemError
from regard.evaluate import prompts
from regard.evaluate.haystack import MOBY_DICK, Haystack, haystack, sentences_setting
from regard.evaluate.models import Model
from regard.evaluate.task import Cell, Question, generator, prompt_parts
from regard.evaluate.tokens import Tokenizer

LENGTHS = (512, 1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Needle:
    """A needle in a haystack: a seven-digit number of a key, at each depth of texts of each length.

    Attributes:
        lengths: tokens of the whole prompt with the answer.
        depths: shares of the haystack before the needle; the needle follows the sentence that ends there or before.
        samples: examples of each length and depth.
        haystack: `moby-dick`, `noise`, or a file.
        chat: whether the prompt is a question in the model's chat template.

    >>> Needle(lengths=(512,), samples=3)
    Needle(lengths=(512,), depths=(0.0, 0.25, 0.5, 0.75, 1.0), samples=3, seed=0, haystack='moby-dick', chat=False)
    """

    name: ClassVar[str] = "needle"
    axes: ClassVar[tuple[str, ...]] = ("depth", "length")
    source: ClassVar[str] = "RULER's needle (Hsieh et al. 2024, arXiv:2404.06654) at the depths of Kamradt 2023"

    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    samples: int = 10
    seed: int = 0
    haystack: str = MOBY_DICK
    chat: bool = False

    def of_text(self) -> dict[str, int]:
        """Its sentences, for results."""
        return sentences_setting(self.haystack)

    def examples(self, model: Model) -> Iterator[Question]:
        """The examples by length, then by depth: each shares its prefix with the next ones."""
        hay = haystack(self.haystack, model.tokenizer, max(self.lengths))
        for length, depth, sample in itertools.product(self.lengths, self.depths, range(self.samples)):
            yield self._example(model.tokenizer, hay, length, depth, sample)

    def _example(self, tokenizer: Tokenizer, hay: Haystack, length: int, depth: float, sample: int) -> Question:
        name = f"{length}/{depth:g}/{sample}"
        by = generator(self, name)
        key, value = prompts.draw("words", by), prompts.draw("numbers", by)
        parts = prompts.niah("numbers", [key], 1)
        needle = f" {prompts.needle('numbers', key, value)}"
        hidden = Hidden(parts, needle, value, self.chat)
        return hidden.example(tokenizer, hay, name, {"length": length, "depth": depth})


@dataclass(frozen=True)
class Hidden:
    """A needle, and the question about it.

    Attributes:
        prompt: the texts around the haystack.
        needle: the text that is hidden, with its space.
        answer: the expected text.
        chat: whether the prompt is a question in the model's chat template.
    """

    prompt: prompts.Prompt
    needle: str
    answer: str
    chat: bool

    def example(self, tokenizer: Tokenizer, hay: Haystack, name: str, cell: Cell) -> Question:
        """The needle at the cell's depth of a haystack, so that prompt and answer have the cell's length.

        Raises:
            ProblemError: the length has no room for the prompt.
        """
        length, depth = int(cell["length"]), float(cell["depth"])
        before, close = prompt_parts(tokenizer, self.chat, self.prompt.before)
        needle = tokenizer.encode_after(self.needle)
        question, target = prompts.question_and_target(tokenizer, self.prompt, self.answer, close)
        room = length - sum(map(len, (before, needle, question, target)))
        if room < 0:
            raise ProblemError(
                f"a prompt of {length} tokens has no room: without a haystack it has {length - room} already. Expected "
                "lengths of more than that."
            )
        cut = hay.cut(room, depth)
        context = [*before, *hay.tokens[:cut], *needle, *hay.tokens[cut:room]]
        return Question(name, cell, tuple(context), tuple(question), tuple(target), (self.answer,))


@dataclass(frozen=True)
class Passkey:
    """A pass key of five digits in noise, at each depth of texts of each length. The attributes are those of `Needle`.

    >>> Passkey(lengths=(512,), samples=3)
    Passkey(lengths=(512,), depths=(0.0, 0.25, 0.5, 0.75, 1.0), samples=3, seed=0, haystack='noise', chat=False)
    """

    name: ClassVar[str] = "passkey"
    axes: ClassVar[tuple[str, ...]] = ("depth", "length")
    source: ClassVar[str] = "Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2"

    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    samples: int = 10
    seed: int = 0
    haystack: str = "noise"
    chat: bool = False

    def of_text(self) -> dict[str, int]:
        """Its sentences, for results."""
        return sentences_setting(self.haystack)

    def examples(self, model: Model) -> Iterator[Question]:
        """The examples by length, then by depth."""
        hay = haystack(self.haystack, model.tokenizer, max(self.lengths))
        for length, depth, sample in itertools.product(self.lengths, self.depths, range(self.samples)):
            name = f"{length}/{depth:g}/{sample}"
            key = str(generator(self, name).randint(10**4, 10**5 - 1))
            needle = f" The pass key is {key}. Remember it. {key} is the pass key."
            hidden = Hidden(PASSKEY, needle, key, self.chat)
            yield hidden.example(model.tokenizer, hay, name, {"length": length, "depth": depth})


PASSKEY = prompts.Prompt(
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there.\n",
    "\nWhat is the pass key?",
    "The pass key is",
)


@dataclass(frozen=True)
class KeyValues:
    """The value of a key among pairs of UUIDs in JSON, by the position of the pair.

    Attributes:
        pairs: numbers of pairs.
        depths: positions of the queried pair, as shares of the list: 0 is the first pair, 1 the last.
        samples: examples of each number and position.
        chat: whether the prompt is a question in the model's chat template.
    """

    name: ClassVar[str] = "key-values"
    axes: ClassVar[tuple[str, ...]] = ("depth", "pairs")
    source: ClassVar[str] = "Liu et al. 2023, Lost in the Middle, arXiv:2307.03172, section 3"

    pairs: tuple[int, ...] = (10, 25, 50)
    depths: tuple[float, ...] = DEPTHS
    samples: int = 10
    seed: int = 0
    chat: bool = False

    def examples(self, model: Model) -> Iterator[Question]:
        """The examples by number of pairs; the positions of one sample share their pairs before them."""
        for pairs, sample in itertools.product(self.pairs, range(self.samples)):
            by = generator(self, f"{pairs}/{sample}")
            keys, values = prompts.distinct("uuids", pairs, by), prompts.distinct("uuids", pairs, by)
            lines = ",\n ".join(f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True))
            before = f"Extract the value corresponding to the specified key in the JSON object below.\n\n{{{lines}}}\n"
            context, close = prompt_parts(model.tokenizer, self.chat, before)
            for depth in self.depths:
                place = round(depth * (pairs - 1))
                prompt = prompts.Prompt("", f'\nKey: "{keys[place]}"\nCorresponding value:', "")
                question, target = prompts.question_and_target(model.tokenizer, prompt, f'"{values[place]}"', close)
                name, cell = f"{pairs}/{depth:g}/{sample}", {"pairs": pairs, "depth": depth}
                yield Question(name, {**cell}, tuple(context), tuple(question), tuple(target), (values[place],))
