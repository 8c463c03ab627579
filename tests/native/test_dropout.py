"""Dropout: drawn from torch's generator in each call; the same weights forward and backward, and on every kernel."""

import pytest
import torch
from torch import Tensor

from regard import Causal, attend
from tests.native.engines import LEAST_AND_BEST, PLAIN


def weights(engine: str, dropout: float, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The weights after dropout, [2, 3, 70, 130], as the outputs for values that are unit vectors."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, n, 8, generator=g, dtype=torch.float64).to(dtype) for n in (70, 130))
    torch.manual_seed(seed)
    return attend(q, k, torch.eye(130, dtype=dtype).expand(2, 3, 130, 130), dropout=dropout, backend=engine)


def by_hand(seed: int, head: int, i: int, j: int) -> int:
    """The 32 bits that decide about a pair, as the description of the interface says."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    row = mix(mix(seed & 0xFFFFFFFF) ^ ((seed >> 32) + 0x9E3779B9 * head & 0xFFFFFFFF))
    row = mix(row + 0x85EBCA6B * i & 0xFFFFFFFF)
    return mix(row ^ mix(0xC2B2AE35 * j + 0x27D4EB2F & 0xFFFFFFFF))


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_the_pairs_dropped_are_those_of_the_hash(engine: str):
    torch.manual_seed(7)
    seed = int(torch.randint(1 << 62, ()))
    kept = weights(engine, 0.4, seed=7) > 0
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 69, 129), (0, 1, 64, 64), (1, 0, 5, 127), (0, 2, 33, 2), (1, 1, 68, 90)]:
        assert bool(kept[b, h, i, j]) == (by_hand(seed, b * 3 + h, i, j) >= round(0.4 * 2**32))


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_what_is_kept_is_scaled_and_what_is_dropped_is_the_share_asked_for(engine: str):
    whole, dropped = weights(engine, 0.0, seed=1), weights(engine, 0.25, seed=1)
    kept = dropped > 0
    assert torch.allclose(dropped[kept], whole[kept] / 0.75, rtol=1e-10)
    assert abs(float(kept.double().mean()) - 0.75) < 0.01  # 54,600 pairs: five standard deviations
    for axis in range(4):  # no batch row, head, query or key is favoured
        others = [a for a in range(4) if a != axis]
        share = kept.double().mean(dim=others)
        pairs = kept.numel() / kept.shape[axis]
        assert float((share - 0.75).abs().max()) < 5 * (0.75 * 0.25 / pairs) ** 0.5


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_kernel_drops_the_same(engine: str, dtype: torch.dtype):
    assert torch.equal(weights(engine, 0.5, 3, dtype) > 0, weights(PLAIN, 0.5, 3, dtype) > 0)
    assert not torch.equal(weights(engine, 0.5, 3, dtype) > 0, weights(engine, 0.5, 4, dtype) > 0)


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(engine: str):
    q, k = torch.randn(1, 2, 70, 8, dtype=torch.float64), torch.randn(1, 1, 130, 8, dtype=torch.float64)
    v = torch.randn(1, 1, 130, 5, dtype=torch.float64, requires_grad=True)
    out = attend(q, k, v, dropout=0.5, mask=Causal(), backend=engine)
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert torch.allclose((grad * v).sum(), out.sum())  # linear in v: only the same dropped weights give this


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_gradients_under_dropout_are_those_of_what_was_drawn(engine: str):
    leaves = [torch.randn(1, h, n, 4, dtype=torch.float64, requires_grad=True) for h, n in ((2, 5), (1, 7), (1, 7))]
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attend(q, k, v, sink=logits, dropout=0.4, backend=engine)

    assert torch.autograd.gradcheck(call, (*leaves, sink))


def test_almost_all_can_be_dropped():
    out = weights(PLAIN, 0.999999, seed=2)
    assert float(out.count_nonzero()) / out.numel() < 1e-3
