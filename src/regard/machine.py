"""What the machine is: the name and the model of its processor, and the sizes of its caches."""

import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""Where Linux describes the caches of a core; names of `sysconf` for them are missing from Python's `os`."""


def processor() -> str:
    """The name of the processor, such as `AMD EPYC 9B45`."""
    names = (value for name, value in _cpuinfo() if name == "model name")
    return next(names, "") or platform.processor() or platform.machine()


def model() -> str:
    """Family, model and stepping, such as `25/17/1`: virtual machines give many processors one name; else nothing."""
    first = dict(reversed(_cpuinfo()))
    numbers = [first.get(name, "") for name in ("cpu family", "model", "stepping")]
    return "/".join(numbers) if all(numbers) else ""


def cache_sizes() -> dict[int, int]:
    """Bytes of the caches for data by level, such as `{1: 49152, 2: 2097152}`; empty where the system does not tell."""
    found = dict[int, int]()
    for index in sorted(CACHES.glob("index*")):
        try:
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction" and (kib := re.fullmatch(r"(\d+)K", size)):
            found[int(level)] = int(kib[1]) << 10
    return found


def _cpuinfo() -> list[tuple[str, str]]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return []
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
