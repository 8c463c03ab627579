"""The report of a survey, as plain values: no tensor, no model, nothing to compute again.

`survey` makes a `Report`; the command line and the page show it. The judgements in it (`kind`, `sure`,
`remarkable`) are rules that a reader can recompute from the scores beside them: see `kinds.py`.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.measure import Definition
from regard.inspect.names import head_text, read_head
from regard.inspect.plot import heat_map, html_table
from regard.inspect.surveying.kinds import DEFINITIONS, Head
from regard.inspect.surveying.sinks import SinkShare, sink_shares, spans

HTML_ROWS = 8
"""Heads in the table that a notebook shows."""

CSV_HEAD = ("model", "layer", "head", "kv_head", "kind", "sure", "remarkable")
"""The first columns of `Report.to_csv`."""


@brief
@dataclass(frozen=True, eq=False)
class Picture:
    """The weights of one head as a square of size x size bytes, round(255 * sqrt(weight)); row = query.

    The root keeps small weights visible: the error of a weight read back is at most 0.004.
    `pooled` is tokens per cell: 1 shows every weight; above it each cell of `weights` is the mean of pooled x pooled
    weights, and each cell of `largest` the greatest of them (None where pooled is 1: it would be equal).
    """

    layer: int
    head: int
    size: int
    pooled: int
    weights: NDArray[np.uint8]
    largest: NDArray[np.uint8] | None = None


@brief
@dataclass(frozen=True, eq=False)
class CloseUp:
    """All n x n weights of one head, computed on demand from 8 dim + 12 bytes a token.

        A[i, j] = exp(cap(scale * q[i] . k[j]) + distance_bias[tokens - 1 + i - j] - total[i])

    with cap(x) = softcap * tanh(x / softcap), for the keys that row i sees: first[i] <= j < last[i], and the first
    `prefix` keys before last[i] (attention sinks). The other weights are 0.
    """

    layer: int
    head: int
    q: NDArray[np.float32]  # [tokens, dim]
    k: NDArray[np.float32]  # [tokens, dim]
    total: NDArray[np.float32]  # [tokens], log of the softmax denominator of each row, including a learned sink
    scale: float
    softcap: float | None
    first: NDArray[np.int32]  # [tokens]
    last: NDArray[np.int32]  # [tokens]
    prefix: int = 0
    distance_bias: NDArray[np.float32] | None = None  # [2 * tokens - 1], at i - j = -(tokens - 1) first

    @property
    def bytes(self) -> int:
        """Its bytes in a page, where elements of q and k have 16 bits."""
        arrays = (self.q, self.k, self.total, self.first, self.last, self.distance_bias)
        return sum(array.nbytes for array in arrays if array is not None) - (self.q.nbytes + self.k.nbytes) // 2


@brief
@dataclass(frozen=True)
class Ablations:
    """The change of the loss when a head is ablated: `deltas` by (layer, head), in nats a token.

    `how` is "zero" or "mean": the replacement of the head's output. `loss` is the loss of the whole model on the
    text, `tokens` how many were predicted for it. One head at a time understates: heads replace each other.
    """

    how: str
    loss: float
    tokens: int
    deltas: Mapping[tuple[int, int], float]
    caveat: str = ""


@brief
@dataclass(frozen=True)
class RunInfo:
    """What was run, on what, how fast. `pairs` and `attention_gflop` are of one pass over all tokens of the report.

    `eager_difference` is of the `eager_output`, "logits" or "hidden states".
    `notes`: what a reader must know of this run, in whole sentences.
    """

    model: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    backends: tuple[str, ...]
    tokens_per_second: float | None
    decode_tokens_per_second: float | None
    attention_gflop: float
    pairs: int
    eager_difference: float | None
    machine: str
    versions: dict[str, str]
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()
    eager_output: str = "logits"


@dataclass(frozen=True, eq=False)
class Report:
    """A survey of one model on one text. `tokens` are display strings of prompt and continuation; heads best first.

    Args:
        close_ups: the heads that can be read to the last weight, most remarkable first.
        missing_close_ups: by (layer, head), why a head that was asked for is not among them.
        profiles: by (layer, head), the mass of a mean row by distance |i - j|: bin 0 is distance 0, bin b the
            distances from 2 ** (b - 1) to 2 ** b - 1.
        other: what this one is compared with, a report on the same text.
        ablations: None where no head was ablated.
        definitions: what each value means, by its key; with those of the caller's own measures.
    """

    run: RunInfo
    text: str
    tokens: tuple[str, ...]
    prompt_tokens: int
    continuation: str
    heads: tuple[Head, ...]
    pictures: tuple[Picture, ...]
    close_ups: tuple[CloseUp, ...] = ()
    profiles: Mapping[tuple[int, int], tuple[float, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[float, ...]]
    )
    other: "Report | None" = None
    ablations: Ablations | None = None
    definitions: Mapping[str, Definition] = field(default_factory=lambda: DEFINITIONS)
    missing_close_ups: Mapping[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])

    def head(self, name: str | tuple[int, int]) -> Head:
        """A head by its name, "18.6" or (18, 6). Raises `ProblemError` if the report has no such head."""
        read = read_head(name)
        for head in self.heads:
            if (head.layer, head.head) == read:
                return head
        layers = spans(sorted({head.layer for head in self.heads}))
        raise ProblemError(f"no head {head_text(read)} in this report: it has the layers {layers}.")

    @property
    def measures(self) -> tuple[str, ...]:
        """The keys of all scores that some head has, in the order of `DEFINITIONS`."""
        return _measures([self])

    @property
    def sink_shares(self) -> tuple[SinkShare, ...]:
        """The share of heads with a sink at the first token, by each published threshold; none without `alpha`."""
        return sink_shares(self.heads)

    def __repr__(self) -> str:
        """A few lines: the model, what it read, its heads by kind, and what of them is kept."""
        run, written = self.run, len(self.tokens) - self.prompt_tokens
        kinds = Counter(head.kind for head in self.heads).most_common()
        kept = [f"pictures of {len(self.pictures):,}"] * bool(self.pictures)
        kept += [f"{len(self.close_ups)} to the last weight"] * bool(self.close_ups)
        read = f"{self.prompt_tokens:,} tokens read, {written:,} written"
        lines = [
            f"Report of {run.model}, {run.layers} layers x {run.heads} heads: {read}",
            f"  {len(self.heads):,} heads: {', '.join(f'{count} {kind}' for kind, count in kinds)}",
            f"  {len(self.measures)} measures{''.join(f'; {part}' for part in kept)}",
            *(f"  note: {note}" for note in run.notes),
        ]
        if self.other is not None:
            lines += [f"  compared with {self.other.run.model}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All but the pictures and the close-ups, as what `json.dumps` takes, with the definitions of all values."""
        return {
            "run": asdict(self.run),
            "text": self.text,
            "tokens": list(self.tokens),
            "prompt_tokens": self.prompt_tokens,
            "continuation": self.continuation,
            "heads": [self._head_values(head) for head in self.heads],
            "sinks": [asdict(share) | {"most": list(share.most)} for share in self.sink_shares],
            "ablations": None if self.ablations is None else _without_keys(self.ablations),
            "other": None if self.other is None else self.other.to_dict(),
            "definitions": {key: definition._asdict() for key, definition in self.definitions.items()},
        }

    def to_csv(self) -> str:
        """One line a head, most remarkable first: every score with its chance value and interval, or nothing.

        The first column is the model. The heads of a report that this one is compared with come after its own, with the
        same columns: all scores that a head of either has.
        """
        reports = [self] if self.other is None else [self, self.other]
        measures = _measures(reports)
        text = io.StringIO(newline="")
        table = csv.writer(text, lineterminator="\n")
        parts = ("", "_chance", "_low", "_high")
        table.writerow([*CSV_HEAD, *(measure + part for measure in measures for part in parts)])
        table.writerows(report._line(head, measures) for report in reports for head in report.heads)
        return text.getvalue()

    def _head_values(self, head: Head) -> dict[str, Any]:
        profile = self.profiles.get((head.layer, head.head))
        return {
            "layer": head.layer,
            "head": head.head,
            "kv_head": head.kv_head,
            "kind": head.kind,
            "sure": head.sure,
            "remarkable": head.remarkable,
            "scores": {measure: score._asdict() for measure, score in head.scores.items()},
            "distances": None if profile is None else list(profile),
        }

    def plot(self, measure: str = "sink", ax: Any = None) -> Any:
        """Draw one measure of every head, a row per layer and a column per head, and return the matplotlib `Axes`.

        Raises:
            ProblemError: no head of this report has that measure.
            RefusalError: matplotlib is not installed.
        """
        if measure not in self.measures:
            raise ProblemError(f"plot({measure!r}): the measures of this report are {', '.join(self.measures)}.")
        layers = sorted({head.layer for head in self.heads})
        values = np.full((len(layers), 1 + max(head.head for head in self.heads)), np.nan)
        for head in self.heads:
            value = head.value(measure)
            values[layers.index(head.layer), head.head] = np.nan if value is None else value
        unit = self.definitions[measure].unit if measure in self.definitions else ""
        title = f"{measure} ({unit})" if unit else measure
        return heat_map(values, title=title, x="head", y="layer", y_ticks=list(map(str, layers)), ax=ax)

    def _repr_html_(self) -> str:
        """The most remarkable heads as a table; `regard.inspect.write_page` writes the whole report as a page."""
        measures = [measure for measure in ("sink", "previous", "induction", "entropy") if measure in self.measures]
        cells = ([h.name, h.kind, *(_cell(h.value(m)) for m in measures)] for h in self.heads[:HTML_ROWS])
        title = f"{self.run.model}: {min(HTML_ROWS, len(self.heads))} most remarkable of {len(self.heads):,} heads"
        return html_table(title, ["head", "kind", *measures], cells)

    def _line(self, head: Head, measures: Sequence[str]) -> Iterator[object]:
        yield from (self.run.model, head.layer, head.head, head.kv_head, head.kind, head.sure, head.remarkable)
        for measure in measures:
            yield from head.score(measure)


def _measures(reports: Sequence[Report]) -> tuple[str, ...]:
    found = {measure for report in reports for head in report.heads for measure in head.scores}
    return (*(m for m in DEFINITIONS if m in found), *sorted(found - DEFINITIONS.keys()))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _without_keys(ablations: Ablations) -> dict[str, Any]:
    """The ablations as a dict whose keys are text."""
    return asdict(ablations) | {"deltas": {f"{layer}.{head}": d for (layer, head), d in ablations.deltas.items()}}
