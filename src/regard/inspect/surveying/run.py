"""The run of a survey: the time and the progress of each stage, the machine, and the versions of the packages."""

import os
import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch

from regard.inspect.surveying.model import settle
from regard.machine import processor

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) to report progress."""


class Clock:
    """The time of each stage by its name, in `seconds`."""

    def __init__(self, progress: Progress | None, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress or (lambda stage, done, total: None)
        self._device = device

    @contextmanager
    def stage(self, name: str, total: int) -> Generator[Callable[[], None]]:
        """Time a stage of `total` steps; what it yields is called after each step."""
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            self._progress(name, min(done, total), total)

        self._progress(name, 0, total)
        settle(self._device)
        start = time.perf_counter()
        yield step
        settle(self._device)
        self.seconds[name] = time.perf_counter() - start
        self._progress(name, total, total)


def machine(device: torch.device) -> str:
    """A short description of the device, such as `AMD EPYC 9B45, 2 threads, 23 GiB`."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if device.type != "cpu":
        return str(device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    threads = torch.get_num_threads()
    known = f", {memory / 2**30:.0f} GiB" if memory else ""
    return f"{processor()}, {threads} thread{'s' * (threads != 1)}{known}"


def versions() -> dict[str, str]:
    """The versions of regard, torch, transformers and Python; packages that are not installed are omitted."""
    found = {"python": platform.python_version()}
    for name in ("regard", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
