"""Pictures of weights: cells of means and of maxima, of any size."""

import pytest
import torch

from regard import Causal
from regard.inspect.weights import lazy as module
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import called, definition


def cells(dense, size, gather):
    """Each cell of a picture of at most size cells a side, gathered from the weights [batch, heads, rows, columns]."""
    cell = -(-max(dense.shape[2:]) // size)
    rows, columns = (torch.arange(n).split(cell) for n in dense.shape[2:])
    return torch.stack([torch.stack([gather(dense[:, :, r][..., c]) for c in columns], -1) for r in rows], -2)


@pytest.mark.exhaustive(per="test")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [1, 8, 100])
def test_a_picture_of_means_is_the_mean_of_each_cell(call, size):
    means = cells(definition(call).weights, size, lambda cell: cell.mean((2, 3)))
    torch.testing.assert_close(Weights.of(call).pooled(size).double(), means, atol=1e-6, rtol=0)


@pytest.mark.exhaustive(per="test")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [1, 8, 100])
def test_a_picture_of_maxima_is_the_largest_of_each_cell(call, size):
    largest = cells(definition(call).weights, size, lambda cell: cell.amax((2, 3)))
    torch.testing.assert_close(Weights.of(call).pooled(size, by="max").double(), largest, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("fine", "coarse"), [(24, 12), (24, 4), (12, 2)])
def test_means_of_means_are_means_and_maxima_of_maxima_are_maxima(fine, coarse):
    weights = Weights.of(called(torch.randn(1, 3, 24, 5), torch.randn(1, 3, 24, 5), mask=Causal()))
    means = cells(weights.pooled(fine), coarse, lambda cell: cell.mean((2, 3)))
    largest = cells(weights.pooled(fine, by="max"), coarse, lambda cell: cell.amax((2, 3)))
    torch.testing.assert_close(weights.pooled(coarse), means, atol=1e-6, rtol=0)
    assert torch.equal(weights.pooled(coarse, by="max"), largest)


def test_the_mean_of_a_cell_of_many_tiles_keeps_its_digits(monkeypatch):
    monkeypatch.setattr(module, "TILE", 2**12)
    q = k = torch.zeros(1, 1, 1501, 2)
    picture = Weights(q, k, torch.full((1, 1, 1501), 1501.0).log()).pooled(1)
    assert picture.item() == pytest.approx(1 / 1501, rel=3e-7)
