"""The prompt of `inspect` and `generate`: its two arguments, and its text."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from regard.cli.quoted import quoted
from regard.errors import ProblemError

STDIN = "-"

# The sample shows what heads do: names that repeat (Calloway, Pell Point), a clause that occurs twice, and a quotation
# that breaks off in the middle of its second occurrence, which an induction head can complete.
SAMPLE = (
    "Anna and Tom Calloway kept the lighthouse at Pell Point for thirty-one years. Every evening Tom Calloway climbed "
    "the two hundred and six steps, wound the clockwork, and lit the lamp; every morning Anna Calloway wrote the "
    'weather in the log. "Wind from the north-west," she wrote, "sea moderate, one sail." When the lamp was made '
    "electric and the clockwork taken away, Tom Calloway still climbed the two hundred and six steps every evening, "
    "because, he said, somebody ought to look at the sea. The log of that year is still in the museum at Pell Point. "
    'On its last page Anna Calloway wrote: "Wind from the north-west, sea moderate,'
)
"""The prompt of `regard inspect` when none is given."""


def add_prompt(parser: Any, default: str = "") -> None:
    """Add the two arguments of a prompt; `default` names the prompt that is read without them."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=f"the text, or - for stdin{default}")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file instead")


def prompt_source(args: argparse.Namespace) -> str | None:
    """The file that the prompt is read from, `-` for stdin; None for a text in the command."""
    return args.prompt_file or (STDIN if args.prompt == STDIN else None)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The text of the prompt: of the file, of stdin for `-`, else the argument itself.

    Raises:
        ProblemError: both or none are given, the prompt is the name of a file, or the text is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise ProblemError("the prompt comes from an argument and from --prompt-file: leave one of them out.")
    if file is not None:
        text, name = _decode(_read_file(file), file), quoted(file)
    elif prompt == STDIN:
        text, name = _decode(sys.stdin.buffer.read(), "stdin"), "stdin"
    elif prompt is not None:
        text, name = _check_text(prompt), "the prompt"
    else:
        raise ProblemError('there is no prompt: give a text in quotes, such as "Why is the sky blue?", or - for stdin.')
    if not text.strip():
        raise ProblemError(f"{name} is empty: expected a word or more.")
    return text


def _read_file(name: str) -> bytes:
    path = Path(name)
    try:
        return path.read_bytes()
    except IsADirectoryError:
        raise ProblemError(f"{name} is a folder: --prompt-file takes a text file.") from None
    except FileNotFoundError:
        raise ProblemError(f"there is no file {quoted(name)}.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ProblemError(f"{quoted(name)} cannot be read: {why}.") from None


def _decode(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProblemError(
            f"{name} is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start:,}): save it as UTF-8 first."
        ) from None
    if "\0" in text:
        raise ProblemError(f"{name} is not text, it contains zero bytes: name a text file.")
    return text


def _check_text(text: str) -> str:
    """The text, unless it is meant as the name of a file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ProblemError("the prompt is not UTF-8: save it in a UTF-8 file, and give --prompt-file.") from None
    if _is_file(text) or re.fullmatch(r"\S*([/\\]\S*|\.\w{1,5})", text):
        raise ProblemError(
            f"{quoted(text)} is the name of a file: read it with --prompt-file {text}; if it is the prompt itself, "
            "give it on stdin, with -."
        )
    return text


def _is_file(name: str) -> bool:
    try:
        return bool(name.strip()) and Path(name).exists()
    except (OSError, ValueError):  # not a file name: too long, or contains a zero byte
        return False
