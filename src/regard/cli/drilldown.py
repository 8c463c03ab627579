"""One head of a survey in a terminal: all of its scores with their meaning, and the pairs of tokens it joins."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from regard.cli.heads_table import COLOURS, number, sureness
from regard.inspect.surveying.closeup import Pair, strongest
from regard.inspect.surveying.kinds import DEFINITIONS
from regard.inspect.surveying.report import Estimate, Head, Report

PAIRS = 8
"""Pairs of tokens that are listed."""


def detail(report: Report, place: tuple[int, int], of: str = "") -> Iterator[Text | Table]:
    """What there is to say about the head at (layer, head), part by part; `of` names its model where there are two."""
    head = next(head for head in report.heads if (head.layer, head.head) == place)
    yield _title(head, f" of {of}" if of else "")
    yield _scores(report, head)
    yield from _meanings(report, head)
    yield from _pairs(report, head)


def _title(head: Head, of: str) -> Text:
    text = Text.assemble("\n", (f"head {head.name}", "bold"), f"{of}, key head {head.kv_head}: ")
    text.append(head.kind, COLOURS.get(head.kind, ""))
    sure = "" if head.sure is None else f", the same in {sureness([head])} of draws on other texts"
    return text.append(f"{sure}; remarkable {head.remarkable:.3f}")


def _scores(report: Report, head: Head) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), pad_edge=True, header_style="dim")
    for name in ("measure", "score", "chance", "95 % interval", "unit"):
        table.add_column(name, no_wrap=True)
    for measure in report.measures:
        score = head.score(measure)
        unit = DEFINITIONS[measure].unit if measure in DEFINITIONS else ""
        table.add_row(measure, number(score.value), number(score.chance), _interval(score), unit)
    return table


def _interval(score: Estimate) -> str:
    return "-" if score.low is None or score.high is None else f"{number(score.low)} to {number(score.high)}"


def _meanings(report: Report, head: Head) -> Iterator[Text]:
    """The formula and the source of every measure that the head was put to."""
    for measure in report.measures:
        if measure in DEFINITIONS and head.score(measure).value is not None:
            said = DEFINITIONS[measure]
            yield Text.assemble((f"  {measure}", "bold"), f": {said.formula}. ", (said.source, "dim"))


def _pairs(report: Report, head: Head) -> Iterator[Text | Table]:
    close = next((close for close in report.close_ups if (close.layer, close.head) == (head.layer, head.head)), None)
    if close is None:
        yield Text("  Its single weights are not kept: its mask or its bias is no run of keys a row.", "dim")
        return
    pairs = strongest(close, PAIRS)
    if not pairs:
        yield Text("  Nearly all of its mass is on the first token, or on the token itself.", "dim")
        return
    yield Text("  strongest pairs, without the first token and the token itself", "dim")
    yield _listed(report, pairs)


def _listed(report: Report, pairs: list[Pair]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), pad_edge=True, header_style="dim")
    for name in ("weight", "this token", "looks at"):
        table.add_column(name, no_wrap=True)
    for pair in pairs:
        table.add_row(number(pair.weight), *(_token(report, at) for at in (pair.query, pair.key)))
    return table


def _token(report: Report, at: int) -> Text:
    """`" Cal" 173`: the token as text, and where it stands."""
    return Text(f"{report.tokens[at]!r} {at}")
