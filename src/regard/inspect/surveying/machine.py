"""The machine of a report, and the versions of the packages."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def machine(device: torch.device) -> str:
    """A short description of the device, such as `AMD EPYC 9B45, 2 threads, 23 GiB`."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if device.type != "cpu":
        return str(device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return f"{_processor()}, {torch.get_num_threads()} threads" + (f", {memory / 2**30:.0f} GiB" if memory else "")


def versions() -> dict[str, str]:
    """The versions of regard, torch, transformers and Python; packages that are not installed are omitted."""
    found = {"python": platform.python_version()}
    for name in ("regard", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
