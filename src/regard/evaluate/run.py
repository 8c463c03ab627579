"""`evaluate`: a task, a model, and results; appended to a file, so that a run that was killed continues.

```python
from regard.evaluate import Needle, evaluate
from regard.integrate import load

model, tokenizer, _ = load()
results = evaluate(Needle(lengths=(512, 1024)), model, tokenizer, file="needle.jsonl")
print(results.table())
```

Started by torchrun, each process evaluates its share of the examples and writes a file of its own; the first one waits
for the others and returns the results of all.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from regard.errors import ProblemError
from regard.evaluate import records
from regard.evaluate.answer import answers, check_fits, check_written
from regard.evaluate.haystack import digest, digest_of_file
from regard.evaluate.models import CacheOptions, Model, as_model, check_label
from regard.evaluate.results import Results
from regard.evaluate.task import Example, Passage, Task, check_storable, settings
from regard.evaluate.tasks import check_task, class_of, is_of_regard
from regard.integrate.evaluation_mode import evaluating

Progress = Callable[[int, int], None]
"""Called with (examples done, examples in all)."""

POLL = 1.0
"""Seconds between two looks at the files of other processes."""


def evaluate(
    task: Task, model: Any, tokenizer: Any = None, *, cache: CacheOptions | None = None, positions: int | None = None,
    label: str | None = None, file: str | os.PathLike[str] | None = None, share: bool = True,
    progress: Progress | None = None,
) -> Results:  # fmt: skip
    """The results of a task for a model.

    Args:
        task: such as `Needle()`; `task_of("needle")` finds one by its name.
        model: a callable from int64 [1, tokens] to logits [1, tokens, vocabulary], a causal language model of
            transformers, a `regard.nn.Decoder`, or a `Model` of `as_model`.
        tokenizer: of the model; None: UTF-8 bytes are tokens.
        cache: the KV cache of the model; None: one that keeps all tokens.
        positions: tokens that the model was made for; None: what its config says.
        label: the name of the model in results; a function without a name of its own, such as a lambda, needs one for
            a file.
        file: where each finished example is appended. If it has results of the same settings, their examples are not
            computed again.
        share: whether a prefix that examples share is read once; the answers are the same.
        progress: called after each example with the finished ones and all.

    Raises:
        ProblemError: a setting of the task is one that no text has, the model cannot be evaluated, an example is longer
            than the model, the tokenizer cannot write its answer, the file has results of other settings, is written by
            another process, or cannot be written.

    A model whose logits are all equal finds a needle of 7 digits by chance, and so never:

    >>> from regard.evaluate import Needle
    >>> evaluate(Needle((400,), (0.5,), samples=2, haystack="noise"), lambda ids: torch.zeros(*ids.shape, 256)).score
    Interval(value=0.0, low=0.0, high=0.65...)
    """
    check_task(task)
    made = as_model(model, tokenizer, cache=cache, positions=positions, label=label)
    examples = list(task.examples(made))
    _check(examples, made)
    rank, world = _place()
    chosen = settings_of(task, made)
    about = {"torch": torch.__version__, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    path = None if file is None else Path(file)
    if path is not None:
        check_label(made)
        check_storable(chosen)
    if path is None and world > 1:
        raise ProblemError("several processes need a file for their results: give file=, or --results FILE.")
    found = {} if path is None else _before(path, chosen)
    own = path if path is None or not rank else path.with_name(f"{path.name}.{rank}")
    ours = [each for each in share_of(examples, task.axes, rank, world) if each.name not in found]
    count = len(examples) - len(found) if world == 1 else len(ours)
    done = len(examples) - count
    with nullcontext() if own is None else records.Writer(own, chosen, about) as writer, evaluating(made.whole):
        if progress is not None:
            progress(done, len(examples))
        for number, (example, answer) in enumerate(answers(made, ours, share=share), done + 1):
            record = {"example": example.name, "cell": example.cell, **answer}
            if writer is not None:
                writer.append(record)
            found[example.name] = record
            if progress is not None:
                progress(number, len(examples))
    if path is not None and world > 1 and not rank:
        found = _wait(path, chosen, [example.name for example in examples], progress)
    return Results(task.name, task.axes, chosen, about, [found[e.name] for e in examples if e.name in found])


def settings_of(task: Task, model: Model) -> dict[str, Any]:
    """All settings of a run; results with the same settings are of one run.

    A file counts by its content, a tokenizer by its tokens of fixed texts.
    """
    of_regard = is_of_regard(task)
    text, questions = (getattr(task, name, None) if of_regard else None for name in ("haystack", "questions"))
    files = ({} if text is None else {"text": digest(text)}) | (
        {} if questions is None else {"questions_digest": digest_of_file(questions)}
    )
    ours = {"model": model.label, "weights": model.digest, "cache": shown_cache(model.cache)}
    ours |= {"config": model.config} if model.config else {}
    more = {"positions": model.positions, "tokenizer": model.tokenizer.digest()}
    others = files | ours | more
    own = {f"task.{name}" if name in others else name: value for name, value in settings(task).items()}
    return own | others


def runs_of(paths: Sequence[Path]) -> list[tuple[str, Results]]:
    """The runs in files, each with the settings by which it differs from the others; files of one run are merged.

    Raises:
        ProblemError: there is no file, one has no results, or they are of different tasks.
    """
    runs, firsts = list[records.Stored](), list[Path]()
    for path in paths:
        stored = records.read(path)
        if stored is None:
            raise ProblemError(f"there are no results in {path}.")
        same = next((each for each in runs if each.settings == stored.settings), None)
        if same is None:
            runs.append(stored)
            firsts.append(path)
        else:
            same.records.update({name: each for name, each in stored.records.items() if name not in same.records})
    if not runs:
        raise ProblemError("show shows the results of files: name one or more.")
    for run, path in zip(runs, firsts, strict=True):
        if not run.records:
            raise ProblemError(f"there are no results in {path}: no example is finished yet.")
    tasks = sorted({run.settings["task"] for run in runs})
    if len(tasks) > 1:
        raise ProblemError(f"the files are of different tasks ({', '.join(tasks)}): show those of one task together.")
    axes = class_of(tasks[0]).axes
    for run, path in zip(runs, firsts, strict=True):
        for name, record in run.records.items():
            if missing := [axis for axis in axes if axis not in record["cell"]]:
                raise ProblemError(f"{path} is damaged: the cell of {name} has no {missing[0]}. Remove the record.")
    found = [Results(tasks[0], axes, run.settings, run.about, list(run.records.values())) for run in runs]
    return list(zip(_differences([run.settings for run in runs]), found, strict=True))


def _differences(found: Sequence[dict[str, Any]]) -> list[str]:
    """For each run the settings that are not the same in all.

    >>> _differences([{"task": "needle", "cache": "dense"}, {"task": "needle", "cache": "codec=Int8()"}])
    ['cache dense', 'cache codec=Int8()']
    """
    keys = [key for key in found[0] if any(each.get(key) != found[0][key] for each in found)]
    return [", ".join(f"{key} {each.get(key)}" for key in keys) for each in found]


def _check(examples: Sequence[Example], model: Model) -> None:
    """Raise `ProblemError` before anything is computed."""
    if not examples:
        raise ProblemError("the task has no examples: give one or more samples.")
    if len({example.name for example in examples}) < len(examples):
        raise ProblemError("two examples of the task have the same name: lengths, depths or positions are repeated.")
    for example in examples:
        check_fits(model, example)
        check_written(model, example)
    model.start()  # raises for a cache that cannot be made


def _before(path: Path, chosen: dict[str, Any]) -> dict[str, records.Record]:
    """The records that the file has already."""
    stored = records.read(path)
    if stored is None:
        return {}
    records.check_same(chosen, stored.settings, str(path))
    return dict(stored.records)


def shown_cache(cache: CacheOptions | None) -> str:
    """A cache as a text: what differs from one that keeps all tokens.

    >>> from regard.storage.stored import Rolling
    >>> shown_cache(CacheOptions(layout=Rolling(512)))
    'layout=Rolling(window=512, sinks=4, rope=None)'
    """
    if cache is None:
        return "none"
    return ", ".join(f"{key}={value!r}" for key, value in cache._asdict().items() if value) or "dense"


# ---- several processes ----------------------------------------------------------------------------------------------


def _place() -> tuple[int, int]:
    """(number of this process, processes), as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def share_of(examples: Sequence[Example], axes: Sequence[str], rank: int, world: int) -> list[Example]:
    """The examples of a process: every `world`th group, so that examples that share a prefix stay together."""
    groups = list[list[Example]]()
    for example in examples:
        if groups and _shares(groups[-1][-1], example, axes):
            groups[-1].append(example)
        else:
            groups.append([example])
    return [example for group in groups[rank::world] for example in group]


def _shares(one: Example, other: Example, axes: Sequence[str]) -> bool:
    """Whether neighbours are of one cell, whose contexts begin alike, or have the same context; passages share none."""
    if isinstance(one, Passage) or isinstance(other, Passage):
        return False
    return all(one.cell.get(axis) == other.cell.get(axis) for axis in axes) or one.context == other.context


def _wait(
    path: Path, chosen: dict[str, Any], names: Sequence[str], progress: Progress | None
) -> dict[str, records.Record]:
    """The records of all processes, as soon as all are there. Torchrun ends all processes if one fails."""
    while True:
        found = _before(path, chosen)
        done = sum(name in found for name in names)
        if progress is not None:
            progress(done, len(names))
        if done == len(names):
            return found
        time.sleep(POLL)
