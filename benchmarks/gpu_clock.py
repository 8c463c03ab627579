"""Where the cases of `./bench gpu` run, and how their time is taken: by CUDA events on a GPU."""

import os
from collections.abc import Callable
from typing import Protocol

import torch

from benchmarks.gpu_page import Chip, find_chip
from regard.bench.rounds import Measure, timed
from regard.bench.this_gpu import Cuda, copy_rate, product_rate
from regard.errors import ProblemError

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
