"""The selection of a survey: its measures, its layers, and the heads with close-ups."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from regard.errors import ProblemError
from regard.inspect.measures.catalogue import MEASURES, measures_named
from regard.inspect.measures.measure import Measure, Text
from regard.inspect.names import read_heads
from regard.inspect.surveying.ablation import HOW
from regard.inspect.surveying.kinds import DEFINITIONS, NAMERS
from regard.inspect.surveying.model import SurveyedModel, heads_of, layers_of
from regard.inspect.surveying.sinks import spans
from regard.integers import as_integer


@dataclass(frozen=True)
class Selection:
    """Which measures, layers and heads; see `select`.

    Args:
        measures: all that are computed.
        named: the keys that the caller named; empty where all measures were meant.
        layers: None for all.
        heads: (layer, head), the heads with close-ups.
    """

    measures: tuple[Measure, ...] = tuple(measure for measure in MEASURES if not measure.on_demand)
    named: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    heads: tuple[tuple[int, int], ...] = ()
    ablate: str | None = None

    @property
    def sweep(self) -> bool:
        """Whether some measure needs every weight."""
        return any("sweep" in measure.needs for measure in self.measures)

    def on(self, text: Text) -> tuple[Measure, ...]:
        """The measures that are defined on this text."""
        return tuple(measure for measure in self.measures if measure.on == text)

    def lacking(self, measures: Iterable[Measure], reason: str) -> str:
        """The note that these measures cannot be computed of this model or text.

        Raises:
            ProblemError: one of them was named by the caller.
        """
        keys = [measure.key for measure in measures]
        if named := [key for key in keys if key in self.named]:
            raise ProblemError(f"measures has {', '.join(named)}, which cannot be measured here: {reason}.")
        return f"Not measured: {', '.join(keys)}, because {reason}."

    def notes(self, model: SurveyedModel) -> list[str]:
        """A note if not all layers are measured, since heads are then ranked among these layers only."""
        if self.layers is None:
            return []
        of = f" of {model.layers}" if model.layers_known else ""
        layers = ", ".join(map(str, sorted(self.layers)))
        return [f"{len(self.layers)}{of} layers were measured ({layers}), and kinds are counted and ranked among them."]

    def check(self, model: SurveyedModel) -> None:
        """Raise `ProblemError` if the model has no such layer or head by its config, or no loss to ablate by."""
        if self.ablate and not model.generates:
            raise ProblemError(
                f"ablate needs a causal language model, which has a loss; {type(model.model).__name__} is none."
            )
        self.check_config(model.model.config)

    def check_config(self, config: Any) -> None:
        """Raise `ProblemError` if a model of this config has no such layer or head; missing entries pass."""
        layers, heads = layers_of(config), heads_of(config)
        for layer in sorted((self.layers or frozenset()) | {layer for layer, _ in self.heads}):
            if layers is not None and not 0 <= layer < layers:
                raise ProblemError(f"layer {layer} does not exist: the model has {layers} layers, 0 to {layers - 1}.")
        for layer, head in self.heads:
            if heads is not None and not 0 <= head < heads:
                raise ProblemError(_no_head(layer, head, heads))

    def check_found(self, heads: Mapping[int, int]) -> None:
        """Raise `ProblemError` if a selected head is in none of the layers that attended."""
        for layer, head in self.heads:
            if layer not in heads:
                raise ProblemError(
                    f"head {layer}.{head} does not exist: no layer {layer} attended, only {spans(heads)}."
                )
            if not 0 <= head < heads[layer]:
                raise ProblemError(_no_head(layer, head, heads[layer]))


def select(
    measures: Sequence[str | Measure] | str | Measure | None = None,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[str | tuple[int, int]] | str | None = None,
    ablate: str | None = None,
) -> Selection:
    """The selection that the arguments of `survey` describe.

    The measures that name heads are computed too, as far as they need no sweep that the others do not need.

    Raises:
        ProblemError: there is no such measure, a value that names no layer or head, a head in none of the layers, or no
            such way to ablate a head.
    """
    computed, named = _measures(measures)
    numbers = layer_numbers(layers)
    places = () if heads is None else tuple(dict.fromkeys(_heads(heads)))
    for layer, head in places:
        if numbers is not None and layer not in numbers:
            raise ProblemError(
                f"head {layer}.{head} is in none of the selected layers ({spans(sorted(numbers))}): select "
                f"layer {layer} as well, or all."
            )
    if ablate not in (None, *HOW):
        raise ProblemError(f"ablate is {ablate!r}: expected 'zero' or 'mean', or None for no ablation.")
    return Selection(computed, named, numbers, places, ablate)


def named_measures(measures: Any) -> tuple[Measure, ...]:
    """Measures by key or value, each once; a single one is a list of one.

    Raises:
        ProblemError: anything else, or one of the caller's own whose key is another's.
    """
    several: Any = [measures] if isinstance(measures, str | Measure) else measures
    if not isinstance(several, Iterable):
        raise ProblemError(f"measures is {measures!r}: expected a list of names, such as ['sink', 'induction'].")
    found = tuple(dict.fromkeys(measures_named(cast("Iterable[str | Measure]", several))))
    _check_keys([key for measure in _own(found) for key in _keys(measure)])
    return found


def _own(measures: Iterable[Measure]) -> tuple[Measure, ...]:
    """The caller's own measures, which are not in `MEASURES`."""
    return tuple(measure for measure in measures if measure not in MEASURES)


def _keys(measure: Measure) -> list[str]:
    """The keys of the values that it adds to a report."""
    return [measure.key] if measure.at is None else [measure.key, f"{measure.key}_at"]


def _check_keys(own: Sequence[str]) -> None:
    """Raise `ProblemError` if one of the caller's keys is the library's, or that of several measures."""
    if clash := sorted(DEFINITIONS.keys() & set(own)):
        raise ProblemError(
            f"measures has one of your own named {clash[0]!r}, the key of a value of the library: give it another key."
        )
    if shared := [key for key in own if own.count(key) > 1]:
        raise ProblemError(f"measures has several of your own named {shared[0]!r}: give each a key of its own.")


def _measures(measures: Any) -> tuple[tuple[Measure, ...], frozenset[str]]:
    """The measures to compute, the library's in order and then the caller's, and the keys that were named."""
    if measures is None:
        return Selection().measures, frozenset()
    found = named_measures(measures)
    keys, swept = {measure.key for measure in found}, any("sweep" in measure.needs for measure in found)
    listed = tuple(
        measure
        for measure in MEASURES
        if measure.key in keys or (measure.key in NAMERS and (swept or "sweep" not in measure.needs))
    )
    return listed + _own(found), frozenset(keys)


def _no_head(layer: int, head: int, heads: int) -> str:
    return f"head {layer}.{head} does not exist: layer {layer} has {heads} heads, {layer}.0 to {layer}.{heads - 1}."


def layer_numbers(layers: Any) -> frozenset[int] | None:
    """The numbers of layers; a single one is a list of one; None for all. Raises `ProblemError` for anything else."""
    if layers is None:
        return None
    several: Any = [layers] if as_integer(layers) is not None else layers
    if isinstance(several, str) or not isinstance(several, Iterable):
        raise ProblemError(f"layers is {layers!r}: expected layer numbers, such as [0, 17, 18], or None for all.")
    found: list[Any] = list(cast("Iterable[Any]", several))
    if not found:
        raise ProblemError("layers is empty: name the layers to measure, or None for all.")
    numbers = [as_integer(number) for number in found]
    if None in numbers:
        raise ProblemError(f"layers has {found[numbers.index(None)]!r}: expected layer numbers from 0.")
    return frozenset(number for number in numbers if number is not None)


def _heads(heads: Any) -> Sequence[tuple[int, int]]:
    """Heads by the number of their layer: a survey numbers all layers of a model."""
    found: list[tuple[int, int]] = []
    for layer, head in read_heads(heads):
        if isinstance(layer, str):
            raise ProblemError(f"head {layer}.{head}: a survey numbers layers; expected a name such as '18.6'.")
        found.append((layer, head))
    return found
