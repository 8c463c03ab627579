"""A folder that is written whole or not at all.

```
.OUT.4711.part/   filled, flushed to the disk   ->   renamed to OUT/       an error or Ctrl-C before: removed
```
"""

import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from regard.errors import ProblemError
from regard.integrate.manifest import not_listed
from regard.unfinished import locked, remove_unfinished, unfinished


def check_target(target: Path, *, force: bool) -> None:
    """Raise `ProblemError` unless a folder can be made at `target`, or the one that is there may be replaced.

    Args:
        force: whether a folder that is there may be replaced. What is in it must be what a conversion wrote, with
            nothing added or changed since: all else is not ours to remove.
    """
    if not target.parent.is_dir():
        raise ProblemError(f"{target} cannot be written: there is no folder {target.parent}.")
    if not os.access(target.parent, os.W_OK):
        raise ProblemError(f"{target} cannot be written: permission denied in {target.parent}.")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ProblemError(f"{target} is there and is no folder: name another place, or remove it.")
    if not force:
        raise ProblemError(f"{target} is there already: name another place, or replace it with --force (force=True).")
    if others := not_listed(target):
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise ProblemError(
            f"{target} is not replaced: {others[0]}{more} in it was not written by a conversion, or was changed since. "
            "Name another place, or move that away."
        )


def check_apart(target: Path, source: Path) -> None:
    """Raise `ProblemError` where `target` is the folder `source`, which is read meanwhile, holds it, or lies in it."""
    if target == source:
        raise ProblemError(f"{target} is what is read: name another place for the result.")
    if source in target.parents or target in source.parents:
        raise ProblemError(f"{target} and {source} lie one in the other: name another place for the result.")


def check_room(place: Path, needed: int) -> None:
    """Raise `ProblemError` unless so many bytes are free where `place` lies."""
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ProblemError(
            f"the disk of {place} has {free / 1e9:,.1f} GB free and the result takes {needed / 1e9:,.1f} GB."
        )


@contextmanager
def whole_folder(target: Path, *, replace: bool) -> Generator[Path]:
    """An empty folder beside `target` that takes its name at the end; whatever is raised inside, it is removed.

    With `replace`, a folder that has the name is set aside first, and set back if the new one cannot take its place.
    Without, one that came to be there meanwhile is an `OSError`.
    """
    remove_unfinished(target)
    part = unfinished(target)
    part.mkdir()
    try:
        with locked(part):
            yield part
            _flush(part.rglob("*"))
            _flush([part])
            _put(part, target, replace=replace)
        _flush([target.parent])
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put(part: Path, target: Path, *, replace: bool) -> None:
    """Rename `part` to `target`. Two names cannot be exchanged at once everywhere: for an instant there may be none."""
    if not replace or not target.exists():
        part.rename(target)
        return
    old = unfinished(target, "old")
    try:
        target.rename(old)
        part.rename(target)
        old.rename(part)  # which is removed: by the next process, if this one is killed meanwhile
    except BaseException:
        if old.exists():
            old.rename(part if target.exists() else target)
        raise


def _flush(paths: Iterable[Path]) -> None:
    """Have the disk hold what was written to these files and folders."""
    for path in paths:
        if os.name == "nt" and path.is_dir():  # Windows opens no folders
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
