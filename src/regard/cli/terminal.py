"""A survey in a terminal: progress while it runs, then what ran, what the model wrote, and the table of heads.

In a terminal the scores have bars; into a pipe or a file go plain columns with the same numbers. Drawn with rich.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from regard.cli import compared, drilldown, heads_table
from regard.inspect.surveying.report import Ablations, Report, RunInfo

STAGES = {
    "model": "loading the model",
    "prompt": "reading the prompt",
    "continuation": "writing on",
    "comparison": "comparing with eager attention",
    "layers": "measuring the heads of each layer",
    "induction": "measuring induction",
    "copying": "measuring copying",
    "other texts": "measuring on other texts",
    "ablation": "taking out one head after the other",
}

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
            TextColumn("left"),
            TimeRemainingColumn(),
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


def show(
    report: Report,
    *,
    top: int,
    measures: Sequence[str] | None = None,
    heads: Sequence[tuple[int, int]] = (),
    console: Console | None = None,
) -> None:
    """Print a report: the `top` most remarkable heads by these measures, and some heads in detail."""
    console = console or Console(highlight=False)
    console.width = max(heads_table.NARROWEST, console.width)
    plain = not console.is_terminal
    parts: list[RenderableType] = [
        _facts(report),
        "",
        _text(report, plain=plain),
        "",
        *_heads(report, min(top, len(report.heads)), measures, console),
        *(part for head in heads for part in drilldown.detail(report, head)),
        *(_compared(report, report.other, top, measures, heads, plain=plain) if report.other is not None else ()),
        "",
    ]
    for part in parts:
        console.print(part, soft_wrap=plain and not isinstance(part, Table))


def _compared(
    report: Report,
    other: Report,
    top: int,
    measures: Sequence[str] | None,
    heads: Sequence[tuple[int, int]],
    *,
    plain: bool,
) -> Iterator[RenderableType]:
    yield Text("\ncompared with ").append(_facts(other))
    yield ""
    if other.continuation:
        yield _text(other, plain=plain)
        yield ""
    yield from compared.told(report, other, top, measures)
    for head in heads:
        yield from drilldown.detail(other, head, visible(other.run.model))


# ---- what ran, what was written -------------------------------------------------------------------------------------


def _facts(report: Report) -> Text:
    run, written = report.run, len(report.tokens) - report.prompt_tokens
    sharing = f"{run.heads} heads on {run.kv_heads} key heads" if run.kv_heads < run.heads else f"{run.heads} heads"
    rows = [
        ("model", f"{_layers(run.layers)} of {sharing}, {run.head_dim} wide; {_parameters(run.parameters)} parameters"),
        ("attention", f"{_engines(run)}; {run.attention_gflop:,.2f} GFLOP for {run.pairs:,} query-key pairs"),
        ("prompt", f"{report.prompt_tokens:,} tokens{_rate(run.tokens_per_second)}"),
        ("written", f"{written:,} tokens{_rate(run.decode_tokens_per_second)}"),
        ("eager", _difference(run)),
        ("machine", run.machine),
    ]
    text = Text.assemble((visible(run.model), "bold"))
    rows += [("ablation", _ablation(report.ablations))] if report.ablations is not None else []
    rows += [("sinks", heads_table.sinks(report.sink_shares))] if report.sink_shares else []
    rows += [("note", visible(note)) for note in run.notes]
    for name, said in rows:
        text.append(f"\n  {name:<10}", "dim").append(said)
    return text


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _ablation(made: Ablations) -> str:
    instead = {"zero": "nothing", "mean": "its mean"}.get(made.how, made.how)
    layer, head = max(made.deltas, key=made.deltas.__getitem__)
    return (
        f"loss {made.loss:.3f} nats a token; with {instead} in place of one head, at most "
        f"{made.deltas[layer, head]:+.3f} ({layer}.{head}). {made.caveat}"
    )


def _engines(run: RunInfo) -> str:
    return ", ".join(f"{name} x{count}" for name, count in Counter(run.backends).items())


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _rate(speed: float | None) -> str:
    return "" if speed is None else f", {speed:,.0f} a second" if speed >= 100 else f", {speed:.1f} a second"


def _difference(run: RunInfo) -> str:
    if run.eager_difference is None:
        return "was not compared"
    return f"logits at most {run.eager_difference:.1e} from transformers' eager attention"


def _text(report: Report, *, plain: bool) -> RenderableType:
    """The end of the prompt, and what the model wrote."""
    shown = report.text if len(report.text) <= SHOWN else "… " + report.text[-SHOWN:].partition(" ")[2]
    text = Text.assemble((visible(shown), "dim"), (visible(report.continuation), "bold"))
    return text if plain else Padding(text, (0, 2))


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


def _heads(report: Report, top: int, measures: Sequence[str] | None, console: Console) -> Iterator[RenderableType]:
    """How many heads of which kind; the most remarkable ones, with the measures that were asked for."""
    yield heads_table.kinds(report)
    if not top:
        return
    shown = tuple(dict.fromkeys(measures or heads_table.USUAL))
    shown += ("delta_loss",) if report.ablations is not None and "delta_loss" not in shown else ()
    yield ""
    yield Text(f"The {top} most remarkable:" if top < len(report.heads) else "Most remarkable first:")
    fits = heads_table.fitting(shown, console.width) if console.is_terminal else shown
    yield heads_table.table(report.heads[:top], fits, console)
    if left := shown[len(fits) :]:
        yield Text(f"No room for {', '.join(left)}: see the page, --heads, --json or --csv.", "dim")
