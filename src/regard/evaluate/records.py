"""Results as lines of JSON that are appended, so that a run that was killed continues.

```
{"regard": "0.1.0", "format": 1, "settings": {"task": "needle", "lengths": [512], ...}, "about": {...}}
{"example": "512/0.5/0", "cell": {"length": 512, "depth": 0.5}, "score": 1.0, "nll": 0.02, "text": " 4812207"}
{"example": "512/0.5/1", ...}
```

A line is written whole, and is on the disk before the next example begins. A process that is killed in between leaves
at most a part of a line at the end: the next run removes it and computes the example again. Only one process writes a
file. With torchrun each process has its own, FILE.1, FILE.2 ...; whoever reads FILE reads them all, and an example
counts once.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from regard import __version__
from regard.errors import ProblemError

if sys.platform != "win32":
    import fcntl

FORMAT = 1
Record = dict[str, Any]


class Stored(NamedTuple):
    """What a file has: the settings of its run, facts about it, and a record of each finished example by its name."""

    settings: dict[str, Any]
    about: dict[str, Any]
    records: dict[str, Record]


def read(path: Path) -> Stored | None:
    """The content of a file and of those of other processes beside it; None if there is none.

    Raises:
        ProblemError: a file is no results, has a line that is not whole before its end, or is of other settings.
    """
    found: Stored | None = None
    for part in parts(path):
        stored = _read_one(part)
        if stored is None:
            continue
        if found is None:
            found = stored
            continue
        check_same(stored.settings, found.settings, str(part))
        found.records.update({name: each for name, each in stored.records.items() if name not in found.records})
    return found


def parts(path: Path) -> list[Path]:
    """The file, and those of other processes, that exist."""
    pattern = re.compile(re.escape(path.name) + r"\.\d+")
    siblings = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return [path] * path.is_file() + [each for each in siblings if pattern.fullmatch(each.name)]


def whole_of(path: Path) -> Path | None:
    """The file that a run of several processes is read by, for that of a process beside the first; None for others.

    >>> whole_of(Path("needle.jsonl.1")), whole_of(Path("needle.jsonl"))
    (...Path('needle.jsonl'), None)
    """
    found = re.fullmatch(r"(.+)\.\d+", path.name)
    if found is None:
        return None
    whole = path.with_name(found[1])
    return whole if found[1].endswith(".jsonl") or whole.is_file() else None


def _read_one(path: Path) -> Stored | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProblemError(f"{path} cannot be read: {error.strerror}.") from None
    lines = data.split(b"\n")[:-1]  # what follows the last newline is torn, or nothing
    if not lines:
        if data and not b'{"regard": '.startswith(data[:11]):
            raise _no_results(path)
        return None
    head, *rest = (_parsed(line, number, path) for number, line in enumerate(lines, 1))
    if "regard" not in head or not _has_task(head.get("settings")):
        raise _no_results(path)
    if head.get("format") != FORMAT:
        raise ProblemError(f"{path} has results of format {head.get('format')}: this version reads {FORMAT}.")
    records = dict[str, Record]()
    for number, record in enumerate(rest, 2):
        if not _is_record(record):
            raise ProblemError(
                f"{path}, line {number}: no record of an example. Remove the line, or name another file."
            )
        records.setdefault(record["example"], record)
    about: Any = head.get("about")
    return Stored(head["settings"], about if isinstance(about, dict) else {}, records)


def _is_record(found: dict[str, Any]) -> bool:
    """Whether it has what the results of an example have: a name, a cell, and a score, or the losses of a passage."""
    if not isinstance(found.get("example"), str) or not isinstance(found.get("cell"), dict):
        return False
    if "losses" not in found:
        return _is_number(found.get("score")) and 0 <= found["score"] <= 1 and _is_loss(found.get("nll"))
    losses, counts = found["losses"], found.get("counts")
    if not isinstance(losses, list) or not isinstance(counts, list) or not isinstance(found.get("first"), int):
        return False
    return len(losses) == len(counts) and all(map(_is_loss, losses)) and all(map(_is_number, counts))


def _is_loss(value: object) -> bool:
    """Whether it is a loss; an infinite one is None."""
    return value is None or _is_number(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parsed(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        if number == 1:
            raise _no_results(path)
        raise ProblemError(f"{path}, line {number}: {line[:40]!r} is not JSON. Remove the line, or name another file.")
    return cast("dict[str, Any]", found)


def _has_task(settings: Any) -> bool:
    return isinstance(settings, dict) and isinstance(cast("dict[str, Any]", settings).get("task"), str)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and infinities, which no record has


def _no_results(path: Path) -> ProblemError:
    return ProblemError(f"{path} exists, and has no results of regard evaluate: name another file.")


def check_same(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    """Raise `ProblemError` for the first setting that differs from those of a file.

    >>> check_same({"seed": 1}, {"seed": 0}, "needle.jsonl")
    Traceback (most recent call last):
    regard.errors.ProblemError: needle.jsonl has results of another run: seed is 0 there and 1 here. ...
    """
    ours = json.loads(json.dumps(ours))
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key):
            advice = "Name another file, or run with its settings." if key in ours else "Name another file."
            raise ProblemError(
                f"{name} has results of another run: {key} is {_shown(theirs, key)} there and {_shown(ours, key)} "
                f"here. {advice}"
            )


def _shown(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not set"


class Writer:
    """Appends records to a file; a context manager. Only one process can have a file open.

    Raises:
        ProblemError: the file cannot be written, another process writes it, or it has results of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        self.path = path
        if path.exists() and not (path.is_file() or path.is_dir()):  # a device may be endless
            raise ProblemError(f"{path} is no regular file: name a file that results can be read from again.")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ProblemError(f"{path} cannot be written: {error.strerror}.") from None
        try:
            self._begin(settings, about)
        except BaseException:
            self.close()
            raise

    def _begin(self, settings: dict[str, Any], about: dict[str, Any]) -> None:
        try:
            if sys.platform != "win32":  # where nothing refuses a second process
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ProblemError(
                f"{self.path} is written by another process: wait for it, or name another file."
            ) from None
        except OSError as error:
            raise ProblemError(
                f"{self.path} cannot be locked against other processes ({error.strerror}): name a file on another file "
                "system."
            ) from None
        stored = _read_one(self.path)
        if stored is not None:
            check_same(settings, stored.settings, str(self.path))
        self._cut(_whole_bytes(self.path))
        if stored is None:
            self._append({"regard": __version__, "format": FORMAT, "settings": settings, "about": about})

    def append(self, record: Record) -> None:
        """Write a record; it is on the disk when this returns.

        Raises:
            ProblemError: there is no space. What was written before remains whole.
        """
        self._append(record)

    def _append(self, content: dict[str, Any]) -> None:
        line, before = json.dumps(content, allow_nan=False).encode() + b"\n", os.fstat(self._file).st_size
        try:
            done = 0
            while done < len(line):
                done += os.write(self._file, line[done:])
            os.fsync(self._file)
        except OSError as error:
            self._cut(before)
            raise ProblemError(
                f"{self.path} cannot be written: {error.strerror}. The results before are whole: make room, and run "
                "the same command again to continue."
            ) from None

    def _cut(self, size: int) -> None:
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)

    def close(self) -> None:
        """Let other processes write the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole_bytes(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1
