"""The command `regard`: what it can do, and how it ends.

Exit codes: 0 done; 2 what was asked cannot be done, said in one line; 130 interrupted with Ctrl-C.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from regard import __version__
from regard.cli import bench, generate, inspect
from regard.errors import RegardError


def main(arguments: Sequence[str] | None = None, *, tools: Callable[[], inspect.Tools] = inspect.tools) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code.

    Args:
        tools: what `inspect` works with; tests bring their own.
    """

    def run() -> int:
        asked = _parser(tools).parse_args(arguments)
        return asked.run(asked)

    return ended(run)


def ended(run: Callable[[], int]) -> int:
    """Run a command and return its exit code; what regard raises, Ctrl-C and a closed pipe end it in a line or none."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no "…" gets a "?"
    try:
        code = run()
        sys.stdout.flush()  # here, where a closed pipe is understood
    except RegardError as error:
        return _end(2, f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        return _end(130, "interrupted")
    except BrokenPipeError:  # `regard inspect | head`: whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _terminated(*_: object) -> NoReturn:
    """End as by Ctrl-C, so that what is half written is removed: a batch system asks so before it kills."""
    raise SystemExit(143)


def _end(code: int, message: str) -> int:
    print(f"regard: {message}", file=sys.stderr)
    return code


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def _parser(tools: Callable[[], inspect.Tools]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="regard",
        description="Attention as a library; its command shows what goes on in a model, and how fast it is here.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and the compiled library, and exit")
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    commands = parser.add_subparsers(metavar="command", title="commands")
    inspect.add_to(commands, tools)
    generate.add_to(commands)
    bench.add_to(commands)
    return parser


class _Version(argparse.Action):
    """Print what is installed, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("regard", __version__)
        for name in ("torch", "transformers"):
            print(name, _installed(name))
        print("compiled library:", _library())
        parser.exit()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _library() -> str:
    from regard import native

    return native.absence() or f"{native.isa()}, of {', '.join(native.isas())}"
