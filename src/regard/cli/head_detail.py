"""One head of a survey in a terminal: all of its scores with their formulas, and its strongest pairs of tokens."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from regard.cli.heads_table import COLOURS, number, sureness
from regard.inspect.surveying.closeup import Pair, strongest
from regard.inspect.surveying.kinds import DEFINITIONS
from regard.inspect.surveying.report import Estimate, Head, Report

PAIRS = 8
"""Pairs of tokens that are listed."""


def head_detail(report: Report, head: tuple[int, int], model: str = "") -> Iterator[Text | Table]:
    """The parts to print of one head (layer, head). `model` is named in the title where two models are compared."""
    own = next(each for each in report.heads if (each.layer, each.head) == head)
    yield _title(own, f" of {model}" if model else "")
    yield _scores(report, own)
    yield from _formulas(report, own)
    yield from _pairs(report, own)


def _title(head: Head, model: str) -> Text:
    text = Text.assemble("\n", (f"head {head.name}", "bold"), f"{model}, key head {head.kv_head}: ")
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


def _formulas(report: Report, head: Head) -> Iterator[Text]:
    """The formula and the source of every measure of the head."""
    for measure in report.measures:
        if measure in DEFINITIONS and head.score(measure).value is not None:
            definition = DEFINITIONS[measure]
            yield Text.assemble((f"  {measure}", "bold"), f": {definition.formula}. ", (definition.source, "dim"))


def _pairs(report: Report, head: Head) -> Iterator[Text | Table]:
    close = next((close for close in report.close_ups if (close.layer, close.head) == (head.layer, head.head)), None)
    if close is None:
        yield Text("  No close-up: the mask or the bias of this head is not one run of keys per row.", "dim")
        return
    pairs = strongest(close, PAIRS)
    if not pairs:
        yield Text("  Nearly all of its mass is on the first token, or on the token itself.", "dim")
        return
    yield Text("  strongest pairs, without the first token and the token itself", "dim")
    yield _pair_table(report, pairs)


def _pair_table(report: Report, pairs: list[Pair]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), pad_edge=True, header_style="dim")
    for name in ("weight", "this token", "looks at"):
        table.add_column(name, no_wrap=True)
    for pair in pairs:
        table.add_row(number(pair.weight), *(_token(report, at) for at in (pair.query, pair.key)))
    return table


def _token(report: Report, at: int) -> Text:
    """`" Cal" 173`: the token as text, and its position."""
    return Text(f"{report.tokens[at]!r} {at}")
