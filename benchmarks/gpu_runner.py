"""Compares and times the libraries in the cases of `./bench gpu`."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.gpu_cases import Call, GpuCase, Tensors, error, formula, formula_gradients, picked
from benchmarks.gpu_clock import Clock
from benchmarks.gpu_libraries import COMPILING, LIBRARIES, Unfit, flex_mask
from benchmarks.gpu_page import Record
from regard import explain
from regard.bench.rounds import Effort, Measure, interleaved
from regard.dispatch.choose import Plan
from regard.errors import ProblemError
from regard.plan.tiling import schedule
from regard.storage.stored import StoredTensor

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Largest norm of the difference from the definition, by that of the definition."""


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
