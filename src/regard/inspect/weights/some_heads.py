"""Query heads by their indices, and the key heads of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.weights.index import index_of


def chosen_heads(index: int | Sequence[int] | Tensor, heads: int) -> Tensor:
    """Indices of query heads, int64 [chosen]. Raises `ProblemError` unless all are below `heads`.

    >>> chosen_heads(np.int64(3), 6), chosen_heads(range(2), 6)
    (tensor([3]), tensor([0, 1]))
    """
    value = index.reshape(-1) if isinstance(index, Tensor | np.ndarray) else index
    several: list[Any] = list(value) if isinstance(value, Iterable) else [value]
    chosen = [number for number in map(index_of, several) if number is not None and 0 <= number < heads]
    if not several or len(chosen) < len(several):
        raise ProblemError(f"heads({index!r}) of {heads} heads: expected one or more integers from 0 to {heads - 1}.")
    return torch.tensor(chosen)


def key_heads(chosen: Tensor, group: int) -> Tensor:
    """The key heads of query heads, grouped evenly as a call requires: one for several in a row, or one for each.

    >>> key_heads(torch.tensor([0, 1, 4, 5]), group=2), key_heads(torch.tensor([0, 1, 4]), group=2)
    (tensor([0, 2]), tensor([0, 0, 2]))
    """
    sharing, counts = torch.unique_consecutive(chosen // group, return_counts=True)
    return sharing if bool((counts == counts[0]).all()) else chosen // group
