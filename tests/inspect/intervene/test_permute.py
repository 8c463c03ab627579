"""Shuffled weights are the same weights, on other tokens that may be seen."""

import pytest
import torch

from regard import Causal, attend
from regard.errors import ProblemError
from regard.inspect.intervene.permute import permuted, shuffle_weights
from regard.inspect.intervene.rows import observe_rows
from tests.inspect.intervene.models import Hiding, Stack, decoder, stack_input, texts


def test_rows_keep_their_weights_and_what_they_may_see():
    model, x = Stack(sink=True), stack_input()
    subject = observe_rows(model, lambda: model(x)[:, -1], [(1, 0), (1, 2)], [4, -1])
    (own,) = subject.own.values()
    other = shuffle_weights(own, torch.Generator().manual_seed(0))
    assert torch.equal(other[..., :-1].sort(-1).values, own.weights[..., :-1].sort(-1).values)
    assert torch.equal(other[..., -1], own.weights[..., -1])
    assert (other[~own.allowed] == 0).all()
    assert not torch.equal(other, own.weights)


def test_every_order_is_drawn_alike():
    q = torch.tensor([1.0, 0, 0])[None, None, :, None]
    subject = observe_rows(None, lambda: attend(q[:, :, :1], q, q).flatten(1), [(0, 0)], [0])
    (own,) = subject.own.values()
    random = torch.Generator().manual_seed(0)
    where = torch.tensor([int(shuffle_weights(own, random)[0, 0, 0].argmax()) for _ in range(600)]).bincount(
        minlength=3
    )
    assert (where - 200).abs().max() < 50


def test_heads_whose_choice_is_of_no_consequence_move_nothing():
    q, v = 5 * torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    v[:, 0] = 1.0
    predict = lambda: attend(q, q, v)[:, :, -1].sum(1)  # noqa: E731
    assert permuted(None, predict, [(0, 0)], draws=9).median.max() < 1e-6
    assert permuted(None, predict, [(0, 1)], draws=9).median.min() > 0.01


def test_the_median_is_over_shuffles():
    model, ids, ticks = decoder(), texts(), []
    found = permuted(model, lambda: model(ids)[:, -1], [(0, 1), (1, 1)], draws=7, tick=lambda: ticks.append(1))
    assert found.distances.shape == (7, 5)
    assert torch.equal(found.median, found.distances.sort(0).values[3])
    assert len(ticks) == 7
    assert "median of 7 shuffles" in str(found)
    assert "not importance" in str(found)


@pytest.mark.parametrize("draws", [0, 2.5])
def test_draws_there_must_be(draws):
    with pytest.raises(ProblemError, match=f"draws is {draws}: expected the number of shuffles, 1 or more"):
        permuted(None, lambda: torch.ones(1, 2), [(0, 0)], draws=draws)


def test_hidden_values_that_are_nan_move_nothing():
    model, x = Hiding(4), torch.randn(1, 6, 8)
    found, clean = (
        permuted(model, lambda v=v: model(x, v)[:, 3], [(0, 0), (1, 1)], [3], draws=9).median for v in (torch.nan, 0.0)
    )
    assert torch.equal(found, clean)


def test_a_value_that_is_nan_reaches_the_rows_alone_that_see_it():
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    found: list[torch.Tensor] = []
    for last in (torch.nan, 0.0):
        v[:, :, 5] = last
        predict = lambda: attend(q, k, v, mask=Causal())[:, :, 3].flatten(1)  # noqa: E731
        found.append(permuted(None, predict, [(0, 0), (0, 1)], [3, 5], draws=9).distances)
    assert found[0].max() > 0.01
    assert torch.equal(*found)
