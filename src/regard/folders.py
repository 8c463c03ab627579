"""Folders of the user, also of a process without a home, as in a container whose user is only a number."""

import os
import reprlib
import tempfile
from pathlib import Path

from regard.errors import ProblemError


def expanded(name: str) -> Path:
    """The path with `~` as the home folder. Where there is no such home it stays as it is, and names nothing.

    >>> expanded("~nobody-of-this-name/model").name
    'model'
    """
    return Path(os.path.expanduser(name))  # noqa: PTH111  pathlib's raises an error without a home


def name_of(model: object) -> str:
    """The name of a model, or the path of its folder, as a text.

    Raises:
        ProblemError: it is neither a text nor a path.

    >>> name_of("gpt2"), name_of(Path("models/own")) == os.path.join("models", "own")
    ('gpt2', True)
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str):
        raise ProblemError(f"the name of the model is {reprlib.repr(model)}: expected a text, or the path of a folder.")
    return name


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/regard` or `~/.cache/regard`; without a home, a folder of the user among the temporary files."""
    home = expanded("~")
    usual = home / ".cache" if home.is_absolute() else Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "regard"
