"""What torch's matrix products reach on a device: FLOP/s with many rows, bytes/s of weights with one row."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Seconds of a call."""

TRIES = 60


class Sizes(NamedTuple):
    """Sizes of the products.

    Attributes:
        rows, dim: `rows` rows by weights [dim, dim].
        wide, weights: one row by each of `weights` weights [wide, wide], together larger than any cache.
    """

    rows: int
    dim: int
    weights: int
    wide: int


def linear_rates(dtype: torch.dtype, device: str, timer: Timer, sizes: Sizes) -> tuple[float, float]:
    """(FLOP/s of products of many rows, bytes/s of weights in products of one row): the best of some tries.

    Calls are short, and the fastest counts: other load only makes them slower.
    """
    with torch.no_grad():
        x, w = (torch.ones(n, sizes.dim, dtype=dtype, device=device) for n in (sizes.rows, sizes.dim))
        many = min(timer(lambda: F.linear(x, w)) for _ in range(TRIES))
        row = torch.ones(1, sizes.wide, dtype=dtype, device=device)
        weights = [torch.ones(sizes.wide, sizes.wide, dtype=dtype, device=device) for _ in range(sizes.weights)]
        one = min(timer(partial(F.linear, row, each)) for _ in range(TRIES // 10) for each in weights)
    return 2 * sizes.rows * sizes.dim**2 / many, weights[0].nbytes / one
