"""Two surveys of one text in a terminal: how many heads of which kind each has, and which heads differ most."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from regard.cli.heads_table import COLOURS, number, own_unit
from regard.inspect.surveying.kinds import NAMED_BY, lift
from regard.inspect.surveying.report import Head, Report


def told(report: Report, other: Report, top: int, measures: Sequence[str] | None = None) -> Iterator[Text | Table]:
    """The comparison of two reports.

    Args:
        top: heads that are listed.
        measures: compare by these; None for all that name a head.
    """
    yield _kinds(report, other)
    by = tuple(measures or NAMED_BY)
    if not _same_heads(report, other):
        yield Text("  Its heads are others: there is nothing to compare head by head.", "dim")
    elif not (pairs := _changes(report, other, by)):
        which = f"No head's {' or '.join(measures)}" if measures else "No score that names a head"
        yield Text(f"  {which} differs: the two do the same on this text.", "dim")
    elif top:
        yield Text("\nThe heads whose scores differ most:")
        yield _changed(pairs[:top], (report.run.model, other.run.model))


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


def _changes(report: Report, other: Report, by: Sequence[str]) -> list[tuple[str, Head, Head]]:
    """(the measure that differs most, the head here, the head there), greatest difference first; none of 0."""
    there = {(head.layer, head.head): head for head in other.heads}
    pairs = [(head, there[head.layer, head.head]) for head in report.heads]
    found = [(max(by, key=lambda m: _difference(m, *pair)), *pair) for pair in pairs]
    found = [change for change in found if _difference(*change) > 0]
    return sorted(found, key=lambda change: -_difference(*change))


def _difference(measure: str, here: Head, there: Head) -> float:
    """Of the lifts; of what has a unit of its own (nats, tokens) the difference in shares of its chance value."""
    one, two = here.score(measure), there.score(measure)
    if measure in NAMED_BY:
        return abs(lift(one) - lift(two))
    if one.value is None or two.value is None:
        return 0.0
    return abs(one.value - two.value) / (one.chance or 1.0 if own_unit(measure) else 1.0)


def _changed(changes: list[tuple[str, Head, Head]], models: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("head", "measure", *models, "kind there"):
        table.add_column(name, no_wrap=True)
    for measure, here, there in changes:
        scores = [number(head.value(measure)) for head in (here, there)]
        table.add_row(Text(here.name, "bold"), measure, *scores, Text(there.kind, COLOURS.get(there.kind, "")))
    return table
