"""`measure`: some measures of every head of a model."""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.circuits import Parts, parts_of
from regard.inspect.measures.means import Tokens, token_ids
from regard.inspect.measures.measure import Measure, Text, compute
from regard.inspect.measures.score import HeadScores
from regard.inspect.measures.stimulus import plain_tokens
from regard.inspect.observing.observe import Look
from regard.inspect.plot import heat_map, html_table
from regard.inspect.surveying.inputs import (
    REPEATED,
    InputReader,
    no_circuits,
    projected_modules,
    repeated_tokens,
    self_attention,
)
from regard.inspect.surveying.model import prepared, surveyed_model
from regard.inspect.surveying.selection import layer_numbers, named_measures
from regard.integrate.checkpoint import tokenizer_of
from regard.integrate.evaluation_mode import evaluating
from regard.integrate.position_tables import context_of


@brief
@dataclass(frozen=True, eq=False)
class Measured:
    """One measure of every head of a model.

    Attributes:
        value, chance: the score and that of uniform attention, float64 [layers, heads]; NaN where there is none.
        low, high: the 95 % interval over sequences or blocks of rows, [layers, heads].
        at: for a score that is the best of several, which one, [layers, heads]; None for other measures. Of several
            texts, each of which has its own best, that of most of them.
        layers: the layer number of each row.
    """

    measure: Measure
    value: Tensor
    chance: Tensor
    low: Tensor
    high: Tensor
    at: Tensor | None
    layers: tuple[int, ...]

    @classmethod
    def of(cls, measure: Measure, scores: Mapping[int, HeadScores]) -> "Measured":
        """The result of a measure, from the scores of each layer by its number."""
        intervals = [score.interval() for score in scores.values()]
        at = [found for score in scores.values() if (found := score.most_common_at()) is not None]
        return cls(
            measure,
            _stack(score.mean() for score in scores.values()),
            _stack(score.mean_chance() for score in scores.values()),
            _stack(interval.low for interval in intervals),
            _stack(interval.high for interval in intervals),
            _stack(at) if at else None,
            tuple(scores),
        )

    def top(self, count: int) -> list[tuple[str, float]]:
        """The heads with the greatest scores, as ("18.6", score)."""
        flat = self.value.nan_to_num(-torch.inf).flatten()
        order = flat.argsort(descending=True, stable=True)[:count].tolist()
        heads = self.value.shape[1]
        places = [(self.layers[place // heads], place % heads, float(flat[place])) for place in order]
        return [(f"{layer}.{head}", value) for layer, head, value in places if value > -torch.inf]

    def plot(self, ax: Any = None) -> Any:
        """Draw the scores, a row per layer and a column per head, and return the matplotlib `Axes`.

        Raises:
            RefusalError: matplotlib is not installed.
        """
        title = f"{self.measure.label} ({self.measure.unit})"
        return heat_map(self.value, title=title, x="head", y="layer", y_ticks=list(map(str, self.layers)), ax=ax)

    def _repr_html_(self) -> str:
        """The heads with the greatest scores as a small table."""
        layers, heads = self.value.shape
        rows = []
        for name, value in self.top(8):
            layer, head = map(int, name.split("."))
            low, high, chance = (float(t[self.layers.index(layer), head]) for t in (self.low, self.high, self.chance))
            rows.append([name, f"{value:.3f}", f"{low:.3f} to {high:.3f}", f"{chance:.3f}"])
        title = f"{self.measure.label}, {layers} layers x {heads} heads: the largest"
        return html_table(title, ["head", self.measure.unit, "95 % interval", "chance"], rows)


def measure(
    model: nn.Module,
    text_or_ids: str | Sequence[str] | Mapping[str, Any] | Tokens,
    measures: Sequence[str | Measure] | str | Measure,
    *,
    tokenizer: Any = None,
    layers: Collection[int] | int | None = None,
) -> dict[str, Measured]:
    """Some measures of every head of a model, by their keys: [layers, heads] with intervals and chance values.

    A measure that is defined on random repeated tokens (`Measure.on`: induction, duplicate ...) is computed on those,
    as a survey does; the others on the text. A pass is made per kind of text that is needed; the model is restored
    afterwards.

    Args:
        model: a model of transformers, or of regard (`regard.nn.Decoder`).
        text_or_ids: a text or several, for which a tokenizer is needed; token ids, integer [tokens] or [batch, tokens];
            or what a tokenizer returned, with `input_ids`. Several texts have the same number of tokens, as padding
            would count as text.
        measures: keys of `regard.inspect.MEASURES`, and `Measure` values of your own.
        tokenizer: tokenises the text, and determines which tokens are drawn for repeats. None: for a text, the one that
            `regard.integrate.load` returned with the model.
        layers: layer numbers from 0, or one; None for all. They are those of a survey.

    Raises:
        ProblemError: no measures, or no such measure, a text without a tokenizer, no tokens, texts of several lengths,
            padding, more tokens than a model has positions, an unsupported measure, or a layer that does not attend.

    >>> from regard.nn import Decoder
    >>> _ = torch.manual_seed(0)
    >>> model = Decoder(97, 32, layers=2, heads=4)
    >>> def two_back(tokens):  # the pairs that count: each token and the one two before it
    ...     return torch.arange(2, len(tokens)), torch.arange(len(tokens) - 2)
    >>> mine = Measure.of_pattern("two_back", two_back)
    >>> found = measure(model, torch.arange(1, 24), ["induction", "sink", mine])
    >>> found["sink"].value.shape, found["two_back"].low.shape, list(found)
    (torch.Size([2, 4]), torch.Size([2, 4]), ['induction', 'sink', 'two_back'])
    """
    chosen, numbers = named_measures(measures), layer_numbers(layers)
    if not chosen:
        raise ProblemError("measures is empty: name some, such as ['sink', 'induction'] (regard.inspect.MEASURES).")
    if tokenizer is None and _is_text(text_or_ids) and isinstance(cast(object, model), torch.nn.Module):
        tokenizer = tokenizer_of(model)
    with torch.no_grad(), _running(model) as (running, run):
        texts = _texts(model, text_or_ids, chosen, tokenizer)
        scores: dict[str, dict[int, HeadScores]] = {measure.key: {} for measure in chosen}
        for text, ids in texts.items():
            here = tuple(measure for measure in chosen if measure.on == text)
            projected = projected_modules(running, here, ids, run)
            reader = InputReader(running, here, projected, _parts(model, here), _drawn_from(model, tokenizer), _refuse)

            def each(number: int, look: Look, reader: InputReader = reader, ids: Tensor = ids) -> dict[str, HeadScores]:
                inputs = reader.inputs(look, ids)
                possible = reader.possible(inputs)
                _refuse([m for m in reader.measures if m not in possible], "the model lacks an input that they need")
                return compute(possible, inputs)

            for layer in self_attention(running, ids, each, numbers, run=run):
                for key, score in layer.value.items():
                    scores[key][layer.layer] = score
    return {measure.key: Measured.of(measure, scores[measure.key]) for measure in chosen}


def _texts(model: Any, text_or_ids: object, measures: Iterable[Measure], tokenizer: Any) -> dict[Text, Tensor]:
    """The tokens of each kind of text that the measures are defined on, int64 [batch, tokens]."""
    needed, device = {measure.on for measure in measures}, next(model.parameters()).device
    found: dict[Text, Tensor] = {"text": _ids(text_or_ids, tokenizer)}
    if "text" in needed:
        _check_length(model, found["text"].shape[1])
    if needed & set(REPEATED):
        first = getattr(tokenizer, "bos_token_id", None)
        context = context_of(model) if hasattr(model, "config") else None
        drawn = repeated_tokens(_drawn_from(model, tokenizer), first, context)
        if drawn is None:
            raise ProblemError("the vocabulary or the context of the model is too small for random repeated tokens.")
        found |= drawn
    return {text: ids.to(device) for text, ids in found.items() if text in needed}


def _is_text(given: object) -> bool:
    """Whether it is a text, or a list of texts."""
    several = [given] if isinstance(given, str) else given
    return isinstance(several, list | tuple) and bool(several) and all(isinstance(one, str) for one in several)


def _ids(given: Any, tokenizer: Any) -> Tensor:
    if _is_text(given):
        if tokenizer is None:
            raise ProblemError("text_or_ids is a text and there is no tokenizer: pass tokenizer=..., or token ids.")
        given = tokenizer(given, verbose=False)
    ids = token_ids(_encoded(given) if isinstance(given, Mapping) else _of_one_length(given))
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ProblemError(
            f"the text is {list(ids.shape)} tokens: expected [tokens] or [batch, tokens], a batch of 1 or more and 2 "
            "tokens or more."
        )
    return ids.long()


def _encoded(given: Mapping[str, Any]) -> Any:
    """The ids of what a tokenizer returned. Raises `ProblemError` if there are none, or some are padding."""
    if "input_ids" not in given:
        raise ProblemError(f"text_or_ids has {', '.join(map(str, given)) or 'no keys'}: expected input_ids.")
    ids, mask = _of_one_length(given["input_ids"]), given.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise ProblemError(
            "text_or_ids has padding, by its attention_mask, which would count as text: give texts with the same "
            "number of tokens, or one text at a time."
        )
    return ids


def _of_one_length(ids: Any) -> Any:
    """The ids, if they are not lists of several lengths. Raises `ProblemError` for those."""
    rows = ids if isinstance(ids, list | tuple) else []
    lengths = sorted({len(row) for row in rows if isinstance(row, list | tuple)})
    if len(lengths) > 1:
        raise ProblemError(
            f"the texts have {lengths[0]} to {lengths[-1]} tokens: give texts with the same number of tokens, or one "
            "text at a time."
        )
    return ids


def _check_length(model: Any, tokens: int) -> None:
    """Raise `ProblemError` for a text longer than the table of positions of a model of transformers."""
    if not hasattr(model, "set_attn_implementation"):
        return
    surveyed = surveyed_model(model)
    if surveyed.context is not None and tokens > surveyed.context and not surveyed.extrapolates:
        raise ProblemError(
            f"the text has {tokens:,} tokens, and the model has a table of {surveyed.context:,} positions: shorten it "
            f"to {surveyed.context:,} tokens."
        )


def _drawn_from(model: Any, tokenizer: Any) -> list[int]:
    """The ids to draw random tokens from; without a tokenizer the middle eight tenths of the vocabulary."""
    embeddings = _embeddings(model)
    if tokenizer is not None:
        return plain_tokens(tokenizer, embeddings)
    return list(range(embeddings // 10, embeddings - embeddings // 10))


def _embeddings(model: Any) -> int:
    """The token ids that the model has an embedding for; 0 if it has none."""
    tables = (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    return next(tables, 0)


def _checking_ids(model: Any, run: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`run`, with an error that names the text for token ids that have no embedding.

    torch raises an `IndexError` for them, and regard's own models a `ProblemError`.
    """

    def checked(ids: Tensor) -> Any:
        try:
            return run(ids)
        except (IndexError, ProblemError) as error:
            embeddings = _embeddings(model)
            without = ids[(ids < 0) | (ids >= embeddings)].tolist()
            if not embeddings or not without:
                raise
            raise ProblemError(
                f"the text has token id {without[0]}, and the model has ids 0 to {embeddings - 1}: pass ids of its "
                "own tokenizer."
            ) from error

    return checked


def _parts(model: Any, measures: Iterable[Measure]) -> Parts | None:
    needing = [measure for measure in measures if "circuit" in measure.needs]
    try:
        return parts_of(model) if needing else None
    except ProblemError as error:
        return _refuse(needing, no_circuits(error))


def _refuse(measures: list[Measure], reason: str) -> None:
    keys = ", ".join(measure.key for measure in measures)
    if keys:
        raise ProblemError(f"measures has {keys}, which cannot be measured here: {reason}.")


@contextmanager
def _running(model: Any) -> Generator[tuple[nn.Module, Callable[[Tensor], Any]]]:
    """The module to observe and the function that runs it, in evaluation mode; restored afterwards."""
    if hasattr(model, "set_attn_implementation"):
        with prepared(model) as surveyed:
            yield surveyed.model, _checking_ids(model, surveyed.run)
        return
    if not isinstance(model, nn.Module):
        raise ProblemError(f"model is {type(model).__name__}: expected a model of transformers or of regard.nn.")
    with evaluating(model):
        yield model, _checking_ids(model, model)


def _stack(rows: Iterable[Tensor]) -> Tensor:
    """One row per layer, float64 on the CPU; layers with fewer heads end with NaN."""
    return nn.utils.rnn.pad_sequence([row.double().cpu() for row in rows], batch_first=True, padding_value=torch.nan)
