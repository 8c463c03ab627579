"""Expected times beside measured ones: how far `regard.cost.expected` is off, for 30 problems on this machine.

`./bench cost` prints the table. What the kernels reach of the limits is measured first, on three other calls, as
`regard cost --machine this` does. Then the limits of the machine are measured in every round beside each call, and
the best of the rounds counts, of the call and of the limits: other load only makes them slower.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks import command
from benchmarks.report import machine as description
from benchmarks.report import table
from regard import Alibi, Causal, Documents, Prefix, Window, attend, explain
from regard.bench import limits
from regard.bench.case import Case
from regard.bench.rounds import Effort, interleaved, on_threads, timed
from regard.bench.this_machine import EFFORT, measure_efficiency
from regard.cli.durations import call_duration
from regard.cost.expected import BACKWARD, expected_seconds
from regard.cost.machine import Efficiency, Machine
from regard.errors import ProblemError
from regard.native import absence, available

PAGE, PART = "cost.md", "expected"
GOAL = 0.15
"""The median error that is to be reached on a quiet machine."""


def _documents(tokens: int, each: int) -> Documents:
    return Documents(torch.arange(tokens) // each)


CASES = (
    Case("dense, 1,024, d 64", 1024, 1024),
    Case("dense, 2,048, d 128", 2048, 2048, dim=128),
    Case("causal, 1,024, d 64", 1024, 1024, mask=Causal),
    Case("causal, 2,048, d 64", 2048, 2048, mask=Causal),
    Case("causal, 4,096, d 64, 4 heads", 4096, 4096, heads=4, kv_heads=4, mask=Causal),
    Case("causal, 2,048, d 128, 16/4 heads", 2048, 2048, heads=16, kv_heads=4, dim=128, mask=Causal),
    Case("causal, a chunk of 512 on 4,096 keys", 512, 4096, mask=Causal),
    Case("causal, 4 rows of 512", 512, 512, batch=4, mask=Causal),
    Case("window 512, 4,096, d 64", 4096, 4096, mask=lambda: Causal() & Window(512)),
    Case("window 512 + 4 sinks, 8,192, d 64", 8192, 8192, heads=4, kv_heads=4,
         mask=lambda: Causal() & (Window(512) | Prefix(4))),
    Case("8 documents of 512", 4096, 4096, heads=4, kv_heads=4, mask=lambda: Causal() & _documents(4096, 512)),
    Case("ALiBi, causal, 2,048", 2048, 2048, mask=Causal, bias=lambda _: Alibi(8)),
    Case("forward + backward, causal, 2,048", 2048, 2048, mask=Causal, backward=True),
    Case("decode, 32/8 heads, 8,192 keys", 1, 8192, heads=32, kv_heads=8, dim=128, mask=Causal, cold=True),
    Case("decode, 32/32 heads, 4,096 keys", 1, 4096, heads=32, kv_heads=32, dim=128, mask=Causal, cold=True),
)  # fmt: skip
"""Each in float32 and bfloat16: 30 problems."""

TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Line:
    """A problem, and its expected, measured and least times in seconds."""

    name: str
    dtype: str
    expected: float
    measured: float
    roofline: float

    @property
    def error(self) -> float:
        """The expected time over the measured one, less 1."""
        return self.expected / self.measured - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


def _parser() -> argparse.ArgumentParser:
    return command.parser("cost", "Compare expected times of attention with measured ones.", page=PAGE, seconds=1.0)


def run(args: argparse.Namespace) -> int:
    """Measure the problems and show their table."""
    if not available():
        raise ProblemError(f"the limits of this machine cannot be measured: {absence()}")
    command.check_part(args.write, PAGE, PART)
    threads = args.threads or torch.get_num_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    effort = Effort(seconds=args.seconds, least=3)
    with on_threads(threads):
        found = {dtype: measure_efficiency(dtype, threads, EFFORT)[1] for dtype in TYPES}
    lines: list[Line] = []
    for case in CASES:
        for dtype in TYPES:
            print(f"{case.name} {dtype}", file=sys.stderr)
            lines.append(compare(case, dtype, threads, effort, found[dtype]))
    busy = f"\n\nThe machine was not quiet: its load was {load:.1f} before the first measurement." if load > 0.5 else ""
    command.publish_part(args.write, PAGE, PART, text_of(lines) + busy)
    return 0


def compare(case: Case, dtype: torch.dtype, threads: int, effort: Effort, efficiency: Efficiency) -> Line:
    """Measure a case, and the limits of the machine in the same rounds."""
    with on_threads(threads), torch.set_grad_enabled(case.backward):
        copies, options = case.copies(dtype), case.options(dtype)
        plan = explain(*copies[0], **options)
        dout = torch.randn_like(attend(*copies[0], **options)) if case.backward else None
        index = 0

        def call() -> None:
            nonlocal index
            inputs, index = copies[index % len(copies)], index + 1
            out = attend(*inputs, **options)
            if dout is not None:
                torch.autograd.grad(out, inputs, dout)

        measures = {
            "call": timed(call),
            "products": lambda: limits.best_products(dtype, threads),
            "stream": lambda: limits.best_stream(threads),
        }
        rounds = interleaved(measures, effort)
    name = str(dtype).removeprefix("torch.")
    peak, bandwidth = (max(one[limit] for one in rounds.rounds) for limit in ("products", "stream"))
    machine = Machine(
        "this", "this machine", "measured", {name: peak}, bandwidth, limits.MEMORY, 1, efficiency={name: efficiency}
    )
    passes, spent = 1 + BACKWARD * case.backward, min(one["call"] for one in rounds.rounds)
    least = machine.seconds(plan.flops * passes, plan.bytes * passes, name)
    expected = expected_seconds(plan, machine, backward=case.backward)
    return Line(case.name, name, expected, spent, least)


def text_of(lines: Sequence[Line]) -> str:
    """The table and the median error."""
    rows = [
        (
            x.name,
            x.dtype,
            *map(call_duration, (x.roofline, x.expected, x.measured)),
            f"{100 * x.error:+.0f} %",
        )
        for x in lines
    ]
    errors = sorted(abs(line.error) for line in lines)
    median, high = statistics.median(errors), errors[min(len(errors) - 1, round(0.9 * len(errors)))]
    reached = "reached" if median < GOAL else "not reached"
    return (
        f"{table(('problem', 'type', 'roofline', 'expected', 'measured', 'error'), rows)}\n\n"
        f"{len(lines)} problems, measured by `./bench cost` on {description()}: the median error is "
        f"{100 * median:.0f} % (the goal, below {100 * GOAL:.0f} % on a quiet machine, is {reached}), nine in ten are "
        f"below {100 * high:.0f} %."
    )


if __name__ == "__main__":
    sys.exit(main())
