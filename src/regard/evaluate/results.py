"""Results by cell, with intervals: as a table, as JSON, and for the pictures and the page."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from regard.errors import ProblemError
from regard.evaluate import loss_results
from regard.evaluate.intervals import Interval, wilson
from regard.evaluate.loss_results import Span, by_length, longest, mean_loss, perplexity
from regard.evaluate.records import Record
from regard.evaluate.task import Cell


@dataclass(frozen=True)
class CellResult:
    """The results of a cell of the table.

    Attributes:
        cell: its coordinates, such as {"length": 512, "depth": 0.5}.
        count: examples.
        score: the mean score with its 95 % interval.
        nll: the mean negative log-likelihood of the answers in nats; None where answers are generated.
    """

    cell: Cell
    count: int
    score: Interval
    nll: float | None


@dataclass(frozen=True)
class Results:
    """What a model answered to all examples of a task.

    Attributes:
        task: its name.
        axes: keys of the cells, rows of the table first.
        settings: of the task, the model and its cache.
        about: version of torch, time.
        records: one for each example.
    """

    task: str
    axes: tuple[str, ...]
    settings: dict[str, Any]
    about: dict[str, Any]
    records: list[Record]

    @property
    def is_loss(self) -> bool:
        """Whether losses were measured, and not scores."""
        return bool(self.records) and "losses" in self.records[0]

    @property
    def score(self) -> Interval:
        """The mean score of all examples; its interval takes them as independent.

        Raises:
            ProblemError: the task measures losses.
        """
        self._check_scores()
        return _scored(self.records)

    def values(self, axis: str) -> list[int | float | str]:
        """The values of an axis, in ascending order: the records of several processes are in any order."""
        return sorted({record["cell"][axis] for record in self.records}, key=_order)

    def cells(self) -> list[CellResult]:
        """The results of each cell, in the order of the axes' values."""
        self._check_scores()
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for record in self.records:
            groups.setdefault(tuple(record["cell"][axis] for axis in self.axes), []).append(record)
        return [
            CellResult(dict(zip(self.axes, key, strict=True)), len(group), _scored(group), _mean_nll(group))
            for key, group in sorted(groups.items(), key=lambda item: [_order(value) for value in item[0]])
        ]

    def along(self, axis: str) -> list[CellResult]:
        """The results for each value of an axis, over all others: accuracy by position, for one."""
        self._check_scores()
        groups = {value: [r for r in self.records if r["cell"][axis] == value] for value in self.values(axis)}
        return [CellResult({axis: v}, len(group), _scored(group), _mean_nll(group)) for v, group in groups.items()]

    @property
    def loss(self) -> Interval:
        """The mean loss of all tokens, in nats; of several lengths of text the longest, which has all of them.

        Raises:
            ProblemError: the task measures scores.
        """
        self._check_losses()
        return mean_loss(longest(self.records), Span("", 0, sys.maxsize))

    @property
    def losses(self) -> dict[int, Interval]:
        """The mean loss for each length of text, in nats."""
        self._check_losses()
        return {length: mean_loss(each, Span("", 0, sys.maxsize)) for length, each in by_length(self.records).items()}

    @property
    def perplexity(self) -> Interval:
        """The exponential of the mean loss."""
        return perplexity(self.loss)

    def _check_scores(self) -> None:
        if self.is_loss:
            raise ProblemError(f"{self.task} measures losses, no scores: see loss, losses and perplexity.")

    def _check_losses(self) -> None:
        if not self.is_loss:
            raise ProblemError(f"{self.task} measures scores, no losses: see score, cells and along.")

    def as_dict(self) -> dict[str, Any]:
        """All of it for JSON, which has no infinity: None for a loss or a bound that is unknown or infinite."""
        return json_values(self._content())

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"settings": self.settings, "about": self.about, "examples": len(self.records)}
        if self.is_loss:
            whole = longest(self.records)
            spans = [
                {"first": span.start, "last": span.end - 1, "name": span.name, "loss": mean_loss(whole, span)}
                for span in loss_results.spans(self.settings, whole)
            ]
            lengths = [{"length": length, "loss": list(loss)} for length, loss in self.losses.items()]
            return content | {"loss": list(self.loss), "lengths": lengths, "spans": spans, "records": self.records}
        cells = [
            {**each.cell, "count": each.count, "score": list(each.score), "nll": each.nll} for each in self.cells()
        ]
        return content | {"score": list(self.score), "cells": cells, "records": self.records}

    def table(self) -> str:
        """A table of the cells in percent, or of losses by position, with 95 % intervals."""
        return "\n".join("  ".join(each) for each in aligned(self.rows()))

    def rows(self) -> list[list[str]]:
        """The rows of the table, the head first."""
        if self.is_loss:
            return loss_results.rows(self.settings, self.records)
        row_axis, column_axis = self.axes[0], self.axes[1] if len(self.axes) > 1 else None
        cells = {tuple(each.cell[axis] for axis in self.axes): each for each in self.cells()}
        if column_axis is None:
            body = [[shown(row_axis, key[0]), percent(each.score), str(each.count)] for key, each in cells.items()]
            return [[row_axis, "right", "examples"], *body, ["all", percent(self.score), str(len(self.records))]]
        columns = self.values(column_axis)
        head = [f"{row_axis} \\ {column_axis}", *(shown(column_axis, value) for value in columns), "all"]
        by_row = {each.cell[row_axis]: each.score for each in self.along(row_axis)}
        body = [
            [
                shown(row_axis, row),
                *(percent(cells[row, column].score) if (row, column) in cells else "" for column in columns),
                percent(by_row[row]),
            ]
            for row in by_row
        ]
        by_column = [percent(each.score) for each in self.along(column_axis)]
        return [head, *body, ["all", *by_column, percent(self.score)]]


def json_values(content: Any) -> Any:
    """The content with None for NaN and infinities.

    >>> json_values({"loss": (1.0, -math.inf, math.nan)})
    {'loss': [1.0, None, None]}
    """
    if isinstance(content, dict):
        return {key: json_values(value) for key, value in cast("dict[str, Any]", content).items()}
    if isinstance(content, list | tuple):
        return [json_values(value) for value in cast("Sequence[Any]", content)]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def comparison(runs: Sequence[tuple[str, Results]]) -> str:
    """A table of several runs of a task: the score of each, or its loss and perplexity."""
    rows = [["run", "right", "examples"]]
    if runs[0][1].is_loss:
        rows = [["run", "loss, nats", "perplexity"]]
    for name, each in runs:
        if each.is_loss:
            rows.append([name, loss_results.shown(each.loss, 3), loss_results.shown(each.perplexity, 2)])
        else:
            rows.append([name, percent(each.score), str(len(each.records))])
    return "\n".join("  ".join(row) for row in aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Cells padded to columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]


def shown(axis: str, value: float | str) -> str:
    """A coordinate as text: a depth in percent, a length with thousands.

    >>> shown("depth", 0.25), shown("length", 8192)
    ('25 %', '8,192')
    """
    if not isinstance(value, int | float):
        return str(value)
    return f"{100 * value:g} %" if axis == "depth" else f"{value:,}"


def percent(score: Interval) -> str:
    """`90 % (60 to 98)`."""
    if math.isnan(score.value):
        return ""
    low, value, high = (f"{100 * each:.0f}" for each in (score.low, score.value, score.high))
    return f"{value} % ({low} to {high})"


def _order(value: Any) -> Any:
    return (isinstance(value, str), value)


def _scored(records: Sequence[Record]) -> Interval:
    return wilson(sum(record["score"] for record in records), len(records))


def _mean_nll(records: Sequence[Record]) -> float | None:
    found = [math.inf if record["nll"] is None else record["nll"] for record in records if "nll" in record]
    return sum(found) / len(found) if found else None
