"""The options of `regard evaluate`. `evaluation.py` runs it, and is imported after the options are checked.

```
task, model, cache -> examples, one by one into FILE.jsonl -> table on stdout, JSON, picture, page
```
"""

import argparse
from typing import Any

from regard.cli import generate_options
from regard.cli.argument_types import chosen_options, count, counts, shares, threads
from regard.cli.generate import DTYPES
from regard.cli.outputs import STDOUT, OutputFile, add_force, add_json, check_outputs, output_files
from regard.cost.storage_names import float_name
from regard.errors import ProblemError
from regard.folders import expanded
from regard.integrate.model_folder import check_name

OF_SHOW = ("task", "files", "json", "plot", "html", "force")
"""Arguments that `regard evaluate show` uses: the others are settings of runs, and a file has its own."""

EPILOG = """\
examples: regard evaluate needle --lengths 512,1k,2k --samples 5
          regard evaluate needle --lengths 1k --evict snapkv --budget 512
          regard evaluate needle --model mine.py:model          a callable, or (model, tokenizer)
          regard evaluate show needle.jsonl --html needle.html  the results of a file

Each finished example is a line of the file --results. The same command continues a run that was interrupted.
"""


def add_to(commands: Any) -> None:
    """Add the command and its options to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "evaluate",
        help="find out whether a model holds at length",
        description="Needles, retrieval, questions and losses by position, with any KV cache.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", nargs="?", metavar="TASK", help="a task, show, or nothing for a list of the tasks")
    parser.add_argument("files", nargs="*", metavar="FILE", help="results to show, after show")
    parser.add_argument(
        "--model", help="a folder, a name known to transformers, or FILE.py:NAME (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", type=float_name, choices=DTYPES, help="type of the weights (default: float32)")
    parser.add_argument("--device", help="such as cuda, cuda:1, mps (default: cpu)")
    parser.add_argument("--threads", type=threads, metavar="N", help="threads (default: torch's)")
    _add_task_options(parser)
    generate_options.add_cache_options(parser)
    parser.add_argument("--step", type=count(1), metavar="N", help="tokens read at once after the first piece")
    parser.add_argument(
        "--with-question", action="store_true", help="evict after the question; without it, before the question is read"
    )
    parser.add_argument("--results", metavar="FILE", help="the file of examples (default: named by task and settings)")
    add_json(parser, "results")
    parser.add_argument("--plot", metavar="FILE", help="draw the results, as SVG")
    parser.add_argument("--html", metavar="FILE", help="write a page with tables and pictures")
    add_force(parser)
    defaults = vars(parser.parse_args([]))
    parser.set_defaults(run=run, defaults=defaults)


def _add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the settings of tasks."""
    group = parser.add_argument_group(
        "task", "Defaults are those of the task; an option that it does not have is refused."
    )
    group.add_argument("--lengths", type=counts, metavar="N,N", help="tokens of the whole prompt, such as 512,1k,8k")
    group.add_argument("--depths", type=shares, metavar="D,D", help="places of the needle, such as 0,0.5,1")
    group.add_argument("--pairs", type=counts, metavar="N,N", help="pairs of keys and values")
    group.add_argument("--documents", type=counts, metavar="N,N", help="documents in a prompt")
    group.add_argument("--questions", metavar="FILE", help="questions with documents, a JSON object in each line")
    group.add_argument("--vocabulary", type=count(2), metavar="N", help="tokens that keys and values are drawn from")
    group.add_argument("--trained", type=count(1), metavar="N", help="tokens of the texts the model was trained on")
    group.add_argument("--multiples", type=counts, metavar="K,K", help="lengths as multiples of --trained")
    group.add_argument("--context", type=count(1), metavar="N", help="tokens of a sliding window")
    group.add_argument("--stride", type=count(1), metavar="N", help="tokens between sliding windows")
    group.add_argument("--samples", type=count(1), metavar="N", help="examples of each cell (default: 10)")
    group.add_argument("--seed", type=count(0), metavar="N", help="seed of the examples (default: 0)")
    group.add_argument("--haystack", metavar="TEXT", help="moby-dick, noise, or a file")
    group.add_argument("--chat", action="store_true", default=None, help="ask in the model's chat template")


def run(args: argparse.Namespace) -> int:
    """Check the options, and evaluate; returns the exit code."""
    if args.task is None and (options := chosen_options(args, args.defaults)):
        raise ProblemError(f"{options[0]} needs a task: add one, as regard evaluate needle {options[0]} ...")
    others = {name: default for name, default in args.defaults.items() if name not in OF_SHOW}
    if args.task == "show" and (options := chosen_options(args, others)):
        raise ProblemError(
            f"regard evaluate show has no {options[0]}: it shows runs with the settings in their files. Expected FILE "
            "..., --json, --plot, --html or --force; for other settings, evaluate again."
        )
    generate_options.check_cache_options(args)
    if args.files and args.task != "show":
        raise ProblemError(f"{args.files[0]!r} follows the task {args.task}: files are for regard evaluate show FILE.")
    _check_model(args)
    _check_files(args)
    from regard.cli import evaluation

    if args.task is None:
        return evaluation.list_tasks()
    if args.task == "show":
        return evaluation.show(args)
    return evaluation.evaluate_task(args)


def _check_model(args: argparse.Namespace) -> None:
    """Raise `ProblemError` for a name that no model has, and for options that the model of a file does not have."""
    if not has_file(args.model):
        check_name(args.model)
        return
    for option, value in (("--dtype", args.dtype), ("--device", args.device)):
        if value is not None:
            raise ProblemError(
                f"{option} has no effect on {args.model}, which the file makes: leave it out, and set it in the file."
            )


def has_file(model: str | None) -> bool:
    """Whether a model is named as `FILE.py:NAME`; the name of a folder may have a colon as well."""
    return model is not None and ":" in model and not expanded(model).is_dir()


def files_of(args: argparse.Namespace) -> list[OutputFile]:
    """The files that the options name, besides that of the examples."""
    return output_files(("--json", args.json, "JSON"), ("--plot", args.plot, "chart"), ("--html", args.html, "page"))


def _check_files(args: argparse.Namespace) -> None:
    """Raise `ProblemError` for outputs that cannot be written, or that are files of this run."""
    if args.results in (STDOUT, ""):
        name = args.results or "''"
        raise ProblemError(
            f"--results {name} names no file, and results are continued from one: expected FILE, or --json -."
        )
    files = files_of(args)
    results = [] if args.results is None else [OutputFile("--results", args.results, "results")]
    inputs, models = [*args.files, args.haystack, args.questions], list[str | None]()
    if has_file(args.model):
        inputs.append(args.model.rpartition(":")[0])
    elif args.task != "show":
        models.append(args.model)
    check_outputs(files, force=args.force, inputs=inputs, models=models, appended=results)
