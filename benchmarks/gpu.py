"""`./bench gpu`: attention on the GPU at hand, beside torch's kernels, FlexAttention, flash-attn and FlashInfer.

Outputs, and for training gradients, are compared with the definition before anything is timed; what differs is not
timed. Times are taken by CUDA events over calls that last 10 ms together, in rounds in which every library has its
turn. A library that fails in a case is listed with its reason, and the others go on.

`--device cpu` tries the whole way with tiny cases and Triton's interpreter, where no GPU is; its times mean nothing.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks import command, gpu_page
from benchmarks.gpu_cases import (
    CASES,
    Call,
    GpuCase,
    Tensors,
    error,
    formula,
    formula_gradients,
    picked,
    shrunk,
)
from benchmarks.gpu_libraries import COMPILING, LIBRARIES, Unfit, flex_mask
from benchmarks.gpu_order import write_order
from benchmarks.gpu_page import Chip, Record, find_chip
from regard import explain
from regard.bench.rounds import Effort, Measure, interleaved, timed
from regard.bench.this_gpu import Cuda, copy_rate, product_rate
from regard.cli.argument_types import count
from regard.cli.outputs import add_force, add_json, check_outputs, output_files, write_json
from regard.dispatch.choose import Plan
from regard.errors import ProblemError
from regard.plan.tiling import schedule
from regard.storage.stored import StoredTensor

FULL, QUICK, TRIED = Effort(1.0, least=5, most=50), Effort(0.1, least=3, most=10), Effort(0, least=2, most=2)
QUICK_SECONDS = 100
"""After which `--quick` starts no more calls, and lists them as not measured."""

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Largest norm of the difference from the definition, by that of the definition."""

LONG_ENOUGH = 0.01
"""Seconds of the calls between two events."""


class Clock(Protocol):
    """Where calls are run, and how their time is taken."""

    device: torch.device
    dtype: torch.dtype

    def measure(self, run: Callable[[], object]) -> Measure:
        """A measurement of the seconds of one call; warms up."""
        ...

    def chip(self) -> Chip:
        """The chip and its limits."""
        ...


class CudaClock:
    """The current CUDA device, timed by events."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ProblemError("torch sees no GPU here: ./bench gpu --device cpu tries the way with tiny cases.")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._gpu = Cuda()

    def measure(self, run: Callable[[], object]) -> Measure:
        for _ in range(2):
            run()
        one = min(_between_events(run, 1) for _ in range(2))
        calls = max(1, min(200, round(LONG_ENOUGH / max(one, 1e-6))))
        return lambda: _between_events(run, calls)

    def chip(self) -> Chip:
        rates = product_rate(self._gpu, self.dtype), copy_rate(self._gpu)
        return find_chip(self._gpu.title, f"torch {torch.__version__}, CUDA {torch.version.cuda}{_triton()}", rates)


def _between_events(run: Callable[[], object], calls: int) -> float:
    """Seconds of a call on the GPU: the mean of several calls between two events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / calls


class CpuClock:
    """The processor, to try the way without a GPU."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        if os.environ.setdefault("TRITON_INTERPRET", "1") != "1":
            raise ProblemError("--device cpu runs the kernels by Triton's interpreter: unset TRITON_INTERPRET.")

    def measure(self, run: Callable[[], object]) -> Measure:
        return timed(run)

    def chip(self) -> Chip:
        return find_chip("a processor, with tiny cases", f"torch {torch.__version__}{_triton()}", None)


def _triton() -> str:
    try:
        import triton  # noqa: PLC0415
    except ImportError:
        return ", no Triton"
    return f", Triton {triton.__version__}"


# ---- a case ---------------------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """Measures cases on a clock.

    Attributes:
        until: when no more calls are started, by `time.monotonic()`; None for no limit.
        records: what was measured so far.
    """

    clock: Clock
    effort: Effort
    libraries: Sequence[str] = tuple(LIBRARIES)
    until: float | None = None
    records: list[Record] = field(default_factory=list)

    def run(self, case: GpuCase) -> list[Record]:
        """Compare and time every library in a case."""
        torch.manual_seed(0)
        try:
            with torch.set_grad_enabled(case.backward):
                new = list(self._records(case))
        except Exception as fault:  # noqa: BLE001 - the other cases are still measured
            _stop_after(fault, case.name)
            new = [Record(case.section, case.name, "all", "", note=_in_one_line(fault))]
        self.records += new
        gc.collect()
        if self.clock.device.type == "cuda":
            torch.cuda.empty_cache()
        return new

    def _records(self, case: GpuCase) -> Iterator[Record]:
        tensors, options = case.tensors(self.clock.dtype, self.clock.device), case.options(self.clock.device)
        keys, values = case.stored(tensors[1], tensors[2])
        plan = explain(tensors[0], keys, values, **options)
        truth = _Truth(case, (tensors[0], _dense(keys), _dense(values)), options, self.clock.dtype)
        del keys, values
        runs: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        failed: dict[str, str] = {}
        for name in self._wanted(plan, case):
            if self.until is not None and time.monotonic() > self.until:
                failed[name] = "no time left"
                continue
            try:
                call = LIBRARIES[name](case, tensors, options)
                errors[name] = truth.error(call)
                if errors[name] > TOLERANCE[self.clock.dtype]:
                    failed[name] = f"differs from the definition by {errors[name]:.2g}"
                else:
                    runs[name] = _run(case, call, tensors, truth.dout)
            except Unfit as reason:
                failed[name] = str(reason)
            except torch.OutOfMemoryError:
                failed[name] = "not enough memory"
            except Exception as fault:  # noqa: BLE001 - another library's, of any kind; the others are still measured
                _stop_after(fault, f"{name} in {case.name}")
                failed[name] = (
                    f"{type(fault).__name__}: {str(fault).strip().splitlines()[0][:150] if str(fault) else ''}"
                )
        rounds = self._rounds(case, runs, failed)
        for name in (*runs, *failed):
            yield self._record(case, plan, name, sorted(one[name] for one in rounds if name in one), errors, failed)

    def _wanted(self, plan: Plan, case: GpuCase) -> list[str]:
        """The libraries of a case: regard's chosen backend is measured once, and in `--quick` few are compiled."""
        found = [name for name in self.libraries if name != f"regard by {plan.backend}"]
        quick = self.until is not None and (case.section, case.keys) != ("prefill", 4096)
        return [name for name in found if not (quick and name in COMPILING)]

    def _rounds(
        self, case: GpuCase, runs: dict[str, Callable[[], object]], failed: dict[str, str]
    ) -> list[dict[str, float]]:
        measures: dict[str, Measure] = {}
        for name, run in runs.items():
            try:
                measures[name] = self.clock.measure(run)
            except Exception as fault:  # noqa: BLE001 - the same
                _stop_after(fault, f"{name} in {case.name}")
                failed[name] = _in_one_line(fault)
        for name in failed:
            runs.pop(name, None)
        return interleaved(measures, self.effort).rounds if measures else []

    def _record(
        self, case: GpuCase, plan: Plan, name: str, times: list[float], errors: dict[str, float], failed: dict[str, str]
    ) -> Record:
        backend = plan.backend if name == "regard" else name.partition(" by ")[2]
        return Record(
            case.section, case.name, name, backend,
            kind="" if plan.order is None else plan.order.kind,
            seconds=times[len(times) // 2] if times else None,
            fastest=times[0] if times else None,
            rounds=len(times),
            flops=4.0 * case.pairs() * case.dim * (3.5 if case.backward else 1),
            nbytes=plan.bytes * (1 if not case.backward else 3),
            error=errors.get(name),
            note=failed.get(name, ""),
        )  # fmt: skip


class _Truth:
    """What the definition gives, for a call to be compared with."""

    def __init__(self, case: GpuCase, tensors: Tensors, options: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.case, self.tensors = case, tensors
        self.out = formula(case, tensors, options)
        self.dout = torch.randn_like(tensors[0], dtype=dtype) if case.backward else None
        self.gradients = None if self.dout is None else formula_gradients(case, tensors, self.dout, options)

    def error(self, call: Call) -> float:
        """The larger error of the output and of the gradients."""
        out = call(*self.tensors)
        found = [error(picked(self.case, out), self.out)]
        if self.gradients is not None:
            grads = torch.autograd.grad(out, self.tensors, self.dout)
            found += [
                error(grad[:1, : truth.shape[1]], truth) for grad, truth in zip(grads, self.gradients, strict=True)
            ]
        return max(found)


def _dense(t: Tensor | StoredTensor) -> Tensor:
    return t if isinstance(t, Tensor) else t.dense()


def _run(case: GpuCase, call: Call, tensors: Tensors, dout: Tensor | None) -> Callable[[], object]:
    if dout is None:
        return lambda: call(*tensors)
    return lambda: torch.autograd.grad(call(*tensors), tensors, dout)


def _in_one_line(fault: Exception) -> str:
    first = str(fault).strip().partition("\n")[0][:150]
    return f"{type(fault).__name__}: {first}"


class GpuLostError(ProblemError):
    """The GPU refuses all further calls of this process: so it does after a fault in a kernel."""


def _stop_after(fault: Exception, what: str) -> None:
    """Raise what no later call survives."""
    if isinstance(fault, GpuLostError):
        raise fault
    if isinstance(fault, RuntimeError) and "CUDA error" in str(fault):
        raise GpuLostError(f"the GPU refuses further calls of this process after {what}: {_in_one_line(fault)}")


# ---- schedules ------------------------------------------------------------------------------------------------------


def time_schedules(clock: Clock, tokens: int) -> list[Record]:
    """The time for the schedule of a window on the processor, and for FlexAttention's `BlockMask` on the device."""
    case = GpuCase("schedule", f"window 4,096, {tokens:,} tokens", tokens, tokens, 1, 1, window=min(4096, tokens // 4))
    mask = case.mask()

    def of_flex() -> object:
        found = flex_mask(case, clock.device)
        if clock.device.type == "cuda":
            torch.cuda.synchronize()
        return found

    def ours() -> object:
        return schedule(mask, batch=1, heads=1, queries=tokens, keys=tokens, offset=0, tile=128)

    records = list[Record]()
    for name, make in {"regard": ours, "FlexAttention": of_flex}.items():
        try:
            make()
            times = sorted(_wall(make) for _ in range(5))
            records.append(Record(case.section, case.name, name, "", seconds=times[2], fastest=times[0], rounds=5))
        except Exception as fault:  # noqa: BLE001 - as above
            _stop_after(fault, f"{name} in {case.name}")
            records.append(Record(case.section, case.name, name, "", note=_in_one_line(fault)))
    return records


def _wall(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# ---- the command ----------------------------------------------------------------------------------------------------


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
