"""Two surveys of one prompt in a terminal: the number of heads by kind, and the heads that differ most."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from regard.cli.heads_table import COLOURS, number, own_unit
from regard.inspect.surveying.kinds import NAMED_BY, Head, lift
from regard.inspect.surveying.report import Report


def comparison(
    report: Report, other: Report, top: int, measures: Sequence[str] | None = None
) -> Iterator[Text | Table]:
    """The parts to print of a comparison of two reports.

    Args:
        top: heads to list.
        measures: compare by these scores; None for all scores that name a head.
    """
    yield _kinds(report, other)
    by = tuple(measures or NAMED_BY)
    if not _same_heads(report, other):
        yield Text("  It has other layers or heads: heads cannot be compared one by one.", "dim")
    elif not (pairs := _changes(report, other, by)):
        which = f"No head's {' or '.join(measures)}" if measures else "No score that names a head"
        yield Text(f"  {which} differs: both models do the same on this prompt.", "dim")
    elif top:
        yield Text("\nThe heads whose scores differ most:")
        yield _change_table(pairs[:top], (report.run.model, other.run.model))


def _kinds(report: Report, other: Report) -> Table:
    ours, theirs = (Counter(head.kind for head in each.heads) for each in (report, other))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("kind", no_wrap=True)
    for each in (report, other):
        table.add_column(Text(each.run.model), justify="right", overflow="fold")
    for kind in dict.fromkeys([*ours, *theirs]):
        table.add_row(Text(kind, COLOURS.get(kind, "")), str(ours[kind]), str(theirs[kind]))
    return table


def _same_heads(report: Report, other: Report) -> bool:
    ours, theirs = ({(head.layer, head.head) for head in each.heads} for each in (report, other))
    return ours == theirs


def _changes(report: Report, other: Report, by: Sequence[str]) -> list[tuple[str, Head, Head]]:
    """(measure that differs most, our head, their head), greatest difference first, without equal heads."""
    theirs = {(head.layer, head.head): head for head in other.heads}
    pairs = [(head, theirs[head.layer, head.head]) for head in report.heads]
    changes = [(max(by, key=lambda m: _difference(m, *pair)), *pair) for pair in pairs]
    return sorted((c for c in changes if _difference(*c) > 0), key=lambda change: -_difference(*change))


def _difference(measure: str, ours: Head, theirs: Head) -> float:
    """The difference of the lifts; of a score in nats or tokens, the difference divided by its chance value."""
    one, two = ours.score(measure), theirs.score(measure)
    if measure in NAMED_BY:
        return abs(lift(one) - lift(two))
    if one.value is None or two.value is None:
        return 0.0
    return abs(one.value - two.value) / (one.chance or 1.0 if own_unit(measure) else 1.0)


def _change_table(changes: list[tuple[str, Head, Head]], models: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("head", "measure"):
        table.add_column(name, no_wrap=True)
    for model in models:
        table.add_column(Text(model), overflow="fold")
    table.add_column("kind there", no_wrap=True)
    for measure, ours, theirs in changes:
        scores = [number(head.value(measure)) for head in (ours, theirs)]
        table.add_row(Text(ours.name, "bold"), measure, *scores, Text(theirs.kind, COLOURS.get(theirs.kind, "")))
    return table
