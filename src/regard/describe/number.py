"""Numbers in descriptions as floats that torch takes: those of NumPy, and ints beyond 64 bits."""

import math

import numpy as np

from regard.describe.whole_number import MOST


def as_number(value: object) -> object:
    """A number of NumPy, or an int beyond 64 bits, as a float (inf beyond all floats); anything else unchanged.

    >>> as_number(np.float32(0.5)), as_number(np.True_), as_number(10**30), as_number(-(10**400)), as_number(4)
    (0.5, np.True_, 1e+30, -inf, 4)
    """
    if isinstance(value, (np.floating, np.integer)):
        return float(value)
    if not isinstance(value, int) or -MOST <= value <= MOST:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def number_field(owner: object, name: str) -> object:
    """Replace the field of a frozen dataclass by `as_number` of it, and return that."""
    value = as_number(getattr(owner, name))
    object.__setattr__(owner, name, value)
    return value
