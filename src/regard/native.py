"""The compiled library `libregard`: found, loaded, and asked which instruction sets this machine has.

The library is a file beside this one: C++ behind a C interface (native/abi.h), so one build serves every Python and
every torch. regard works without it: then `available()` is False, `absence()` says why, and the first call that it
would have computed warns of that (`SlowWarning`), unless the environment variable `REGARD_QUIET` is set.

Instruction sets, plainest first: "portable", then "avx2", "avx512", "avx512vnni", "avx512bf16" on x86 or "neon" on
64-bit ARM. An installation from source compiles "portable" and the best one of the machine ("avx512vnni" brings
"avx512", whose kernels it shares); with the environment variable `REGARD_ISAS=all` it compiles all of them, as wheels
do. A call uses the best compiled one that the machine runs, unless the environment variable `REGARD_ISA` names another.

A call is a struct whose every field has 8 bytes. `CALL` and `GRADIENT` name the fields in order; an `Entry`
writes and runs it. `Attend` runs many calls of one form, and writes only what differs between them.
"""

import ctypes
import os
import struct
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from inspect import currentframe
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# Before the library: its OpenMP must find the threads that torch brought, and not start others.
import torch
from torch import Tensor

from regard.errors import ProblemError, RefusalError, RegardError, SlowWarning

DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""regard_dtype of native/abi.h."""

FORMS = {"int8": 4, "int4": 5, "fp8": 6}
"""regard_form of native/abi.h: how a part is written that is not plain."""

LIBRARY = "libregard.so"
ABI = 5  # REGARD_ABI_VERSION of native/abi.h


def _tensor(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{field}" for field in ("data", "batch", "head", "token"))


def _schedule(name: str) -> tuple[str, ...]:
    lists = ("run_start", "run_tile", "run_length", "patch_start", "patch_tile", "patch_pattern", "patterns")
    intervals = ("intervals", "interval_count", "offset")
    return tuple(f"{name}.{field}" for field in (*intervals, "rows", *lists, "pattern_count"))


CALL = (
    *("bytes", "isa", "dtype", "threads", "batch", "heads", "kv_heads", "queries", "keys", "qk_dim", "v_dim"),
    *(
        "scale",
        "softcap",
        "dropout",
        "seed",
        *_tensor("q"),
        *_tensor("k"),
        *_tensor("v"),
        *_tensor("out"),
        *("k_parts", "v_parts", "k_count", "v_count"),
        "lse",
        "sink",
    ),
    *("distance", "distance_head", "bias", "bias_dtype", "bias_batch", "bias_head", "bias_row", "bias_key"),
    *("maps_batch", "maps_head", *_schedule("by_query"), "workspace", "workspace_bytes", "seconds", "next"),
)
"""The fields of regard_call."""

OPERANDS = (
    *(*_tensor("q"), *_tensor("k"), *_tensor("v"), *_tensor("out"), "lse", "threads", "queries", "keys"),
    *("intervals", "interval_count", "offset", "maps_batch", "workspace", "workspace_bytes"),
)
"""The fields of regard_operands."""

GRADIENT = (
    *(*CALL, *_tensor("dout"), "dlse", *_tensor("dq"), *_tensor("dk"), *_tensor("dv"), "delta", "ddistance", "dbias"),
    *(f"bias_sizes.{axis}" for axis in range(4)),
)
"""The fields of regard_gradient, which begins with a regard_call."""

SWEEP = (
    *(*CALL, "offset", "entropy", "squares", "mass", "top", "top_key", "bins", "columns"),
    *("vectors", "vector_count", "vector_batch", "along", "mean", "largest", "cell"),
)
"""The fields of regard_sweep, which begins with a regard_call."""

LINEAR = (
    *("bytes", "isa", "dtype", "threads", "batch", "heads", "kv_heads", "tokens", "qk_dim", "v_dim"),
    *("chunk", "feature", "normalise", "scale", "epsilon"),
    *(*_tensor("q"), *_tensor("k"), *_tensor("v"), *_tensor("out"), "log_decay", "log_decay_head", "state", "spoilt"),
    *("workspace", "workspace_bytes"),
)
"""The fields of regard_linear."""

PART = (
    *("form", "end", "ends", "skip", "page", "pages", "table", "table_pages", "table_row"),
    *("data", "data_page", "data_head", "data_step", "tiled", "per_token", "group"),
    *("scale", "low", "scale_page", "scale_head", "scale_step"),
)
"""The fields of regard_part."""

NUMBERS = ("scale", "softcap", "dropout", "seconds", "epsilon")
"""The fields that are doubles; all others are integers and addresses."""

KEPT_WORKSPACE = 1 << 20
"""Bytes of workspace that each thread of Python keeps from call to call; a call that needs more makes its own."""

TOO_SMALL = -4
"""The regard_status of a call whose workspace is too small."""

WRONG = {
    -1: "a size makes no sense",
    -2: "a tensor is missing",
    -3: "a tile is outside of the call",
    -4: "the workspace is too small",
    -5: "the machine lacks the instruction set",
}
"""regard_status below 0."""


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
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("regard", "torch"):
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
            warn_once(
                f"Attention on the CPU is slower than it could be: this machine runs {best}, and regard was compiled "
                f"for {', '.join(here)}. Install regard again on this machine, or with REGARD_ISAS=all."
            )
        return here[-1]
    if asked not in here:
        raise ProblemError(
            f"REGARD_ISA is {asked!r}, and this machine runs {', '.join(here)}: name one of these, or unset REGARD_ISA "
            f"to use {here[-1]}."
        )
    return asked


def best_isa() -> str | None:
    """The best instruction set of this machine, compiled or not; None when there is no library."""
    loaded = _load(_find())
    return loaded.regard_best_isa().decode() if isinstance(loaded, ctypes.CDLL) else None


class Entry:
    """A function of the library that runs a struct.

    They are regard_forward of `CALL`, regard_backward of `GRADIENT`, regard_gather of `SWEEP` and
    regard_attend_linear of `LINEAR`.
    """

    def __init__(self, name: str, fields: tuple[str, ...]) -> None:
        library: Any = _load(_find())
        self._fields, self._memory = fields, ctypes.c_int64 * len(fields)
        self._packing = struct.Struct("=" + "".join("d" if field in NUMBERS else "q" for field in fields))
        self._run, self._workspace = getattr(library, name), library.regard_workspace
        self._run.restype = self._workspace.restype = ctypes.c_int64
        self._run.argtypes = self._workspace.argtypes = (ctypes.c_void_p,)

    def packed(self, values: Mapping[str, float]) -> bytes:
        """A struct with these fields, all others 0; `bytes` is put in."""
        values = {"bytes": self._packing.size, **values}
        return self._packing.pack(*[values.get(field, 0) for field in self._fields])

    def opened(self, packed: bytes) -> Any:
        """A copy of the struct to write to and to run: an array of its fields by number, as integers."""
        return self._memory.from_buffer_copy(packed)

    def workspace(self, call: Any) -> int:
        """The bytes of workspace that an opened struct needs."""
        found = int(self._workspace(call))
        return found if found >= 0 else _wrong(found)

    def __call__(self, call: Any, tick: Callable[[], None] | None = None) -> None:
        """Run an opened struct. Where it limits its seconds, Python sees to its signals in between, and to `tick`."""
        while status := self._run(call):
            if status < 0:
                _wrong(status)
            if tick is not None:
                tick()


class Attend:
    """regard_attend: runs a struct of `CALL` with operands that differ from call to call.

    One call of `struct.pack` writes them all, and nothing else is written where they are all that differs.
    """

    def __init__(self) -> None:
        library: Any = _load(_find())
        self._pack = struct.Struct(f"={len(OPERANDS)}q").pack
        self._run, self._workspace = library.regard_attend, library.regard_attend_workspace
        self._run.restype = self._workspace.restype = ctypes.c_int64
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64)
        self._workspace.argtypes = self._run.argtypes[:2]

    def __call__(self, form: Any, operands: tuple[int, ...]) -> None:
        """Run a struct, of which an `Entry` opened the form, with operands in the order of `OPERANDS`.

        Args:
            operands: without the workspace.
        """
        # who calls from a signal handler, inside a call, gets other memory
        memory, _workspace.kept = _workspace.kept, NO_MEMORY
        packed = self._pack(*operands, memory.address, memory.size)
        status = self._run(form, packed, 0)
        if status == TOO_SMALL:
            memory = memory_of(self._workspace(form, packed))
            packed = self._pack(*operands, memory.address, memory.size)
            status = self._run(form, packed, 0)
        while status:  # in between, Python sees to its signals
            if status < 0:
                _wrong(status)
            status = self._run(form, packed, status)
        if memory.size <= KEPT_WORKSPACE:
            _workspace.kept = memory


class Workspace(NamedTuple):
    """Memory for a call of the library."""

    memory: Tensor
    size: int  # bytes
    address: int


def memory_of(size: int) -> Workspace:
    """Workspace of `size` bytes."""
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    return Workspace(memory, size, memory.data_ptr())


NO_MEMORY = memory_of(0)


class _Kept(threading.local):
    """Memory for a thread's next call: allocating it would cost a tiny call 1 us of 10."""

    kept = NO_MEMORY


_workspace = _Kept()


def _wrong(status: int) -> NoReturn:
    raise RegardError(
        f"regard's compiled library does not take a call that regard made: {WRONG.get(status)} (status {status} "
        'of native/abi.h). This is an error in regard, please report it; backend="reference" does without the library.'
    )


def products(dtype: torch.dtype, threads: int, seconds: float) -> float:
    """FLOP/s of products that never leave the registers, measured for about `seconds`; see native/limits.h."""
    measured = _measuring("regard_products", ctypes.c_int64, ctypes.c_int64, ctypes.c_double)
    return _positive(measured(isas().index(isa()), DTYPES[dtype], threads, seconds))


def stream(address: int, size: int, threads: int) -> float:
    """Bytes/s of one read of `size` bytes from `address` on, which must have been written before."""
    measured = _measuring("regard_stream", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return _positive(measured(isas().index(isa()), address, size, threads))


def _measuring(name: str, *arguments: type) -> Any:
    """A function of the library that takes an instruction set and these, and gives a number."""
    function = getattr(_load(_find()), name)
    function.restype, function.argtypes = ctypes.c_double, (ctypes.c_int64, *arguments)
    return function


def _positive(number: float) -> float:
    """The number, unless it is a regard_status."""
    if number < 0:
        raise ProblemError(f"regard's compiled library cannot measure this (status {number:.0f} of native/abi.h).")
    return number


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
    if _is_cut_short(path):
        return "regard's compiled library is incomplete: its file was cut short. Install regard again on this machine."
    try:
        library = ctypes.CDLL(path)
        version = int(library.regard_abi_version())
        if version == ABI:
            library.regard_best_isa.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        return f"regard's compiled library cannot be used ({error}). Install regard again on this machine."
    if version != ABI:
        return (
            f"The compiled library has interface version {version}, these sources need {ABI}: it is left over from "
            "another version. Install regard again."
        )
    return library


ELF = struct.Struct("<4sBB26xQQ6xHHHH2x")
"""Of the header of an ELF file: magic, class, byte order, then offset, size and count of its two tables."""


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
        file.seek(segments)
        table = file.read(segment_size * segment_count)
    if len(table) < segment_size * segment_count or sections + section_size * section_count > size:
        return True
    places = (struct.unpack_from("<8xQ16xQ", table, at) for at in range(0, len(table), segment_size))
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
