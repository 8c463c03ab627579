"""Losses by position: beyond the length of training, in sliding windows, of a stream under any cache.

Losses are negative log-likelihoods in nats; a perplexity is the exponential of their mean. A passage of a text gives
one mean for each bucket of positions, and the intervals are over passages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from regard.errors import ProblemError
from regard.evaluate.corpus import spread
from regard.evaluate.haystack import MOBY_DICK, read
from regard.evaluate.loss_results import parts_of
from regard.evaluate.models import Model
from regard.evaluate.task import Cell, Passage

BUCKETS = 64
"""Buckets of a passage, at most: points of the picture."""


class _Placed:
    """A task whose passages are chosen by their places in the text."""

    @property
    def seed(self) -> int:
        """Nothing is drawn."""
        return 0


@dataclass(frozen=True)
class Extrapolation(_Placed):
    """Losses at 1, 2, 4 and 8 times the length of training, of the same passages.

    One pass over a passage gives all of them: a token's loss depends on those before it only.

    Attributes:
        trained: tokens of the texts that the model was trained on; 0: the positions of its config.
        multiples: lengths as multiples of it; the largest is the length of the passages.
        samples: passages, spread over the text.
        haystack: the text: `moby-dick`, or a file.
    """

    name: ClassVar[str] = "extrapolation"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    source: ClassVar[str] = "Press et al. 2022, arXiv:2108.12409, section 2"

    trained: int = 0
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    samples: int = 10
    haystack: str = MOBY_DICK

    def examples(self, model: Model) -> Iterator[Passage]:
        """Passages of the largest multiple."""
        trained = self.trained or model.positions
        if trained is None:
            raise ProblemError("the length of training is unknown: give --trained, such as 512.")
        length = trained * max(self.multiples)
        bucket = max(1, min(trained // 8, length // BUCKETS) or 1)
        cuts = tuple(at for k in self.multiples for at in (k * trained // 2, k * trained))
        for i, tokens in enumerate(passages(model, self.haystack, self.samples, length + 1)):
            cell: Cell = {"length": length, "trained": trained}
            yield Passage(f"{length}/{i}", cell, tokens, bucket=bucket, cuts=cuts)


@dataclass(frozen=True)
class Perplexity(_Placed):
    """The perplexity of a text in sliding windows: each token sees `context - stride` tokens or more.

    Attributes:
        context: tokens of a window; 0: the positions of the model.
        stride: tokens between windows, which are the scored ones of each; 0: half of the context.
        lengths: tokens of the text that are read, from its beginning. Each is a row of the results; their total is
            that of the longest, of which the others are beginnings, so that no token counts twice.
        haystack: the text: `moby-dick`, or a file.
    """

    name: ClassVar[str] = "perplexity"
    axes: ClassVar[tuple[str, ...]] = ("context",)
    source: ClassVar[str] = "Baevski and Auli 2019, arXiv:1809.10853, section 5.2: a context window that slides"

    context: int = 0
    stride: int = 0
    lengths: tuple[int, ...] = (16384,)
    haystack: str = MOBY_DICK
    samples: ClassVar[int] = 1

    def examples(self, model: Model) -> Iterator[Passage]:
        """The windows; the last one ends with the text."""
        context = self.context or model.positions
        if context is None:
            raise ProblemError("the positions of the model are unknown: give --context, such as 512.")
        stride = self.stride or max(1, context // 2)
        if stride > context:
            raise ProblemError(f"a stride of {stride} skips tokens of a context of {context}: give a stride below it.")
        for length in self.lengths:
            (tokens,) = passages(model, self.haystack, 1, length + 1)
            scored = 1  # tokens[scored:] are to be scored
            for number, end in enumerate(_ends(length, context, stride)):
                begin = max(0, end - context)
                part = tokens[begin : end + 1]
                cell: Cell = {"context": context, "length": length, "start": scored}
                bucket, cuts = min(stride, max(1, length // BUCKETS)), tuple(1 + at - scored for at in parts_of(length))
                yield Passage(f"{length}/{number}", cell, part, scored - begin, bucket, cuts)
                scored = end + 1


def _ends(length: int, context: int, stride: int) -> Iterator[int]:
    """The last predicted token of each window.

    >>> list(_ends(10, 4, 3))
    [4, 7, 10]
    """
    end = min(context, length)
    yield end
    while end < length:
        end = min(end + stride, length)
        yield end


@dataclass(frozen=True)
class Stream(_Placed):
    """Losses of a long text that is read without an end, under any cache: a window, with sinks, quantised, evicting.

    Attributes:
        lengths: tokens of each passage; longer than the model where a cache forgets. Each is a row of the results;
            their total is that of the longest, since passages of all lengths begin at the same places.
        samples: passages, spread over the text.
        haystack: the text: `moby-dick`, or a file.
    """

    name: ClassVar[str] = "stream"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    source: ClassVar[str] = "Xiao et al. 2023, arXiv:2309.17453, section 4.1"

    lengths: tuple[int, ...] = (4096,)
    samples: int = 4
    haystack: str = MOBY_DICK

    def examples(self, model: Model) -> Iterator[Passage]:
        """Passages by length."""
        for length in self.lengths:
            bucket, cuts = max(1, length // BUCKETS), tuple(parts_of(length))
            for i, tokens in enumerate(passages(model, self.haystack, self.samples, length + 1)):
                cell: Cell = {"length": length}
                yield Passage(f"{length}/{i}", cell, tokens, bucket=bucket, cuts=cuts, is_stream=True)


def passages(model: Model, text: str, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Passages of a text, spread evenly over it, the first at its beginning.

    Raises:
        ProblemError: the text is too short for them.
    """
    start = model.tokenizer.start
    ids = torch.tensor(model.tokenizer.encode(read(text)))
    return [start + tuple(row) for row in spread(ids, count, tokens - len(start)).tolist()]
