"""The limits of a GPU, measured with torch: matrix products, copies of memory, and what attention reaches of them.

The peak is what the largest products reach, so it is below the figure of a data sheet, and the share of other matrix
products is of that peak.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from regard import Causal, attend
from regard.bench.linear_rates import Sizes, linear_rates
from regard.cost.machine import Efficiency, Machine
from regard.cost.products import attention_flops
from regard.cost.this_machine import stored_at
from regard.errors import ProblemError

TYPES = (torch.bfloat16, torch.float16, torch.float32)
SQUARE = 8192
"""Rows and columns of the largest products."""

COPIED = 1 << 30
"""Bytes of the copy that measures the bandwidth: many times the L2 cache."""

LINEAR = Sizes(rows=4096, dim=4096, weights=16, wide=8192)
TOKENS, HEADS, DIM = 4096, 16, 128
TRIES = 10
FALLBACK_FAST_MEMORY = 128 << 10


class Gpu(Protocol):
    """A device that can be measured: `Cuda`, or another one in its place."""

    device: str
    title: str
    memory: int
    fast_memory: int

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call on the device."""
        ...


class Cuda:
    """The current CUDA device."""

    device = "cuda"

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.title = str(properties.name)
        self.memory = int(properties.total_memory)
        self.fast_memory = int(getattr(properties, "shared_memory_per_multiprocessor", 0)) or FALLBACK_FAST_MEMORY

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds between two events around the call, after one call before it."""
        call()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3


def measure_gpu(gpu: Gpu) -> Machine:
    """The limits of a GPU."""
    peaks, found = dict[str, float](), dict[str, Efficiency]()
    bandwidth = copy_rate(gpu)
    for dtype in TYPES:
        name = str(dtype).removeprefix("torch.")
        try:
            peaks[name] = product_rate(gpu, dtype)
            found[name] = _efficiency(gpu, dtype, peaks[name], bandwidth)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise ProblemError(f"{gpu.title} has no memory left to be measured: {error}") from None
            peaks.pop(name, None)  # a type that this GPU does not multiply
    if not peaks:
        raise ProblemError(f"{gpu.title} multiplies none of {', '.join(map(str, TYPES))}.")
    return Machine(
        name="this",
        title=f"this GPU: {gpu.title}",
        source=f"measured here: {stored_at()}",
        flops=peaks,
        bandwidth=bandwidth,
        memory=gpu.memory,
        fast_memory=gpu.fast_memory,
        efficiency=found,
    )


def product_rate(gpu: Gpu, dtype: torch.dtype) -> float:
    """FLOP/s of the largest products: the best of some tries."""
    a, b = (torch.randn(SQUARE, SQUARE, device=gpu.device).to(dtype) for _ in range(2))
    return 2 * SQUARE**3 / min(gpu.seconds(lambda: a @ b) for _ in range(TRIES))


def copy_rate(gpu: Gpu) -> float:
    """Bytes/s of a large copy, counting bytes read and bytes written: the best of several tries."""
    a, b = (torch.ones(COPIED // 4, device=gpu.device) for _ in range(2))
    return 2 * COPIED / min(gpu.seconds(lambda: b.copy_(a)) for _ in range(TRIES))


def _efficiency(gpu: Gpu, dtype: torch.dtype, peak: float, bandwidth: float) -> Efficiency:
    flops, stream = linear_rates(dtype, gpu.device, gpu.seconds, LINEAR)

    def share(queries: int, *, causal: bool) -> float:
        q, k, v = (torch.randn(1, HEADS, n, DIM, device=gpu.device).to(dtype) for n in (queries, TOKENS, TOKENS))
        mask = Causal() if causal else None
        pairs = HEADS * (TOKENS * (TOKENS + 1) // 2 if causal and queries > 1 else queries * TOKENS)
        with torch.no_grad():
            seconds = min(gpu.seconds(lambda: attend(q, k, v, mask=mask)) for _ in range(TRIES))
        return min(1.0, attention_flops(pairs, DIM, DIM) / seconds / peak)

    full = share(TOKENS, causal=False)
    return Efficiency(
        share=full,
        partial_cost=max(0.5, full / share(TOKENS, causal=True)),
        few_share=share(1, causal=True),
        linear_share=min(1.0, flops / peak),
        stream_share=min(1.0, stream / bandwidth),
    )
