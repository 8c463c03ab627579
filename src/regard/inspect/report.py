"""What a survey of a model found, as plain values: no tensor, no model, nothing that must be computed again.

`survey` makes a `Report`; the command line and the page show it. The two judgements in it, `kind` and `remarkable`, are
rules that a reader can recompute from the scores beside them; they are `kind_of` and `ranked` below.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NAMED_FROM = 0.3
"""The lift from which a head is named after a score; the threshold that Gu et al. 2024 use for sinks."""

BROAD_FROM = 0.5
"""The share of the visible tokens over which a head spreads from which it is called broad."""


class Definition(NamedTuple):
    """What a number of a report means: its formula, where it comes from, what uniform attention would score."""

    formula: str
    source: str
    chance: str


DEFINITIONS: dict[str, Definition] = {
    "entropy": Definition(
        "mean over rows i of H_i = -sum_j A[i,j] ln A[i,j], in nats",
        "Clark et al. 2019, arXiv:1906.04341, §3.2",
        "mean of ln(number of keys that row i sees)",
    ),
    "effective_tokens": Definition(
        "mean over rows i of exp(H_i): the number of tokens that an even spread of the same entropy would cover",
        "Clark et al. 2019, arXiv:1906.04341, §3.2, as a perplexity",
        "mean number of keys that row i sees",
    ),
    "sink": Definition(
        "mean over rows i >= 1 of A[i,0]: the mass put on the first token",
        "Gu et al. 2024, arXiv:2410.10781, §3; Xiao et al. 2024, arXiv:2309.17453",
        "mean of 1 / (number of keys that row i sees)",
    ),
    "previous": Definition(
        "mean over rows i >= 1 of A[i,i-1]: the mass put on the token just before",
        "Olsson et al. 2022, In-context learning and induction heads",
        "mean of 1 / (number of keys that row i sees)",
    ),
    "induction": Definition(
        "on a sequence of random tokens repeated four times: mean over the rows i in which something repeats of "
        "sum_j A[i,j] over j with x[j-1] = x[i], j-1 < i: the mass put on what followed an earlier occurrence",
        "Olsson et al. 2022, In-context learning and induction heads, appendix on head scores",
        "mean of (number of such j) / (number of keys that row i sees)",
    ),
    "kind": Definition(
        "lift = (score - chance) / (1 - chance): 0 is uniform attention, 1 is always. The first that holds: induction "
        f"if its lift is at least {NAMED_FROM}; previous token, likewise; sink, likewise; broad if exp(entropy - its "
        f"chance) is at least {BROAD_FROM}, so that the head spreads over half of what it sees; mixed",
        "a rule of this report",
        "uniform attention is broad",
    ),
    "remarkable": Definition(
        "(lift of the score that names the head, or its greatest lift if none does, at least 0) x "
        "(1 - share of this model's heads that are of the same kind): how strongly, times how rarely",
        "a rule of this report",
        "0",
    ),
}


@dataclass(frozen=True)
class Head:
    """One query head of one layer; scores as in `DEFINITIONS`, each with what uniform attention would score.

    `induction` is None where the model's attention is not causal: such a model cannot be said to predict what follows.
    """

    layer: int
    head: int
    kv_head: int
    entropy: float
    effective_tokens: float
    sink: float
    previous: float
    induction: float | None
    entropy_chance: float
    sink_chance: float
    previous_chance: float
    induction_chance: float | None
    kind: str = "mixed"
    remarkable: float = 0.0


@dataclass(frozen=True, eq=False)
class Picture:
    """The weights of one head as a square of size x size bytes, round(255 * sqrt(weight)); row = query.

    The root keeps small weights visible: the error of a weight read back is at most 0.004.
    `pooled` is tokens per cell: 1 shows every weight, above it each cell is the mean of pooled x pooled weights.
    """

    layer: int
    head: int
    size: int
    pooled: int
    weights: NDArray[np.uint8]


@dataclass(frozen=True)
class Run:
    """What was run, on what, how fast. `pairs` and `attention_gflop` are of one pass over all tokens of the report."""

    model: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    backends: tuple[str, ...]
    tokens_per_second: float
    decode_tokens_per_second: float | None
    attention_gflop: float
    pairs: int
    eager_difference: float | None
    machine: str
    versions: dict[str, str]
    seconds: dict[str, float]


@dataclass(frozen=True, eq=False)
class Report:
    """A survey of one model on one text. `tokens` are display strings of prompt and continuation; heads best first."""

    run: Run
    text: str
    tokens: tuple[str, ...]
    prompt_tokens: int
    continuation: str
    heads: tuple[Head, ...]
    pictures: tuple[Picture, ...]

    def to_dict(self) -> dict[str, Any]:
        """All but the pictures, as what `json.dumps` takes, with the definitions of the numbers."""
        return {
            "run": asdict(self.run),
            "text": self.text,
            "tokens": list(self.tokens),
            "prompt_tokens": self.prompt_tokens,
            "continuation": self.continuation,
            "heads": [asdict(head) for head in self.heads],
            "definitions": {name: definition._asdict() for name, definition in DEFINITIONS.items()},
        }


def lift(score: float | None, chance: float | None) -> float:
    """How far a score stands from chance to certainty: (score - chance) / (1 - chance); 0 where there is no score.

    >>> lift(0.6, 0.2)
    0.5
    """
    if score is None or chance is None or chance >= 1:
        return 0.0
    return (score - chance) / (1 - chance)


def kind_of(head: Head) -> str:
    """What a head is called: see `DEFINITIONS["kind"]`."""
    for kind, strength in _lifts(head).items():
        if strength >= NAMED_FROM:
            return kind
    return "broad" if np.exp(head.entropy - head.entropy_chance) >= BROAD_FROM else "mixed"


def ranked(heads: Iterable[Head]) -> tuple[Head, ...]:
    """The heads with their kind and `remarkable` filled in, most remarkable first: see `DEFINITIONS["remarkable"]`."""
    named = [replace(head, kind=kind_of(head)) for head in heads]
    of_kind = Counter(head.kind for head in named)
    weighed = [replace(h, remarkable=_strength(h) * (1 - of_kind[h.kind] / len(named))) for h in named]
    return tuple(sorted(weighed, key=lambda h: (-h.remarkable, h.layer, h.head)))


def _lifts(head: Head) -> dict[str, float]:
    """In the order of naming: what a head is named after is the rarest thing that it does."""
    return {
        "induction": lift(head.induction, head.induction_chance),
        "previous token": lift(head.previous, head.previous_chance),
        "sink": lift(head.sink, head.sink_chance),
    }


def _strength(head: Head) -> float:
    lifts = _lifts(head)
    return max(0.0, lifts.get(head.kind, max(lifts.values())))
