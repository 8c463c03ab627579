"""What the tests of measures share: means over rows, uniform attention, heads made by hand."""

import torch
from torch import Tensor

from regard.attention import Call
from tests.inspect.dense import Dense64

SHARP = 40.0
"""A score so far above the others, at 0, that it takes all of the mass: they are left 4e-18."""


def mean_over(rows: Tensor, values: Tensor) -> Tensor:
    """The mean over rows that count; [batch, heads]."""
    rows = rows.expand(values.shape)
    return torch.where(rows, values, 0.0).sum(-1) / rows.sum(-1)


def equal(found: Tensor, exact: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), exact.double(), atol=atol, rtol=0, equal_nan=True)


def uniform_of(exact: Dense64) -> Tensor:
    """Uniform attention over the same mask."""
    return exact.keep.double() / exact.keep.sum(-1, keepdim=True).clamp(min=1)


def positions(call: Call) -> Tensor:
    return call.offset + torch.arange(call.q.shape[2])


def looking(at: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [heads, tokens, tokens] of heads whose row i looks at token `at[head, i]`, and at nothing else."""
    tokens = at.shape[-1]
    return SHARP * torch.nn.functional.one_hot(at, tokens).double(), torch.eye(tokens).double().expand(len(at), -1, -1)
