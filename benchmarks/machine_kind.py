"""The kind of CPU that a page of measurements is for: pages of different kinds stand side by side."""

import platform
import re
from pathlib import Path

MICROARCHITECTURES = {
    ("AuthenticAMD", 23): "zen2",
    ("AuthenticAMD", 25, 1): "zen3",
    ("AuthenticAMD", 25, 17): "zen4",
    ("AuthenticAMD", 25, 97): "zen4",
    ("AuthenticAMD", 26): "zen5",
    ("GenuineIntel", 6, 85): "cascade-lake",  # and Skylake-SP, which lacks VNNI
    ("GenuineIntel", 6, 106): "ice-lake",
    ("GenuineIntel", 6, 143): "sapphire-rapids",
    ("GenuineIntel", 6, 207): "emerald-rapids",
    ("GenuineIntel", 6, 173): "granite-rapids",
}
"""By vendor, family and, where it decides, model, as /proc/cpuinfo has them."""

TITLES = {"zen2": "AMD Zen 2", "zen3": "AMD Zen 3", "zen4": "AMD Zen 4", "zen5": "AMD Zen 5"}


def machine_kind(cpuinfo: str | None = None) -> str:
    r"""A name for the kind of this CPU, fit for a file: "zen4", else vendor, family and model, else the architecture.

    Args:
        cpuinfo: the text of /proc/cpuinfo; None reads it.

    >>> machine_kind("vendor_id : AuthenticAMD\ncpu family : 26\nmodel : 2\n")
    'zen5'
    >>> machine_kind("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 1\n")
    'genuineintel-6-1'
    """
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.is_file() else ""
    found = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: *(\S+)$", cpuinfo, re.MULTILINE))
    if len(found) < 3:
        return platform.machine().lower() or "unknown"
    vendor, family, model = found["vendor_id"], int(found["cpu family"]), int(found["model"])
    known = MICROARCHITECTURES.get((vendor, family, model)) or MICROARCHITECTURES.get((vendor, family))
    return known or f"{vendor}-{family}-{model}".lower()


def title(kind: str) -> str:
    """What a heading calls the kind.

    >>> title("zen4"), title("cascade-lake")
    ('AMD Zen 4', 'Cascade Lake')
    """
    return TITLES.get(kind) or kind.replace("-", " ").title()
