"""The machine at hand: its limits, measured once by `regard.bench.this_machine` and stored in a file.

Reading them needs nothing of torch. They are measured again after the file is deleted, or on another processor.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from regard.atomic_write import write_whole
from regard.cost.machine import Efficiency, Machine
from regard.errors import ProblemError
from regard.machine import processor

NAME = "this"
FALLBACK_FAST_MEMORY = 1 << 20
"""Bytes, where the system does not tell the size of a core's L2 cache."""


def stored_at() -> Path:
    """The file: `regard/machine.json` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "regard" / "machine.json"


def identity() -> str:
    """The processor and its usable cores: limits of another are not this machine's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {cores} cores"


def read_this_machine() -> Machine | None:
    """The stored limits; None if there are none, or none of this processor."""
    try:
        content: Any = json.loads(stored_at().read_text())
    except (OSError, ValueError):
        return None
    found = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if found.get("identity") != identity():
        return None
    try:
        limits = {key: found[key] for key in ("flops", "bandwidth", "memory", "fast_memory")}
        efficiency = {dtype: Efficiency(**each) for dtype, each in found["efficiency"].items()}
        where = f"measured here: {stored_at()}"
        return Machine(name=NAME, title=identity(), source=where, **limits, efficiency=efficiency)
    except (KeyError, TypeError, AttributeError, ProblemError):  # of another version
        return None


def store_this_machine(machine: Machine) -> None:
    """Write the limits to the file; without a place for it they are measured again next time."""
    limits = {key: getattr(machine, key) for key in ("bandwidth", "memory", "fast_memory")}
    efficiency = {dtype: asdict(each) for dtype, each in (machine.efficiency or {}).items()}
    content = {"identity": identity(), "flops": dict(machine.flops), **limits, "efficiency": efficiency}
    try:
        stored_at().parent.mkdir(parents=True, exist_ok=True)
        write_whole(stored_at(), json.dumps(content, indent=1).encode())
    except OSError:
        return


def fast_memory() -> int:
    """Bytes of the L2 cache of a core."""
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (AttributeError, OSError, ValueError):
        size = 0
    return size if size > 0 else FALLBACK_FAST_MEMORY
