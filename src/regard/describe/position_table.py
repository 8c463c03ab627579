"""The positions of a call, and tables of what belongs to positions 0, 1, 2 ..., kept from call to call.

So a layer takes a slice of what another has made. Tables are made of constant words alone, so they hold no tensor of
the user's. They grow in powers of two: ever longer calls make new ones ever more rarely.
"""

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from regard.describe.recent import Recent
from regard.errors import ProblemError
from regard.torch_internals import current_func_transform, dispatch_modes

KEPT = 128 << 20
"""Bytes of tables that are kept, and so the largest one that is made."""

BLOCK = 256
"""Positions after which, far from 0, a table of its own begins: there a sequence is decoded token by token."""


def is_traced() -> bool:
    """Whether torch now makes something other than plain tensors: in a traced graph, `torch.func`, a dispatch mode."""
    return torch.compiler.is_compiling() or current_func_transform() is not None or dispatch_modes() > 0


def kept_table(key: Hashable, make: Callable[[Tensor], Tensor], end: int, count: int) -> Tensor | None:
    """`make(positions)` for the positions 0 .. at least `end` - 1, or None where making it would not pay.

    It does not pay where few positions are wanted far from 0, or for more positions than can be kept.

    Args:
        key: what the table is known by; it must not hold a tensor.
        make: float64 positions [n], on the CPU, to the rows of the table [n, ...].
        end: one more than the greatest position wanted.
        count: how many positions are wanted.
    """
    kept = _tables.get(key)
    if kept is not None and end <= len(kept):
        return kept
    if end > max(4 * count + 1024, 0 if kept is None else 2 * len(kept)):
        return None
    size = 1 << max(end - 1, 63).bit_length()
    with torch.inference_mode(mode=False), torch.no_grad():  # it may be saved for a backward pass later
        if size * make(torch.zeros(1, dtype=torch.float64, device="cpu")).nbytes > KEPT:
            return None
        made = make(torch.arange(size, dtype=torch.float64, device="cpu"))
    _tables.put(key, made)
    return made


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The type of the tables for activations of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows(key: Hashable, make: Callable[[Tensor], Tensor], positions: int | Tensor | None, x: Tensor) -> Tensor:
    """The rows that `make` gives for the positions of x, from a kept table where there is one: [..., tokens, *row]."""
    device = torch.device("cpu") if x.device.type == "mps" else x.device  # which has no float64
    if isinstance(positions, Tensor):
        table = _table_reaching((key, 0), make, positions)
        return make(positions.to(device)) if table is None else table[positions.to(torch.int64)]
    first, tokens = 0 if positions is None else positions, x.shape[-2]
    if not is_traced():
        for start in (0, first - first % BLOCK) if tokens <= BLOCK else (0,):
            shifted = partial(_from, start, make)
            table = None if first < start else kept_table((key, start), shifted, first - start + tokens, tokens)
            if table is not None:
                return table[first - start : first - start + tokens]
    return make(torch.arange(tokens, device=device) + first)


def _from(start: int, make: Callable[[Tensor], Tensor], positions: Tensor) -> Tensor:
    return make(positions + start)


def _table_reaching(key: Hashable, make: Callable[[Tensor], Tensor], positions: Tensor) -> Tensor | None:
    """A kept table that has all these positions. On accelerators None: finding the greatest would wait for them."""
    if positions.is_floating_point() or positions.device.type != "cpu" or not positions.numel() or is_traced():
        return None
    low, high = (int(bound) for bound in positions.aminmax())
    return None if low < 0 else kept_table(key, make, high + 1, positions.numel())


def check_type(positions: Tensor) -> None:
    """Raise `ProblemError` unless this is a tensor of numbers."""
    if not isinstance(positions, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"positions is {positions!r}: expected a tensor of positions.")
    if positions.dtype == torch.bool or positions.is_complex():
        raise ProblemError(f"positions are {positions.dtype}: expected whole numbers, or floats.")


def check_positions(positions: object, x: Tensor, rank: int) -> None:
    """Raise `ProblemError` unless these are positions of x's tokens; it has a batch axis if it has `rank` axes."""
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        if isinstance(positions, bool) or not isinstance(positions, int | torch.SymInt):
            raise ProblemError(f"positions is {positions!r}: expected an int, a tensor of positions, or None.")
        return
    check_type(positions)
    batch, tokens = x.shape[0], x.shape[-2]
    fits = positions.ndim == 1 or (positions.ndim == 2 and x.ndim == rank and positions.shape[0] in (1, batch))
    if not fits or positions.shape[-1] != tokens:
        raise ProblemError(
            f"positions are {list(positions.shape)} and x is {list(x.shape)}: expected [tokens] = [{tokens}] or "
            f"[batch, tokens] = [{batch}, {tokens}]."
        )


_tables: Recent[Hashable, Tensor] = Recent(entries=1024, nbytes=KEPT, size=lambda table: table.nbytes)
