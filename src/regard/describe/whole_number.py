"""The check of integers in descriptions: Python's, numpy's, any type with `__index__`; no bool, no float."""

from typing import cast

import torch

from regard.errors import ProblemError
from regard.integers import as_integer

MOST = (1 << 63) - 1
"""Positions are int64."""


def whole(value: object, what: str, unit: str = "tokens", least: int | None = None) -> int:
    """The integer as a Python int; a symbolic one, of a traced graph, stays symbolic.

    Args:
        what: its name in the message.
        unit: the unit of the count, for the message.
        least: lower limit; None: no limit.

    Raises:
        ProblemError: not an integer, less than `least`, or beyond 64 bits.

    >>> import numpy as np
    >>> whole(np.int64(3), "Window(left)")
    3
    """
    return _whole(value, what + " is {!r}", unit, least)


def whole_field(owner: object, name: str, unit: str = "tokens", least: int | None = None) -> None:
    """Replace the field of a frozen dataclass by `whole` of it.

    Raises:
        ProblemError: not an integer, less than `least`, or beyond 64 bits.
    """
    head = f"{type(owner).__name__}({name}={{!r}})"
    object.__setattr__(owner, name, _whole(getattr(owner, name), head, unit, least))


def _whole(value: object, head: str, unit: str, least: int | None) -> int:
    """`head` names the field and has `{!r}` for the argument."""
    if isinstance(value, bool) or not (isinstance(value, int | torch.SymInt) or hasattr(value, "__index__")):
        raise ProblemError(f"{head.format(value)}: expected a whole number of {unit}.")
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):
        return cast(int, value)
    found = as_integer(value)
    if found is None:
        raise ProblemError(f"{head.format(value)}: expected a whole number of {unit}.")
    if abs(found) > MOST:
        raise ProblemError(f"{head.format(found)}: expected at most {MOST:,} {unit}, as positions are 64-bit integers.")
    if least is not None and found < least:
        raise ProblemError(f"{head.format(found)}: expected at least {least} {unit}.")
    return found
