"""Pruning curves: each point is an ablation, and the band is that of random orders of the same heads."""

import numpy as np
import pytest
import torch

from regard.errors import ProblemError
from regard.inspect.intervene.ablate import ablated
from regard.inspect.intervene.loss import next_token_loss
from regard.inspect.intervene.prune import prune_curve
from tests.inspect.intervene.models import decoder, texts

ORDER = [(1, 3), (0, 0), (0, 2), (1, 1)]


def test_every_point_is_an_ablation_of_the_first_heads():
    model, held_out, other = decoder(), texts(), texts(batch=3)
    loss_of = next_token_loss(model)
    curve = prune_curve(model, [held_out], loss_of, ORDER, made_on=[other], at=(0, 0.5, 0.75))
    assert curve.counts == (0, 2, 3)
    assert curve.shares == (0.0, 0.5, 0.75)
    for point, count in enumerate(curve.counts):
        with torch.no_grad(), ablated(model, ORDER[:count]):
            assert torch.equal(curve.held_out[point], loss_of(held_out).double())
            assert torch.equal(curve.made_on[point], loss_of(other).double())


@pytest.mark.parametrize("at", [np.array([0, 0.5, 1]), torch.tensor([0, 0.5, 1]), np.linspace(0, 1, 3).tolist()])
def test_shares_are_whatever_lists_them(at):
    model = decoder()
    curve = prune_curve(model, [texts()], next_token_loss(model), ORDER, at=at, draws=1)
    assert curve.counts == (0, 2, 4)


def test_all_orders_meet_at_both_ends():
    model = decoder()
    curve = prune_curve(model, [texts()], next_token_loss(model), ORDER, at=(0, 0.5, 1), draws=6)
    low, high = curve.band
    assert torch.equal(low[[0, 2]], curve.losses[[0, 2]])
    assert torch.equal(high[[0, 2]], curve.losses[[0, 2]])
    assert low[1] < high[1]
    assert curve.made_on is None


def test_the_same_seed_draws_the_same_orders():
    model, ids = decoder(), texts()
    curves = [
        prune_curve(model, [ids], next_token_loss(model), ORDER, at=[0.5], draws=3, seed=seed).random
        for seed in (0, 0, 1)
    ]
    assert torch.equal(curves[0], curves[1])
    assert not torch.equal(curves[0], curves[2])


def test_what_is_known_is_not_measured_again():
    model, ticks = decoder(), []
    prune_curve(model, [texts()], next_token_loss(model), ORDER, at=(0, 1), draws=9, tick=lambda: ticks.append(1))
    assert len(ticks) == 1  # nothing out is measured in any case


def test_the_curve_as_text_shows_the_band_and_the_caveat():
    model = decoder()
    message = str(prune_curve(model, [texts()], next_token_loss(model), ORDER, made_on=[texts()], at=(0, 1), draws=2))
    assert "random orders (2)" in message
    assert " to " in message
    assert "no better than chance" in message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"order": [(0, 1), (0, 1)]}, r"names head \(0, 1\) twice"),
        ({"order": []}, "order is empty"),
        ({"order": [(0, 9)]}, "layer 0 has 4"),
        ({"at": (0.5, 1.5)}, "shares from 0 to 1"),
        ({"at": ()}, "shares from 0 to 1"),
        ({"at": 0.5}, r"at is 0.5: expected a list of shares from 0 to 1, such as \[0, 0.5, 1\]"),
        ({"at": "half"}, "at is 'half': expected a list of shares"),
        ({"at": (0.5, float("nan"))}, "shares from 0 to 1"),
        ({"draws": 0}, "draws is 0: expected the number of random orders"),
        ({"draws": 2.5}, "draws is 2.5: expected the number of random orders"),
    ],
)
def test_what_makes_no_curve_is_refused(changed, message):
    model = decoder()
    given = {"order": ORDER, "at": (0, 0.5)} | changed
    with pytest.raises(ProblemError, match=message):
        prune_curve(model, [texts()], next_token_loss(model), given.pop("order"), **given)


def test_progress_may_stop_the_work():
    model, ids = decoder(), texts()
    before = model(ids)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_curve(model, [ids], next_token_loss(model), ORDER, tick=stop)
    assert torch.equal(model(ids), before)
