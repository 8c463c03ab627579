"""Folders of the user, also of a process without a home, as in a container whose user is only a number."""

import os
import tempfile
from pathlib import Path


def expanded(name: str) -> Path:
    """The path with `~` as the home folder. Where there is no such home it stays as it is, and names nothing.

    >>> expanded("~nobody-of-this-name/model").name
    'model'
    """
    return Path(os.path.expanduser(name))  # noqa: PTH111  pathlib's raises an error without a home


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/regard` or `~/.cache/regard`; without a home, a folder of the user among the temporary files."""
    home = expanded("~")
    usual = home / ".cache" if home.is_absolute() else Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "regard"
