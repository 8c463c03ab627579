"""Student's t: how far the mean of a few values may be from what they are values of.

With 4 values the standard error itself is a guess. The percentile bootstrap does not count that: of 4 normal values its
95 % interval covers the mean in 79 of 100 samples, Student's in 95.
"""

import math
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def quantile(share: float, degrees: int) -> float:
    """The value below which Student's t stays in this share of all samples; degrees of freedom: values less 1.

    By substituting t = sqrt(degrees) tan(x): the density of x is proportional to cos(x)^(degrees - 1).

    >>> round(quantile(0.975, 3), 3), round(quantile(0.975, 31), 3), round(quantile(0.5, 7), 3)
    (3.182, 2.04, 0.0)
    """
    x = np.linspace(-math.pi / 2, math.pi / 2, 20_001)
    density = np.maximum(np.cos(x), 0.0) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp(share, below / below[-1], x)))
