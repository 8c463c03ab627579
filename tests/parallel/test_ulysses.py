"""Heads shared between ranks, and both ways on a mesh, equal one process for every count of heads."""

import pytest
import torch

from regard import Alibi, Causal, T5Bias, TensorBias, TensorMask, Window
from regard.parallel import Layout
from tests.parallel import cases
from tests.parallel.comparing import N, check, layouts, some
from tests.parallel.workers import Workers


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", layouts(4))
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (6, 3), (7, 1), (6, 2), (3, 3), (10, 5)])
def test_heads_are_shared_between_four_ranks(four: Workers, name: str, heads: int, kv_heads: int):
    torch.manual_seed(0)
    more = {"mask": Causal() & Window(30), "bias": T5Bias(torch.randn(32, heads)), "sink": torch.randn(heads)}
    check(four, layouts(4)[name], some(2, heads, kv_heads), cases.ulysses, **more)


@pytest.mark.parametrize("name", layouts(2))
def test_masks_and_biases_of_heads(pair: Workers, name: str):
    torch.manual_seed(0)
    more = {"mask": TensorMask(torch.rand(2, 4, N, N) < 0.4), "bias": TensorBias(torch.randn(4, N, N)) + Alibi(4)}
    check(pair, layouts(2)[name], some(), cases.ulysses, **more)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (4,)])
@pytest.mark.parametrize("name", layouts(4))
def test_a_ring_of_ranks_that_share_heads(four: Workers, name: str, shape: tuple[int, ...]):
    torch.manual_seed(0)
    more = {"mask": Window(9, 7), "bias": Alibi(4), "sink": torch.randn(4), "softcap": 5.0}
    check(four, layouts(4)[name], some(), cases.on_mesh, shape=shape, **more)


def test_bits_are_the_same_from_run_to_run(four: Workers):
    more = {"mask": Causal(), "layout": Layout.zigzag(N, 4), "shape": (2, 2)}
    first, second = (four.run(cases.on_mesh, **some(), **more) for _ in range(2))
    for (out, grads), (again, grads_again) in zip(first, second, strict=True):
        assert torch.equal(out, again)
        assert all(map(torch.equal, grads, grads_again))
