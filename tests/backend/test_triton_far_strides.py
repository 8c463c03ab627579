"""The GPU kernels compute addresses in 64 bits: tokens or heads 2^30 elements apart, in a file that is mostly hole."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard import Causal, T5Bias, attend
from regard.backend import triton
from regard.inspect.sweep import by_triton
from regard.inspect.weights.lazy import Weights
from tests.conformance import differentiated
from tests.inspect.dense import called
from tests.oracle import Case

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

FAR = (1 << 30) + 64
"""Elements; two steps of this are beyond 32 bits."""

Place = Callable[[Tensor, int], Tensor]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Copies a tensor to the middle of 2^32 elements and more, 16 GiB, where one of its axes has the stride `FAR`."""
    size, path = 4 * FAR + (1 << 20), tmp_path / "hole"
    path.touch()
    os.truncate(path, 4 * size)
    hole = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32)

    def placed(near: Tensor, axis: int) -> Tensor:
        strides = [FAR if a == axis else stride for a, stride in enumerate(near.contiguous().stride())]
        return hole.as_strided(near.shape, strides, 2 * FAR).copy_(near)

    return placed


def test_queries_that_lie_far_apart_are_decoded(place: Place):
    q, k, v = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 37, 16), torch.randn(1, 2, 37, 16)
    expected = attend(q, k, v, mask=Causal(), backend="triton")
    assert torch.equal(attend(place(q, 2), k, v, mask=Causal(), backend="triton"), expected)


@pytest.mark.parametrize("lowest", [0.0, -1e9], ids=["near 0", "far rows"])
def test_biases_by_distance_of_heads_that_lie_far_apart_are_read(
    lowest: float, place: Place, monkeypatch: pytest.MonkeyPatch
):
    bias = T5Bias(torch.randn(32, 3) + lowest)
    case = Case(*torch.randn(3, 1, 3, 37, 16), {"mask": Causal(), "bias": bias})
    weights = Weights.of(called(case.q, case.k, **case.words))
    expected = [*differentiated(case, "triton")[:4], by_triton.swept(weights, None, None).columns]
    near, of_sweep = triton.vectors, by_triton.kept_by_distance
    monkeypatch.setattr(triton, "vectors", lambda *given: place(near(*given).detach(), 0))
    monkeypatch.setattr(by_triton, "kept_by_distance", lambda *given: place(of_sweep(*given), 0))
    found = [*differentiated(case, "triton")[:4], by_triton.swept(weights, None, None).columns]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
