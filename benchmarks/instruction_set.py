"""Measuring as on an older CPU: regard, torch, and the libraries that torch calls are limited to an instruction set."""

import os
import sys
from collections.abc import Mapping

LIMITS = {
    "portable": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""By regard's name of the set, what limits torch's own kernels, MKL and oneDNN; other sets limit regard alone."""


def limits(isa: str) -> Mapping[str, str]:
    """The environment variables that limit a process to an instruction set of `native.isas()`.

    >>> limits("avx2")["ATEN_CPU_CAPABILITY"]
    'avx2'
    """
    return {"REGARD_ISA": isa, **LIMITS.get(isa, {})}


def limit(isa: str) -> None:
    """Start this process again, limited to the instruction set, unless it is: libraries look only when loaded."""
    wanted = limits(isa)
    if not wanted.items() <= os.environ.items():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})  # noqa: S606 - itself
