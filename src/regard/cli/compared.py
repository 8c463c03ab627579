"""Two surveys of one text in a terminal: how many heads of which kind each has, and which heads differ most."""

from collections import Counter
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from regard.cli.heads_table import COLOURS, number
from regard.inspect.surveying.kinds import NAMED_BY, lift
from regard.inspect.surveying.report import Head, Report


def told(report: Report, top: int) -> Iterator[Text | Table]:
    """The comparison of a report with its `other`; nothing where there is none."""
    if report.other is None:
        return
    yield Text.assemble("\ncompared with ", (report.other.run.model, "bold"))
    yield _kinds(report, report.other)
    if not _same_heads(report, report.other):
        yield Text("  Its heads are others: there is nothing to compare head by head.", "dim")
    elif not (pairs := _changes(report, report.other)):
        yield Text("  No score that names a head differs: the two do the same on this text.", "dim")
    elif top:
        yield Text("\nThe heads whose scores differ most:")
        yield _changed(pairs[:top], (report.run.model, report.other.run.model))


def _kinds(report: Report, other: Report) -> Table:
    here, there = (Counter(head.kind for head in each.heads) for each in (report, other))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("kind", no_wrap=True)
    for each in (report, other):
        table.add_column(each.run.model, justify="right", no_wrap=True)
    for kind in dict.fromkeys([*here, *there]):
        table.add_row(Text(kind, COLOURS.get(kind, "")), str(here[kind]), str(there[kind]))
    return table


def _same_heads(report: Report, other: Report) -> bool:
    here, there = ({(head.layer, head.head) for head in each.heads} for each in (report, other))
    return here == there


def _changes(report: Report, other: Report) -> list[tuple[str, Head, Head]]:
    """(the measure that differs most, the head here, the head there), greatest difference of lifts first; none of 0."""
    there = {(head.layer, head.head): head for head in other.heads}
    pairs = [(head, there[head.layer, head.head]) for head in report.heads]
    found = [(max(NAMED_BY, key=lambda m: _difference(m, *pair)), *pair) for pair in pairs]
    found = [change for change in found if _difference(*change) > 0]
    return sorted(found, key=lambda change: -_difference(*change))


def _difference(measure: str, here: Head, there: Head) -> float:
    return abs(lift(here.score(measure)) - lift(there.score(measure)))


def _changed(changes: list[tuple[str, Head, Head]], models: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("head", "measure", *models, "kind there"):
        table.add_column(name, no_wrap=True)
    for measure, here, there in changes:
        scores = [number(head.value(measure)) for head in (here, there)]
        table.add_row(Text(here.name, "bold"), measure, *scores, Text(there.kind, COLOURS.get(there.kind, "")))
    return table
