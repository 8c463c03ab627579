"""What a model says to an example: scores of questions, losses of passages; with prefixes read once for many examples.

A trunk is a reader of the prefix that the next examples share. It ends where a piece ends (`Model.piece_end`) or where
the context does, so that an example is read in the same pieces with the trunk and without, and its logits have the same
bits.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.errors import ProblemError
from regard.evaluate.common_prefix import common_prefix
from regard.evaluate.models import Model, Reader
from regard.evaluate.task import Cell, Example, Passage, Question

Answer = dict[str, Any]
"""What is recorded of an example: score, nll, text; or the mean losses of its buckets."""


def answers(model: Model, examples: Sequence[Example], *, share: bool = True) -> Iterator[tuple[Example, Answer]]:
    """Each example with what the model says to it, in this order.

    Args:
        share: whether common prefixes of neighbours are read once; the answers are the same.
    """
    trunk = Trunk(model)
    if model.cache is not None and model.cache.with_question:
        examples = [with_question(each) if isinstance(each, Question) else each for each in examples]
    for example, after in itertools.zip_longest(examples, examples[1:]):
        check_fits(model, example)
        if isinstance(example, Passage):
            yield example, losses(model, example)
        else:
            following = after if share and isinstance(after, Question) else None
            reader = trunk.reader_of(example.context, None if following is None else following.context)
            yield example, answered(model, reader, example)


def check_fits(model: Model, example: Example) -> None:
    """Raise `ProblemError` for an example that is longer than the model or has tokens that it does not know.

    Also for a passage that is read whole before the policy of its cache evicts.
    """
    is_question = isinstance(example, Question)
    after = max(len(example.target), example.new_tokens) if is_question else -1  # the last of a passage is not read
    count = len(example.tokens) + after
    has_limit = model.needs_positions or (is_question and not _forgets(model))
    if model.positions is not None and has_limit and count > model.positions:
        raise ProblemError(
            f"the example {example.name} {'has' if is_question else 'reads'} {count:,} tokens, and {model.label} has "
            f"{model.positions:,} positions: give {_shorter(example.cell, model.positions)}."
        )
    most = max((*example.tokens, *(example.target if is_question else ())), default=0)
    if model.vocabulary is not None and most >= model.vocabulary:
        raise ProblemError(
            f"the example {example.name} has the token {most:,}, and {model.label} knows {model.vocabulary:,}: "
            f"{_known_tokens(example)}."
        )
    if isinstance(example, Passage) and model.cache is not None and model.cache.with_question:
        raise ProblemError(
            f"the example {example.name} has no question after which a policy could evict: leave --with-question out."
        )
    policy = None if model.cache is None else model.cache.evict
    if policy is not None and isinstance(example, Passage) and not example.is_stream:
        raise ProblemError(
            f"the policy {policy} would evict after the whole example {example.name}, and change none of its losses: "
            "give the task stream, in which it evicts all the time, or leave the policy out."
        )


def check_written(model: Model, example: Example) -> None:
    """Raise `ProblemError` for answers that the tokenizer cannot write: they are neither in the prompt nor generated.

    The expected tokens would be unknown ones, and a model that always predicts these would be right.
    """
    if not isinstance(example, Question):
        return
    lost = [answer for answer in example.answers if not model.tokenizer.writes(answer)]
    if lost and (not example.any_answer or len(lost) == len(example.answers)):
        made = model.tokenizer.decode(model.tokenizer.encode_after(f" {lost[0]}"))
        raise ProblemError(
            f"the tokenizer makes {made!r} of {lost[0]!r}, an answer of the example {example.name}, so that no text "
            "has it. Give a tokenizer with these letters and digits, or None for UTF-8 bytes."
        )


def _shorter(cell: Cell, positions: int) -> str:
    """What makes the examples of a task shorter, in its own options."""
    if "trained" in cell:
        return "fewer --multiples"
    for key in ("pairs", "documents"):
        if key in cell:
            return f"fewer --{key}"
    option = "context" if "context" in cell else "lengths" if "length" in cell else ""
    return f"shorter texts, such as --{option} {positions}" if option else "shorter texts"


def _known_tokens(example: Example) -> str:
    """What gives an example the tokens of the model, in options of its task."""
    is_recall = isinstance(example, Question) and "pairs" in example.cell and not example.answers
    return "give a smaller --vocabulary" if is_recall else "give the tokenizer of the model"


def with_question(example: Question) -> Question:
    """The same prompt, whose context has all of the question but its last token."""
    return dataclasses.replace(example, context=example.tokens[:-1], question=example.tokens[-1:])


def check_numbers(logits: Tensor, example: Example, targets: Sequence[int] = ()) -> None:
    """Raise `ProblemError` for logits that give no probabilities, or none for the expected tokens."""
    if not logits.numel():
        return
    if not bool((best := logits.amax(-1)).isfinite().all()):  # -inf for some tokens is a probability of 0
        kind = "NaN" if bool(best.isnan().any()) else "infinite"
        raise ProblemError(
            f"the model's logits for the example {example.name} are {kind}, whose order means "
            "nothing. A wider --dtype may help."
        )
    if (most := max(targets, default=0)) >= logits.shape[-1]:
        raise ProblemError(
            f"the example {example.name} has the token {most:,}, and the model gave logits of {logits.shape[-1]:,} "
            f"tokens: {_known_tokens(example)}."
        )


def finite(value: float) -> float | None:
    """The value; None for an infinite one, as JSON has no infinity: a token with the probability 0.

    >>> finite(1.5), finite(float("inf"))
    (1.5, None)
    """
    return value if math.isfinite(value) else None


def _forgets(model: Model) -> bool:
    """Whether positions stay within the model's, however long the text: those of a rolling cache are its slots."""
    window = getattr(model.cache and model.cache.layout, "window", None)
    return window is not None and model.positions is not None and window <= model.positions


# ---- the shared prefix ----------------------------------------------------------------------------------------------


class Trunk:
    """A reader of the prefix that neighbours share."""

    def __init__(self, model: Model) -> None:
        self.model, self.ids, self.reader = model, tuple[int, ...](), model.start()

    def reader_of(self, context: Sequence[int], after: Sequence[int] | None) -> Reader:
        """A reader that has read this context; the trunk grows to what the next context shares with it."""
        context = tuple(context)
        if context[: len(self.ids)] != self.ids:
            self.ids, self.reader = (), self.model.start()
        shared = 0 if after is None else self._shared(context, tuple(after))
        if shared > len(self.ids):
            self.model.read(self.reader, len(self.ids), context[len(self.ids) : shared], 0)
            self.ids = context[:shared]
        is_last = after is None or shared < len(self.ids)  # the trunk is of no use to the next example
        reader, start = (self.reader if is_last else self.reader.copy()), len(self.ids)
        if is_last:
            self.ids, self.reader = (), self.model.start()
        if context[start:]:
            self.model.read(reader, start, context[start:], 0)
        return reader

    def _shared(self, context: tuple[int, ...], after: tuple[int, ...]) -> int:
        if context == after:
            return len(context)
        return self.model.shared(common_prefix(context, after))


# ---- questions ------------------------------------------------------------------------------------------------------


def answered(model: Model, reader: Reader, example: Question) -> Answer:
    """The score of a question whose context was read: by generated text, or by the answer's tokens."""
    if example.new_tokens:
        text, score = generated(model, reader, example)
        return {"score": score, "text": text}
    logits = target_logits(model, reader, example)
    check_numbers(logits, example, example.target)
    target = torch.tensor(example.target)
    top, nll = logits.argmax(-1), F.cross_entropy(logits.double(), target, reduction="none")
    ties = (logits == logits.gather(-1, target[:, None])).sum(-1)  # equal logits are drawn from, in expectation
    right = (logits.gather(-1, target[:, None])[:, 0] >= logits.max(-1).values) / ties
    score = float(right.double().prod())
    text = model.tokenizer.decode(top.tolist())
    return {"score": 1.0 if score == 1 else score, "nll": finite(float(nll.sum())), "text": text}


def target_logits(model: Model, reader: Reader, example: Question) -> Tensor:
    """The logits of each token of the answer after those before it, [target, vocabulary]."""
    start, target = len(example.context), example.target
    if not model.is_stepwise:
        return model.read(reader, start, example.question + target[:-1], len(target))
    found = [model.read(reader, start, example.question, 1)]
    start += len(example.question)
    found += [reader.read([token], 1) for token in target[:-1]]
    return torch.cat(found)


def generated(model: Model, reader: Reader, example: Question) -> tuple[str, float]:
    """The text of greedy decoding, and its score. It ends early once every answer is in it: the score stays the same.

    An answer counts as it is, and as the tokenizer spells it.
    """
    logits = model.read(reader, len(example.context), example.question, 1)
    spellings = [(answer, model.tokenizer.spelled(answer)) for answer in example.answers]
    tokens, text, score = list[int](), "", 0.0
    for count in range(1, example.new_tokens + 1):
        check_numbers(logits, example)
        token = int(logits[0].argmax())
        if token in model.tokenizer.end:
            break
        tokens.append(token)
        text = model.tokenizer.decode(tokens)
        found = [answer if found_in(text, [answer]) else spelled for answer, spelled in spellings]
        score = found_in(text, found, any_of=example.any_answer)
        if count == example.new_tokens or score == 1:
            break
        logits = reader.read([token], 1)
    return text, score


def found_in(text: str, answers: Sequence[str], *, any_of: bool = False) -> float:
    """The share of answers that are in the text, whatever their case; with `any_of`, 1 if one of them is.

    RULER's string_match_all and string_match_part for one text: Hsieh et al. 2024, arXiv:2404.06654, section 4.

    >>> found_in("They are 12 and 34.", ["34", "56"]), found_in("Blue", ["blue", "red"], any_of=True)
    (0.5, 1.0)
    """
    hits = [answer.lower() in text.lower() for answer in answers]
    return float(any(hits)) if any_of else sum(hits) / len(hits)


# ---- passages -------------------------------------------------------------------------------------------------------


def losses(model: Model, passage: Passage) -> Answer:
    """The mean loss of each bucket of tokens, in nats, and their counts."""
    reader, tokens, start = model.start(), passage.tokens, 0
    found = list[Tensor]()
    while start < len(tokens) - 1:
        stop = min(model.piece_end(start, is_stream=passage.is_stream) or len(tokens), len(tokens) - 1)
        last = min(stop - start, max(0, stop - passage.first + 1))
        logits = reader.read(tokens[start:stop], last)
        expected = tokens[stop - last + 1 : stop + 1]
        check_numbers(logits, passage, expected)
        if last:
            target = torch.tensor(expected)
            found.append(F.cross_entropy(logits.double(), target, reduction="none"))
        start = stop
    scored = torch.cat(found)
    edges = sorted({*range(0, len(scored), passage.bucket), *(at for at in passage.cuts if 0 < at < len(scored))})
    parts = scored.tensor_split(edges[1:])
    means, counts = [finite(float(part.mean())) for part in parts], [len(part) for part in parts]
    return {"first": passage.first, "losses": means, "counts": counts}
