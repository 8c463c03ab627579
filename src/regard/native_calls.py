"""Calls of the compiled library: structs whose every field has 8 bytes, as native/abi.h declares them.

`CALL` and `GRADIENT` name the fields in order; an `Entry` writes and runs a struct. `Attend` runs many calls of one
form, and writes only what differs between them.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from regard import native
from regard.errors import ProblemError, RegardError
from regard.huge_pages import advise_huge_pages

DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""regard_dtype of native/abi.h."""

FORMS = {"int8": 4, "int4": 5, "fp8": 6}
"""regard_form of native/abi.h: how a part is written that is not plain."""


def _tensor(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{field}" for field in ("data", "batch", "head", "token"))


def _schedule(name: str) -> tuple[str, ...]:
    lists = ("run_start", "run_tile", "run_length", "patch_start", "patch_tile", "patch_pattern", "patterns")
    intervals = ("intervals", "interval_count", "offset")
    table = ("table.data", "table.batch", "table.head", "table.row", "table.key")
    return tuple(f"{name}.{field}" for field in (*intervals, *table, "rows", *lists, "pattern_count"))


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
    *("chunk", "feature", "features", "normalise", "scale", "epsilon", "vectors", "top"),
    *(*_tensor("q"), *_tensor("k"), *_tensor("v"), *_tensor("out"), "log_decay", "log_decay_head"),
    *(*_tensor("log_gate"), "log_gate_feature", *_tensor("beta"), *_tensor("log_fade"), "state", "spoilt"),
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


class Entry:
    """A function of the library that runs a struct.

    They are regard_forward of `CALL`, regard_backward of `GRADIENT`, regard_gather of `SWEEP` and
    regard_attend_linear of `LINEAR`.
    """

    def __init__(self, name: str, fields: tuple[str, ...]) -> None:
        library: Any = native.library()
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
        self._go_on(call, self._run(call), tick)

    def run_with_workspace(self, call: Any, at: slice) -> None:
        """Run an opened struct with memory for its workspace, whose fields are `at`: the thread's own if it fits."""
        memory, _workspace.kept = _workspace.kept, NO_MEMORY
        call[at] = memory.address, memory.size
        if (status := self._run(call)) == TOO_SMALL:
            memory = memory_of(self.workspace(call))
            call[at] = memory.address, memory.size
            status = self._run(call)
        self._go_on(call, status)
        _keep(memory)

    def _go_on(self, call: Any, status: int, tick: Callable[[], None] | None = None) -> None:
        while status:
            if status < 0:
                _wrong(status)
            if tick is not None:
                tick()
            status = self._run(call)


_BEGIN = ctypes.c_int64(0)

_PACK = struct.Struct(f"={len(OPERANDS)}q").pack

pack_packed = struct.Struct("=q24sq24sq24sq32s3q16s4q").pack
"""Packs `OPERANDS`: the strides of q, k, v and out (with lse) and the intervals are bytes; all others are integers."""


def packed_operands(*values: int) -> bytes:
    """Operands that follow one another, as bytes."""
    return struct.pack(f"={len(values)}q", *values)


class Attend:
    """regard_attend: runs a struct of `CALL` with operands that differ from call to call.

    One call of `struct.pack` writes them all, and nothing else is written where they are all that differs.
    """

    def __init__(self) -> None:
        library: Any = native.library()
        self._run, self._workspace = library.regard_attend, library.regard_attend_workspace
        self._run.restype = self._workspace.restype = ctypes.c_int64  # without argtypes, which are converted one by one

    def __call__(self, form: Any, operands: tuple[int | bytes, ...], pack: Callable[..., bytes] = _PACK) -> None:
        """Run a struct, of which an `Entry` opened the form, with operands in the order of `OPERANDS`.

        Args:
            operands: without the workspace.
            pack: what makes bytes of them; `pack_packed` where some are bytes already.
        """
        # who calls from a signal handler, inside a call, gets other memory
        memory, _workspace.kept = _workspace.kept, NO_MEMORY
        packed = pack(*operands, memory.address, memory.size)
        status = self._run(form, packed, _BEGIN)
        if status == TOO_SMALL:
            memory = memory_of(self._workspace(form, packed))
            packed = pack(*operands, memory.address, memory.size)
            status = self._run(form, packed, _BEGIN)
        while status:  # in between, Python sees to its signals
            if status < 0:
                _wrong(status)
            status = self._run(form, packed, ctypes.c_int64(status))
        _keep(memory)


class Workspace(NamedTuple):
    """Memory for a call of the library."""

    memory: Tensor
    size: int  # bytes
    address: int


def memory_of(size: int) -> Workspace:
    """Workspace of `size` bytes."""
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    advise_huge_pages(memory)
    return Workspace(memory, size, memory.data_ptr())


NO_MEMORY = memory_of(0)


class _Kept(threading.local):
    """Memory for a thread's next call: allocating it would cost a tiny call 1 us of 10."""

    kept = NO_MEMORY


_workspace = _Kept()


def _keep(memory: Workspace) -> None:
    if memory.size <= KEPT_WORKSPACE:
        _workspace.kept = memory


def _wrong(status: int) -> NoReturn:
    raise RegardError(
        f"regard's compiled library does not take a call that regard made: {WRONG.get(status)} (status {status} "
        'of native/abi.h). This is an error in regard, please report it; backend="reference" does without the library.'
    )


def products(dtype: torch.dtype, threads: int, seconds: float) -> float:
    """FLOP/s of products that never leave the registers, measured for about `seconds`; see native/limits.h."""
    measured = _measuring("regard_products", ctypes.c_int64, ctypes.c_int64, ctypes.c_double)
    return _positive(measured(native.isas().index(native.isa()), DTYPES[dtype], threads, seconds))


def stream(address: int, size: int, threads: int) -> float:
    """Bytes/s of one read of `size` bytes from `address` on, which must have been written before."""
    measured = _measuring("regard_stream", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return _positive(measured(native.isas().index(native.isa()), address, size, threads))


def _measuring(name: str, *arguments: type) -> Any:
    """A function of the library that takes an instruction set and these, and gives a number."""
    function = getattr(native.library(), name)
    function.restype, function.argtypes = ctypes.c_double, (ctypes.c_int64, *arguments)
    return function


def _positive(number: float) -> float:
    """The number, unless it is a regard_status."""
    if number < 0:
        raise ProblemError(f"regard's compiled library cannot measure this (status {number:.0f} of native/abi.h).")
    return number
