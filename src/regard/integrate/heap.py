"""Freed memory, given back to the system.

glibc keeps what is freed below something that is still in use, and a model's prompt leaves its heap full of such holes:
the activations of all layers, and the tokens that policies of forgetting dropped. `malloc_trim` gives their pages back.
It takes milliseconds, and what is used again has to be faulted in, so once a prompt is enough.
"""

import ctypes
import functools
from collections.abc import Callable
from contextlib import suppress


def give_back() -> None:
    """Give freed memory of this process back to the system, where its C library can: glibc's."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    with suppress(OSError, AttributeError, TypeError):  # Windows has no library of that name, others no such function
        return ctypes.CDLL(None).malloc_trim
    return None
