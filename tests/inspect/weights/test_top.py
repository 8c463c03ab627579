"""The largest weights of each row, in order, with their keys."""

import pytest
import torch

from regard import Causal, Window
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import definition

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.parametrize("k", [1, 11])
def test_the_largest_weights_come_in_descending_order(call, k):
    weights, _ = Weights.of(call).top(k)
    torch.testing.assert_close(weights.double(), definition(call).weights.topk(k).values, atol=1e-6, rtol=0)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("k", [1, 11])
def test_the_keys_beside_them_have_these_weights_and_are_all_different(call, k):
    weights, keys = Weights.of(call).top(k)
    at = definition(call).weights.gather(-1, keys)
    seen = weights > 0
    torch.testing.assert_close(at[seen], weights[seen].double(), atol=1e-6, rtol=0)
    twice = (keys[..., :, None] == keys[..., None, :]) & seen[..., :, None] & seen[..., None, :]
    assert torch.equal(twice.sum((-1, -2)), seen.sum(-1))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_of_equals_the_first_key_comes_first(k):
    uniform = Weights(torch.zeros(1, 6, 29, 3), torch.zeros(1, 6, 29, 3), torch.full((1, 6, 29), 29.0).log())
    assert torch.equal(uniform.top(k)[1], torch.arange(k).expand(1, 6, 29, k))


def test_of_equals_among_others_the_first_key_comes_first():
    k = torch.tensor([0.0, 1, 0, 2, 1, 0, 1, 2, 0, 1])[None, None, :, None]
    weights = Weights(torch.ones(1, 1, 1, 1), k, torch.zeros(1, 1, 1))
    assert weights.top(5)[1].flatten().tolist() == [3, 7, 1, 4, 6]


def test_where_a_row_has_fewer_the_rest_are_0():
    q = torch.randn(1, 2, 29, 3)
    weights, keys = Weights(q, q, torch.zeros(1, 2, 29), Causal() & Window(2)).top(40)
    assert weights.shape == keys.shape == (1, 2, 29, 40)
    assert (weights[..., :1, :1] > 0).all()
    assert torch.equal(weights[..., 2:], torch.zeros(1, 2, 29, 38))
    assert torch.equal(keys[..., 2:], torch.zeros(1, 2, 29, 38, dtype=torch.int64))
