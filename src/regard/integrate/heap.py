"""Freed memory, returned to the system.

glibc keeps freed memory below a block that is still in use, and after a prompt the heap of a model is full of such
gaps: the activations of all layers, and the tokens that an eviction policy dropped. `malloc_trim` returns their pages.
It takes milliseconds, and pages that are used again must be mapped again, so once after a prompt is enough.
"""

import ctypes
import functools
from collections.abc import Callable
from contextlib import suppress


def trim_heap() -> None:
    """Return freed memory of this process to the system, where the C library (glibc) can."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    with suppress(OSError, AttributeError, TypeError):  # Windows has no library of that name, others no such function
        return ctypes.CDLL(None).malloc_trim
    return None
