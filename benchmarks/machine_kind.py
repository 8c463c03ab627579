"""The kind of CPU that a page of measurements is for: pages of different kinds are side by side.

A virtual machine may report another model than the processor has. A model is believed only where its best instructions
fit: these decide the speed.
"""

import platform
import re
from pathlib import Path

EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
"""Flags of /proc/cpuinfo, best first: the first that a CPU has is its level."""

MICROARCHITECTURES = {
    ("AuthenticAMD", 23): {"avx2": "zen2"},
    ("AuthenticAMD", 25, 1): {"avx2": "zen3"},
    ("AuthenticAMD", 25, 17): {"avx512_bf16": "zen4", "avx2": "zen4-without-avx512"},  # as virtual machines may have it
    ("AuthenticAMD", 25, 97): {"avx512_bf16": "zen4"},
    ("AuthenticAMD", 26): {"avx512_bf16": "zen5"},
    ("GenuineIntel", 6, 85): {"avx512_vnni": "cascade-lake", "avx512f": "cascade-lake"},  # and Skylake-SP, without VNNI
    ("GenuineIntel", 6, 106): {"avx512_vnni": "ice-lake"},
    ("GenuineIntel", 6, 143): {"amx_bf16": "sapphire-rapids"},
    ("GenuineIntel", 6, 207): {"amx_bf16": "emerald-rapids"},
    ("GenuineIntel", 6, 173): {"amx_bf16": "granite-rapids"},
}
"""Names by level, by vendor, family and, where it decides, model, as /proc/cpuinfo has them."""

INTEL_AMX = "intel-amx"
AS = "-as-"
"""Between the kind of a CPU and the instruction set that it was limited to."""

TITLES = {
    "zen2": "AMD Zen 2",
    "zen3": "AMD Zen 3",
    "zen4": "AMD Zen 4",
    "zen4-without-avx512": "AMD Zen 4 without AVX-512",
    "zen5": "AMD Zen 5",
    INTEL_AMX: "Intel Xeon with AMX (Sapphire Rapids or later)",
}


def limited_kind(isa: str | None) -> str:
    """The kind of this CPU, limited to an instruction set unless that is None.

    >>> limited_kind("avx2").removeprefix(machine_kind())
    '-as-avx2'
    """
    return machine_kind() + (f"{AS}{isa}" if isa else "")


def machine_kind(cpuinfo: str | None = None) -> str:
    r"""A name for the kind of this CPU, fit for a file.

    That of its model, such as "zen4", where its instructions fit; "intel-amx" for another Intel CPU with AMX; else
    vendor, family, model and level; without /proc/cpuinfo the architecture.

    Args:
        cpuinfo: the text of /proc/cpuinfo; None reads it.

    >>> machine_kind("vendor_id : AuthenticAMD\ncpu family : 26\nmodel : 2\nflags : avx2 avx512f avx512_bf16\n")
    'zen5'
    >>> machine_kind("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 167\nflags : avx512_bf16 amx_bf16 amx_tile\n")
    'intel-amx'
    >>> machine_kind("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 167\nflags : avx2 avx512f avx512_vnni\n")
    'genuineintel-6-167-avx512-vnni'
    """
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.is_file() else ""
    found = dict(re.findall(r"^(vendor_id|cpu family|model|flags)\s*: *(.+?) *$", cpuinfo, re.MULTILINE))
    if not found.keys() >= {"vendor_id", "cpu family", "model"}:
        return platform.machine().lower() or "unknown"
    vendor, family, model = found["vendor_id"], int(found["cpu family"]), int(found["model"])
    best = level(found.get("flags", ""))
    for known in ((vendor, family, model), (vendor, family)):
        if name := MICROARCHITECTURES.get(known, {}).get(best):
            return name
    if vendor == "GenuineIntel" and best == "amx_bf16":
        return INTEL_AMX
    return "-".join(filter(None, (vendor, str(family), str(model), best.replace("_", "-")))).lower()


def level(flags: str) -> str:
    """The best of `EXTENSIONS` among the flags; nothing if they have none.

    >>> level("fma avx2 avx512f")
    'avx512f'
    """
    return next((name for name in EXTENSIONS if name in flags.split()), "")


def title(kind: str) -> str:
    """What a heading calls the kind.

    >>> title("zen4"), title("cascade-lake"), title("zen5-as-avx2")
    ('AMD Zen 4', 'Cascade Lake', 'AMD Zen 5 limited to avx2')
    """
    name, limited, isa = kind.partition(AS)
    return (TITLES.get(name) or name.replace("-", " ").title()) + f" limited to {isa}" * bool(limited)
