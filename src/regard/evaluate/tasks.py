"""The tasks by their names."""

from dataclasses import fields
from typing import Any, cast

from regard.cost.near_names import unknown_name
from regard.errors import KeywordError
from regard.evaluate.documents import Documents, Recall
from regard.evaluate.losses import Extrapolation, Perplexity, Stream
from regard.evaluate.retrieval import KeyValues, Needle, Passkey
from regard.evaluate.ruler import RULER
from regard.evaluate.task import Task, check_is_task, check_settings

TASKS: dict[str, type[Any]] = {
    **{each.name: each for each in (Needle, Passkey, KeyValues, Documents, Recall)},
    **RULER,
    **{each.name: each for each in (Perplexity, Extrapolation, Stream)},
}
"""Classes of tasks by their names."""


def task_of(name: str, **options: Any) -> Task:
    """A task by its name, with these settings in place of its own.

    Raises:
        ProblemError: there is no such task; those with a similar name are listed. Or the task has no such setting; all
            that it has are listed.

    >>> task_of("needle", samples=3).samples
    3
    >>> task_of("needel")
    Traceback (most recent call last):
    regard.errors.ProblemError: unknown task 'needel'. Near: needle.
    """
    kind = class_of(name)
    known = [field.name for field in fields(kind)]
    if unknown := [option for option in options if option not in known]:
        raise KeywordError(f"the task {name} has no {', '.join(unknown)}: expected {', '.join(known)}.")
    return kind(**options)


def check_task(task: Any) -> None:
    """Raise `ProblemError` for what is no task, and for a task of `TASKS` with settings that no text can have."""
    check_is_task(task)
    if is_of_regard(task):
        check_settings(task)


def is_of_regard(task: Any) -> bool:
    """Whether a task is one of `TASKS` or derived from one, and not a user's own, whose settings mean anything."""
    return isinstance(task, tuple(TASKS.values()))


def class_of(name: str) -> type[Any]:
    """The class of a task."""
    if not isinstance(cast(object, name), str) or name not in TASKS:
        raise unknown_name("task", str(name), list(TASKS))
    return TASKS[name]
