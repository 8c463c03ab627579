"""What the machine is and has: its processor, the sizes of its caches, and what torch.compile needs on CPU."""

import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

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


def torch_compilers() -> tuple[str, ...]:
    """The C++ compilers that torch.compile tries on CPU, in order: those of torch's setting `cpp.cxx`.

    When torch reads its settings they are CXX, or else one name (torch 2.13, torch/_inductor/config.py); none where CXX
    is empty. A g++ that torch may download (TORCH_INDUCTOR_INSTALL_GXX) is left out.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        names = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    else:
        names = config.cpp.cxx
    return tuple(filter(None, names if isinstance(names, (list, tuple)) else [names]))


def torch_compiler() -> str | None:
    """The path of the C++ compiler that torch.compile uses on CPU; None where it finds none."""
    return next(filter(None, map(shutil.which, torch_compilers())), None)


def python_header() -> str | None:
    """The path of `Python.h`, which kernels of torch.compile include on CPU; None where torch does not find it."""
    folders = [sysconfig.get_path("include"), sysconfig.get_path("include", scheme="posix_prefix")]
    if sys.platform == "darwin":  # a Python that is a framework
        folders.append(str(Path(sysconfig.get_path("stdlib")).parents[1] / "Headers"))
    return next((str(file) for folder in folders if (file := Path(folder, "Python.h")).is_file()), None)


def _cpuinfo() -> list[tuple[str, str]]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return []
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
