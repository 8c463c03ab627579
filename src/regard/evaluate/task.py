"""What a task is: examples with seeds, where each belongs in the results, and how it is scored.

```
Question   context, question -> answer     scored by the answer's tokens, or by what the model generates
Passage    tokens                          scored by the loss of each token
```

A task is a frozen dataclass whose fields are its settings. The same settings and tokenizer give the same examples, and
each example has a random generator of its own: what was drawn for one does not change with the number of others.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from os import PathLike, fspath
from typing import Any, ClassVar, Protocol, cast

from regard.errors import ProblemError
from regard.evaluate.models import Model
from regard.evaluate.tokens import Tokenizer

Cell = dict[str, int | float | str]
"""Where an example belongs in the results: {"length": 1024, "depth": 0.5}."""

SPARE = 8
"""Tokens to generate beyond those of an answer: it may begin with a space or a quotation mark."""


@dataclass(frozen=True)
class Question:
    """A text, a question about it, and the answer.

    Attributes:
        name: unique in the task.
        cell: where it belongs in the results.
        context: tokens that are read first; a cache may evict after them.
        question: tokens after the context.
        target: tokens of the answer; empty where the answer is only looked for in what the model generates.
        answers: texts that are looked for in what the model generates.
        new_tokens: tokens to generate at most; 0: the answer is right if each of its tokens is the most probable one,
            which is what greedy decoding would give.
    """

    name: str
    cell: Cell
    context: tuple[int, ...]
    question: tuple[int, ...]
    target: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    new_tokens: int = 0
    any_answer: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the prompt."""
        return self.context + self.question


@dataclass(frozen=True)
class Passage:
    """Tokens whose loss is measured.

    Attributes:
        name: unique in the task.
        cell: where it belongs in the results.
        tokens: the text; each is predicted from those before it.
        first: the first token that is scored, from 1.
        bucket: scored tokens of each mean that is recorded, at most.
        cuts: scored tokens, counted from 0, with which a new mean begins besides, such as the edges of what is shown.
        is_stream: whether a cache that evicts does so all the time, and not after the whole text only.
    """

    name: str
    cell: Cell
    tokens: tuple[int, ...]
    first: int = 1
    bucket: int = 64
    cuts: tuple[int, ...] = ()
    is_stream: bool = False


Example = Question | Passage


class Task(Protocol):
    """A task: a frozen dataclass with these members.

    Attributes:
        name: as in `regard evaluate NAME`.
        axes: the keys of `Example.cell` that results are grouped by; rows first.
        source: where it is defined.
        samples: examples of each cell.
        seed: of all that is drawn.
    """

    name: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    source: ClassVar[str]

    @property
    def samples(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def examples(self, model: Model) -> Iterator[Example]:
        """The examples for this model, in an order in which neighbours share long prefixes."""
        ...


COUNTS = ("lengths", "pairs", "documents", "multiples")
"""Settings that are whole numbers from 1 on, one or more of them."""

OWN = ("context", "stride", "trained")
"""Settings that are one whole number; 0: that of the model."""

TEXTS = ("haystack", "questions")
"""Settings that are a name or the path of a file."""


def check_is_task(task: Any) -> None:
    """Raise `ProblemError` for what is no task."""
    if isinstance(task, type) or not is_dataclass(task) or not hasattr(task, "examples"):
        name = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
        raise ProblemError(
            f"the task is {name}: expected a task with its settings, such as Needle() or task_of('needle')."
        )


def check_settings(task: Any) -> None:
    """Raise `ProblemError` for settings of a task of regard that no text can have.

    >>> from regard.evaluate.retrieval import Passkey
    >>> check_settings(Passkey(depths=(0.5, 2.0)))
    Traceback (most recent call last):
    regard.errors.ProblemError: depths has 2.0: expected numbers from 0 to 1, shares of the text.
    """
    for name in COUNTS:
        values = getattr(task, name, (1,))
        if not isinstance(values, tuple | list) or not values:
            raise ProblemError(
                f"{name} is {values!r}: expected one or more whole numbers from 1 on, such as (512, 1024)."
            )
        for value in values:
            if not _is_count(value):
                raise ProblemError(f"{name} has {value!r}: expected whole numbers from 1 on.")
    _check_depths(getattr(task, "depths", (0.0,)))
    for name in (*COUNTS, "depths"):
        _check_once(name, getattr(task, name, ()))
    for name in OWN:
        if not _is_count(value := getattr(task, name, 0), least=0):
            raise ProblemError(f"{name} is {value!r}: expected a whole number from 1 on, or 0 for that of the model.")
    for name in TEXTS:
        value = getattr(task, name, "")
        if not isinstance(value, str | PathLike) and (name, value) != ("questions", None):
            raise ProblemError(f"{name} is {value!r}: expected a name or the path of a file, such as 'book.txt'.")
    for name, value in (("samples", getattr(task, "samples", None)), ("vocabulary", getattr(task, "vocabulary", 1))):
        if not _is_count(value):
            raise ProblemError(f"{name} is {value!r}: expected a whole number from 1 on.")


def _check_depths(depths: Any) -> None:
    if not isinstance(depths, tuple | list) or not depths:
        raise ProblemError(f"depths is {depths!r}: expected one or more numbers from 0 to 1, such as (0.0, 0.5, 1.0).")
    for depth in cast("Sequence[Any]", depths):
        if not isinstance(depth, int | float) or not 0 <= depth <= 1:
            raise ProblemError(f"depths has {depth!r}: expected numbers from 0 to 1, shares of the text.")


def _check_once(name: str, values: "Sequence[float]") -> None:
    """Raise `ProblemError` where a value is repeated: its rows would be the same."""
    if twice := [value for i, value in enumerate(values) if value in values[:i]]:
        raise ProblemError(f"{name} has {twice[0]!r} more than once: expected each value once.")


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def settings(task: Any) -> dict[str, Any]:
    """The name and all settings of a task, as JSON has them, with what it says of its text besides (`of_text`)."""
    fields = {key if key != "task" else "task.task": _plain(value) for key, value in asdict(task).items()}
    return {"task": task.name} | fields | getattr(task, "of_text", dict[str, Any])()


def check_storable(found: dict[str, Any]) -> None:
    """Raise `ProblemError` for settings that a file cannot hold, so that they could not be compared.

    >>> check_storable({"task": "own", "words": {"a"}})
    Traceback (most recent call last):
    regard.errors.ProblemError: words is {'a'}: expected what JSON can hold, such as a number, a text or a list ...
    """
    for name, value in found.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ProblemError(
                f"{name} is {value!r}: expected what JSON can hold, such as a number, a text or a list of them, as the "
                "file of results has all settings of the task."
            ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, PathLike):
        return fspath(cast("PathLike[str]", value))
    return list(value) if isinstance(value, tuple) else value


def generator(task: Any, name: str) -> random.Random:
    """The random generator of an example: of the task's seed, its name and the example's.

    >>> from regard.evaluate.retrieval import Passkey
    >>> generator(Passkey(), "a").random() == generator(Passkey(), "a").random()
    True
    """
    return random.Random(f"{task.seed}/{task.name}/{name}")  # noqa: S311  no secret


def prompt_parts(tokenizer: Tokenizer, chat: bool, text: str) -> tuple[list[int], list[int]]:
    """(the tokens of a text that begins a prompt, those after the question), with those of the chat template."""
    if not chat:
        return [*tokenizer.start, *tokenizer.encode(text)], []
    if tokenizer.chat is None:
        raise ProblemError(tokenizer.no_chat)
    before, after = tokenizer.chat
    return [*tokenizer.encode(before), *tokenizer.encode_after(text)], tokenizer.encode_after(after)
