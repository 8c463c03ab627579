"""Files that are written whole or not at all.

```
.OUT.4711.2.part    what process 4711 writes, until the file is renamed to OUT; 2: the third file that it writes so
```

An error or Ctrl-C removes the temporary file. A killed process cannot, so the next process that writes OUT removes it,
once process 4711 has ended. The file has the permissions of the file that it replaces.
"""

import os
import re
import stat
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from regard.errors import ProblemError

STEM_BYTES = 200
"""Bytes of the file's name in that of its temporary file: most file systems allow 255, and the numbers take some."""

_counter = count()
"""Threads of one process may write the same file: each temporary file has a name of its own."""


@contextmanager
def atomic_write(target: Path) -> Generator[Path]:
    """Yield a temporary path beside `target`, to be written; at the end it replaces `target`, after an error it goes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "out.txt")) as part:
    ...         _ = part.write_text("whole")
    ...     [path.name for path in Path(folder).iterdir()]
    ['out.txt']
    """
    for abandoned in _abandoned(target):
        abandoned.unlink(missing_ok=True)
    part = target.with_name(f".{_stem(target)}.{os.getpid()}.{next(_counter)}.part")
    try:
        part.touch()
        mode = (target if target.exists() else part).stat().st_mode
        _set_mode(part, mode | stat.S_IRUSR | stat.S_IWUSR)  # before anything is in it that others must not read
        yield part
        _set_mode(part, mode)  # safetensors changes it
        part.replace(target)
    except OSError as error:
        if str(error.filename) != str(part):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from None  # its user did not name the part
    finally:
        with suppress(OSError):  # the first error counts, and a part that is left goes with the next writing
            part.unlink()


def write_whole(path: Path, content: bytes) -> int:
    """Write a file whole or not at all and return its size in bytes. A device is written to directly."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        return path.write_bytes(content)
    with atomic_write(path) as part:
        return part.write_bytes(content)


def check_writable(name: str | os.PathLike[str]) -> None:
    """Raise unless a file of that name can be written. It is called before work that takes minutes.

    Raises:
        ProblemError: the name is not a file name, names a folder, its folder does not exist, or permission is missing.
    """
    try:
        path = Path(name)
    except TypeError:
        raise ProblemError(f"the output is {name!r}: expected the name of a file.") from None
    try:
        target = path.resolve()  # a link is kept, its target is replaced
        exists = target.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, contains a zero byte, circular links
        why = getattr(error, "strerror", None) or error
        raise ProblemError(f"{str(path)[:60]!r} cannot be written: {why}.") from None
    if target.is_dir():
        raise ProblemError(f"{path} is a folder: name the file to write in it.")
    if not target.parent.is_dir():
        raise ProblemError(f"{path} cannot be written: there is no folder {path.parent}.")
    if exists and not os.access(target, os.W_OK):
        raise ProblemError(f"{path} cannot be written: permission denied.")
    if (target.is_file() or not exists) and not os.access(target.parent, os.W_OK):  # for the temporary file
        raise ProblemError(f"{path} cannot be written: permission denied in {target.parent}.")


def _abandoned(target: Path) -> Iterator[Path]:
    """Temporary files of `target` whose process has ended. On Windows none: `os.kill` would end a process."""
    if sys.platform == "win32":
        return
    pattern = re.compile(rf"\.{re.escape(_stem(target))}\.([1-9]\d{{0,8}})\.\d+\.part")
    siblings = list[Path]()
    with suppress(OSError):  # a folder that does not exist, or cannot be listed
        siblings += target.parent.iterdir()
    for path in siblings:
        match = pattern.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink() and not _is_running(int(match[1])):
            yield path


def _stem(target: Path) -> str:
    """The file's name, cut where the name of its temporary file would be too long."""
    return os.fsencode(target.name)[:STEM_BYTES].decode(errors="ignore")


def _set_mode(path: Path, mode: int) -> None:
    if path.stat().st_mode != mode:  # some file systems know one mode only, and refuse to set any
        path.chmod(mode)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 tests only
    except ProcessLookupError:
        return False
    except OSError:  # it runs as another user
        return True
    return True
