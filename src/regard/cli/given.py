"""What a command is given to read: a text by any name."""

import re
import sys
from pathlib import Path

from regard.cli.sample import SAMPLE
from regard.errors import ProblemError


def read(name: str | None) -> str:
    """The text that was asked for: of a file if there is one by that name, of stdin for `-`, else the name itself.

    Raises:
        ProblemError: a folder, a file that cannot be read or is no UTF-8 text, or nothing in it.
    """
    if name is None:
        return SAMPLE
    if name == "-":
        text = _decoded(sys.stdin.buffer.read(), "stdin")
    elif (file := file_of(name)) is not None:
        text = _decoded(_bytes(file), name)
    else:
        text = _typed(name)
    if not text.strip():
        raise ProblemError(f"{_short(name)} is empty: give a text of a few words or more, a file, or - for stdin.")
    return text


def file_of(name: str | None) -> Path | None:
    """The file or folder of that name, which is what is read then; None where there is none."""
    try:
        return Path(name) if name is not None and name.strip() and Path(name).exists() else None
    except (OSError, ValueError):  # no name of a file: too long, or with a zero byte
        return None


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise ProblemError(f"{path} is a folder: name a text file, or give the text itself in quotes.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ProblemError(f"{path} cannot be read: {error.strerror}.") from None


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProblemError(
            f"{name} is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start:,}): save it as UTF-8 first."
        ) from None
    if "\0" in text:
        raise ProblemError(f"{name} is no text, there are zero bytes in it: name a text file.")
    return text


def _typed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ProblemError("the text is not UTF-8: put it into a UTF-8 file, and name that.") from None
    if re.fullmatch(r"\S*([/\\]\S*|\.\w{1,5})", text):
        raise ProblemError(f"there is no file {_short(text)}; to read it as a text, give it on stdin.")
    return text


def _short(name: str) -> str:
    return repr(name) if len(name) <= 60 else f"{name[:57]!r}..."
