"""`regard inspect`: run a model on a text, and show what its heads do, in the terminal and as a page.

```
text, model -> survey -> tables here, a page of every head, JSON and CSV for programs
```
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from regard.cli import which
from regard.cli.given import read
from regard.cli.outputs import STDOUT, add_force, as_json, check_outputs, outputs
from regard.errors import ProblemError
from regard.inspect.surveying.wanted import wanted

if TYPE_CHECKING:
    from regard.inspect.surveying.report import Report

Progress = Callable[[str, int, int], None]

HOW = ("zero", "mean")

TOP = 12
"""Heads that are listed where nobody said how many."""

EPILOG = """\
examples:
  regard inspect                                          our own paragraph, SmolLM2-135M-Instruct
  regard inspect book.txt --tokens 8k --heads 18.6        8,192 tokens of a book, one head in detail
  regard inspect book.txt --measure sink,induction        these scores alone; fast, for no sweep over all pairs is made
  regard inspect --compare ./finetuned --csv heads.csv    two models on the same text, the scores for a spreadsheet
  regard inspect --ablate mean                            and what the model loses with each head

A score says what a head looks at, and not that the head matters: for that take it out (--ablate), and mind that heads
stand in for each other. Every measure stands with its formula and its source on the page and in the JSON.

measures: """


class Survey(Protocol):
    """`regard.inspect.surveying.survey.survey`."""

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        *,
        measures: Sequence[str] | None,
        layers: Sequence[int] | None,
        heads: Sequence[tuple[int, int]] | None,
        tokens: int | None,
        new_tokens: int,
        compare_eager: bool,
        ablate: str | None,
        progress: Progress,
    ) -> "Report": ...


@dataclass(frozen=True)
class Tools:
    """What the command works with.

    Args:
        load: `load(name or None, device=) -> (model, tokenizer, label)`.
        survey: of a model.
        config: the config of a model by its name, where it is known before the weights are read; else None.
        check: raises what a survey with these arguments would raise before it starts; `survey.check`.
    """

    load: Callable[..., tuple[Any, Any, str]]
    survey: Survey
    config: Callable[[str | None], Any] = lambda name: None
    check: Callable[..., None] = lambda *model, **asked: None


def tools() -> Tools:
    """The real ones. They import torch and transformers, which takes seconds: called when all else is right."""
    from regard.inspect.surveying.survey import check, survey
    from regard.integrate.checkpoint import config_of, load

    return Tools(load, survey, config_of, check)


def add_to(commands: Any, tools: Callable[[], Tools]) -> None:
    """Add the command and its arguments to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="run a model on a text and show what its heads do",
        description="Run a model on a text with regard's attention, measure every head, and write a page of them.",
        epilog=EPILOG + ", ".join(which.SURVEYED) + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("text", nargs="?", help="a file, the text itself, or - for stdin (default: our own paragraph)")
    reading = parser.add_argument_group("what is read")
    reading.add_argument("--model", help="a folder, or a name that transformers knows (default: SmolLM2-135M-Instruct)")
    reading.add_argument("--compare", metavar="MODEL_B", help="a second model, surveyed on the same text")
    reading.add_argument(
        "--tokens", type=which.tokens, metavar="N", help="read the first N tokens, or 32k (default: all)"
    )
    reading.add_argument(
        "--write", type=which.count, default=24, metavar="N", help="new tokens to write (default: 24; 0: read once)"
    )
    reading.add_argument("--device", default="cpu", help="where models run, such as cuda, cuda:1, mps (default: cpu)")
    measured = parser.add_argument_group("what is measured")
    many: dict[str, Any] = {"action": "extend"}
    measured.add_argument(
        "--measure", type=which.measures, metavar="NAME,...", help="these scores alone (default: all)", **many
    )
    measured.add_argument(
        "--layer", type=which.layers, metavar="N,...", help="these layers alone, such as 0,16-18", **many
    )
    measured.add_argument(
        "--heads",
        type=which.heads,
        metavar="L.H,...",
        help="these heads in detail, to the last weight: 18.6,17.3",
        **many,
    )
    measured.add_argument("--ablate", choices=HOW, help="take out one head after the other, and say what that costs")
    measured.add_argument(
        "--no-eager", action="store_true", help="do not compare with transformers' own eager attention"
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--top", type=which.count, metavar="N", help=f"heads to list (default: {TOP})")
    shown.add_argument("--out", default="regard.html", metavar="PAGE", help="the page (default: regard.html)")
    shown.add_argument("--json", metavar="FILE", help="all scores as JSON; - for stdout, with nothing else there")
    shown.add_argument("--csv", metavar="FILE", help="all scores as a table, a line a head; - for stdout, likewise")
    add_force(shown)
    parser.set_defaults(run=partial(run, tools=tools))


def run(asked: argparse.Namespace, tools: Callable[[], Tools]) -> int:
    """Do what was asked. Everything that can be wrong with it is found before the model is loaded."""
    text = read(asked.text)
    _check(asked)
    terminal = _terminal()
    with terminal.Stages() as stages:
        report = _surveyed(tools(), text, asked, stages)
    _write(report, asked)
    quiet = STDOUT in (asked.json, asked.csv)
    if not quiet:
        top = TOP if asked.top is None else asked.top
        terminal.show(report, top=top, measures=asked.measure, heads=asked.heads or ())
    megabytes = Path(asked.out).stat().st_size / 1e6
    print(f"page: {asked.out} ({megabytes:.1f} MB)", file=sys.stderr if quiet else sys.stdout)
    return 0


def _check(asked: argparse.Namespace) -> None:
    """Raise if what was asked for cannot be done, as far as that can be told without a model."""
    if asked.out == STDOUT:
        raise ProblemError("the page cannot go to stdout: name a file after --out.")
    if asked.json == asked.csv == STDOUT:
        raise ProblemError("--json and --csv cannot both go to stdout: name a file for one of them.")
    if STDOUT in (asked.json, asked.csv) and asked.top is not None:
        option = "--json" if asked.json == STDOUT else "--csv"
        raise ProblemError(f"--top lists heads on stdout, which {option} - takes for itself: leave one of them out.")
    wanted_files = outputs(("--out", asked.out, "page"), ("--json", asked.json, "JSON"), ("--csv", asked.csv, "table"))
    check_outputs(wanted_files, force=asked.force, texts=[asked.text], models=_names(asked))
    wanted(asked.measure, asked.layer, asked.heads, asked.ablate)
    if asked.device != "cpu":
        from regard.integrate.checkpoint import device_of

        device_of(asked.device)


def _surveyed(tools: Tools, text: str, asked: argparse.Namespace, progress: Progress) -> "Report":
    """The report; with --compare both models are loaded first, so that what is wrong with one is found at once."""
    names = _names(asked)
    models: list[tuple[Any, Any, str]] = []
    progress("model", 0, len(names))
    for name in names:
        if (config := tools.config(name)) is not None:
            wanted(asked.measure, asked.layer, asked.heads, asked.ablate).check_config(config)
    for name in names:
        models.append(tools.load(name, device=asked.device))
        progress("model", len(models), len(names))
    for model, tokenizer, _ in models:
        tools.check(model, tokenizer, text, **_what(asked))
    labels = _labels([label for *_, label in models], names)
    reports = [
        _one(tools, model, tokenizer, label, text, asked, progress)
        for (model, tokenizer, _), label in zip(models, labels, strict=True)
    ]
    return replace(reports[0], other=reports[1]) if reports[1:] else reports[0]


def _names(asked: argparse.Namespace) -> list[str | None]:
    """The models, by name."""
    return [asked.model] if asked.compare is None else [asked.model, asked.compare]


def _labels(labels: list[str], names: list[str | None]) -> list[str]:
    """What the models are called: by the last part of their names, by all of it where that is the same, or by number.

    >>> _labels(["a", "a"], ["old/a", "new/a"]), _labels(["a", "a"], ["a", "a"])
    (['old/a', 'new/a'], ['a', 'a (2)'])
    """
    if len(set(labels)) == len(labels):
        return labels
    if len(set(names)) == len(names):
        return [name or label for name, label in zip(names, labels, strict=True)]
    return [label if n == 0 else f"{label} ({n + 1})" for n, label in enumerate(labels)]


def _one(
    tools: Tools, model: Any, tokenizer: Any, label: str, text: str, asked: argparse.Namespace, progress: Progress
) -> "Report":
    report = tools.survey(
        model,
        tokenizer,
        text,
        **_what(asked),
        compare_eager=not asked.no_eager,
        progress=progress,
    )
    return replace(report, run=replace(report.run, model=label))


def _what(asked: argparse.Namespace) -> dict[str, Any]:
    """What the survey is to measure, and of what."""
    return {
        "measures": asked.measure,
        "layers": asked.layer,
        "heads": asked.heads,
        "tokens": asked.tokens,
        "new_tokens": asked.write,
        "ablate": asked.ablate,
    }


def _terminal() -> Any:
    """The file beside this that draws with rich, which is an extra."""
    try:
        from regard.cli import terminal
    except ModuleNotFoundError as error:
        raise ProblemError(
            f"`regard inspect` draws with {error.name}, which is not installed: pip install 'regard[cli]'."
        ) from None
    return terminal


def _write(report: "Report", asked: argparse.Namespace) -> None:
    from regard.inspect.page import write_page, write_whole

    told = {
        asked.json: lambda: as_json(report.to_dict()),
        asked.csv: report.to_csv,
    }
    try:
        write_page(report, asked.out)
        for place, text in told.items():
            if place == STDOUT:
                print(text(), end="", flush=True)
            elif place is not None:
                write_whole(Path(place), text().encode())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ProblemError(f"{error.filename or asked.out} cannot be written: {error.strerror}.") from None
