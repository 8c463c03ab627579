"""A survey in a terminal: progress while it runs, then what ran, what the model wrote, and the table of heads.

In a terminal the scores have bars; into a pipe or a file go plain columns with the same numbers. Drawn with rich.
"""

import sys
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from regard.inspect.report import NAMED_FROM, Head, Report, Run, lift

STAGES = {
    "model": "loading the model",
    "prompt": "reading the prompt",
    "continuation": "writing on",
    "comparison": "comparing with eager attention",
    "layers": "measuring the heads of each layer",
    "induction": "measuring induction",
}
COLOURS = {"induction": "green", "previous token": "yellow", "sink": "blue", "broad": "magenta"}
SCORES = {"sink": "sink", "previous": "previous", "induction": "induction", "entropy": "entropy"}
LINE = "━╸"
"""What bars are drawn with: a whole character and a half one."""
NARROWEST = 60
"""Characters that the table needs without bars; a narrower terminal has to break its lines."""

SHOWN = 240
"""Characters of the prompt's end that are shown before the continuation."""


class Stages:
    """Progress on stderr, one line a stage, gone when all is done. Nothing where stderr is no terminal.

    Called as `survey` calls its `progress`.
    """

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` steps of a stage are done."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(STAGES.get(stage, stage), total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def show(report: Report, *, top: int, console: Console | None = None) -> None:
    """Print a report, with the `top` most remarkable heads."""
    console = console or Console(highlight=False)
    console.width = max(NARROWEST, console.width)
    plain = not console.is_terminal
    console.print(_facts(report), soft_wrap=plain)
    console.print()
    console.print(_text(report) if plain else Padding(_text(report), (0, 2)), soft_wrap=plain)
    console.print()
    console.print(_kinds(report, min(top, len(report.heads))), soft_wrap=plain)
    if top:
        console.print(_table(report.heads[:top], console))
    console.print()


# ---- what ran, what was written -------------------------------------------------------------------------------------


def _facts(report: Report) -> Text:
    run, written = report.run, len(report.tokens) - report.prompt_tokens
    sharing = f"{run.heads} heads on {run.kv_heads} key heads" if run.kv_heads < run.heads else f"{run.heads} heads"
    rows = [
        ("model", f"{run.layers} layers of {sharing}, {run.head_dim} wide; {_parameters(run.parameters)} parameters"),
        ("attention", f"{_engines(run)}; {run.attention_gflop:,.2f} GFLOP for {run.pairs:,} query-key pairs"),
        ("prompt", f"{report.prompt_tokens:,} tokens{_rate(run.tokens_per_second)}"),
        ("written", f"{written:,} tokens{_rate(run.decode_tokens_per_second)}"),
        ("eager", _difference(run)),
        ("machine", run.machine),
    ]
    text = Text.assemble((visible(run.model), "bold"))
    for name, said in rows:
        text.append(f"\n  {name:<10}", "dim").append(said)
    return text


def _engines(run: Run) -> str:
    return ", ".join(f"{name} x{count}" for name, count in Counter(run.backends).items())


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _rate(speed: float | None) -> str:
    return "" if speed is None else f", {speed:,.0f} a second" if speed >= 100 else f", {speed:.1f} a second"


def _difference(run: Run) -> str:
    if run.eager_difference is None:
        return "was not compared"
    return f"logits at most {run.eager_difference:.1e} from transformers' eager attention"


def _text(report: Report) -> Text:
    """The end of the prompt, and what the model wrote."""
    shown = report.text if len(report.text) <= SHOWN else "… " + report.text[-SHOWN:].partition(" ")[2]
    return Text.assemble((visible(shown), "dim"), (visible(report.continuation), "bold"))


def visible(text: str) -> str:
    r"""The text without what a terminal would obey: control characters as pictures of themselves, line breaks kept.

    >>> visible("a\x1b[31mb\n")
    'a␛[31mb\n'
    """
    return "".join(
        character if character == "\n" or character.isprintable() else _pictured(character) for character in text
    )


def _pictured(control: str) -> str:
    return chr(0x2400 + ord(control)) if ord(control) < 32 else "\ufffd"


# ---- the heads ------------------------------------------------------------------------------------------------------


def _kinds(report: Report, top: int) -> Text:
    """`270 heads: 8 induction, 7 previous token, ...`, each kind in its colour."""
    text = Text(f"{len(report.heads)} heads: ")
    for position, (kind, count) in enumerate(Counter(head.kind for head in report.heads).items()):
        text.append(", " if position else "").append(f"{count} {kind}", COLOURS.get(kind, ""))
    return text.append(f"\nThe {top} most remarkable:" if 0 < top < len(report.heads) else "")


def _table(heads: tuple[Head, ...], console: Console) -> Table:
    """One row a head; in a terminal every score has a bar. Under each name, what uniform attention would score."""
    room = min(12, (console.width - NARROWEST) // len(SCORES)) if console.is_terminal and _draws(console) else 0
    bar = room if room >= 4 else 0
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("head\n", no_wrap=True)
    table.add_column("kind\nchance", no_wrap=True)
    for field, name in SCORES.items():
        chance = getattr(heads[0], f"{field}_chance")
        unit = " nats" if field == "entropy" else ""
        table.add_column(f"{name}\n{_number(chance)}{unit}", no_wrap=True)
    for head in heads:
        cells = [_score(head, field, bar) for field in SCORES]
        table.add_row(Text(f"{head.layer}.{head.head}", "bold"), Text(head.kind, COLOURS.get(head.kind, "")), *cells)
    return table


def _score(head: Head, field: str, bar: int) -> Text:
    """`0.857 ━━━━━╸`, bright where it would name the head."""
    value, chance = getattr(head, field), getattr(head, f"{field}_chance")
    says = field != "entropy" and lift(value, chance) >= NAMED_FROM
    text = Text(_number(value), "bold" if says else "")
    if bar and value is not None:
        share = value / chance if field == "entropy" and chance else value
        kind = "previous token" if field == "previous" else field
        text.append(" ").append(_bar(share, bar), COLOURS[kind] if says else "dim")
    return text


def _number(value: float | None) -> str:
    return "    -" if value is None else f"{value:5.3f}"


def _bar(share: float, cells: int) -> str:
    """A bar that is `cells` characters long for a share of one, to half a character.

    >>> _bar(1.0, 4), _bar(0.4, 4)
    ('━━━━', '━╸  ')
    """
    halves = round(2 * cells * min(1.0, max(0.0, share)))
    return (LINE[0] * (halves // 2) + LINE[1] * (halves % 2)).ljust(cells)


def _draws(console: Console) -> bool:
    """Whether the terminal's encoding has the lines that bars are made of."""
    try:
        LINE.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True
