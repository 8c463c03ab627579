"""Kernel regression: the estimator's own formula, and attention as one of its kernels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, ProblemError, attend
from regard.scores import Cosine, Dot, Epanechnikov, Gaussian, Laplacian, Score, nadaraya_watson


def kernel_of(score: Score, difference: Tensor) -> Tensor:
    """K of a difference, as textbooks write it."""
    match score:
        case Gaussian(h):
            return torch.exp(-difference.square().sum(-1) / (2 * h**2))
        case Laplacian(h):
            return torch.exp(-difference.abs().sum(-1) / h)
        case Epanechnikov(h):
            return (1 - difference.square().sum(-1) / h**2).clamp(min=0)
        case _:
            raise AssertionError(score)


@pytest.mark.parametrize("kernel", [Gaussian(0.8), Laplacian(1.1), Epanechnikov(1.9)], ids=str)
@pytest.mark.parametrize("dim", [1, 3])
def test_the_estimate_is_the_weighed_mean_of_the_textbook(kernel: Score, dim: int):
    x, y, at = (torch.randn(*s, dtype=torch.float64) for s in ((31, dim), (31, 2), (17, dim)))
    weights = kernel_of(kernel, at[:, None] - x[None])
    total = weights.sum(1, keepdim=True)
    expected = torch.where(total > 0, weights @ y / total.clamp(min=1e-300), 0.0)
    assert torch.allclose(nadaraya_watson(at, x, y, kernel=kernel), expected, atol=1e-13)


def test_attention_is_the_estimator_of_the_exponential_kernel_exactly():
    q, k, v = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 3)
    attention = attend(q[:, None], k[:, None], v[:, None])[:, 0]
    assert torch.equal(nadaraya_watson(q, k, v), attention)
    assert torch.equal(nadaraya_watson(q, k, v, kernel=Dot()), attention)
    kernel = torch.exp((q @ k.mT).double() / math.sqrt(8))
    assert torch.allclose(attention.double(), kernel @ v.double() / kernel.sum(-1, keepdim=True), atol=1e-6)


def test_points_on_a_line_by_hand():
    """At 0.5, both neighbours are as near: the mean of 2 and 4. Beyond the support there is nothing."""
    x, y = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 4.0])
    assert nadaraya_watson(torch.tensor([0.5, 9.0]), x, y, kernel=Epanechnikov(0.8)).tolist() == [3.0, 0.0]


@pytest.mark.parametrize("kernel", [Gaussian, Laplacian, Epanechnikov])
def test_a_curve_is_recovered_as_the_bandwidth_shrinks(kernel: type[Gaussian]):
    x = torch.linspace(0, 6, 3001, dtype=torch.float64)
    at = torch.linspace(1, 5, 37, dtype=torch.float64)
    errors = [
        float((nadaraya_watson(at, x, x.sin(), kernel=kernel(h)) - at.sin()).abs().max()) for h in (0.2, 0.1, 0.05)
    ]
    assert errors[2] < 0.003
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)  # the bias falls as h^2
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.15)


def test_a_mask_and_leading_axes_are_carried():
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(3, 5, 4), torch.randn(3, 5, 2)
    out = nadaraya_watson(q, k, v, kernel=Gaussian(1.0), mask=Causal())
    one = nadaraya_watson(q[1, 2, :3], k[2, :3], v[2, :3], kernel=Gaussian(1.0), mask=Causal())
    assert out.shape == (2, 3, 5, 2)
    assert torch.allclose(out[1, 2, :3], one, atol=1e-6)
    assert torch.equal(out[:, :, 0], v[:, 0].expand(2, 3, 2))


@pytest.mark.parametrize("sizes", [(0, 7), (5, 0)])
def test_nothing_is_estimated_from_or_at_nothing(sizes: tuple[int, int]):
    queries, keys = sizes
    out = nadaraya_watson(torch.ones(2, queries, 3), torch.ones(keys, 3), torch.ones(keys, 4), kernel=Gaussian(1.0))
    assert out.shape == (2, queries, 4)
    assert not out.any()


def test_any_score_is_the_logarithm_of_a_kernel():
    q, k, v = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 2)
    cosine = torch.nn.functional.normalize(q) @ torch.nn.functional.normalize(k).T
    assert torch.allclose(nadaraya_watson(q, k, v, kernel=Cosine()), torch.softmax(cosine, 1) @ v, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((5, 4), (7, 4), (6, 2)), "keys are 7 points and values 6"),
        (((5, 4), (7, 3), (7, 2)), "q has 4 dimensions and k 3"),
        (((2, 5, 4), (3, 7, 4), (3, 7, 2)), r"leading axes \[2\], \[3\], \[3\]"),
        (
            ((3,), (7, 3), (7, 2)),
            r"queries are \[3\] and keys \[7, 3\]: a tensor of one axis has points on a line",
        ),
        ((torch.Size(), (7, 4), (7, 2)), r"queries is a tensor \[\]"),
    ],
)
def test_what_makes_no_regression_is_refused(shapes: tuple[tuple[int, ...], ...], message: str):
    with pytest.raises(ProblemError, match=message):
        nadaraya_watson(*(torch.zeros(s) for s in shapes), kernel=Gaussian(1.0))


@pytest.mark.parametrize("at", range(3))
def test_lists_make_no_regression(at: int):
    given: list[Any] = [torch.zeros(3)] * 3
    given[at] = [1.0, 2.0, 3.0]
    with pytest.raises(ProblemError, match=rf"^{('queries', 'keys', 'values')[at]} is list: expected a tensor"):
        nadaraya_watson(*given)
