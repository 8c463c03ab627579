"""Files that commands write: checked before anything is loaded, so that no file is lost by mistake.

A file that the command reads is never written to. Another existing file is replaced if regard wrote it in the same
format, or with `--force`. Each file is written whole or not at all.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard import __version__
from regard.atomic_write import check_writable, write_whole
from regard.errors import ProblemError

STDOUT = "-"

SIGNATURES = {
    "page": re.compile(rb'<!doctype html>.{0,200}<meta name="generator" content="regard">', re.DOTALL),
    "JSON": re.compile(rb'\{\s*"regard": "(?![^"]*",\s*"format":)'),  # with a format: examples of regard evaluate
    "picture": re.compile(rb"<svg [^>]*><desc>regard cost</desc>"),
    "chart": re.compile(rb"<svg [^>]*><desc>regard evaluate</desc>"),
    "table": re.compile(b"model,layer,head,kv_head,kind,sure,remarkable"),
}
"""How a file that regard wrote begins, by its format."""


DRAWINGS = ("picture", "chart")
"""Formats of `SIGNATURES` that are SVG."""

OTHER_PICTURES = (".png", ".jpg", ".jpeg", ".pdf", ".gif", ".webp", ".eps", ".ps", ".bmp", ".tif", ".tiff")


class OutputFile(NamedTuple):
    """A file to write: the option that names it, its name, and its format, a key of `SIGNATURES`."""

    option: str
    name: str
    format: str


def add_json(parser: Any, content: str) -> None:
    """Add the option that writes `content` as JSON."""
    parser.add_argument(
        "--json", metavar="FILE", help=f"write {content} as JSON; - for stdout, which then gets nothing else"
    )


def add_force(parser: Any) -> None:
    """Add the option that lets other files be replaced."""
    parser.add_argument("--force", action="store_true", help="replace existing files that regard did not write")


def output_files(*outputs: tuple[str, str | None, str]) -> list[OutputFile]:
    """The outputs that are files: neither None nor stdout.

    Raises:
        ProblemError: more than one goes to stdout.
    """
    to_stdout = [option for option, name, _ in outputs if name == STDOUT]
    if len(to_stdout) > 1:
        raise ProblemError(f"{' and '.join(to_stdout[:2])} cannot both go to stdout: name a file for one of them.")
    return [OutputFile(option, name, kind) for option, name, kind in outputs if name not in (None, STDOUT)]


def check_outputs(
    files: Sequence[OutputFile], *, force: bool, prompts: Iterable[str | None] = (), models: Iterable[str | None] = (),
    inputs: Iterable[str | None] = (), appended: Sequence[OutputFile] = (),
) -> None:  # fmt: skip
    """Raise `ProblemError` unless every file can be written and none of another program is lost by it.

    Args:
        force: whether files may be replaced that regard did not write.
        prompts: files that prompts are read from, `-` for stdin; None for none.
        models: models that are read, by name; None for the default model.
        inputs: other files that are read; None for none.
        appended: files that the command appends to, and checks itself.
    """
    for file in files:
        _check_suffix(file)
        check_writable(file.name)
    _check_different([*appended, *files])
    for file in files:
        path = Path(file.name)
        if path.is_file() and path.stat().st_size:
            _check_read(file, path, prompts, "the prompt that is read")
            _check_read(file, path, inputs, "a file that is read")
            _check_replaced(file, path, force, models)


def check_not_results(files: Sequence[OutputFile], results: Sequence[Path]) -> None:
    """Raise `ProblemError` for a file that would replace results of this run, which `--force` does not allow either."""
    for file in files:
        if any(_is_same(file.name, str(each)) for each in results):
            raise ProblemError(f"{file.name} is a file of this run's results: name another one after {file.option}.")


def _check_suffix(file: OutputFile) -> None:
    """Raise `ProblemError` for a picture under the name of another format: viewers choose by the name."""
    suffix = Path(file.name).suffix
    if file.format in DRAWINGS and suffix.lower() in OTHER_PICTURES:
        raise ProblemError(
            f"{file.option} writes SVG, and {file.name} is the name of another format ({suffix}): expected .svg."
        )


def _check_different(files: Sequence[OutputFile]) -> None:
    for number, file in enumerate(files):
        for other in files[:number]:
            if _is_same(file.name, other.name):
                raise ProblemError(f"{other.option} and {file.option} name the same file: give each its own.")


def _is_same(one: str, other: str) -> bool:
    """Whether both names are of one file, which need not exist yet, or links to one."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return Path(one).is_file() and Path(other).is_file() and Path(one).samefile(other)


def _check_read(file: OutputFile, path: Path, names: Iterable[str | None], what: str) -> None:
    if any(os.path.samestat(path.stat(), status) for name in names for status in _status(name)):
        raise ProblemError(f"{file.name} is {what}: name another file after {file.option}.")


def _check_replaced(file: OutputFile, path: Path, force: bool, models: Iterable[str | None]) -> None:
    with path.open("rb") as opened:
        is_ours = SIGNATURES[file.format].match(opened.read(1024))
    if is_ours:
        return
    for model in models:
        if any(os.path.samestat(path.stat(), part.stat()) for part in _files_of(model)):
            raise ProblemError(f"{file.name} is a file of the model that is read: name another after {file.option}.")
    if not force:
        raise ProblemError(
            f"{file.name} exists, and is no {file.format} that regard wrote: name another file after {file.option}, or "
            "replace it with --force."
        )


def _status(name: str | None) -> Iterator[os.stat_result]:
    """The status of the file of this name, `-` for stdin, if there is one."""
    if name == STDOUT:
        try:
            yield os.fstat(sys.stdin.fileno())
        except (OSError, ValueError):  # stdin is closed, or not a file of the operating system
            return
    elif name is not None and Path(name).is_file():
        yield Path(name).stat()


def _files_of(model: str | None) -> Iterator[Path]:
    from regard.integrate.checkpoint import folder_of

    folder = folder_of(model)
    return iter(()) if folder is None else (path for path in folder.rglob("*") if path.is_file())


# ---- JSON -----------------------------------------------------------------------------------------------------------


def as_json(content: dict[str, Any]) -> str:
    """JSON with the version of regard, and null for NaN and infinities."""
    from regard.inspect.page import finite

    return json.dumps({"regard": __version__, **finite(content)}, indent=1, allow_nan=False) + "\n"


def write_json(name: str | None, content: dict[str, Any]) -> None:
    """Write JSON to a file, whole or not at all, or to stdout for `-`; nowhere for None."""
    if name is not None:
        write_text(name, as_json(content))


def write_text(name: str, text: str) -> None:
    """Write a text to a file, whole or not at all, or to stdout for `-`."""
    if name == STDOUT:
        print(text, end="", flush=True)
        return
    try:
        write_whole(Path(name), text.encode(errors="replace"))  # such as a lone surrogate in a file name
    except OSError as error:
        raise ProblemError(f"{name} cannot be written: {error.strerror}.") from None
