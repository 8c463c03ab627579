"""`regard evaluate` after its options: load the model, evaluate, and show the results.

`regard.cli.evaluate` has the options and imports this file once they are checked.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from regard.bench.rounds import on_threads
from regard.cli.evaluate import files_of, has_file
from regard.cli.generate import DTYPES
from regard.cli.generate_options import cache_spec
from regard.cli.outputs import STDOUT, check_not_results, write_json, write_text
from regard.cli.progress import progress_bars
from regard.errors import ProblemError
from regard.evaluate import TASKS, CacheOptions, Results, as_model, evaluate, task_of
from regard.evaluate.models import Model
from regard.evaluate.page import page
from regard.evaluate.picture import picture
from regard.evaluate.records import parts, whole_of
from regard.evaluate.results import comparison
from regard.evaluate.run import runs_of, settings_of
from regard.storage.stored import Contiguous

OPTIONS = (
    "lengths", "depths", "pairs", "documents", "questions", "vocabulary", "trained", "multiples", "context", "stride",
    "samples", "seed", "haystack", "chat",
)  # fmt: skip
"""Options that are settings of tasks."""


def list_tasks() -> int:
    """Print the tasks with their sources."""
    width = max(map(len, TASKS))
    for name, kind in TASKS.items():
        print(f"{name:{width}}  {(kind.__doc__ or '').splitlines()[0]}\n{'':{width}}  {kind.source}")
    return 0


def evaluate_task(args: argparse.Namespace) -> int:
    """Evaluate as the options say, and return the exit code."""
    task = _task(args)
    with on_threads(args.threads or torch.get_num_threads()), progress_bars() as progress:
        progress("model", 0, 1)
        model = load_model(args)
        progress("model", 1, 1)
        file = Path(args.results or _default_file(settings_of(task, model)))
        check_not_results(files_of(args), [file, *parts(file)])
        name_file = one_time(f"results: {file}")

        def advance(done: int, total: int) -> None:
            name_file()  # not before: the settings are checked, and the file is open
            progress("examples", done, total)

        results = evaluate(task, model, file=file, progress=advance)
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first process shows the results of all
    return show_runs(args, [("", results)])


def one_time(line: str) -> Callable[[], None]:
    """A function that prints a line to stderr the first time it is called."""
    lines = [line]

    def show() -> None:
        while lines:
            print(lines.pop(), file=sys.stderr)

    return show


def _task(args: argparse.Namespace) -> Any:
    """The task with the settings of the options."""
    task = task_of(args.task)
    known = {field.name for field in dataclasses.fields(task)}  # pyright: ignore[reportArgumentType]
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    for name in options:
        if name not in known:
            takes = ", ".join(f"--{each}" for each in OPTIONS if each in known)
            raise ProblemError(f"the task {args.task} has no --{name}: expected {takes}.")
    return task_of(args.task, **options)


def _default_file(settings: dict[str, Any]) -> str:
    """A name by task, model and a digest of all settings, so that other settings are another file."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    model = "".join(c if c.isalnum() or c in "-._" else "-" for c in settings["model"])
    return f"regard-{settings['task']}-{model}-{digest}.jsonl"


def load_model(args: argparse.Namespace) -> Model:
    """The model of the options with its cache."""
    spec = cache_spec(args)
    if args.with_question and spec.evict is None:
        raise ProblemError("--with-question says when a policy evicts: add --evict, such as snapkv.")
    layout = None if spec.layout == Contiguous() else spec.layout
    cache = CacheOptions(layout, spec.codec, spec.evict, args.step, args.with_question)
    if has_file(args.model):
        model, tokenizer, label, digest = _of_file(args.model)
    else:
        from regard.integrate.checkpoint import load

        dtype, device = args.dtype or DTYPES[0], "cpu" if args.device is None else args.device
        model, tokenizer, label = load(args.model, dtype=getattr(torch, dtype), device=device)
        digest = ""
        if not getattr(model, "can_generate", lambda: True)():
            raise ProblemError(f"{label} is a {type(model).__name__}: expected a causal language model.")
    is_plain = not isinstance(model, torch.nn.Module) and cache == CacheOptions()
    own_label = None if isinstance(model, Model) else label
    made = as_model(model, tokenizer, cache=None if is_plain else cache, label=own_label)
    return dataclasses.replace(made, digest=made.digest + digest)


def _of_file(name: str) -> tuple[Any, Any, str, str]:
    """(model, tokenizer, label, digest) of `FILE.py:NAME`: a callable or other model, or (model, tokenizer).

    The digest is that of the file: after a change of it, the model is another one.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ProblemError(f"there is no file {file}: expected --model FILE.py:NAME, a folder, or the name of a model.")
    module, digest = _module_of(path), hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    if not hasattr(module, attribute):
        raise ProblemError(f"{file} has no {attribute!r}: expected --model FILE.py:NAME.")
    found = getattr(module, attribute)
    parts = cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found, None)
    if len(parts) != 2:
        raise ProblemError(f"{name} is a tuple of {len(parts)}: expected a model, or (model, tokenizer).")
    model, tokenizer = parts
    return model, tokenizer, f"{path.stem}:{attribute}", digest


def _module_of(path: Path) -> ModuleType:
    """The module of a Python file, which is run."""
    spec = importlib.util.spec_from_file_location(f"regard_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ProblemError(f"{path} is no Python file: expected --model FILE.py:NAME.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names of annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ProblemError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def show(args: argparse.Namespace) -> int:
    """Show the results of files: of one run, or of several side by side."""
    paths = [Path(file) for file in args.files]
    check_not_results(files_of(args), [part for path in paths for part in parts(path)])
    runs = runs_of(paths)
    for path in paths:
        whole = whole_of(path)
        if whole is not None and whole not in paths:
            print(f"note: {path} has the examples of one process alone; those of all: {whole}.", file=sys.stderr)
    return show_runs(args, runs)


def show_runs(args: argparse.Namespace, runs: Sequence[tuple[str, Results]]) -> int:
    """Print the tables, and write JSON, picture and page."""
    if len(runs) == 1:
        write_json(args.json, runs[0][1].as_dict())
    else:
        write_json(args.json, {"runs": [{"name": name, **results.as_dict()} for name, results in runs]})
    if args.plot is not None:
        write_text(args.plot, picture(runs))
    if args.html is not None:
        write_text(args.html, page(runs))
    if STDOUT not in (args.json, args.plot, args.html):
        for name, results in runs:
            print(f"{name}\n{results.table()}\n" if name else results.table())
        if len(runs) > 1:
            print(comparison(runs))
    return 0
