"""The positions of a call, and cached tables with a row per position 0, 1, 2 ...

All layers slice one table. Tables are computed from constants, so the cache keeps no tensor of the user alive. Sizes
are powers of two, so a growing sequence seldom makes a new table.
"""

import math
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.lru_cache import LRUCache
from regard.torch_internals import current_func_transform, dispatch_modes

KEPT = 128 << 20
"""The most bytes of cached tables, and so the size limit of one table."""

BLOCK = 256
"""Far from 0, where a sequence is decoded token by token, each block of 256 positions has its own table."""


_NARROW = (torch.uint16, torch.uint32, torch.uint64)
"""Types of integers for which torch has few operators."""


def is_traced() -> bool:
    """Whether operations may give other than plain tensors: in a traced graph, `torch.func` or a dispatch mode."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - it is documented
        or current_func_transform() is not None
        or dispatch_modes() > 0
    )


def cached_table(key: Hashable, make: Callable[[Tensor], Tensor], end: int, count: int) -> Tensor | None:
    """`make(positions)` for the positions 0 .. at least `end` - 1, or None where a table is not worth its cost.

    It is not for few positions far from 0, nor for more positions than the cache can keep.

    Args:
        key: of the table in the cache, without tensors.
        make: float64 positions [n], on the CPU, to the rows of the table [n, ...].
        end: one more than the greatest position.
        count: how many positions the call has.
    """
    kept = _tables.get(key)
    if kept is not None and end <= len(kept):
        return kept
    if end > max(4 * count + 1024, 0 if kept is None else 2 * len(kept)):
        return None
    size = 1 << max(end - 1, 63).bit_length()
    with torch.inference_mode(mode=False), torch.no_grad():  # a later call may save the table for its backward pass
        if size * make(torch.zeros(1, dtype=torch.float64, device="cpu")).nbytes > KEPT:
            return None
        made = make(torch.arange(size, dtype=torch.float64, device="cpu"))
    _tables.put(key, made)
    return made


def rows(key: Hashable | None, make: Callable[[Tensor], Tensor], positions: int | Tensor | None, x: Tensor) -> Tensor:
    """The rows of `make` for the positions of x, from a cached table where possible: [..., tokens, *row].

    Without a key, no table is cached: each call makes its rows, differentiable in the tensors that `make` uses.
    """
    device = torch.device("cpu") if x.device.type == "mps" else x.device  # MPS has no float64
    if isinstance(positions, Tensor):
        table = None if key is None else _table_with((key, 0), make, positions)
        return make(positions.to(device)) if table is None else table[positions.to(torch.int64)]
    first, tokens = 0 if positions is None else positions, x.shape[-2]
    if key is not None and not is_traced():
        for start in (0, first - first % BLOCK) if tokens <= BLOCK else (0,):
            shifted = partial(_from, start, make)
            table = None if first < start else cached_table((key, start), shifted, first - start + tokens, tokens)
            if table is not None:
                return table[first - start : first - start + tokens]
    return make(torch.arange(tokens, device=device) + first)


def _from(start: int, make: Callable[[Tensor], Tensor], positions: Tensor) -> Tensor:
    return make(positions + start)


def _table_with(key: Hashable, make: Callable[[Tensor], Tensor], positions: Tensor) -> Tensor | None:
    """A cached table with all these positions. None on accelerators, where finding the greatest would synchronise."""
    if positions.is_floating_point() or positions.device.type != "cpu" or not positions.numel() or is_traced():
        return None
    low, high = (int(bound) for bound in positions.aminmax())
    return None if low < 0 else cached_table(key, make, high + 1, positions.numel())


def check_type(positions: Tensor) -> None:
    """Raise `ProblemError` unless this is a tensor of integers or floats."""
    if not isinstance(positions, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"positions is {positions!r}: expected a tensor of positions.")
    if positions.dtype == torch.bool or positions.is_complex():
        raise ProblemError(f"positions are {positions.dtype}: expected integers or floats.")


def check_positions(positions: object, x: Tensor, rank: int) -> int | Tensor | None:
    """The positions of x's tokens, an int as Python's. x has a batch axis if it has `rank` axes.

    Raises:
        ProblemError: they are no positions, or their sizes do not fit x.
    """
    if positions is None:
        return None
    if not isinstance(positions, Tensor):
        return whole(positions, "positions", "tokens (the first position), a tensor of positions, or None")
    check_type(positions)
    batch, tokens = x.shape[0], x.shape[-2]
    fits = positions.ndim == 1 or (positions.ndim == 2 and x.ndim == rank and positions.shape[0] in (1, batch))
    if not fits or positions.shape[-1] != tokens:
        raise ProblemError(
            f"positions are {list(positions.shape)} and x is {list(x.shape)}: expected [tokens] = [{tokens}] or "
            f"[batch, tokens] = [{batch}, {tokens}]."
        )
    return positions.to(torch.int64) if positions.dtype in _NARROW else positions


def end_of(positions: Tensor) -> int:
    """One more than the greatest position, rounded down; 0 where there are no positions. It reads the tensor.

    Raises:
        ProblemError: a position is NaN or infinite.
    """
    if not positions.numel():
        return 0
    greatest = positions.max().item()
    if not positions.is_floating_point():
        return int(greatest) + 1
    if not math.isfinite(greatest):
        raise ProblemError(f"the greatest of the positions is {greatest}: expected finite positions.")
    return math.floor(greatest) + 1


_tables: LRUCache[Hashable, Tensor] = LRUCache(entries=1024, nbytes=KEPT, size=lambda table: table.nbytes)
