"""Measuring as on an older CPU: regard, torch, and the libraries that torch calls are limited to an instruction set."""

import os
import sys
from collections.abc import Mapping

from regard import native

LIMITS = {
    isa: {"ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    for isa, aten, mkl, onednn in (
        ("portable", "default", "SSE4_2", "SSE41"),
        ("avx2", "avx2", "AVX2", "AVX2"),
        ("avx512", "avx512", "AVX512", "AVX512_CORE"),
        ("avx512vnni", "avx512", "AVX512_E1", "AVX512_CORE_VNNI"),
        ("avx512bf16", "avx512", "AVX512_E3", "AVX512_CORE_BF16"),
    )
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


def is_older() -> bool:
    """Whether this machine has older instructions than AVX-512, for which the goals beside torch were set."""
    best = native.best_isa()
    return best is not None and not best.startswith(("avx512", "amx"))
