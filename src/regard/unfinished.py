"""Files and folders while they are written, and what a killed process left of them.

```
.OUT.4711.part    what process 4711 writes, until it is renamed to OUT
.OUT.4711.old     the OUT from before, for the instant between two renames
```

An error or Ctrl-C removes a part. A killed process cannot, so the next one that writes OUT does: once process 4711 is
gone, and of a folder once nobody has it locked, for process 4711 of another container is not seen here.
"""

import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl


def unfinished(target: Path, ending: str = "part") -> Path:
    """The name that this process gives to what will become `target`, beside it."""
    return target.with_name(f".{target.name}.{os.getpid()}.{ending}")


def remove_unfinished(target: Path) -> None:
    """Remove what killed processes left of `target`; put back a folder that one had only set aside."""
    for old in _left(target, "old"):
        if not os.path.lexists(target):
            old.rename(target)
    for part in _left(target, "part"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keep `remove_unfinished` of every other process from this folder; where there are such locks."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _left(target: Path, ending: str) -> Iterator[Path]:
    """Files and folders beside `target` that ended processes left. On Windows none: `os.kill` would end a process."""
    if sys.platform == "win32":
        return
    named = re.compile(rf"\.{re.escape(target.name)}\.([1-9]\d{{0,8}})\.{ending}")
    beside = list[Path]()
    with suppress(OSError):  # a folder that is not there, or whose names may not be read
        beside += target.parent.iterdir()
    for path in beside:
        found = named.fullmatch(path.name)
        if found and not path.is_symlink() and _is_left(path, int(found[1])):
            yield path


def _is_left(path: Path, process: int) -> bool:
    if not path.is_dir():
        return not _runs(process)
    return (process == os.getpid() or not _runs(process)) and not _is_locked(path)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except OSError:  # it runs, and is another user's
        return True
    return True


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether nobody else has it locked; true where the file system has no locks."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
