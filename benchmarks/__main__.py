"""`./bench`: measure the project's cases on this machine, and say which goals are reached.

Exit codes as of `regard`: 0 done; 2 what was asked makes no sense; 130 interrupted, with what was measured until then.
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

from benchmarks import cases, report
from benchmarks.memory import extra_bytes
from benchmarks.picture import drawn
from benchmarks.report import Line
from regard.atomic_write import write_whole
from regard.bench.measure import measure
from regard.bench.rounds import QUICK, Effort
from regard.cli.argument_types import count
from regard.cli.bench import effort
from regard.cli.main import Parser, run_command
from regard.cli.outputs import STDOUT, add_force, check_outputs, output_files, write_json
from regard.errors import ProblemError

DOCS = Path(__file__).parents[1] / "docs"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """One case in one type."""

    section: str
    row: cases.Row
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """As `--cases` looks for it, and as progress shows it."""
        return f"{self.section}: {self.row.name} {report.TYPES[str(self.dtype).removeprefix('torch.')]}"

    def run(self, threads: int, effort: Effort, progress: Callable[[int, int], None]) -> Line:
        """Measure it. What a small machine cannot do, for want of memory above all, is said in the line."""
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
    return run_command(lambda: run(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="./bench", description="Measure regard's own cases here, beside torch and the machine's limit."
    )
    parser.add_argument("--cases", metavar="TEXT", help="only those with this in their name, as --list shows them")
    parser.add_argument("--dtype", choices=[*TYPES], help="only this type (default: both)")
    parser.add_argument("--threads", type=count(1), metavar="N", help="threads (default: as torch has)")
    parser.add_argument("--rounds", type=count(1), metavar="N", help="rounds of each case (default: 2 seconds of them)")
    parser.add_argument("--quick", action="store_true", help="few rounds: a first look, in a fraction of the time")
    parser.add_argument("--list", action="store_true", help="say which cases there are, and measure nothing")
    parser.add_argument("--json", metavar="FILE", help="the results as JSON; - for stdout, with nothing else there")
    add_force(parser)
    parser.add_argument("--write", action="store_true", help="write docs/performance.md and its picture")
    parser.set_defaults(docs=DOCS)
    return parser


def run(asked: argparse.Namespace) -> int:
    """Do what was asked. Everything that can be wrong with it is found before."""
    if asked.write and (asked.cases or asked.dtype):
        raise ProblemError("--write writes the whole page: name no --cases and no --dtype.")
    if asked.quick and asked.rounds:
        raise ProblemError("--quick says how many rounds, and so does --rounds: give one of them.")
    check_outputs(output_files(("--json", asked.json, "JSON")), force=asked.force)
    jobs = list(_jobs(asked))
    if not jobs:
        raise ProblemError(f"no case has {asked.cases!r} in its name: ./bench --list shows them.")
    if asked.list:
        print(*(job.name for job in jobs), sep="\n")
        return 0
    lines, cut = _measured(jobs, asked)
    write_json(asked.json, {"machine": report.machine(), "lines": [line.to_dict() for line in lines]})
    if asked.json != STDOUT:
        _show(lines)
    if asked.write and not cut:
        _write(lines, asked.docs)
    return 130 if cut else 0


def _jobs(asked: argparse.Namespace) -> Iterator[Job]:
    types = [TYPES[asked.dtype]] if asked.dtype else list(TYPES.values())
    for section in (*cases.SECTIONS, cases.MEMORY):
        for row in section.rows:
            found = (Job(section.title, row, dtype) for dtype in types if dtype in row.dtypes)
            yield from (job for job in found if (asked.cases or "").lower() in job.name.lower())


def _measured(jobs: list[Job], asked: argparse.Namespace) -> tuple[list[Line], bool]:
    """The lines of the jobs that were done, and whether Ctrl-C ended them early."""
    lines: list[Line] = []
    how = QUICK if asked.quick else effort(asked.rounds)
    try:
        with _progress(len(jobs)) as told:
            for job in jobs:
                line = job.run(asked.threads or torch.get_num_threads(), how, told(job.name))
                lines.append(line)
                if line.result is not None and line.result.interrupted:
                    return lines, True
    except KeyboardInterrupt:
        return lines, True
    return lines, False


@contextmanager
def _progress(total: int) -> Generator[Callable[[str], Callable[[int, int], None]]]:
    """How far all is, and the rounds of the case at hand; on stderr, and nothing where that is no terminal."""
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

        def told(name: str) -> Callable[[int, int], None]:
            bars.reset(one, description=name, total=None)
            started.append(name)
            bars.update(every, completed=len(started) - 1)
            return lambda done, rounds: bars.update(one, completed=done, total=rounds)

        started: list[str] = []
        yield told


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


def _write(lines: Sequence[Line], docs: Path) -> None:
    """The page and its picture, each whole or not at all; the picture first, as the page shows it."""
    write_whole(docs / "performance.svg", drawn(lines).encode())
    write_whole(docs / "performance.md", report.page(lines, report.machine(), "performance.svg").encode())
    print(f"page: {docs / 'performance.md'}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
