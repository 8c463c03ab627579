"""What a survey is asked for: which measures, of which layers, and which heads to the last weight."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

from regard.errors import ProblemError
from regard.inspect.measures.definitions import PAIRS, SWEPT
from regard.inspect.measures.score import HeadScores
from regard.inspect.surveying.ablation import HOW
from regard.inspect.surveying.kinds import NAMERS
from regard.inspect.surveying.sinks import spans
from regard.inspect.surveying.subject import Subject, heads_of, layers_of

ON_DEMAND = ("sink_output", "rarest_hits")
"""Measures that are made only if they are named: each takes as long as another sweep."""

SURVEYED = (*PAIRS, *SWEPT, "sink_value", "copying", "copying_eigenvalues", *ON_DEMAND)
"""What a survey can measure. The others are of pairs or needles that one names, and have functions of their own."""


@dataclass(frozen=True)
class Wanted:
    """Which measures, layers and heads; None is all. What names a head is wanted too where it costs no sweep."""

    measures: frozenset[str] | None = None
    layers: frozenset[int] | None = None
    heads: tuple[tuple[int, int], ...] = ()
    ablate: str | None = None

    @property
    def sweep(self) -> bool:
        """Whether some measure needs every weight."""
        return self.measures is None or bool(self.measures & {*SWEPT, "rarest_hits"})

    def layer(self, number: int) -> bool:
        """Whether this layer is wanted."""
        return self.layers is None or number in self.layers

    def has(self, measure: str) -> bool:
        """Whether this measure is wanted."""
        if self.measures is None:
            return measure not in ON_DEMAND
        return measure in self.measures or measure in NAMERS

    def among(self, scores: Mapping[str, HeadScores]) -> dict[str, HeadScores]:
        """Those of the scores that are wanted."""
        return {measure: score for measure, score in scores.items() if self.has(measure)}

    def lacking(self, measures: Iterable[str], reason: str) -> str:
        """The note that this model, or this text, cannot be put to these measures.

        Raises:
            ProblemError: one of them was asked for by its name.
        """
        names = [measure for measure in measures if self.has(measure)]
        if named := [measure for measure in names if measure in (self.measures or ())]:
            raise ProblemError(f"measures has {', '.join(named)}, which cannot be measured here: {reason}.")
        return f"Not measured: {', '.join(names)}, because {reason}."

    def notes(self, subject: Subject) -> list[str]:
        """A note where not all layers are measured, for then heads are ranked among those of the others alone."""
        if self.layers is None:
            return []
        of = f" of {subject.layers}" if subject.says_layers else ""
        told = ", ".join(map(str, sorted(self.layers)))
        return [f"{len(self.layers)}{of} layers were measured ({told}), and kinds are counted and ranked among them."]

    def check(self, subject: Subject) -> None:
        """Raise `ProblemError` if the model says that it has no such layer or head, or has no loss to ablate by."""
        if self.ablate and not subject.generates:
            raise ProblemError(
                f"ablate needs a causal language model, whose loss it tells; {type(subject.model).__name__} is none."
            )
        self.check_config(subject.model.config)

    def check_config(self, config: Any) -> None:
        """Raise `ProblemError` if a model of this config has no such layer or head; what it does not say is passed."""
        layers, heads = layers_of(config), heads_of(config)
        for layer in sorted((self.layers or frozenset()) | {layer for layer, _ in self.heads}):
            if layers is not None and not 0 <= layer < layers:
                raise ProblemError(f"layer {layer} is asked for, and the model has {layers}: 0 to {layers - 1}.")
        for layer, head in self.heads:
            if heads is not None and not 0 <= head < heads:
                raise ProblemError(_no_head(layer, head, heads))

    def check_found(self, heads: Mapping[int, int]) -> None:
        """Raise `ProblemError` if a head that was asked for is in none of the layers that attended."""
        for layer, head in self.heads:
            if layer not in heads:
                raise ProblemError(
                    f"head {layer}.{head} is asked for, and no layer {layer} attended: {spans(heads)} did."
                )
            if not 0 <= head < heads[layer]:
                raise ProblemError(_no_head(layer, head, heads[layer]))


def _no_head(layer: int, head: int, heads: int) -> str:
    return f"head {layer}.{head} is asked for, and layer {layer} has {heads}: {layer}.0 to {layer}.{heads - 1}."


def wanted(
    measures: Sequence[str] | str | None,
    layers: Sequence[int] | int | None,
    heads: Sequence[tuple[int, int]] | None,
    ablate: str | None,
) -> Wanted:
    """What the arguments of a survey say.

    Raises:
        ProblemError: there is no such measure, what should name a layer or head does not, a head is in none of the
            layers, or there is no such way to take out a head.
    """
    names = None if measures is None else frozenset(_measures(measures))
    numbers = None if layers is None else frozenset(_layers(layers))
    places = () if heads is None else tuple(dict.fromkeys(_heads(heads)))
    for layer, head in places:
        if numbers is not None and layer not in numbers:
            raise ProblemError(
                f"head {layer}.{head} is in none of the layers that are asked for ({spans(sorted(numbers))}): ask for "
                f"layer {layer} as well, or for all."
            )
    if ablate not in (None, *HOW):
        raise ProblemError(f"ablate is {ablate!r}: expected 'zero' or 'mean', or None for no ablation.")
    return Wanted(names, numbers, places, ablate)


def _measures(given: Any) -> Sequence[str]:
    names: Any = [given] if isinstance(given, str) else given
    if not isinstance(names, Iterable):
        raise ProblemError(f"measures is {given!r}: expected a list of names, such as ['sink', 'induction'], or None.")
    found: list[Any] = list(cast("Iterable[Any]", names))
    for name in found:
        if name not in SURVEYED:
            raise ProblemError(f"measures has {name!r}: expected some of {', '.join(SURVEYED)}.")
    return found


def _layers(given: Any) -> Sequence[int]:
    """The numbers of layers; one by itself is a list of one."""
    numbers: Any = [given] if is_whole(given) else given
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise ProblemError(
            f"layers is {given!r}: expected the numbers of layers, such as [0, 17, 18], or None for all."
        )
    found: list[Any] = list(cast("Iterable[Any]", numbers))
    if not found:
        raise ProblemError("layers is empty: name the layers to measure, or None for all.")
    if wrong := [number for number in found if not is_whole(number)]:
        raise ProblemError(f"layers has {wrong[0]!r}: expected numbers of layers, from 0.")
    return found


def _heads(given: Any) -> Sequence[tuple[int, int]]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ProblemError(f"heads is {given!r}: expected pairs (layer, head), such as [(18, 6)], or None.")
    found: list[Any] = list(cast("Iterable[Any]", given))
    for pair in found:
        if not isinstance(pair, tuple) or len(cast("tuple[Any, ...]", pair)) != 2 or not all(map(is_whole, pair)):
            raise ProblemError(f"heads has {pair!r}: expected pairs (layer, head), such as (18, 6).")
    return found


def is_whole(number: Any) -> bool:
    """Whether it is a whole number, of Python or NumPy, and not True or False."""
    return type(number) is not bool and isinstance(number, Integral)
