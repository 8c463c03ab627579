"""The compiled library `libregard`: found, loaded, and asked which instruction sets this machine has.

The library is a file beside this one: C++ behind a C interface (native/abi.h), so one build serves every Python and
every torch. regard works without it: then `available()` is False, `absence()` says why, and the first call that it
would have computed warns of that (`SlowWarning`), unless the environment variable `REGARD_QUIET` is set.

Instruction sets, plainest first: "portable", then "avx2", "avx512", "avx512vnni", "avx512bf16", "amx" on x86 or "neon"
on 64-bit ARM. An installation from source compiles "portable" and the best one of the machine ("avx512vnni" brings
"avx512" and "amx" brings "avx512bf16", whose kernels they share); with the environment variable `REGARD_ISAS=all` it
compiles all of them, as wheels do. A call uses the best compiled one that the machine runs, unless the environment
variable `REGARD_ISA` names another.

`native_calls.py` calls it.
"""

import ctypes
import os
import struct
import warnings
from functools import cache
from importlib.resources import files
from inspect import currentframe
from pathlib import Path
from typing import Any

# Before the library: its OpenMP must find the threads that torch brought, and not start others.
import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

from regard.errors import ProblemError, RefusalError, SlowWarning

LIBRARY = "libregard.so"
ABI = 9  # REGARD_ABI_VERSION of native/abi.h


def path() -> str:
    """Where the compiled library is, or would be."""
    return _find()


def available() -> bool:
    """Whether the compiled library is there and fits this version of regard."""
    return absence() is None


def absence() -> str | None:
    """Why there is no compiled library, in one sentence; None when there is one."""
    loaded = _load(_find())
    return None if isinstance(loaded, ctypes.CDLL) else loaded


def warn_of_absence() -> None:
    """Give a `SlowWarning` if there is no compiled library: once in a process, and not if `REGARD_QUIET` is set."""
    if (absent := absence()) is not None:
        warn_once(f"Attention on the CPU is several times slower than it could be: {absent}")


def warn_once(sentence: str, category: type[Warning] = SlowWarning) -> None:
    """Give a warning with this sentence: once in a process, and not if `REGARD_QUIET` is set."""
    if os.environ.get("REGARD_QUIET", "0") in ("", "0"):
        _warn(sentence, category)


@cache
def _warn(sentence: str, category: type[Warning]) -> None:
    warnings.warn(
        f'{sentence} To silence this: warnings.filterwarnings("ignore", category=regard.{category.__name__}), or '
        "REGARD_QUIET=1.",
        category,
        stacklevel=_outside(),
    )


def _outside() -> int:
    """How far up the stack the caller of our caller is that is neither regard nor torch: whose line a warning names."""
    frame, level = currentframe(), 0
    within = ("regard", "torch", "functools")  # which computes our cached properties
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in within:
        frame, level = frame.f_back, level + 1
    return level


def isas() -> tuple[str, ...]:
    """Every instruction set that the library has kernels for and this machine runs, plainest first.

    `("portable", "avx2")` for example. Empty when there is no library.
    """
    loaded = _load(_find())
    return _names(loaded) if isinstance(loaded, ctypes.CDLL) else ()


def isa() -> str:
    """The instruction set to use: what `REGARD_ISA` names, else the best of `isas()`.

    Warns once (`SlowWarning`) if this machine has a better one that was not compiled, as in an image that was built on
    an older machine.

    Raises:
        RefusalError: there is no compiled library.
        ProblemError: `REGARD_ISA` names one that does not exist or that this machine lacks.
    """
    asked, here = os.environ.get("REGARD_ISA"), isas()
    if not here:
        raise RefusalError(absence())
    if not asked:
        if (best := best_isa()) != here[-1]:
            compiler = ", by GCC 11, Clang 12 or newer" if best == "amx" else ""
            warn_once(
                f"Attention on the CPU is slower than it could be: this machine runs {best}, and regard was compiled "
                f"for {', '.join(here)}. Install regard again on this machine, or with REGARD_ISAS=all{compiler}."
            )
        return here[-1]
    if asked not in here:
        raise ProblemError(
            f"REGARD_ISA is {asked!r}, and regard has kernels for {', '.join(here)} that this machine runs: name one "
            f"of these, or unset REGARD_ISA to use {here[-1]}. Others need an install with REGARD_ISAS=all, and a "
            "machine that runs them."
        )
    return asked


def best_isa() -> str | None:
    """The best instruction set of this machine, compiled or not; None when there is no library."""
    loaded = _load(_find())
    return loaded.regard_best_isa().decode() if isinstance(loaded, ctypes.CDLL) else None


def library() -> Any:
    """The loaded library, of a process where `absence()` is None."""
    return _load(_find())


@cache  # four questions of a new plan, each some 40 us of looking into folders
def _find() -> str:
    """Where the library is, or would be. An editable install keeps it apart from the sources; `files` knows both."""
    return str(files("regard").joinpath(LIBRARY))


@cache
def _load(path: str) -> ctypes.CDLL | str:
    """The loaded library, or the sentence that says why it cannot be had."""
    if not Path(path).is_file():
        return (
            "The compiled library is missing: the install found no working C++ compiler, or regard runs from its "
            "sources. Install g++ or clang++, and then regard again, with pip --verbose."
        )
    try:
        if _is_cut_short(path):
            return (
                "regard's compiled library is incomplete: its file was cut short. Install regard again on this machine."
            )
        library = ctypes.CDLL(path)
        version = int(library.regard_abi_version())
        if version == ABI:
            library.regard_best_isa.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:  # also of a file that may not be read
        return f"regard's compiled library cannot be used ({error}). Install regard again on this machine."
    if version != ABI:
        return (
            f"The compiled library has interface version {version}, these sources need {ABI}: it is left over from "
            "another version. Install regard again."
        )
    return library


ELF = struct.Struct("<4sBB26xQQ6xHHHH2x")
"""The header of an ELF file: magic, class, byte order, then offset, size and count of its two tables."""

SEGMENT = struct.Struct("<8xQ16xQ")
"""A segment in its table: offset and size in the file."""


def _is_cut_short(path: str) -> bool:
    """Whether an ELF file of 64 bits ends before what its header tells of: loading such a file ends Python (SIGBUS).

    The linker writes the table of sections last, so its end is the end of the file.
    """
    with Path(path).open("rb") as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(ELF.size)
        if not head.startswith(b"\x7fELF\x02\x01"):
            return False
        if len(head) < ELF.size:
            return True
        *_, segments, sections, segment_size, segment_count, section_size, section_count = ELF.unpack(head)
        if segment_size < SEGMENT.size:
            return True
        file.seek(segments)
        table = file.read(segment_size * segment_count)
    if len(table) < segment_size * segment_count or sections + section_size * section_count > size:
        return True
    places = (SEGMENT.unpack_from(table, at) for at in range(0, len(table), segment_size))
    return any(offset + length > size for offset, length in places)


def _names(library: ctypes.CDLL) -> tuple[str, ...]:
    names = library.regard_isas
    names.restype = ctypes.POINTER(ctypes.c_char_p)
    found: list[str] = []
    for name in names():  # ended by a null pointer
        if name is None:
            break
        found.append(name.decode())
    return tuple(found)
