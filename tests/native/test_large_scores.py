"""Scores far beyond the range of the exponential, at which attention is a hard choice, and must not be nothing."""

import pytest
import torch

from regard import Causal, TensorBias, attend, attend_state
from tests.native.engines import ALL, PLAIN
from tests.oracle import Case, dense, worst


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("engine", [*ALL, PLAIN])
@pytest.mark.parametrize("queries", [1, 67])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_scores_choose_the_best_key(engine: str, queries: int, dtype: torch.dtype):
    q, k, v = (torch.randn(1, 2, n, 8).to(dtype) for n in (queries, 131, 131))
    for scale in (1e6, 1e9, 1e12):
        out = attend(q, k, v, scale=scale, backend=engine)
        assert worst(out, dense(Case(q, k, v, {"scale": scale}))[0]) <= torch.finfo(dtype).eps * float(v.abs().max())


@pytest.mark.parametrize("engine", [*ALL, PLAIN])
@pytest.mark.parametrize("queries", [1, 67])
@pytest.mark.parametrize("low", [-1e17, -1e30, torch.finfo(torch.float32).min])
def test_a_row_of_equally_low_biases_is_the_mean_as_in_torch(engine: str, queries: int, low: float):
    """Masks of other libraries hide padding so; a row of nothing but padding is then uniform."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (queries, 131, 131))
    state = attend_state(q, k, v, bias=TensorBias(torch.full((131,), low)), backend=engine)
    assert torch.allclose(state.out, v.mean(2, keepdim=True).expand_as(state.out), atol=1e-6)
    assert bool(torch.isfinite(state.lse).all())
    mixed = torch.where(torch.arange(131) < 100, 0.0, low)
    expected = attend(q, k[:, :, :100], v[:, :, :100], mask=Causal(), offset=200, backend=engine)
    out = attend(q, k, v, bias=TensorBias(mixed), mask=Causal(), offset=200, backend=engine)
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("engine", [*ALL, PLAIN, "reference"])
@pytest.mark.parametrize("queries", [1, 67])
@pytest.mark.parametrize("words", [{"scale": 1e-46}, {"scale": 1e-310}, {"softcap": 1e39}, {"softcap": 1e300}], ids=str)
def test_a_scale_below_float32_is_0_and_a_cap_beyond_it_none(engine: str, queries: int, words: dict[str, float]):
    q, k, v = (torch.randn(1, 2, n, 8) for n in (queries, 131, 131))
    same = {"scale": 0.0} if "scale" in words else {}
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        found, expected = (attend(*leaves, **each, backend=engine) for each in (words, same))
        rounding = max(1e-5, torch.finfo(dtype).eps)  # scores are scaled before or after a sum, which rounds otherwise
        assert torch.allclose(found, expected, atol=1e-6, rtol=rounding)
        for a, b in zip(*(torch.autograd.grad(out.sum(), leaves) for out in (found, expected)), strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=rounding)
