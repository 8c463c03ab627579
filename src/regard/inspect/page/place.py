"""Where a file is to be written, looked at before the work is done."""

import os
from pathlib import Path

from regard.errors import ProblemError


def check_place(name: str | os.PathLike[str]) -> None:
    """Raise unless a file of that name can be written: minutes of work must not end at a folder that is not there.

    Raises:
        ProblemError: it is no name, or a folder, stands in a folder that is not there, or may not be written.
    """
    try:
        path = Path(name)
    except TypeError:
        raise ProblemError(f"the place to write to is {name!r}: expected the name of a file.") from None
    try:
        there = path.resolve()  # a link is not replaced, what it leads to is
        is_there = there.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a zero byte, links in a circle
        why = getattr(error, "strerror", None) or error
        raise ProblemError(f"{str(path)[:60]!r} cannot be written: {why}.") from None
    if there.is_dir():
        raise ProblemError(f"{path} is a folder: name the file to write in it.")
    if not there.parent.is_dir():
        raise ProblemError(f"{path} cannot be written: there is no folder {path.parent}.")
    if is_there and not os.access(there, os.W_OK):
        raise ProblemError(f"{path} cannot be written: permission denied.")
    if (there.is_file() or not is_there) and not os.access(there.parent, os.W_OK):  # it is written beside, and renamed
        raise ProblemError(f"{path} cannot be written: permission denied in {there.parent}.")
