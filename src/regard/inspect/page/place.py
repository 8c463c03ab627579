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
    if path.is_dir():
        raise ProblemError(f"{path} is a folder: name the file to write in it.")
    if not path.parent.is_dir():
        raise ProblemError(f"{path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ProblemError(f"{path} cannot be written: permission denied.")
