"""Results in a few lines: what a session shows of values that hold tensors, or hundreds of heads.

Adversary(heads=((0, 0), ... 270 in all), divergence=tensor([0.6800]), weights={0: ..., 30 in all})
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np
from torch import Tensor

T = TypeVar("T")

FEW = 8
"""Elements of a tensor, or members of a collection, that are shown."""

LONGEST = 300
"""Characters of a text, or of a value of another type, that are shown."""


def brief(cls: type[T]) -> type[T]:
    """A decorator of dataclasses: their `repr` in a few lines, whatever they hold.

    >>> import torch
    >>> from dataclasses import dataclass
    >>> @brief
    ... @dataclass
    ... class Found:
    ...     heads: tuple[tuple[int, int], ...]
    ...     weights: Tensor
    ...     median: Tensor
    >>> Found(tuple((0, head) for head in range(97)), torch.zeros(1, 97, 5, 5), torch.tensor([0.25]))
    Found(heads=((0, 0), (0, 1), (0, 2), ... 97 in all), weights=float32 [1, 97, 5, 5], median=tensor([0.2500]))
    """
    cls.__repr__ = cast(Any, _fields)
    return cls


def shown(value: Any) -> str:
    """A value as `brief` shows it: a large tensor by its type and shape, a long collection by its first members.

    >>> import torch
    >>> shown({layer: torch.zeros(3, 5) for layer in range(30)})
    '{0: float32 [3, 5], 1: float32 [3, 5], 2: float32 [3, 5], ... 30 in all}'
    """
    if isinstance(value, Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value)
        return "{" + _members((f"{shown(key)}: {shown(of)}" for key, of in pairs.items()), len(pairs)) + "}"
    if type(value) in (tuple, list):  # no named tuple, which says what its members are
        left, right = "()" if isinstance(value, tuple) else "[]"
        members: Any = value
        alone = "," if isinstance(value, tuple) and len(members) == 1 else ""
        return left + _members(map(shown, members), len(members)) + alone + right
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _fields(value: Any) -> str:
    shown_fields = (f"{field.name}={shown(getattr(value, field.name))}" for field in fields(value) if field.repr)
    return f"{type(value).__name__}({', '.join(shown_fields)})"


def _members(texts: Iterable[str], count: int) -> str:
    return ", ".join(texts) if count <= FEW else ", ".join([*islice(texts, 3), f"... {count:,} in all"])


def _array(value: Any) -> str:
    elements = value.numel() if isinstance(value, Tensor) else value.size
    if elements <= FEW:
        return repr(value)
    device = f" on {value.device}" if isinstance(value, Tensor) and value.device.type != "cpu" else ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"
