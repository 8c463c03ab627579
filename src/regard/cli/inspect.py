"""`regard inspect`: run a model on a prompt and show what its heads do, in the terminal and as a page.

```
prompt, model -> survey -> tables in the terminal, a page of all heads, JSON and CSV for programs
```
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.argument_types import count, heads, layers, tokens
from regard.cli.outputs import STDOUT, add_force, add_json, as_json, check_outputs, output_files, write_text
from regard.cli.progress import Progress, progress_bars
from regard.cli.prompt import SAMPLE, add_prompt, prompt_source, read_prompt
from regard.errors import ProblemError
from regard.integrate.model_folder import check_name, sizes_of

if TYPE_CHECKING:
    from regard.inspect.surveying.report import Report

ABLATIONS = ("zero", "mean")

TOP = 12
"""Default of --top."""

NEW_TOKENS = 24
"""Default of --max-new-tokens."""

MEASURES = (
    "sink", "alpha", "previous", "current", "best_offset", "duplicate", "induction", "induction_jittered",
    "best_shift", "entropy", "effective_tokens", "inverse_squares", "evenness", "largest", "positional",
    "local_mass", "mean_distance", "column", "rare_word", "value_weighted", "sink_value", "copying",
    "copying_eigenvalues", "sink_output", "rarest_hits",
)  # fmt: skip
"""The keys of `regard.inspect.MEASURES`, which cannot be imported without torch; a test compares the two."""

EPILOG = """\
examples:
  regard inspect                                         a sample prompt, SmolLM2-135M-Instruct
  regard inspect --prompt-file book.txt --heads 18.6     a book, one head in detail
  regard inspect "One two one" --measures sink,entropy   two scores; faster where they need no sweep over all pairs
  regard inspect --compare-model ./finetuned --csv x.csv two models on the same prompt, scores as a table
  regard inspect --ablate mean                           also the loss without each head

A score says what a head looks at. It does not say that the head matters: ablate the head for that (--ablate); other
heads can replace it. The page and the JSON give the formula and the source of every measure.

measures: """


@dataclass(frozen=True)
class Tools:
    """The functions that load and survey a model; tests replace them.

    Args:
        load: `load(name or None, device=) -> (model, tokenizer, label)`.
        survey: surveys a model; `survey.survey`.
        config: the config of a model by its name, if it can be read before the weights; else None.
        check: raises the errors of a survey that are found before it starts; `survey.check`.
    """

    load: Callable[..., tuple[Any, Any, str]]
    survey: Callable[..., "Report"]
    config: Callable[[str | None], Any] = lambda name: None
    check: Callable[..., None] = lambda *model, **options: None


def tools() -> Tools:
    """The real functions. They import torch and transformers, which takes seconds."""
    from regard.inspect.surveying.survey import check, survey
    from regard.integrate.checkpoint import config_of, load

    return Tools(load, survey, config_of, check)


def add_to(commands: Any) -> None:
    """Add the command and its options to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="run a model on a prompt and show what its heads do",
        description="Run a model on a prompt with regard's attention, measure every head, and write a page of them.",
        epilog=EPILOG + ", ".join(MEASURES) + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_prompt(parser, " (default: a sample paragraph)")
    parser.add_argument(
        "--prompt-tokens",
        type=tokens,
        metavar="N",
        help="read only the first N tokens of the prompt, such as 500 or 32k (default: all)",
    )
    parser.add_argument(
        "--max-new-tokens", type=count(0), default=NEW_TOKENS, metavar="N",
        help=f"tokens to generate at most (default: {NEW_TOKENS}; 0: read the prompt once)",
    )  # fmt: skip
    parser.add_argument("--model", help="a folder, or a name known to transformers (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--compare-model", metavar="MODEL", help="survey a second model on the same prompt")
    parser.add_argument("--device", default="cpu", help="such as cuda, cuda:1, mps (default: cpu)")
    measured = parser.add_argument_group("measures")
    lists: dict[str, Any] = {"action": "extend"}
    measured.add_argument("--measures", type=measures, metavar="NAME,...", help="these scores (default: all)", **lists)
    measured.add_argument("--layers", type=layers, metavar="N,...", help="these layers, such as 0,16-18", **lists)
    measured.add_argument(
        "--heads", type=heads, metavar="L.H,...", help="these heads in detail, to the last weight: 18.6,17.3", **lists
    )
    measured.add_argument("--ablate", choices=ABLATIONS, help="ablate one head after the other, and report the loss")
    measured.add_argument("--no-eager", action="store_true", help="no comparison with transformers' eager attention")
    shown = parser.add_argument_group("output")
    shown.add_argument("--top", type=count(0), metavar="N", help=f"heads to list (default: {TOP})")
    shown.add_argument("--html", default="regard.html", metavar="FILE", help="write the page (default: regard.html)")
    add_json(shown, "all scores")
    shown.add_argument("--csv", metavar="FILE", help="write all scores as a table, a line per head; - for stdout")
    add_force(shown)
    parser.set_defaults(run=run)


def measures(text: str) -> list[str]:
    """Names of measures, for argparse; `-` may replace `_`."""
    names = [part.strip().replace("-", "_") for part in text.split(",")]
    for name in names:
        if name not in MEASURES:
            raise argparse.ArgumentTypeError(f"{name!r} is no measure: expected one of {', '.join(MEASURES)}")
    return names


def run(args: argparse.Namespace, tools: Callable[[], Tools] = tools) -> int:
    """Check the options, survey, and show the report; returns the exit code."""
    sample = args.prompt is None and args.prompt_file is None
    prompt = SAMPLE if sample else read_prompt(args.prompt, args.prompt_file)
    _check(args)
    view = _view()
    with progress_bars(lines=True) as progress:
        progress("model", 0, len(_names(args)))
        report = _survey(tools(), prompt, args, progress)
    _write(report, args)
    quiet = STDOUT in (args.json, args.csv)
    if not quiet:
        top = TOP if args.top is None else args.top
        view.show(report, top=top, measures=args.measures, heads=args.heads or ())
    megabytes = Path(args.html).stat().st_size / 1e6
    print(f"page: {args.html} ({megabytes:.1f} MB)", file=sys.stderr if quiet else sys.stdout)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise `ProblemError` for options that cannot be satisfied, as far as that is known without a model."""
    if args.html == STDOUT:
        raise ProblemError("the page cannot go to stdout: name a file after --html.")
    files = output_files(("--html", args.html, "page"), ("--json", args.json, "JSON"), ("--csv", args.csv, "table"))
    if STDOUT in (args.json, args.csv) and args.top is not None:
        option = "--json" if args.json == STDOUT else "--csv"
        raise ProblemError(f"--top lists heads on stdout, and {option} - writes there: leave one of them out.")
    check_outputs(files, force=args.force, prompts=[prompt_source(args)], models=_names(args))
    for layer, head in args.heads or ():
        if args.layers is not None and layer not in args.layers:
            raise ProblemError(f"head {layer}.{head} is in none of the --layers: add layer {layer}, or leave them out.")
    for name in _names(args):
        check_name(name)
        _check_heads(args, sizes_of(name))
    if args.device != "cpu":
        from regard.integrate.checkpoint import device_of

        device_of(args.device)


def _check_heads(args: argparse.Namespace, sizes: tuple[int, int] | None) -> None:
    """Raise `ProblemError` for layers and heads beyond those of the model; sizes are (layers, heads), None: unknown."""
    if sizes is None:
        return
    for layer in sorted({*(args.layers or ()), *(layer for layer, _ in args.heads or ())}):
        if layer >= sizes[0]:
            raise ProblemError(f"layer {layer} does not exist: the model has {sizes[0]} layers, 0 to {sizes[0] - 1}.")
    for layer, head in args.heads or ():
        if head >= (heads := sizes[1]):
            raise ProblemError(
                f"head {layer}.{head} does not exist: layer {layer} has {heads} heads, {layer}.0 to "
                f"{layer}.{heads - 1}."
            )


def _survey(tools: Tools, prompt: str, args: argparse.Namespace, progress: Progress) -> "Report":
    """The report. With --compare-model both models are loaded and checked before either is surveyed."""
    from regard.inspect.surveying.selection import select

    names = _names(args)
    models: list[tuple[Any, Any, str]] = []
    for name in names:
        if (config := tools.config(name)) is not None:
            select(args.measures, args.layers, args.heads, args.ablate).check_config(config)
    for name in names:
        models.append(tools.load(name, device=args.device))
        progress("model", len(models), len(names))
    options = _survey_options(args)
    for model, tokenizer, _ in models:
        tools.check(model, tokenizer, prompt, **options)
    run = partial(tools.survey, **options, compare_eager=not args.no_eager, progress=progress)
    reports: list[Report] = []
    for (model, tokenizer, _), label in zip(models, _labels([label for *_, label in models], names), strict=True):
        report = run(model, tokenizer, prompt)
        reports.append(replace(report, run=replace(report.run, model=label)))
    return replace(reports[0], other=reports[1]) if reports[1:] else reports[0]


def _names(args: argparse.Namespace) -> list[str | None]:
    """The models, by name; None is the default model."""
    return [args.model] if args.compare_model is None else [args.model, args.compare_model]


def _labels(labels: list[str], names: list[str | None]) -> list[str]:
    """Distinct labels of the models: the last part of their names, else the whole names, else numbered.

    >>> _labels(["a", "a"], ["old/a", "new/a"]), _labels(["a", "a"], ["a", "a"])
    (['old/a', 'new/a'], ['a', 'a (2)'])
    """
    if len(set(labels)) == len(labels):
        return labels
    if len(set(names)) == len(names):
        return [name or label for name, label in zip(names, labels, strict=True)]
    return [label if n == 0 else f"{label} ({n + 1})" for n, label in enumerate(labels)]


def _survey_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `survey` and of its check."""
    return {
        "measures": args.measures,
        "layers": args.layers,
        "heads": args.heads,
        "tokens": args.prompt_tokens,
        "new_tokens": args.max_new_tokens,
        "ablate": args.ablate,
    }


def _view() -> Any:
    """The module that prints a report with rich, which is an optional dependency."""
    try:
        from regard.cli import survey_view
    except ModuleNotFoundError as error:
        raise ProblemError(
            f"`regard inspect` prints tables with {error.name}, which is not installed: pip install 'regard[cli]'."
        ) from None
    return survey_view


def _write(report: "Report", args: argparse.Namespace) -> None:
    from regard.inspect.page import write_page

    try:
        write_page(report, args.html)
    except OSError as error:
        raise ProblemError(f"{error.filename or args.html} cannot be written: {error.strerror}.") from None
    if args.json is not None:
        write_text(args.json, as_json(report.to_dict()))
    if args.csv is not None:
        write_text(args.csv, report.to_csv())
