"""Measuring: medians of interleaved runs, so that a busy machine slows all that is compared alike."""

import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch


def interleaved(runs: Mapping[str, Callable[[], object]], *, seconds: float = 2.0, least: int = 3) -> dict[str, float]:
    """The median time of each run, in seconds, after one that warms up; rounds go on for `seconds` in all."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    until = time.perf_counter() + seconds
    while len(next(iter(times.values()))) < least or time.perf_counter() < until:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that Python and numpy held at once during the run, in bytes."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def machine() -> str:
    """Where and with what the numbers were measured."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    day = datetime.now(UTC).date()
    python = platform.python_version()
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {python}, {day}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    lines = [head, ("---", *("---:" for _ in head[1:])), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
