"""Starting a kernel as often as calls have the same sizes: what Triton compiled for it is looked up once.

Triton finds what it compiled by every argument in turn, which takes the host longer than the start itself. Calls whose
tensors have the same forms (sizes, strides, types, devices, alignment) need the same kernels with the same numbers, so
these are kept with the schedule of the calls.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from triton import JITFunction

from regard.gpu.tokens import ALIGNED
from regard.plan.schedule import Schedule

MOST_KEPT = 256
"""Forms of calls that are kept for a schedule."""


class Start:
    """A kernel with its grid size, and with the arguments that do not change from call to call."""

    def __init__(
        self, kernel: Any, programs: int, rest: tuple[Any, ...], constants: dict[str, Any], device: torch.device
    ) -> None:
        self.kernel, self.programs, self.rest, self.constants, self.device = kernel, programs, rest, constants, device
        self._compiled: Any = None
        self._more: tuple[Any, ...] = ()

    def __call__(self, *front: Any) -> None:
        """Start it on the current stream of the device, with these first arguments, of the same forms each time."""
        with started(self.device):
            if self._compiled is not None:
                self._compiled[(self.programs, 1, 1)](*front, *self.rest, *self._more)
                return
            compiled = self.kernel[(self.programs,)](*front, *self.rest, **self.constants)
        names = self.kernel.arg_names[len(front) + len(self.rest) :] if _is_kept(self.kernel, self.device) else None
        if names is not None and all(name in self.constants for name in names):
            self._more = tuple(self.constants[name] for name in names)
            self._compiled = compiled  # last, as another thread may ask for it


def _is_kept(kernel: Any, device: torch.device) -> bool:
    """Whether what was compiled depends on the forms alone: on AMD's chips also on how much memory a tensor has."""
    return isinstance(kernel, JITFunction) and device.type == "cuda" and torch.version.hip is None


def started(device: torch.device) -> AbstractContextManager[Any]:
    """Where a kernel is started: on the device of its tensors; on a CPU without numpy's warnings of infinite scores."""
    return np.errstate(all="ignore") if device.type == "cpu" else torch.cuda.device(device)


class Starts(NamedTuple):
    """The starts of a kernel for a call: the first, and the one with care for what is not finite.

    Attributes:
        each: one or both of them.
        flags: how many programs have a flag, by which the first tells the second; 0 if there are no flags.
    """

    each: tuple[tuple[Start, bool], ...]
    flags: int

    def run(
        self, tensors: tuple[Any, ...], others: tuple[Any, ...], described: list[Any], seeds: tuple[int, int]
    ) -> None:
        """Start them: with tensors, flags, other tensors, the descriptors of blocks for the first one, and seeds."""
        flags = tensors[0]
        if self.flags:
            flags = torch.empty(self.flags, dtype=torch.int32, device=flags.device)
        by_address = [None] * len(described)
        for start, careful in self.each:
            start(*tensors, flags, *others, *(by_address if careful else described), *seeds)


def form(t: Tensor | None) -> tuple[Any, ...] | None:
    """What a kernel is compiled for, and what it is passed besides the address, of a tensor."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNED == 0)


def kept(schedule: Schedule, key: tuple[Any, ...], make: Callable[[], Starts]) -> Starts:
    """The starts of calls with a schedule and a key, which has everything that `make` reads."""
    of_schedule = _kept.setdefault(schedule, {})
    found = of_schedule.get(key)
    if found is None:
        if len(of_schedule) >= MOST_KEPT:
            of_schedule.clear()
        found = of_schedule[key] = make()
    return found


_kept: "WeakKeyDictionary[Schedule, dict[tuple[Any, ...], Starts]]" = WeakKeyDictionary()
