"""`./bench`: measure the project's cases on this machine, and report which goals are reached.

Exit codes as of `regard`: 0 done; 2 wrong arguments; 130 interrupted, after the tables of what was measured until then.
"""

import argparse
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from benchmarks import cases, command, performance_pages, report
from benchmarks.instruction_set import LIMITS, is_older, limit
from benchmarks.machine_kind import limited_kind
from benchmarks.memory import extra_bytes
from benchmarks.picture import draw
from benchmarks.report import Line
from regard import native
from regard.bench.measure import measure
from regard.bench.rounds import QUICK, Effort
from regard.cli.argument_types import count
from regard.cli.bench import effort
from regard.cli.outputs import STDOUT, add_force, add_json, check_outputs, output_files, write_json
from regard.errors import ProblemError

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """One case in one type."""

    section: str
    row: cases.Row
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name that `--cases` searches and progress shows."""
        return f"{self.section}: {self.row.name} {report.TYPES[str(self.dtype).removeprefix('torch.')]}"

    def run(self, threads: int, effort: Effort, progress: Callable[[int, int], None]) -> Line:
        """Measure it. The line has the error if the machine cannot run it, mostly for lack of memory."""
        row, dtype = self.row, str(self.dtype).removeprefix("torch.")
        line = Line(self.section, row.name, dtype, row.goals.get(self.dtype, cases.Goal()))
        try:
            if self.section == cases.MEMORY.title:
                return replace(line, mebibytes=extra_bytes(row.case, threads) / 2**20)
            return replace(
                line, result=measure(row.case, self.dtype, threads, effort, beside=row.beside, progress=progress)
            )
        except (RuntimeError, MemoryError, OSError) as error:
            return replace(line, failed=(str(error).strip() or type(error).__name__).splitlines()[-1][:100])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "", "Measure the project's cases, beside torch and the machine's limit.", page=performance_pages.PAGE
    )
    parser.add_argument("--cases", metavar="TEXT", help="the cases with this in their name alone, as --list shows them")
    parser.add_argument("--dtype", choices=[*TYPES], help="this type alone (default: both)")
    parser.add_argument("--rounds", type=count(1), metavar="N", help="rounds per case (default: as many as fit in 2 s)")
    parser.add_argument("--quick", action="store_true", help="few rounds: a first look, in a fraction of the time")
    parser.add_argument(
        "--isa", choices=native.isas() or [*LIMITS], help="limit regard and torch to an instruction set"
    )
    parser.add_argument("--list", action="store_true", help="list the cases, and measure nothing")
    add_json(parser, "the results")
    add_force(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure the cases, show their tables, and write the page if `--write` is given."""
    if args.write and (args.cases or args.dtype):
        raise ProblemError("--write writes the whole page of this machine: leave --cases and --dtype out.")
    if args.quick and args.rounds:
        raise ProblemError("--quick and --rounds both set the number of rounds: leave one of them out.")
    check_outputs(output_files(("--json", args.json, "JSON")), force=args.force)
    jobs = list(_jobs(args))
    if not jobs:
        raise ProblemError(f"no case has {args.cases!r} in its name: ./bench --list shows them.")
    if args.list:
        print(*(job.name for job in jobs), sep="\n")
        return 0
    if args.isa:
        limit(args.isa)
    lines, interrupted = _measure(jobs, args)
    write_json(args.json, {"machine": report.machine(), "lines": [line.to_dict() for line in lines]})
    if args.json != STDOUT:
        _show(lines)
    if args.write and not interrupted:
        write_pages(args.write, lines, limited_kind(args.isa))
    return 130 if interrupted else 0


def write_pages(folder: Path, lines: list[Line], kind: str) -> None:
    """The page of this kind of machine with its picture, then the page of all kinds."""
    pages = folder / "performance"
    pages.mkdir(exist_ok=True)
    text = report.page(lines, report.machine(), kind, f"{kind}.svg")
    command.publish_page(pages, f"{kind}.md", text, {f"{kind}.svg": draw(lines)})
    performance_pages.publish_overview(folder)


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    types = [TYPES[args.dtype]] if args.dtype else list(TYPES.values())
    limited = args.isa or is_older()
    for section in (*cases.SECTIONS, cases.MEMORY):
        for row in map(cases.Row.limited, section.rows) if limited else section.rows:
            own = (Job(section.title, row, dtype) for dtype in types if dtype in row.dtypes)
            yield from (job for job in own if (args.cases or "").lower() in job.name.lower())


def _measure(jobs: list[Job], args: argparse.Namespace) -> tuple[list[Line], bool]:
    """The lines of the finished jobs, and whether Ctrl-C ended them early."""
    lines: list[Line] = []
    how = QUICK if args.quick else effort(args.rounds)
    try:
        with _progress(len(jobs)) as start:
            for job in jobs:
                line = job.run(args.threads or torch.get_num_threads(), how, start(job.name))
                lines.append(line)
                if line.result is not None and line.result.interrupted:
                    return lines, True
    except KeyboardInterrupt:
        return lines, True
    return lines, False


@contextmanager
def _progress(total: int) -> Generator[Callable[[str], Callable[[int, int], None]]]:
    """Progress bars of all cases and of the rounds of one case, on stderr; nothing where that is no terminal."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    with bars:
        every, one = bars.add_task("cases", total=total), bars.add_task("")

        def start(name: str) -> Callable[[int, int], None]:
            bars.reset(one, description=name, total=None)
            started.append(name)
            bars.update(every, completed=len(started) - 1)
            return lambda done, rounds: bars.update(one, completed=done, total=rounds)

        started: list[str] = []
        yield start


# ---- out ------------------------------------------------------------------------------------------------------------


def _show(lines: Sequence[Line], console: Console | None = None) -> None:
    """Print the tables."""
    console = console or Console(highlight=False)
    console.width = max(console.width, 100) if console.is_terminal else 160
    console.print(f"on {report.machine()}", soft_wrap=True)
    for section, own in report.by_section(lines):
        head, rows = report.cells(section, own)
        table = Table(title=section.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in head:
            table.add_column(
                name, header_style="dim", justify="left" if name in ("case", "goal", "reached") else "right"
            )
        for row in rows:
            table.add_row(
                *(Text(cell, "green" if cell == "yes" else "red" if cell.startswith("no: ") else "") for cell in row)
            )
        console.print()
        console.print(table)
    for warning in report.unrest(lines):
        console.print(f"\n{warning}", soft_wrap=True)
    goals = [line for line in lines if line.goal != cases.Goal()]
    console.print(f"\n{sum(not line.missed() for line in goals)} of {len(goals)} goals reached")


if __name__ == "__main__":
    sys.exit(main())
