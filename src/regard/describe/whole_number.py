"""Whole numbers as the fields of descriptions take them: Python's, numpy's, whatever can index; no bool, no float."""

from typing import SupportsIndex, cast

import torch

from regard.errors import ProblemError

MOST = (1 << 63) - 1
"""Positions are int64."""


def whole(given: object, what: str, unit: str = "tokens", least: int | None = None) -> int:
    """The whole number as a Python int; a symbolic one, of a traced graph, stays symbolic.

    Args:
        what: how the message names it.
        unit: what is counted.
        least: the smallest that makes sense.

    Raises:
        ProblemError: it is no whole number, or does not fit 64 bits.

    >>> import numpy as np
    >>> whole(np.int64(3), "Window(left)")
    3
    """
    if isinstance(given, bool) or not isinstance(given, torch.SymInt | SupportsIndex):
        raise ProblemError(f"{what} is {given!r}: expected a whole number of {unit}.")
    if torch.compiler.is_compiling() or isinstance(given, torch.SymInt):
        return cast(int, given)
    try:
        found = given.__index__()
    except (TypeError, ValueError):  # a tensor that is no integer, or more than one
        raise ProblemError(f"{what} is {given!r}: expected a whole number of {unit}.") from None
    if abs(found) > MOST:
        raise ProblemError(f"{what} is {found}: expected at most {MOST:,} {unit}, as positions are 64-bit integers.")
    if least is not None and found < least:
        raise ProblemError(f"{what} is {found}: expected at least {least} {unit}.")
    return found
