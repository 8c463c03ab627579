"""What the commands `./bench NAME` share: their options, and where their tables go.

Tables are printed. `--write` puts them into docs/ instead, or into another folder that has the page: a page as a whole,
or the part of a page between its two marks (`page_parts`).
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.page_parts import with_part, write_part
from regard.atomic_write import write_whole
from regard.cli.argument_types import count, number
from regard.cli.main import Parser, run_command

DOCS = Path(__file__).parents[1] / "docs"


def parser(
    name: str, description: str, *, page: str | None = None, seconds: float | None = None, threads: bool = True
) -> Parser:
    """The parser of `./bench NAME`.

    Args:
        page: the page that `--write` writes; None for a command that only prints.
        seconds: the default of `--seconds`; None for a command without it.
        threads: whether it has `--threads`.
    """
    made = Parser(prog=f"./bench {name}".strip(), description=description)
    if threads:
        made.add_argument("--threads", type=count(1), metavar="N", help="threads (default: torch's)")
    if seconds is not None:
        made.add_argument(
            "--seconds", type=number("above 0, below 3600", 1e-6, 3600), default=seconds, metavar="S",
            help=f"for each measurement (default: {seconds:g})",
        )  # fmt: skip
    if page is not None:
        made.add_argument(
            "--write", nargs="?", type=Path, const=DOCS, metavar="FOLDER", help=f"write docs/{page}, or FOLDER/{page}"
        )
    return made


def main(
    make: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None,
) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return run_command(lambda: run(make().parse_args(arguments)))


def check_part(folder: Path | None, page: str, part: str) -> None:
    """Raise `ProblemError` before anything is measured if the page to write lacks the marks of the part."""
    if folder is not None:
        with_part(folder / page, part, "")


def publish_part(
    folder: Path | None, page: str, part: str, text: str, pictures: Mapping[str, str] | None = None
) -> None:
    """Print a part of a page, or write it with its pictures into the page in `folder`."""
    if folder is None:
        print(text)
        return
    print(f"page: {write_part(folder / page, part, text, pictures)}", file=sys.stderr)


def publish_page(folder: Path | None, page: str, text: str, pictures: Mapping[str, str] | None = None) -> None:
    """Print a page, or write it with its pictures into `folder`; pictures first, as the page shows them."""
    if folder is None:
        print(text)
        return
    for name, picture in (pictures or {}).items():
        write_whole(folder / name, picture.encode())
    write_whole(folder / page, text.encode())
    print(f"page: {folder / page}", file=sys.stderr)
