"""The adversary finds what is free to be otherwise, and stays within what it was allowed."""

import math

import pytest
import torch

from regard import Causal, attend
from regard.errors import ProblemError
from regard.inspect.intervene.adversary import adversary
from regard.inspect.intervene.rows import divergence
from regard.inspect.observing.observe import observe
from tests.inspect.intervene.models import decoder, texts


def test_it_stays_within_epsilon():
    model, ids, ticks = decoder(), texts(), []
    found = adversary(
        model, lambda: model(ids)[:, -1], [(0, 2), (1, 1)], epsilon=0.02, steps=20, starts=2,
        tick=lambda: ticks.append(1),
    )  # fmt: skip
    assert found.distance.max() <= 0.02
    assert len(ticks) == 42
    apart = [divergence(found.own[s].double(), found.weights[s].double()).flatten(1) for s in found.own]
    assert torch.allclose(torch.cat(apart, 1).mean(1), found.divergence, atol=1e-5)
    for weights in found.weights.values():
        assert torch.allclose(weights.sum(-1), torch.ones(5, 1, 1).double(), atol=1e-6)


def test_weights_over_equal_values_are_free():
    q, v = 5 * torch.randn(1, 1, 6, 4), torch.ones(1, 1, 6, 4)
    found = adversary(None, lambda: attend(q, q, v)[:, 0, -1], [(0, 0)], steps=120, starts=2)
    assert found.divergence.item() > 0.5
    assert found.distance.item() < 1e-6


def test_weights_that_the_output_is_read_off_are_not():
    q, v = torch.randn(1, 1, 4, 3), 30 * torch.eye(4)[None, None]
    found = adversary(None, lambda: attend(q, q, v)[:, 0, -1], [(0, 0)], epsilon=0.01, steps=80, starts=2)
    assert found.divergence.item() < 0.01


def test_keys_that_may_not_be_seen_get_nothing():
    model, ids = decoder(), texts()
    found = adversary(model, lambda: model(ids)[:, -1], [(0, 2)], rows=[4], epsilon=1.0, steps=3, starts=1)
    (weights,) = found.weights.values()
    assert (weights[..., 5:] == 0).all()
    assert (found.divergence > 0).all()


def test_the_same_seed_finds_the_same():
    model, ids = decoder(), texts()
    found = [
        adversary(model, lambda: model(ids)[:, -1], [(1, 2)], epsilon=0.3, steps=5, starts=1, seed=seed).divergence
        for seed in (0, 0, 1)
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_caveat_comes_with_the_result():
    model, ids = decoder(), texts()
    message = str(adversary(model, lambda: model(ids)[:, -1], [(1, 2), (1, 3)], steps=1, starts=1))
    assert "1.2 + 1.3" in message
    assert "Attention weights are not importance" in message
    assert "Wiegreffe & Pinter" in message


@pytest.mark.parametrize("given", [{"epsilon": 0.0}, {"epsilon": "x"}, {"steps": 0}, {"steps": 2.5}, {"starts": 0}])
def test_what_makes_no_search_is_refused(given):
    with pytest.raises(ProblemError, match="expected 0 < epsilon"):
        adversary(None, lambda: torch.ones(1, 2), [(0, 0)], **given)


def test_weights_are_in_the_order_of_the_heads():
    model, ids = decoder(), texts()
    found = adversary(model, lambda: model(ids)[:, -1], [(1, 3), (0, 2), (1, 0)], steps=1, starts=1)
    with torch.no_grad(), observe(model) as calls:
        model(ids)
    assert found.heads == ((1, 3), (0, 2), (1, 0))
    for call, heads in zip(calls, ([2], [3, 0]), strict=True):
        (own,) = (own for site, own in found.own.items() if site.layer == call.layer)
        assert torch.allclose(own[:, :, 0, :-1], call.weights.dense()[:, heads, -1])


def test_a_prediction_without_gradients_is_reported():
    model, ids = decoder(), texts()
    predict = lambda: model(ids)[:, -1]  # noqa: E731
    message = r"prediction has no gradients: let it run without torch\.no_grad, inference_mode and detach"
    with pytest.raises(ProblemError, match=message), torch.inference_mode():
        adversary(model, predict, [(1, 2)], steps=1, starts=1)
    with pytest.raises(ProblemError, match=message):
        adversary(model, lambda: predict().detach(), [(1, 2)], steps=1, starts=1)


def test_gradients_of_the_model_stay_as_they_were():
    model, ids = decoder(), texts()
    adversary(model, lambda: model(ids)[:, -1], [(1, 2)], steps=2, starts=1)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert math.isclose(0.693, math.log(2), abs_tol=1e-3)


def test_a_value_that_is_nan_reaches_the_rows_alone_that_see_it():
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    found: list[torch.Tensor] = []
    for last in (torch.nan, 0.0):
        v[:, :, 5] = last
        predict = lambda: attend(q, k, v, mask=Causal())[:, :, 3].flatten(1)  # noqa: E731
        found.append(adversary(None, predict, [(0, 0), (0, 1)], [3, 5], epsilon=0.2, steps=9, starts=1).divergence)
    assert found[0].min() > 0.01
    assert torch.equal(*found)
