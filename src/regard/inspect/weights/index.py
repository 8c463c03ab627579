"""Indices of heads, layers and tokens: integers of Python or NumPy, or tensors with one element."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from regard.describe.not_a_spec import received
from regard.errors import ProblemError

Indices = Tensor | Sequence[int]
"""Rows or keys, one for each of several pairs."""


def index_of(value: object) -> int | None:
    """A value as an integer, by `__index__`; None for other values, and for booleans.

    >>> import numpy as np
    >>> index_of(np.int64(3)), index_of(torch.tensor(3)), index_of(1.5), index_of(True)
    (3, 3, None, None)
    """
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(cast(Any, value))
    except TypeError:
        return None


def count_of(name: str, value: object, what: str) -> int:
    """A count as a Python int.

    Args:
        name, what: of the count, for the message.

    Raises:
        ProblemError: it is no integer, or below 1.

    >>> count_of("draws", 7, "the number of draws")
    7
    """
    count = index_of(value)
    if count is None or count < 1:
        raise ProblemError(f"{name} is {received(value)}: expected {what}, 1 or more.")
    return count


def index_pairs(
    rows: Indices, keys: Indices, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows and keys of pairs, int64 [pairs] each, checked against the shape of a call.

    Raises:
        ProblemError: indices of another shape or type, or out of range.
    """
    try:
        i, j = (torch.as_tensor(value, device=device) for value in (rows, keys))
    except (TypeError, ValueError, RuntimeError) as unlike:
        raise ProblemError(f"pairs of no integers ({unlike}): expected a row and a key of each pair.") from None
    whole = not any(index.is_floating_point() or index.dtype == torch.bool for index in (i, j) if index.numel())
    if i.ndim != 1 or j.shape != i.shape or not whole:
        received = " and ".join(f"{list(index.shape)} {index.dtype}" for index in (i, j))
        raise ProblemError(f"pairs of {received}: expected a row and a key of each pair, both int64 [pairs].")
    for index, kind, size in ((i, "row", shape[2]), (j, "key", shape[3])):
        if bool((outside := (index < 0) | (index >= size)).any()):
            raise ProblemError(
                f"pairs has {kind} {int(index[outside][0])}, and the call has {size}: expected 0 to {size - 1}; rows "
                "count from the first query of the call."
            )
    return i.long(), j.long()


def listed(kind: str, rows: object) -> tuple[Any, ...]:
    """The rows, or tokens, of a list, a tuple, an array or a tensor; not checked, but Python's own where integers.

    Raises:
        ProblemError: it lists none, as a single integer.

    >>> listed("row", torch.tensor([3, -1])), listed("row", [0, 1.5])
    ((3, -1), (0, 1.5))
    """
    if not isinstance(rows, Iterable) or isinstance(rows, str) or getattr(rows, "ndim", 1) == 0:
        such = [0, -1] if (number := index_of(rows)) is None else [number]
        raise ProblemError(f"{kind}s is {received(cast(object, rows))}: expected a list, such as {such}.")
    several = cast("Iterable[Any]", rows)
    return tuple(one if (number := index_of(one)) is None else number for one in several)


def counted_rows(kind: str, rows: Sequence[int], of: int) -> tuple[int, ...]:
    """Rows, or tokens, counted from the first; -1 is the last.

    Raises:
        ProblemError: an index is out of range, or no integer.

    >>> counted_rows("row", [0, -1], of=5)
    (0, 4)
    """
    indices = [index_of(row) for row in rows]
    for row, index in zip(rows, indices, strict=True):
        if index is None or not -of <= index < of:
            raise ProblemError(
                f"{kind} {row} does not exist: there are {of}, expected 0 to {of - 1}, or -1 for the last."
            )
    return tuple(index % of for index in indices if index is not None)
