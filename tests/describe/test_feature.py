"""Feature maps: their definitions, and how near those that mean softmax come to it, as the papers say."""

import math
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import ProblemError
from regard.describe.feature import Elu1, Favor, Feature, Relu, Taylor
from regard.describe.serialized import deserialize
from regard.linear import linear_attend


def _pair(norm: float, tokens: int = 23, dim: int = 16) -> tuple[Tensor, Tensor]:
    """Queries and keys of that length once the root of the scale is in them."""
    q, k = torch.randn(2, tokens, dim, dtype=torch.float64)
    return tuple(norm * dim**0.25 * t / t.norm(dim=1, keepdim=True) for t in (q, k))  # pyright: ignore[reportReturnType]


def _exact(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(q @ k.T / math.sqrt(q.shape[1]))


def _kernel(features: Feature, q: Tensor, k: Tensor) -> Tensor:
    return features.map(q) @ features.map(k).T


def test_elu_plus_one_is_exact_where_it_is_near_zero():
    x = torch.tensor([-30.0, -1.0, -1e-4, 0.0, 3.0])
    right = [math.exp(-30), math.exp(-1), math.exp(-1e-4), 1.0, 4.0]
    assert Elu1().map(x).tolist() == pytest.approx(right, rel=1e-6)
    assert torch.autograd.gradcheck(Elu1().map, torch.randn(7, dtype=torch.float64, requires_grad=True))
    zero = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(Elu1().map(zero), zero)[0].item() == 1


def test_taylor_features_multiply_to_the_polynomial():
    q, k = torch.randn(2, 7, 5, dtype=torch.float64)
    s = q @ k.T / math.sqrt(5)
    torch.testing.assert_close(_kernel(Taylor(), q, k), 1 + s + s**2 / 2)
    assert Taylor().map(q).shape[-1] == Taylor().size(5) == 21
    s = 0.3 * q @ k.T
    torch.testing.assert_close(Taylor().map(q, 0.3) @ Taylor().map(k, 0.3).T, 1 + s + s**2 / 2)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_favor_is_the_formula_and_split_is_the_same_in_two_parts(orthogonal: bool):
    favor = Favor(5, features=7, orthogonal=orthogonal)
    x = torch.randn(3, 11, 5, dtype=torch.float64)
    scaled = x / 5**0.25
    right = torch.exp(scaled @ favor.vectors().T - scaled.square().sum(-1, keepdim=True) / 2) / math.sqrt(7)
    torch.testing.assert_close(favor.map(x), right)
    share, top = favor.split(x)
    torch.testing.assert_close(share * top.exp()[..., None], right)
    assert share.amax(-1).eq(1).all()
    assert share.amin() >= math.exp(-40.001)
    far = favor.split(1e18 * x.float())
    assert all(part.isfinite().all() for part in far)


def test_favors_directions_are_orthogonal_in_groups_and_as_long_as_gaussian_ones():
    vectors = Favor(13, features=13 * 400).vectors()
    directions = (vectors / vectors.norm(dim=1, keepdim=True)).view(400, 13, 13)
    torch.testing.assert_close(directions @ directions.mT, torch.eye(13, dtype=torch.float64).expand(400, 13, 13))
    squares = vectors.square().sum(1)  # chi-squared with 13 degrees of freedom: mean 13, variance 26
    assert abs(squares.mean() - 13) < 4 * math.sqrt(26 / len(squares))
    assert squares.var().item() == pytest.approx(26, rel=0.1)
    means = vectors.mean(0)  # no direction is preferred, as it would be without the signs of the triangle
    assert means.abs().max() < 4 / math.sqrt(len(vectors))
    firsts = directions[:, 0, 0]
    assert abs(firsts.mean()) < 4 / math.sqrt(13 * len(firsts))


def _estimates(favor: Favor, q: Tensor, k: Tensor, draws: int) -> Tensor:
    """phi(q) . phi(k) / exp(scale q . k) of each pair, for each draw."""
    return torch.stack([_kernel(favor.redraw(seed), q, k) for seed in range(draws)]) / _exact(q, k)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_favor_is_right_on_the_mean(orthogonal: bool):
    q, k = _pair(0.8, tokens=5)
    found = _estimates(Favor(16, features=64, orthogonal=orthogonal), q, k, draws=600)
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - 1).abs() < 4 * error).all()


def test_favors_variance_is_what_lemma_2_says():
    q, k = _pair(0.7, tokens=11)
    found = _estimates(Favor(16, features=128, orthogonal=False), q, k, draws=600)
    expected = Favor(16, features=128).variance(q, k)
    assert ((found - 1).square().mean(0) / expected).mean().item() == pytest.approx(1, rel=0.05)
    x, y = q[0] / 2, k[0] / 2  # by hand: 16 ** 0.25 is 2
    assert expected[0, 0].item() == pytest.approx((math.exp((x + y).square().sum()) - 1) / 128)


@pytest.mark.exhaustive
def test_favors_variance_falls_as_one_over_the_features():
    q, k = _pair(0.8, tokens=7)
    sizes = [16, 32, 64, 128, 256, 512, 1024]
    for orthogonal in (True, False):
        spread = [
            (_estimates(Favor(16, m, orthogonal=orthogonal), q, k, draws=200) - 1).square().mean().item() for m in sizes
        ]
        x, y = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in (sizes, spread))
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        assert slope.item() == pytest.approx(-1, abs=0.1)


def test_orthogonal_vectors_err_less_than_independent_ones():
    q, k = _pair(0.8, tokens=11)
    for features in (16, 64):
        apart, free = (
            (_estimates(Favor(16, features, orthogonal=orthogonal), q, k, draws=300) - 1).square().mean()
            for orthogonal in (True, False)
        )
        assert apart < 0.95 * free


@pytest.mark.parametrize("word", [Favor(16, features=128), Taylor()])
def test_the_error_grows_with_the_norms(word: Favor | Taylor):
    errors = [word.error(*_pair(norm, tokens=101)) for norm in (0.25, 0.5, 1.0, 1.5)]
    assert all(a.kernel < b.kernel and a.weights < b.weights for a, b in pairwise(errors))
    assert all(0 <= error.weights <= 1 for error in errors)


@pytest.mark.parametrize("word", [Favor(16, features=32), Taylor()])
def test_the_error_is_that_of_the_weights(word: Favor | Taylor):
    q, k = _pair(1.0)
    kernel, exact = _kernel(word, q, k), _exact(q, k)
    found = word.error(q, k)
    assert found.kernel == pytest.approx((kernel / exact - 1).square().mean().sqrt().item())
    apart = kernel / kernel.sum(1, keepdim=True) - exact / exact.sum(1, keepdim=True)
    assert found.weights == pytest.approx(apart.abs().sum(1).mean().item() / 2)


def test_equal_words_are_equal_maps():
    x = torch.randn(3, 8)
    one, two = Favor(8, features=16, seed=3), Favor(8, features=16).redraw(3)
    assert one == two
    assert torch.equal(one.map(x), two.map(x))
    assert one != Favor(8, features=16)
    assert not torch.equal(one.map(x), Favor(8, features=16).map(x))
    tensors: list[Tensor] = []
    numbers: list[int] = []
    assert deserialize(one.serialize(tensors, numbers), tensors, numbers) == one


@pytest.mark.parametrize("seed", [-1, None, "x", True, 1.5])
def test_the_seed_of_another_draw_is_checked_as_that_of_the_first(seed: Any):
    with pytest.raises(ProblemError) as first:
        Favor(8, features=16, seed=seed)
    with pytest.raises(ProblemError) as other:
        Favor(8, features=16).redraw(seed)
    assert str(other.value) == str(first.value)
    assert Favor(8, features=16).redraw(cast(int, np.int64(3))) == Favor(8, features=16, seed=3)


def test_half_precision_is_mapped_in_single():
    x = torch.randn(3, 8)
    for word in (Elu1(), Relu(), Taylor(), Favor(8, features=16)):
        assert word.map(x.bfloat16()).dtype == torch.float32
        assert torch.equal(word.map(x.half()), word.map(x.half().float()))
        assert word.map(x.double()).dtype == torch.float64


WRONG = {
    "no features": (lambda: Favor(8, features=0), "Favor(features=0): expected at least 1 features"),
    "half a dim": (lambda: Favor(8.5), "Favor(dim=8.5)"),
    "another size": (lambda: Favor(8).map(torch.zeros(3, 7)), "maps vectors of 8 elements, and these have 7"),
    "a scale below 0": (lambda: Favor(8).map(torch.zeros(3, 8), scale=-1.0), "expected a finite number above 0"),
    "a scale for elu": (lambda: Elu1().map(torch.zeros(3), scale=1.0), "no function of q . k"),
    "a negative epsilon": (lambda: Relu(epsilon=-1e-3), "at least 0"),
    "sizes that differ": (lambda: Taylor().error(torch.zeros(3, 4), torch.zeros(3, 5)), "[..., keys, dim]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused(name: str):
    make, message = WRONG[name]
    with pytest.raises(ProblemError) as caught:
        make()
    assert message in str(caught.value)


def test_the_error_of_many_pairs_needs_no_memory_for_all(monkeypatch: pytest.MonkeyPatch):
    q, k = torch.randn(1, 2, 301, 8) / 3, torch.randn(1, 2, 401, 8) / 3
    whole = Favor(8, features=32).error(q, k)
    monkeypatch.setattr("regard.describe.feature.PAIRS", 5000)
    parts = Favor(8, features=32).error(q, k)
    assert parts.kernel == pytest.approx(whole.kernel, rel=1e-12)
    assert parts.weights == pytest.approx(whole.weights, rel=1e-12)


def test_an_error_that_makes_no_sense_is_refused():
    with pytest.raises(ProblemError, match="Favor and Taylor have an error"):
        Elu1().error(torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(ProblemError, match="repeat shared key heads"):
        Favor(4).error(torch.randn(1, 8, 3, 4), torch.randn(1, 2, 3, 4))


def test_float64_keeps_the_formula_at_large_norms():
    q, k, v = (15 * torch.randn(1, 1, 29, 16, dtype=torch.float64) for _ in range(3))
    favor = Favor(16, features=64)
    weights = torch.softmax(favor.log_kernel(q, k).masked_fill(torch.ones(29, 29).triu(1).bool(), -torch.inf), -1)
    along = (q * 16**-0.25) @ favor.vectors().T, (k * 16**-0.25) @ favor.vectors().T
    exact = (
        torch.logsumexp(along[0][..., :, None, :] + along[1][..., None, :, :], -1)
        - (k * 16**-0.25).square().sum(-1)[..., None, :] / 2
    )
    exact = torch.softmax(exact.masked_fill(torch.ones(29, 29).triu(1).bool(), -torch.inf), -1)
    torch.testing.assert_close(linear_attend(q, k, v, favor).out, exact @ v)
    torch.testing.assert_close(weights, exact)
