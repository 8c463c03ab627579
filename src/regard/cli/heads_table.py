"""The heads of a survey in a terminal: a line per kind, a line per head with its scores, and all of one head.

One head has all of its scores with their formulas, and its strongest pairs of tokens.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.inspect.measures.catalogue import BY_KEY
from regard.inspect.surveying.closeup import Pair, strongest
from regard.inspect.surveying.kinds import DEFINITIONS, NAMED_BY, NAMED_FROM, Estimate, Head, lift
from regard.inspect.surveying.report import Report
from regard.inspect.surveying.sinks import SinkShare, spans

COLOURS = {
    "induction": "green",
    "shifted induction": "green",
    "previous token": "yellow",
    "duplicate token": "cyan",
    "sink": "blue",
    "positional": "red",
    "broad": "magenta",
}
USUAL = ("sink", "previous", "induction", "entropy")
"""The measures of the table by default."""
LINE = "━╸"
"""The characters of bars: a whole cell and a half one."""
OWN_UNITS = ("nats", "tokens")
LEFT = 32
"""Characters before the first score: 4 for a head, 17 for its kind, 5 for how sure that is; two blanks after each."""
NARROWEST = 72
"""Characters that the usual table needs without bars; a narrower terminal has to break its lines."""
NAMED = 6
"""Heads of a kind that are listed."""


def kinds(report: Report) -> Table:
    """A line per kind, the commonest last: the number of heads, their confidence on other texts, their names."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(f"{len(report.heads)} heads", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("same kind", justify="right", no_wrap=True)
    table.add_column("strongest heads")  # the one column that is broken into lines where the table is too wide
    of_kind: dict[str, list[Head]] = {}
    for head in report.heads:
        of_kind.setdefault(head.kind, []).append(head)
    for kind, heads in sorted(of_kind.items(), key=lambda item: len(item[1])):
        named = " ".join(head.name for head in heads[:NAMED]) + (" ..." if len(heads) > NAMED else "")
        table.add_row(Text(kind, COLOURS.get(kind, "")), str(len(heads)), sureness(heads), named)
    return table


def legend(measures: Sequence[str], *, sure: bool) -> Text:
    """What the columns of the tables mean, where these measures are shown; `sure`: whether other texts were read."""
    lines = (
        ["same kind: the share of draws from three other texts in which the heads have the same kind"] if sure else []
    )
    lines.append("chance: the score of uniform attention, in the line below the names of the measures")
    if random := [key for key in measures if key in BY_KEY and BY_KEY[key].on != "text"]:
        lines.append(f"{', '.join(random)}: measured on random tokens that repeat, not on the prompt")
    return Text("\n".join(lines), "dim")


def sureness(heads: Sequence[Head]) -> str:
    """The mean confidence of heads in per cent, as far as they have one.

    >>> sureness([Head(0, 0, 0, {}, sure=0.5), Head(0, 1, 0, {}, sure=1.0)])
    '75 %'
    """
    known = [head.sure for head in heads if head.sure is not None]
    return f"{100 * fmean(known):.0f} %" if known else "-"


def sinks(shares: Sequence[SinkShare]) -> str:
    """The share of heads with a sink and the layers in which most heads have one, a line per threshold.

    >>> sinks([SinkShare(0.3, 0.75, 0.5, 1.0, {0: 0.25, 1: 1.0, 2: 1.0}, 0.125)])
    '75 % of heads have alpha (mean over rows of A[i,0]) above 0.3: most of layers 1-2, token 0 at 0.12 of the mean |v|'
    """
    parts = [f"{100 * share.share:.0f} % have it above {share.threshold}{_where(share)}" for share in shares]
    first = parts[0].replace("have it", "of heads have alpha (mean over rows of A[i,0])", 1)
    return "\n".join([first, *parts[1:]])


def _where(share: SinkShare) -> str:
    layers = f"most of layer{'s' * (len(share.most) > 1)} {spans(share.most)}" if share.most else ""
    norm = "" if share.value is None else f"token 0 at {share.value:.2f} of the mean |v|"
    where = ", ".join(filter(None, (layers, norm)))
    return f": {where}" if where else ""


def fitting(heads: Sequence[Head], measures: Sequence[str], width: int) -> tuple[str, ...]:
    """The first measures whose columns fit into a table of `width` characters; at least one."""
    columns = [_column(heads, measure, 0) + 2 for measure in measures]
    fits = [n for n in range(1, len(columns) + 1) if LEFT + sum(columns[:n]) - 2 <= width]
    return tuple(measures[: max(fits, default=1)])


def table(heads: Sequence[Head], measures: Sequence[str], console: Console) -> Table:
    """One row per head. In a terminal every score has a bar. Below each name: the score of uniform attention.

    Layers with other masks have other chance values: the least and the greatest are shown then.
    """
    bar = _bar(heads, measures, console.width) if console.is_terminal and has_bars(console) else 0
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    head_name, kind, sure, *scores = _headers(heads, measures)
    made.add_column(head_name, no_wrap=True)
    made.add_column(kind, no_wrap=True)
    made.add_column(sure, justify="right", no_wrap=True)
    for header in scores:
        made.add_column(header, no_wrap=True)
    for head in heads:
        cells = [_score(head.score(measure), measure, bar) for measure in measures]
        kind = Text(head.kind, COLOURS.get(head.kind, ""))
        made.add_row(Text(head.name, "bold"), kind, sureness([head]), *cells)
    return made


def _headers(heads: Sequence[Head], measures: Sequence[str]) -> list[str]:
    """The names of the columns, all of as many lines: rich aligns others at the bottom."""
    names = [
        ["head"],
        ["kind", "chance"],
        ["same", "kind"],
        *([measure, *_chances(heads, measure)] for measure in measures),
    ]
    most = max(map(len, names))
    return ["\n".join(lines + [""] * (most - len(lines))) for lines in names]


def _chances(heads: Sequence[Head], measure: str) -> list[str]:
    """The chance value of a measure in a line, or its range over the heads in two.

    >>> _chances([Head(0, 0, 0, {"sink": Estimate(0.9, 0.25)}), Head(1, 0, 0, {"sink": Estimate(0.9, 0.5)})], "sink")
    ['0.250 ', 'to 0.500']
    """
    chances = [chance for head in heads if (chance := head.score(measure).chance) is not None]
    least, greatest = number(min(chances, default=None)), number(max(chances, default=None))
    return [f"{least} {own_unit(measure)}", *([f"to {greatest}"] if greatest != least else [])]


def _bar(heads: Sequence[Head], measures: Sequence[str], width: int) -> int:
    """The length of the bars: as long as the table fits, and 0 where they would be too short to read."""
    widths = {bar: sum(_column(heads, measure, bar + 1) + 2 for measure in measures) for bar in range(4, 13)}
    return max((bar for bar, columns in widths.items() if LEFT + columns - 2 <= width), default=0)


def _column(heads: Sequence[Head], measure: str, more: int) -> int:
    """The width of a column whose cells have `more` characters beside the number."""
    unit = own_unit(measure)
    chances = max(len(line.rstrip()) for line in _chances(heads, measure))
    return max(len(measure), 5 + more, len(f"12.345 {unit}") if unit else 0, chances)


def own_unit(measure: str) -> str:
    """The unit of a measure if it is shown; others are shares or masses, at most 1."""
    unit = DEFINITIONS[measure].unit if measure in DEFINITIONS else ""
    return unit if unit in OWN_UNITS else ""


def _score(score: Estimate, measure: str, bar: int) -> Text:
    """`0.857 ━━━━━╸`, bright where the score would name the head."""
    names = measure in NAMED_BY and lift(score) >= NAMED_FROM
    text = Text(number(score.value), "bold" if names else "")
    if bar and score.value is not None:
        whole = score.chance if own_unit(measure) else 1.0
        colour = COLOURS[NAMED_BY[measure]] if names else "dim"
        text.append(" ").append(bar_of(score.value / whole if whole else 0.0, bar), colour)
    return text


def number(value: float | None) -> str:
    """A score in five characters, if it fits.

    >>> number(0.25), number(-0.0312), number(None), number(1234.5)
    ('0.250', '-0.031', '    -', '1,234')
    """
    if value is None:
        return "    -"
    return f"{value:5.3f}" if abs(value) < 100 else f"{value:,.0f}"


def bar_of(share: float, cells: int) -> str:
    """A bar that is `cells` characters long for a share of one, to half a character.

    >>> bar_of(1.0, 4), bar_of(0.4, 4)
    ('━━━━', '━╸  ')
    """
    halves = round(2 * cells * min(1.0, max(0.0, share)))
    return (LINE[0] * (halves // 2) + LINE[1] * (halves % 2)).ljust(cells)


def has_bars(console: Console) -> bool:
    """Whether the terminal's encoding has the characters of bars."""
    try:
        LINE.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


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
        reason = report.missing_close_ups.get((head.layer, head.head), "none was asked for")
        yield Text(f"  No close-up: {reason}.", "dim")
        return
    pairs = strongest(close, PAIRS)
    if not pairs:
        yield Text("  Nearly all of its mass is on the first token, or on the token itself.", "dim")
        return
    yield Text("  strongest pairs, without the first token and the token itself", "dim")
    yield _pair_table(report, pairs)


def _pair_table(report: Report, pairs: list[Pair]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), pad_edge=True, header_style="dim")
    table.add_column("weight", no_wrap=True)
    for name in ("this token", "looks at"):
        table.add_column(name, overflow="fold")
    for pair in pairs:
        table.add_row(number(pair.weight), *(_token(report, at) for at in (pair.query, pair.key)))
    return table


def _token(report: Report, at: int) -> Text:
    """`" Cal" 173`: the token as text, and its position."""
    return Text(f"{report.tokens[at]!r} {at}")
