"""A head with its scores, its kind, and how remarkable it is: rules that can be recomputed from the scores."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.inspect.brief import brief
from regard.inspect.measures import catalogue
from regard.inspect.measures.measure import Definition


class Estimate(NamedTuple):
    """One measure of one head: `chance` is the score of uniform attention, low to high its 95 % interval.

    A field is None where it does not exist: a measure that does not apply, a score without chance value or interval.
    """

    value: float | None
    chance: float | None = None
    low: float | None = None
    high: float | None = None


NONE = Estimate(None)
"""The estimate of a measure that a head does not have."""


@brief
@dataclass(frozen=True)
class Head:
    """One query head of one layer: its scores by the keys of `DEFINITIONS`, and its kind.

    `kind`, `remarkable` and `sure` are filled in by `kinds.ranked`. `sure` is the share of draws on
    other texts in which the head has the same kind; None where no other text was read.
    """

    layer: int
    head: int
    kv_head: int
    scores: Mapping[str, Estimate]
    kind: str = "mixed"
    remarkable: float = 0.0
    sure: float | None = None

    @property
    def name(self) -> str:
        """`18.6`: layer and head, both from 0."""
        return f"{self.layer}.{self.head}"

    def score(self, measure: str) -> Estimate:
        """The head's score, `NONE` where it does not have the measure."""
        return self.scores.get(measure, NONE)

    def value(self, measure: str) -> float | None:
        """The value of a score, None where there is none."""
        return self.score(measure).value


NAMED_FROM = 0.3
"""The least lift of a score that names a head; the threshold of Gu et al. 2024 for sinks."""

POSITIONAL_FROM = 0.9
"""The least share of rows with their greatest weight at one offset of a positional head; Voita et al. 2019, §5.1."""

BROAD_FROM = 0.5
"""The least share of the visible tokens over which a broad head spreads."""

Floats = NDArray[np.floating]


def lifts(values: Floats, chances: Floats) -> Floats:
    """(score - chance) / (1 - chance); NaN where the chance value is 1."""
    return (values - chances) / np.where(chances < 1, 1 - chances, np.nan)


class Kind(NamedTuple):
    """A rule that names heads: all of its measures that were computed must reach the threshold."""

    name: str
    measures: tuple[str, ...]
    statistic: Callable[[Floats, Floats], Floats] = lifts
    threshold: float = NAMED_FROM


KINDS = (
    Kind("induction", ("induction", "induction_jittered")),
    Kind("shifted induction", ("best_shift",)),
    Kind("previous token", ("previous",)),
    Kind("duplicate token", ("duplicate",)),
    Kind("sink", ("sink",)),
    Kind("positional", ("positional",), lambda values, chances: values, POSITIONAL_FROM),
    Kind("broad", ("entropy",), lambda values, chances: np.exp(values - chances), BROAD_FROM),
)
"""The rules in order, from the rarest behaviour; the first that holds names the head."""

BY_LIFT = tuple(kind for kind in KINDS if kind.statistic is lifts)

NAMED_BY = {measure: kind.name for kind in BY_LIFT for measure in kind.measures}
"""The kind that a measure names, alone or with others, if its lift is high enough."""

NAMERS = frozenset(measure for kind in KINDS for measure in kind.measures)
"""Every measure that a kind depends on."""

MIXED = "mixed"
"""The kind of a head that no rule names."""


RULES: dict[str, Definition] = {
    "kind": Definition(
        "kind",
        "",
        "lift = (score - chance) / (1 - chance): 0 is uniform attention, 1 is always. The first that holds: induction "
        f"if its lifts on fixed and on jittered repeats are both at least {NAMED_FROM}; shifted induction if that of "
        "its best shift is; previous token, duplicate token, sink, likewise; positional if the share of rows at one "
        f"distance is at least {POSITIONAL_FROM}; broad if exp(entropy - its chance) is at least {BROAD_FROM}, so that "
        "the head spreads over half of what it sees; mixed. A score that was not measured is passed over",
        "a rule of this report; 0.3: Gu et al. 2024, arXiv:2410.10781, §3; 0.9: Voita et al. 2019, arXiv:1905.09418, "
        "§5.1",
        "uniform attention is broad",
    ),
    "sure": Definition(
        "same kind on other texts",
        "share",
        "the mean over three short texts of this library (prose, a dialogue, a program; cut to the length of this "
        "text) of the share of 1,000 bootstrap draws of all scores, those on repeated random tokens too, in which the "
        "head has the same kind there as here",
        "a rule of this report",
        "no chance value: 1 is certain",
    ),
    "sink_shares": Definition(
        "heads with a sink",
        "share of heads",
        "the share of all heads whose alpha, the mean over all rows of A[i,0], is above 0.3, and above 0.8; most of a "
        "layer's where it is half or more. A share of heads and not of mass, which shrinks as texts grow",
        "Gu et al. 2024, arXiv:2410.10781, §3 (0.3, on 64 tokens); Barbero et al. 2025, arXiv:2504.02732 (0.8)",
        "0 from 10 tokens on",
    ),
    "delta_loss": Definition(
        "loss without it",
        "nats",
        "mean over the tokens of the text of (loss with this head's output replaced - loss): above 0 the head was "
        "useful. Replaced, at the input of the output projection, by zero or by its mean over the text",
        "Michel et al. 2019, arXiv:1905.10650, §2.3",
        "0: no change",
    ),
    "remarkable": Definition(
        "remarkable",
        "",
        "(lift of the score that names the head, or its greatest lift if none does, at least 0) x "
        "(1 - share of this model's heads that are of the same kind): how strongly, times how rarely",
        "a rule of this report",
        "0",
    ),
}

DEFINITIONS: dict[str, Definition] = catalogue.DEFINITIONS | RULES
"""The definitions of all values of a report, by key: the measures, and the rules of this file."""


def lift(score: Estimate) -> float:
    """The position of a score between chance (0) and certainty (1): (score - chance) / (1 - chance); 0 without a score.

    >>> lift(Estimate(0.6, 0.2))
    0.5
    """
    value, chance = score.value, score.chance
    if value is None or chance is None or chance >= 1 or math.isnan(value):
        return 0.0
    return (value - chance) / (1 - chance)


def kind_of(scores: Mapping[str, Estimate]) -> str:
    """The kind of a head with these scores: see `RULES["kind"]`."""
    made = {name: score for name, score in scores.items() if score.value is not None}
    values = {name: np.array(score.value) for name, score in made.items()}
    chances = {name: np.array(math.nan if score.chance is None else score.chance) for name, score in made.items()}
    return str(kinds_of(values, chances))


def kinds_of(values: Mapping[str, Floats], chances: Mapping[str, Floats]) -> NDArray[np.str_]:
    """The kinds of any number of heads at once: arrays of one shape, or that broadcast.

    A measure that is missing, and a score that is NaN, names no head.
    """
    holds: list[tuple[str, NDArray[np.bool_]]] = []
    for kind in KINDS:
        reached = [kind.statistic(values[m], chances[m]) >= kind.threshold for m in kind.measures if m in values]
        if reached:
            holds.append((kind.name, np.logical_and.reduce(reached)))
    if not holds:
        return np.array(MIXED)
    names, conditions = zip(*holds, strict=True)
    return np.select(np.broadcast_arrays(*conditions), [np.array(name) for name in names], default=MIXED)


def keeping(kinds: NDArray[np.str_], drawn: Mapping[str, Floats], chances: Mapping[str, Floats]) -> NDArray[np.float64]:
    """The share of draws in which heads keep their kinds [heads]; scores are [draws, heads], chance values [heads]."""
    return (kinds_of(drawn, chances) == kinds).mean(0)


def ranked(heads: Iterable[Head]) -> tuple[Head, ...]:
    """The heads with their kind and `remarkable` filled in, most remarkable first: see `RULES["remarkable"]`."""
    named = [replace(head, kind=kind_of(head.scores)) for head in heads]
    of_kind = Counter(head.kind for head in named)
    weighed = [replace(h, remarkable=strength(h) * (1 - of_kind[h.kind] / len(named))) for h in named]
    return tuple(sorted(weighed, key=lambda h: (-h.remarkable, h.layer, h.head)))


def strength(head: Head) -> float:
    """The lift of the scores that name a head (the smaller of two), or its greatest lift if none does; at least 0."""
    found = dict[str, float]()
    for kind in BY_LIFT:
        made = [lift(head.score(measure)) for measure in kind.measures if head.value(measure) is not None]
        if made:
            found[kind.name] = min(made)
    return max(0.0, found.get(head.kind, max(found.values(), default=0.0)))
