"""The compiled library `libregard`: found, loaded, and asked which instruction sets this machine has.

The library stands beside this file. It is C++ behind a C interface (native/abi.h), so one build serves every Python and
every torch, and regard works without it: then `available()` is False and `absence()` says why.

Instruction sets, plainest first: "portable", then "avx2", "avx512", "avx512bf16" on x86 or "neon" on 64-bit ARM. The
last one that the machine has is used, unless the environment variable `REGARD_ISA` names another.
"""

import ctypes
import os
from functools import cache
from importlib.resources import files
from pathlib import Path

# Before the library: its OpenMP must find the threads that torch brought, and not start others.
import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

from regard.errors import ProblemError, RefusalError

LIBRARY = "libregard.so"
ABI = 1  # REGARD_ABI_VERSION of native/abi.h


def available() -> bool:
    """Whether the compiled library is there and fits this version of regard."""
    return absence() is None


def absence() -> str | None:
    """Why there is no compiled library, in one sentence; None when there is one."""
    loaded = _load(_find())
    return None if isinstance(loaded, ctypes.CDLL) else loaded


def isas() -> tuple[str, ...]:
    """Every instruction set that the library has kernels for and this machine runs, plainest first.

    `("portable", "avx2")` for example. Empty when there is no library.
    """
    loaded = _load(_find())
    return _names(loaded) if isinstance(loaded, ctypes.CDLL) else ()


def isa() -> str:
    """The instruction set to use: what `REGARD_ISA` names, else the best of `isas()`.

    Raises:
        RefusalError: there is no compiled library.
        ProblemError: `REGARD_ISA` names one that does not exist or that this machine lacks.
    """
    asked, here = os.environ.get("REGARD_ISA"), isas()
    if not here:
        raise RefusalError(absence())
    if not asked:
        return here[-1]
    if asked not in here:
        raise ProblemError(
            f"REGARD_ISA is {asked!r}, and this machine runs {', '.join(here)}: name one of these, or unset REGARD_ISA "
            f"to use {here[-1]}."
        )
    return asked


def _find() -> str:
    """Where the library is, or would be. An editable install keeps it apart from the sources; `files` knows both."""
    return str(files("regard").joinpath(LIBRARY))


@cache
def _load(path: str) -> ctypes.CDLL | str:
    """The loaded library, or the sentence that says why it cannot be had."""
    if not Path(path).is_file():
        return (
            "regard is here without its compiled library: when installed, no C++ compiler was found or it failed, "
            "or it runs from its sources. Install g++ or clang++, and then regard again, with pip --verbose."
        )
    try:
        library = ctypes.CDLL(path)
        version = int(library.regard_abi_version())
    except (OSError, AttributeError) as error:
        return f"regard's compiled library cannot be used ({error}). Install regard again on this machine."
    if version != ABI:
        return (
            f"regard's compiled library speaks version {version} of its interface and these sources speak {ABI}: it is "
            f"left over from another version. Install regard again."
        )
    return library


def _names(library: ctypes.CDLL) -> tuple[str, ...]:
    names = library.regard_isas
    names.restype = ctypes.POINTER(ctypes.c_char_p)
    found: list[str] = []
    for name in names():  # ended by a null pointer
        if name is None:
            break
        found.append(name.decode())
    return tuple(found)
