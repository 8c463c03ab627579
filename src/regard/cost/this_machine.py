"""The machine at hand: its limits, measured once by `regard.bench.this_machine` and stored in a file.

Reading them needs nothing of torch. They are measured again after the file is deleted, or on another processor or GPU.
"""

import json
import os
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from regard.atomic_write import write_whole
from regard.cost.machine import Efficiency, Machine
from regard.errors import ProblemError
from regard.folders import cache_folder
from regard.machine import cache_sizes, model, processor

FALLBACK_FAST_MEMORY = 1 << 20
"""Bytes, where the system does not tell the size of a core's L2 cache."""

GPUS = Path("/proc/driver/nvidia/gpus")
"""Where the driver of NVIDIA describes each GPU."""


def stored_at(name: str = "this") -> Path:
    """The file: `regard/machine.json`, for `this-cpu` `regard/machine-cpu.json`, in `$XDG_CACHE_HOME` or `~/.cache`."""
    return cache_folder() / {"this": "machine.json", "this-cpu": "machine-cpu.json"}[name]


def identity() -> str:
    """The processor, its usable cores, its model and the GPUs: limits of another machine are not this one's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return "; ".join([f"{processor()}, {cores} cores", *filter(None, [model()]), *gpus()])


def gpus() -> list[str]:
    """The GPUs that the driver describes, as text; not read from torch, which takes seconds to import."""
    try:
        found = [each.read_text(encoding="utf-8") for each in sorted(GPUS.glob("*/information"))]
    except OSError:
        return []
    names = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in found]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name[1] for name in names if name] + ([f"visible: {visible}"] if found and visible is not None else [])


def read_this_machine(name: str = "this") -> Machine | None:
    """The stored limits; None if there are none, or none of this machine."""
    try:
        content: Any = json.loads(stored_at(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if found.get("identity") != identity():
        return None
    try:
        limits = {key: found[key] for key in ("title", "flops", "bandwidth", "memory", "fast_memory")}
        names = [field.name for field in fields(Efficiency)]
        efficiency = {
            dtype: Efficiency(**{name: each[name] for name in names}) for dtype, each in found["efficiency"].items()
        }
        where = f"measured here: {stored_at(name)}"
        return Machine(name=name, source=where, **limits, efficiency=efficiency)
    except (KeyError, TypeError, AttributeError, ProblemError):  # of another version
        return None


def store_this_machine(machine: Machine) -> None:
    """Write the limits to the file; without a place for it they are measured again next time."""
    limits = {key: getattr(machine, key) for key in ("title", "bandwidth", "memory", "fast_memory")}
    efficiency = {dtype: asdict(each) for dtype, each in (machine.efficiency or {}).items()}
    content = {"identity": identity(), "flops": dict(machine.flops), **limits, "efficiency": efficiency}
    path = stored_at(machine.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1).encode())
    except OSError:
        return


def fast_memory() -> int:
    """Bytes of the L2 cache of a core."""
    return cache_sizes().get(2, FALLBACK_FAST_MEMORY)
