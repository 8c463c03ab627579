"""Losses of passages by position: means over spans of tokens with bootstrap intervals over the passages."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.evaluate.intervals import Interval, drawn
from regard.evaluate.records import Record

SPANS = 8
"""Rows of a table without lengths of its own."""


class Span(NamedTuple):
    """Predicted tokens `start` to `end - 1`, counted from 1: the second token of a text is the first predicted one."""

    name: str
    start: int
    end: int


def by_length(records: Sequence[Record]) -> dict[int, list[Record]]:
    """The records of each length of text, the shortest first; of runs without a length in their cells, under 0."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record["cell"].get("length", 0), []).append(record)
    return dict(sorted(groups.items()))


def longest(records: Sequence[Record]) -> list[Record]:
    """The records of the longest texts: texts of other lengths are beginnings of these, and would count twice.

    >>> longest([{"cell": {"length": 8}}, {"cell": {"length": 16}}])
    [{'cell': {'length': 16}}]
    """
    return list(by_length(records).values())[-1]


def spans(settings: dict[str, Any], records: Sequence[Record]) -> list[Span]:
    """The rows of the table: multiples of the length of training, each whole and its last half; or equal parts."""
    start, end = _range(records)
    if "multiples" in settings:
        trained = records[0]["cell"]["trained"]
        rows = [Span(f"{k}x", 1, k * trained + 1) for k in settings["multiples"]]
        return rows + [Span(f"{k}x, last half", k * trained // 2 + 1, k * trained + 1) for k in settings["multiples"]]
    edges = [start, *(start + cut for cut in parts_of(end - start)), end]
    return [Span("", a, b) for a, b in itertools.pairwise(edges) if b > a] + [Span("all", start, end)]


def parts_of(tokens: int) -> list[int]:
    """Where a text is cut into `SPANS` parts, as equal as they can be.

    >>> parts_of(1000)
    [125, 250, 375, 500, 625, 750, 875]
    """
    return [round(i * tokens / SPANS) for i in range(1, SPANS)]


def _range(records: Sequence[Record]) -> tuple[int, int]:
    """The first token that is scored, and the one after the last."""
    return min(map(_offset, records)), max(_offset(record) + sum(record["counts"]) for record in records)


def _offset(record: Record) -> int:
    """The position in the text of the first token that is scored."""
    return record["cell"].get("start", record["first"])


def mean_loss(records: Sequence[Record], span: Span) -> Interval:
    """The mean loss of the tokens of a span, by buckets whose middle is in it; unknown (NaN) without any."""
    sums, counts = list[float](), list[int]()
    for record in records:
        at, total, count = _offset(record), 0.0, 0
        for loss, size in zip(record["losses"], record["counts"], strict=True):
            if span.start <= at + (size - 1) / 2 < span.end:
                total, count = total + (math.inf if loss is None else loss) * size, count + size
            at += size
        if count:
            sums.append(total)
            counts.append(count)
    if math.inf in sums:
        return Interval(math.inf, math.inf, math.inf)
    if len(sums) < 2:
        return Interval(sums[0] / counts[0] if sums else math.nan, -math.inf, math.inf)
    return drawn(np.array(sums), np.array(counts, dtype=np.float64), of=lambda total, count: total / count)


def curve(records: Sequence[Record], points: int = 64) -> list[tuple[float, Interval]]:
    """(position, mean loss) over the text, for the picture."""
    start, end = _range(records)
    edges = sorted({start + round(i * (end - start) / points) for i in range(points + 1)})
    found = [(a, b, mean_loss(records, Span("", a, b))) for a, b in itertools.pairwise(edges)]
    return [((a + b - 1) / 2, loss) for a, b, loss in found if not math.isnan(loss.value)]


def perplexity(loss: Interval) -> Interval:
    """The exponential of a loss in nats.

    >>> perplexity(Interval(0.0, 0.0, math.inf))
    Interval(value=1.0, low=1.0, high=inf)
    """
    return Interval(*(math.inf if each > 700 else math.exp(each) for each in loss))


def rows(settings: dict[str, Any], records: Sequence[Record]) -> list[list[str]]:
    """The table, the head first."""
    head = ["tokens", "", "loss, nats", "perplexity"]
    *shorter, last = by_length(records).values()
    rows = [(each, Span("all", *_range(each))) for each in shorter] + [(last, span) for span in spans(settings, last)]
    body = [
        [f"{span.start:,} to {span.end - 1:,}", span.name, shown(loss, 3), shown(perplexity(loss), 2)]
        for each, span in rows
        if not math.isnan((loss := mean_loss(each, span)).value)
    ]
    return [head, *body]


def shown(value: Interval, digits: int) -> str:
    """`3.214 (3.101 to 3.350)`; without the interval where one sample gives none."""
    if not math.isfinite(value.high):
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"
