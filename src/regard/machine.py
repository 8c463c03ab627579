"""What the machine is called."""

import platform
from pathlib import Path


def processor() -> str:
    """The name of the processor, such as `AMD EPYC 9B45`."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
