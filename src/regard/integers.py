"""Which values are integers: Python's, numpy's, any type with `__index__`; without torch, where none is needed."""

import operator
from typing import SupportsIndex, cast


def as_integer(value: object) -> int | None:
    """The integer as a Python int; None for anything else, such as a bool or a float.

    >>> import numpy as np
    >>> as_integer(np.int64(3)), as_integer(True), as_integer(3.0)
    (3, None, None)
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":  # whose index is 0 or 1
        return None
    try:
        return operator.index(cast(SupportsIndex, value))
    except (RuntimeError, TypeError, ValueError):  # a tensor that is no single integer, or without data
        return None


def is_integer(value: object, least: int) -> bool:
    """Whether it is an integer of at least that much.

    >>> is_integer(2, 1), is_integer(0, 1), is_integer("2", 1)
    (True, False, False)
    """
    number = as_integer(value)
    return number is not None and number >= least
