"""Times the stages of a survey, and reports their progress."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from regard.inspect.surveying.model import settle

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
