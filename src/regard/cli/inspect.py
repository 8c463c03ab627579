"""`regard inspect`: run a model on a text, and show what its heads do, in the terminal and as a page.

```
text, model -> survey -> a table here, a page of every head, JSON for programs
```
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from regard.cli.sample import SAMPLE
from regard.errors import ProblemError

if TYPE_CHECKING:
    from regard.inspect.report import Report

STDOUT = "-"


Progress = Callable[[str, int, int], None]


class Survey(Protocol):
    """`regard.inspect.survey.survey`."""

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        *,
        new_tokens: int,
        compare_eager: bool,
        progress: Progress,
    ) -> "Report": ...


@dataclass(frozen=True)
class Tools:
    """What the command works with: `load(name or None) -> (model, tokenizer, label)`, and the survey."""

    load: Callable[[str | None], tuple[Any, Any, str]]
    survey: Survey


def tools() -> Tools:
    """The real ones. They import torch and transformers, which takes seconds: called when all else is right."""
    from regard.inspect.survey import survey
    from regard.integrate.checkpoint import load

    return Tools(load, survey)


def add_to(commands: Any, tools: Callable[[], Tools]) -> None:
    """Add the command and its arguments to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="run a model on a text and show what its heads do",
        description="Run a model on a text with regard's attention, measure every head, and write a page of them.",
    )
    parser.add_argument("text", nargs="?", help="a file, the text itself, or - for stdin (default: our own paragraph)")
    parser.add_argument("--model", help="a folder, or a name that transformers knows (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=_count, default=24, metavar="N", help="new tokens to write (default: 24)")
    parser.add_argument("--out", default="regard.html", metavar="PAGE", help="the page (default: regard.html)")
    parser.add_argument("--json", metavar="FILE", help="the scores as JSON; - for stdout, with nothing else there")
    parser.add_argument("--top", type=_count, default=12, metavar="N", help="heads to list (default: 12)")
    parser.add_argument("--no-eager", action="store_true", help="do not compare with transformers' own eager attention")
    parser.set_defaults(run=partial(run, tools=tools))


def run(asked: argparse.Namespace, tools: Callable[[], Tools]) -> int:
    """Do what was asked. Everything that can be wrong with it is found before the model is loaded."""
    text = read(asked.text)
    check_place(asked.out)
    if asked.json not in (None, STDOUT):
        check_place(asked.json)
    terminal = _terminal()
    with terminal.Stages() as stages:
        report = _surveyed(tools(), text, asked, stages)
    _write(report, asked)
    if asked.json != STDOUT:
        terminal.show(report, top=asked.top)
    megabytes = Path(asked.out).stat().st_size / 1e6
    print(f"page: {asked.out} ({megabytes:.1f} MB)", file=sys.stderr if asked.json == STDOUT else sys.stdout)
    return 0


def _surveyed(tools: Tools, text: str, asked: argparse.Namespace, progress: Progress) -> "Report":
    progress("model", 0, 1)
    model, tokenizer, label = tools.load(asked.model)
    progress("model", 1, 1)
    report = tools.survey(
        model, tokenizer, text, new_tokens=asked.tokens, compare_eager=not asked.no_eager, progress=progress
    )
    return replace(report, run=replace(report.run, model=label))


def _terminal() -> Any:
    """The file beside this that draws with rich, which is an extra."""
    try:
        from regard.cli import terminal
    except ModuleNotFoundError as error:
        raise ProblemError(
            f"`regard inspect` draws with {error.name}, which is not installed: pip install 'regard[cli]'."
        ) from None
    return terminal


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: expected 0, 1, 2 ...")
    return number


# ---- in -------------------------------------------------------------------------------------------------------------


def read(name: str | None) -> str:
    """The text that was asked for: of a file if there is one by that name, of stdin for `-`, else the name itself.

    Raises:
        ProblemError: a folder, a file that cannot be read or is no UTF-8 text, or nothing in it.
    """
    if name is None:
        return SAMPLE
    if name == "-":
        text = _decoded(sys.stdin.buffer.read(), "stdin")
    elif name.strip() and _exists(Path(name)):
        text = _decoded(_bytes(Path(name)), name)
    else:
        text = _typed(name)
    if not text.strip():
        raise ProblemError(f"{_short(name)} is empty: give a text of a few words or more, a file, or - for stdin.")
    return text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file: too long, or with a zero byte
        return False


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


# ---- out ------------------------------------------------------------------------------------------------------------


def check_place(name: str) -> None:
    """Raise unless a file of that name can be written: minutes of work must not end at a folder that is not there."""
    path = Path(name)
    if name == STDOUT:
        raise ProblemError("the page cannot go to stdout: name a file after --out.")
    if path.is_dir():
        raise ProblemError(f"{path} is a folder: name the file to write in it.")
    if not path.parent.is_dir():
        raise ProblemError(f"{path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ProblemError(f"{path} cannot be written: permission denied.")


def _write(report: "Report", asked: argparse.Namespace) -> None:
    from regard.inspect.page import finite, write_page, write_whole

    try:
        write_page(report, asked.out)
        if asked.json is not None:
            scores = json.dumps(finite(report.to_dict()), indent=1, allow_nan=False)
            if asked.json == STDOUT:
                print(scores, flush=True)
            else:
                write_whole(Path(asked.json), f"{scores}\n".encode())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ProblemError(f"{error.filename or asked.out} cannot be written: {error.strerror}.") from None
