"""`./bench gpu`: attention on the GPU at hand, beside torch's kernels, FlexAttention, flash-attn and FlashInfer.

Outputs, and for training gradients, are compared with the definition before anything is timed; what differs is not
timed. Times are taken by CUDA events over calls that last 10 ms together, in rounds in which every library has its
turn. A library that fails in a case is listed with its reason, and the others go on.

`--device cpu` tries the whole way with tiny cases and Triton's interpreter, where no GPU is; its times mean nothing.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import command, gpu_page
from benchmarks.gpu_cases import CASES, GpuCase, shrunk
from benchmarks.gpu_clock import Clock, CpuClock, CudaClock
from benchmarks.gpu_order import write_order
from benchmarks.gpu_page import Chip, Record
from benchmarks.gpu_runner import Runner, time_schedules
from regard.bench.rounds import Effort
from regard.cli.argument_types import count
from regard.cli.outputs import add_force, add_json, check_outputs, output_files, write_json
from regard.errors import ProblemError

FULL, QUICK, TRIED = Effort(1.0, least=5, most=50), Effort(0.1, least=3, most=10), Effort(0, least=2, most=2)
QUICK_SECONDS = 100
"""After which `--quick` starts no more calls, and lists them as not measured."""


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, and write what was asked for."""
    check_outputs(output_files(("--json", args.json, "JSON")), force=args.force)
    if (args.write or args.write_order) and (args.device == "cpu" or args.cases or args.quick):
        raise ProblemError("--write and --write-order need all cases, measured on a GPU: leave the other options out.")
    cases = [case for case in (quick_cases() if args.quick else CASES) if args.cases in case.name]
    if not cases:
        raise ProblemError(f"no case has {args.cases!r} in its name: ./bench gpu --list shows them.")
    if args.list:
        print(*(f"{case.section}: {case.name}" for case in cases), sep="\n")
        return 0
    start = time.monotonic()
    clock: Clock = CpuClock() if args.device == "cpu" else CudaClock()
    if args.device == "cpu":
        cases = [shrunk(case) for case in cases if case.quick or args.cases]
    effort = TRIED if args.device == "cpu" else QUICK if args.quick else FULL
    seconds = args.seconds or (QUICK_SECONDS if args.quick else None)
    runner = Runner(clock, effort, until=None if seconds is None else start + seconds)
    chip, stopped = clock.chip(), ""
    try:
        for case in cases:
            _report(runner.run(case))
            if args.json not in (None, "-"):  # so that a machine that goes away leaves what it measured
                write_json(args.json, _content(chip, runner.records, "unfinished"))
        runner.records += time_schedules(clock, 1 << 16 if args.device == "cuda" else 1 << 10)
    except ProblemError as fault:
        stopped = str(fault)
    write_json(args.json, _content(chip, runner.records, stopped))
    text = gpu_page.page(runner.records, chip)
    if args.write is not None and not stopped:
        folder = args.write / gpu_page.FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        command.publish_page(folder, f"{chip.name}.md", text)
    elif args.json != "-":
        print(text)
    if args.write_order and not stopped:
        print(*write_order(runner.records, chip), sep="\n", file=sys.stderr)
    if stopped:
        raise ProblemError(stopped)
    return 0


def quick_cases() -> list[GpuCase]:
    """The cases of `--quick`: the first of each section, then the second ..., as time may not suffice for all."""
    turns = dict.fromkeys((case.section for case in CASES), 0)
    found = list[tuple[int, GpuCase]]()
    for case in CASES:
        if case.quick:
            found.append((turns[case.section], case))
            turns[case.section] += 1
    return [case for _, case in sorted(found, key=lambda each: each[0])]


def _report(records: Sequence[Record]) -> None:
    """One line for each record, on stderr, as soon as it is measured."""
    for record in records:
        print(f"{record.section}: {record.case}: {gpu_page.in_words(record)}", file=sys.stderr, flush=True)


def _content(chip: Chip, records: Sequence[Record], stopped: str) -> dict[str, Any]:
    return {"chip": chip.to_dict(), "stopped": stopped, "records": [record.to_dict() for record in records]}


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "gpu", "Attention on the GPU at hand, beside other libraries.", page=f"{gpu_page.FOLDER}/CHIP.md", threads=False
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, in under 2 minutes")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny cases, to try the way")
    parser.add_argument("--seconds", type=count(1), metavar="S", help="start no more calls after this time")
    parser.add_argument("--write-order", action="store_true", help="write the order of backends on CUDA into regard")
    parser.add_argument("--list", action="store_true", help="list the cases, and measure nothing")
    add_json(parser, "the measurements")
    add_force(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
