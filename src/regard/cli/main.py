"""The command `regard`: its grammar, and its exit codes.

```
regard inspect  [PROMPT]   what the heads of a model do
regard generate  PROMPT    text with any KV cache, its speed and memory
regard evaluate [TASK]     whether a model holds at length
regard bench               how fast attention of given shapes is here
regard cost      [MODEL]   what a model costs, before it runs
regard doctor              what is installed, what runs, and what is wrong; for reports of bugs
regard script.py ...       a program of yours, with its attention run by regard (script.py)
```

A prompt is a text without an option, `-` for stdin, or `--prompt-file FILE`. An option has one meaning in all commands:

| option | meaning | inspect | generate | bench | cost | evaluate |
|---|---|---|---|---|---|---|
| `--model`, `--compare-model` | folder or name of a model; a second model | x | `--model` | | | `--model` |
| `--prompt-file` | file that the prompt is read from | x | x | | | |
| `--prompt-tokens` | first tokens of the prompt that are read | x | | | | |
| `--max-new-tokens` | tokens to generate at most | x | x | | | |
| `--stop`, `--ignore-eos`, `--chat`, `--raw` | where a text ends, how a prompt is read | | x | | | `--chat` |
| `--temperature`, `--top-p`, `--top-k`, `--seed` | sampling | | x | | | `--seed` |
| `--cache`, `--group-size` | how the KV cache stores keys and values | | x | | x | x |
| `--window`, `--sinks`, `--page-size` | which tokens the KV cache keeps, and in which layout | | x | | x | x |
| `--rotate`, `--evict`, `--budget` | codes of rotated keys and values; eviction | | x | | | x |
| `--compare-cache`, `--explain` | the same with a plain cache; layers and plans | | x | | | |
| `--measures`, `--layers`, `--heads`, `--ablate`, `--no-eager`, `--top` | what is measured and listed | x | | | | |
| `--batch` | batch rows | | | x | x | |
| `--queries`, `--keys`, `--query-heads`, `--kv-heads`, `--dim`, `--v-dim` | sizes | | | x | | |
| `--mask`, `--bias`, `--softcap`, `--backward`, `--backend`, `--rounds` | the call that is measured | | | x | | |
| `--context`, `--machine`, `--plot` | tokens and machine that costs are for; a picture | | | | x | not `--machine` |
| `--lengths`, `--depths`, `--samples`, `--results` ... | settings of a task, and its file | | | | | x |
| `--device`, `--dtype`, `--threads` | where, which type | `--device` | x | not `--device` | `--dtype` | x |
| `--html`, `--json`, `--csv`, `--force` | files; replace others | x | `--json` | `--json` | `--json` | not `--csv` |

`doctor` has `--json` and `--force` only.

Exit codes: 0 done; 2 the request cannot be satisfied, with one line that says why; 130 interrupted with Ctrl-C.

Arguments are read before torch is imported, so that help and errors in them come at once.
"""

import argparse
import difflib
import errno
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from regard import __version__
from regard.cli import bench, cost, doctor, evaluate, generate, inspect, script
from regard.cli.quoted import quoted
from regard.errors import RegardError

HINTS = {
    "--prompt": ("the prompt takes no option, a file of it --prompt-file",),
    "--text": ("the prompt takes no option, a file of it --prompt-file",),
    "--out": ("the page is --html", "results are --json", "a table is --csv", "a picture is --plot"),
    "--output": ("the page is --html", "results are --json", "a table is --csv", "a picture is --plot"),
    "--report": ("it is for a program: regard --report script.py", "the page is --html"),
    "--page": ("the page is --html", "the size of a cache's pages is --page-size"),
    "--tokens": ("tokens to generate are --max-new-tokens", "those of the prompt are --prompt-tokens"),
    "--write": ("tokens to generate are --max-new-tokens",),
    "--compare": ("another model is --compare-model", "a plain cache is --compare-cache"),
    "--measure": ("it is --measures",),
    "--layer": ("it is --layers",),
    "--head": ("it is --heads",),
    "--heads": ("a number of heads is --query-heads",),
    "--group": ("it is --group-size",),
    "--no-end": ("it is --ignore-eos",),
    "--quick": ("the number of rounds is --rounds, such as --rounds 3",),
    "--repeat": ("the number of rounds is --rounds, such as --rounds 3",),
}
"""What to write in place of an option that a command does not have, where it has what is written."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk that takes no more, which no program can prevent."""

NO_ACCESS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of a name that is given: a file or folder that the user may not read, or a name that no file can have."""


def main(arguments: Sequence[str] | None = None, *, tools: Callable[[], inspect.Tools] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code.

    Args:
        tools: the functions that `inspect` uses, replaced in tests.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if script.is_program(argv):
        try:
            return script.run_program(argv)
        except RegardError as error:
            return _end(2, f"error: {error}")

    def run() -> int:
        args = _parse(arguments)
        return args.run(args) if tools is None or args.run is not inspect.run else inspect.run(args, tools)

    return run_command(run)


def run_command(run: Callable[[], int]) -> int:
    """Run a command and return its exit code. Its errors are one line each.

    Those are errors of regard, Ctrl-C, a full disk, files without access, and memory that is not there; a closed pipe
    ends it without a line.
    """
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, _terminate)
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal whose encoding lacks "…" gets a "?"
    try:
        return _run_and_flush(run)
    except RegardError as error:
        return _end(2, f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        return _end(130, "interrupted")
    except MemoryError as error:
        return _end(2, f"error: there is not enough memory: {str(error) or 'ask for less'}.")
    except BrokenPipeError:  # `regard inspect | head`: the reader has enough
        _discard_stdout()
        return 0
    except OSError as error:
        if error.errno in NO_ACCESS and isinstance(error.filename, str):
            return _end(2, f"error: {quoted(error.filename)} cannot be read: {error.strerror}.")
        if error.errno not in NO_SPACE:
            raise
        _discard_stdout()
        return _end(2, f"error: {error.filename or 'the output'} cannot be written: {error.strerror}.")


def _open_streams() -> None:
    """Replace standard streams that the caller closed, which are None, by streams of nothing: `regard ... >&-`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123 - it lives as long as the process
            setattr(sys, name, stream)


def _run_and_flush(run: Callable[[], int]) -> int:
    """Run a command and write what is left of its output, here, where errors of stdout are handled."""
    try:
        code = run()
    except SystemExit:  # --help and --version
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _discard_stdout() -> None:
    """Send what is left of the output nowhere, so that the interpreter does not try to write it when it ends."""
    with suppress(OSError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(*_: object) -> NoReturn:
    """End as after Ctrl-C, so that temporary files are removed: batch systems send SIGTERM before they kill."""
    raise SystemExit(143)


def _end(code: int, message: str) -> int:
    print(f"regard: {message}", file=sys.stderr)
    return code


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which reads no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help. Other than argparse's own method, it raises where stdout cannot be written."""
        if file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            near = nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
            message += f". Did you mean {near}?" if near else ""
        self.exit(
            2, f"{self.prog}: error: {message}{'' if message.endswith(('.', '?')) else '.'} See {self.prog} --help.\n"
        )


def nearest(name: str, known: Sequence[str], *, alike: float = 0.6) -> str | None:
    """The known name that is nearest; None if none is near.

    Args:
        alike: the least share of letters in common, as difflib counts them.

    >>> nearest("--modle", ["--model", "--mask"]), nearest("--blue", ["--model"])
    ('--model', None)
    """
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=alike)), None)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser, commands = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.prog = " ".join(filter(None, (parser.prog, args.command)))
        parser.error(_unrecognized(unknown, (commands[args.command] if args.command else parser).format_usage()))
    return args


def _unrecognized(unknown: list[str], usage: str) -> str:
    """The message for arguments that a command does not have; of options and their values, the options alone."""
    options = [each for each in unknown if each.startswith("--")]
    message = f"unrecognized arguments: {' '.join(options or unknown)}"
    known = re.findall(r"--[\w-]+", usage)
    hints = {name: found for name in HINTS if (found := _hint(name, {*known, name}))}
    for name in (each.partition("=")[0] for each in options):
        if name in known:
            return f"{message}. Write {name} after the command"
        if (hint := hints.get(nearest(name, [*hints, *known], alike=0.8) or "")) is not None:
            return f"{message} ({hint})"
        if near := nearest(name, known):
            return f"{message}. Did you mean {near}?"
    return message


def _hint(name: str, known: set[str]) -> str:
    """What to write in place of an option, of a command that knows these; empty if it has nothing of the kind."""
    return "; ".join(text for text in HINTS[name] if {*re.findall(r"--[\w-]+", text)} <= known)


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of `regard`, and those of its commands by name."""
    parser = Parser(
        prog="regard",
        description="Attention as a library; its command shows what goes on in a model, and how fast it is here.",
        epilog="regard [--report] script.py ..., regard [--report] -m module ...: run a program on regard",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and the compiled library, and exit")
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    commands = parser.add_subparsers(metavar="command", dest="command", title="commands")
    inspect.add_to(commands)
    generate.add_to(commands)
    evaluate.add_to(commands)
    bench.add_to(commands)
    cost.add_to(commands)
    doctor.add_to(commands)
    return parser, commands.choices


class _Version(argparse.Action):
    """Print the installed versions, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("regard", __version__)
        for name in ("torch", "transformers"):
            print(name, _installed(name), flush=True)  # the library is loaded after torch, which takes seconds
        print("compiled library:", _library())
        parser.exit()


def _installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # a third of the start of a command, if imported above

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _library() -> str:
    from regard import native

    with warnings.catch_warnings(action="ignore"):  # of a better set, for which `regard doctor` is
        return native.absence() or f"{native.isa()}, of {', '.join(native.isas())}"
