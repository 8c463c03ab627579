"""Addresses are reckoned in 64 bits: heads, rows, tokens billions of elements apart, in a file that is mostly hole."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard import Causal, TensorBias, attend
from tests.native.engines import LEAST_AND_BEST, PLAIN

FAR = (1 << 31) + 64
"""Elements; one step of this is beyond 32 bits, two are beyond an unsigned 32 bits."""


@pytest.fixture
def hole(tmp_path: Path) -> Tensor:
    """2^33 bf16 numbers, 16 GiB, of which only those take room that are written."""
    path = tmp_path / "hole"
    path.touch()
    os.truncate(path, 2 << 33)
    return torch.from_file(str(path), shared=True, size=1 << 33, dtype=torch.bfloat16)


def far(hole: Tensor, near: Tensor, strides: tuple[int, ...], first: int) -> Tensor:
    """The same numbers, with these strides (elements), from element `first` of the hole on."""
    placed = hole.view(near.dtype).as_strided(near.shape, strides, first)
    placed.copy_(near)
    return placed


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, pytest.param(PLAIN, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("queries", [3, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_whose_parts_lie_far_apart(engine: str, queries: int, dtype: torch.dtype, hole: Tensor):
    q, k, v = torch.randn(2, 2, queries, 16), torch.randn(2, 2, 70, 16), torch.randn(2, 2, 70, 16)
    q, k, v, bias = (t.to(dtype) for t in (q, k, v, torch.randn(2, 1, queries, 70)))
    token = FAR // 70 + 1  # the last token lies beyond 32 bits
    placed = (
        far(hole, q, (FAR, 4096, 16, 1), 0),
        far(hole, k, (32, 64, token, 1), 1 << 20),
        far(hole, v, (16, FAR, 512, 1), 1 << 19),
    )
    words = {"mask": Causal(), "backend": engine}
    table = TensorBias(far(hole, bias, (FAR - 64, 1, 128, 1), 3 << 20))
    found, near = attend(*placed, bias=table, **words), attend(q, k, v, bias=TensorBias(bias), **words)
    assert torch.equal(found, near)

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(attend(*leaves, **words).square().sum(), leaves)

    for ours, expected in zip(gradients(*placed), gradients(q, k, v), strict=True):
        assert torch.equal(ours, expected)
