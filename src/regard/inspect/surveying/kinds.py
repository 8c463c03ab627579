"""What a head is called, and how remarkable it is: rules that a reader can recompute from the scores in a report."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from regard.inspect.measures import definitions
from regard.inspect.measures.definitions import Definition
from regard.inspect.surveying.head import Estimate, Head

NAMED_FROM = 0.3
"""The lift from which a head is named after a score; the threshold that Gu et al. 2024 use for sinks."""

POSITIONAL_FROM = 0.9
"""The share of rows whose greatest weight is at one offset from which a head is positional; Voita et al. 2019, §5.1."""

BROAD_FROM = 0.5
"""The share of the visible tokens over which a head spreads from which it is called broad."""

NAMING = {
    "induction": ("induction", "induction_jittered"),
    "shifted induction": ("best_shift",),
    "previous token": ("previous",),
    "duplicate token": ("duplicate",),
    "sink": ("sink",),
}
"""The names of heads in order, each with the scores of which all must stand out: the rarest thing that a head does."""

NAMED_BY = {measure: kind for kind, measures in NAMING.items() for measure in measures}
"""The name that a score gives, or helps to give."""

NAMERS = frozenset({*NAMED_BY, "positional", "entropy"})
"""Every score that a name depends on."""

MIXED = "mixed"
"""What a head is called that none of the names fits."""

Floats = NDArray[np.floating]


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
        "the mean over three short texts of this library (prose, people talking, a program; cut to the length of this "
        "text) of the share of 1,000 draws in which the head has there the kind that it has here, every draw with all "
        "of its scores anew, those on repeated random tokens too",
        "a rule of this report",
        "no chance value: 1 is certain",
    ),
    "best_shift_at": Definition(
        "shift of induction",
        "tokens",
        "the s of 1 to 8 that the score best_shift is of: how far behind an earlier occurrence the head looks",
        "a rule of this report",
        "none",
    ),
    "sink_value": Definition(
        "value of the first token",
        "ratio",
        "|v_0| / mean over j of |v_j|, the norms of the head's values: far below 1, its mass on token 0 moves little",
        "Gu et al. 2024, arXiv:2410.10781; Guo et al. 2024, arXiv:2410.13835",
        "1, the mean token",
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
        "mean over the tokens of the text of (loss with this head's output replaced - loss): above 0 the head was of "
        "use. Replaced, at the input of the output projection, by zero or by its mean over the text",
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

DEFINITIONS: dict[str, Definition] = definitions.DEFINITIONS | RULES
"""Every number of a report by its key: the measures, and the judgements of this file."""


def lift(score: Estimate) -> float:
    """How far a score stands from chance to certainty: (score - chance) / (1 - chance); 0 where there is no score.

    >>> lift(Estimate(0.6, 0.2))
    0.5
    """
    value, chance = score.value, score.chance
    if value is None or chance is None or chance >= 1 or math.isnan(value):
        return 0.0
    return (value - chance) / (1 - chance)


def kind_of(scores: Mapping[str, Estimate]) -> str:
    """What a head of these scores is called: see `RULES["kind"]`."""
    given = {name: score for name, score in scores.items() if score.value is not None}
    values = {name: np.array(score.value) for name, score in given.items()}
    chances = {name: np.array(math.nan if score.chance is None else score.chance) for name, score in given.items()}
    return str(kinds_of(values, chances))


def kinds_of(values: Mapping[str, Floats], chances: Mapping[str, Floats]) -> NDArray[np.str_]:
    """What heads of these scores are called, any number at once: arrays of one shape, or that broadcast.

    A measure that is not there, and a score that is no number, names no head.
    """
    holds: dict[str, NDArray[np.bool_]] = {}
    for kind, measures in NAMING.items():
        lifts = [_lifts(values[measure], chances[measure]) for measure in measures if measure in values]
        if lifts:
            holds[kind] = np.logical_and.reduce([lift >= NAMED_FROM for lift in lifts])
    if "positional" in values:
        holds["positional"] = values["positional"] >= POSITIONAL_FROM
    if "entropy" in values:
        holds["broad"] = np.exp(values["entropy"] - chances["entropy"]) >= BROAD_FROM
    if not holds:
        return np.array(MIXED)
    return np.select(np.broadcast_arrays(*holds.values()), [np.array(kind) for kind in holds], default=MIXED)


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
    """The lift of what names a head (of two scores the smaller), or its greatest if nothing does; at least 0."""
    lifts = {
        kind: min(lift(head.score(measure)) for measure in measures if head.value(measure) is not None)
        for kind, measures in NAMING.items()
        if any(head.value(measure) is not None for measure in measures)
    }
    return max(0.0, lifts.get(head.kind, max(lifts.values(), default=0.0)))


def _lifts(values: Floats, chances: Floats) -> Floats:
    return (values - chances) / np.where(chances < 1, 1 - chances, np.nan)
