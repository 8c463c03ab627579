"""Keys and values of tokens that tell each token and all before it."""

import itertools
from functools import cache

import torch
from torch import Tensor

HEADS, QK, V = 2, 3, 5


@cache
def _numbers(ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, tokens, dim] that tell a token and all before it."""
    marks = itertools.accumulate(ids, lambda mark, token: (31 * mark + token + 1) % 10007, initial=0)
    mark = torch.tensor([*marks][1:], dtype=torch.float64)[:, None, None]
    wide = torch.sin(mark * torch.arange(1.0, 1 + HEADS * (QK + V)).view(HEADS, QK + V)).float().transpose(0, 1)
    return wide[..., :QK], wide[..., QK:]


def numbers(ids: list[int]) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens with these ids."""
    return _numbers(tuple(ids))
