"""Where a command writes: looked at before anything is loaded, so that no file is lost by mistake.

What the command reads is never written to. Another existing file is replaced if regard wrote it in the same
form, or by `--force`. Each is written whole or not at all.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard import __version__
from regard.cli.given import file_of
from regard.errors import ProblemError
from regard.inspect.page import finite, write_whole
from regard.inspect.page.place import check_place
from regard.inspect.surveying.report import CSV_HEAD

STDOUT = "-"

MARKS = {
    "page": re.compile(rb'<!doctype html>.{0,200}<meta name="generator" content="regard">', re.DOTALL),
    "JSON": re.compile(rb'\{\s*"regard": "'),
    "table": re.compile(",".join(CSV_HEAD).encode()),
}
"""How a file that regard wrote begins, by its form."""


class Output(NamedTuple):
    """A file to write: the option that names it, its name, and its form, a key of `MARKS`."""

    option: str
    place: str
    form: str


def add_force(parser: Any) -> None:
    """Add the option that lets other files be replaced."""
    parser.add_argument("--force", action="store_true", help="replace files that are there, though regard wrote none")


def outputs(*wanted: tuple[str, str | None, str]) -> list[Output]:
    """The outputs that are files: neither None nor stdout."""
    return [Output(option, place, form) for option, place, form in wanted if place not in (None, STDOUT)]


def check_outputs(
    wanted: Sequence[Output], *, force: bool, texts: Iterable[str | None] = (), models: Iterable[str | None] = ()
) -> None:
    """Raise `ProblemError` unless every file can be written, and nothing of others is lost by it.

    Args:
        force: whether files may be replaced that regard did not write.
        texts: what texts are read, as `given.read` takes them.
        models: which models are read, by name; None for the one that comes as a package.
    """
    for one in wanted:
        check_place(one.place)
        path = Path(one.place)
        if path.is_file() and path.stat().st_size:
            _check_replaced(one, path, force, texts, models)
    _check_different(wanted)


def _check_different(wanted: Sequence[Output]) -> None:
    for number, one in enumerate(wanted):
        for other in wanted[:number]:
            if Path(one.place).resolve() == Path(other.place).resolve() or _same(one.place, other.place):
                raise ProblemError(f"{other.option} and {one.option} name the same file: give each its own.")


def _same(one: str, other: str) -> bool:
    """Whether both are one file by two names."""
    return Path(one).is_file() and Path(other).is_file() and Path(one).samefile(other)


def _check_replaced(
    one: Output, path: Path, force: bool, texts: Iterable[str | None], models: Iterable[str | None]
) -> None:
    if any(_is(path, read) for text in texts for read in _read(text)):
        raise ProblemError(f"{one.place} is the text that is read: name another file after {one.option}.")
    with path.open("rb") as file:
        ours = MARKS[one.form].match(file.read(1024))
    if ours:
        return
    for model in models:
        if any(_is(path, file.stat()) for file in _files_of(model)):
            raise ProblemError(f"{one.place} is a file of the model that is read: name another after {one.option}.")
    if not force:
        raise ProblemError(
            f"{one.place} is there, and is no {one.form} that regard wrote: name another file after {one.option}, or "
            "replace it with --force."
        )


def _is(path: Path, read: os.stat_result) -> bool:
    return os.path.samestat(path.stat(), read)


def _read(text: str | None) -> Iterator[os.stat_result]:
    """The file that a text is read from, if it is one."""
    if text == STDOUT:
        try:
            yield os.fstat(sys.stdin.fileno())
        except (OSError, ValueError):  # stdin is closed, or not of the operating system
            return
    elif (file := file_of(text)) is not None:
        yield file.stat()


def _files_of(model: str | None) -> Iterator[Path]:
    from regard.integrate.checkpoint import folder_of

    folder = folder_of(model)
    return iter(()) if folder is None else (path for path in folder.rglob("*") if path.is_file())


# ---- JSON -----------------------------------------------------------------------------------------------------------


def as_json(found: dict[str, Any]) -> str:
    """As JSON that says which regard made it, with null for what JSON cannot say."""
    return json.dumps({"regard": __version__, **finite(found)}, indent=1, allow_nan=False) + "\n"


def write_json(place: str | None, found: dict[str, Any]) -> None:
    """As JSON to a file, whole or not at all, or to stdout for `-`; nowhere for None."""
    if place is None:
        return
    if place == STDOUT:
        print(as_json(found), end="", flush=True)
        return
    try:
        write_whole(Path(place), as_json(found).encode())
    except OSError as error:
        raise ProblemError(f"{place} cannot be written: {error.strerror}.") from None
