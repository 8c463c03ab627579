"""Large caches and outputs on pages of 2 MiB, where the operating system grants them.

A core finds the page of an address in a table of some 3,000 entries. With pages of 4 KiB these cover 12 MiB, and its
prefetching stops at the end of each page; so reading a long cache waits for addresses. On a Zen 4 one core reads
26 GB/s from pages of 4 KiB and 33 from pages of 2 MiB. And new memory is mapped page by page as it is first written: an
output of 32 MiB, which the allocator takes from the system in each call, by 8,192 interrupts or by 16.

Linux gives them to memory whose owner asks (madvise(2), `MADV_HUGEPAGE`), unless its administrator wrote `never` to
`/sys/kernel/mm/transparent_hugepage/enabled`; after `always` it gives them unasked. Other systems have no such call.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_HUGE = 1 << 21
_MADV_HUGEPAGE = 14


def advise_huge_pages(memory: Tensor) -> None:
    """Ask for huge pages for all of them that lie within new memory; nothing happens where there are none.

    Only what is not yet written gains, so call this before the memory is filled.
    """
    if type(memory) is not Tensor or memory.nbytes < _HUGE or memory.device.type != "cpu":
        return
    first = -(-memory.data_ptr() // _HUGE) * _HUGE
    size = (memory.data_ptr() + memory.nbytes) // _HUGE * _HUGE - first
    if size > 0 and (madvise := _madvise()) is not None:
        madvise(first, size, _MADV_HUGEPAGE)  # advice: a kernel without huge pages refuses it, and nothing is lost


def empty_like(like: Tensor) -> Tensor:
    """`torch.empty_like`, of huge pages."""
    memory = torch.empty_like(like)
    advise_huge_pages(memory)
    return memory


def allocator_like(like: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes memory of such a size: torch's function alone where a huge page may not fit in."""
    return empty_like if like.nbytes >= 2 * _HUGE else torch.empty_like


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
