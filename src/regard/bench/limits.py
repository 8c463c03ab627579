"""The limits of the machine: products that never leave the registers, and one read of memory.

Measured by small loops of the compiled library (native/limits.h) with the instruction set that its kernels use. They
are measured again in every comparison: other load on the machine lowers them.
"""

import os
from functools import cache

import torch

from regard import native, native_calls
from regard.machine import cache_sizes

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
"""Bytes of memory of the machine."""


STREAMED = max(256 << 20, min(2 * max(cache_sizes().values(), default=0), MEMORY // 16))
"""Bytes of the read: twice the last-level cache, at least 256 MiB, and for a large cache at most 1/16 of the memory.

Where that cache has 480 MiB, one core reads 256 MiB 1.28 times as fast as 1 GiB.
"""


def products(dtype: torch.dtype, threads: int, seconds: float = 0.02) -> float | None:
    """FLOP/s of multiply-adds of that dtype on `threads` threads, measured for `seconds`; None without the library.

    float16 is measured as float32, and so is bfloat16 where the machine has no bfloat16 products, as in the kernels.
    """
    return native_calls.products(dtype, threads, seconds) if native.available() else None


def stream(threads: int) -> float | None:
    """Bytes/s of one read of `STREAMED` bytes of memory, shared between the threads; None without the library."""
    if not native.available():
        return None
    data = _touched()
    return native_calls.stream(data.data_ptr(), data.nbytes, threads)


BURST = 16 << 20
"""Bytes of each of the short reads of `best_stream`."""


def best_products(dtype: torch.dtype, threads: int) -> float:
    """The best of 8 measurements of 2 ms each, between which other load may pause; 0 without the library."""
    return max(products(dtype, threads, 0.002) or 0.0 for _ in range(8))


def best_stream(threads: int) -> float:
    """The best of short reads, of 16 MiB each and of other memory each time; 0 without the library."""
    if not native.available():
        return 0.0
    data = _touched()
    return max(native_calls.stream(data.data_ptr() + at, BURST, threads) for at in range(0, STREAMED, BURST))


@cache
def _touched() -> torch.Tensor:
    """Memory that was written before: untouched pages all map to one page, and read several times too fast."""
    return torch.ones(STREAMED // 4)
