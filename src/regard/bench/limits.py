"""What the machine can do at best: products that never leave the registers, and one read of memory.

Measured by small loops of the compiled library (native/limits.h) with the instruction set that its kernels use. They
are measured again beside everything that is compared with them: a machine that others use has less to give.
"""

import os
from functools import cache

import torch

from regard import native

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
"""Bytes of memory that the machine has."""

STREAMED = 256 << 20
"""Bytes of the read: several times the largest cache of most machines."""


def products(dtype: torch.dtype, threads: int, seconds: float = 0.02) -> float | None:
    """FLOP/s of multiply-adds of that dtype on so many threads, measured for `seconds`; None without the library.

    float16 counts as float32, and so does bfloat16 where the machine has no products of its own for it: kernels
    compute them so.
    """
    return native.products(dtype, threads, seconds) if native.available() else None


def stream(threads: int) -> float | None:
    """Bytes/s of one read of 256 MiB that lie in memory, shared between the threads; None without the library."""
    if not native.available():
        return None
    data = _written()
    return native.stream(data.data_ptr(), data.nbytes, threads)


@cache
def _written() -> torch.Tensor:
    """Memory that was written: pages that never were are all the same one, and read several times too fast."""
    return torch.ones(STREAMED // 4)
