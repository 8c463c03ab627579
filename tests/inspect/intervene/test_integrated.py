"""Shares of heads sum to what the heads do together."""

import re

import pytest
import torch

from regard import attend
from regard.errors import ProblemError, RefusalError
from regard.inspect.intervene.ablate import ablated
from regard.inspect.intervene.integrated import integrated
from regard.inspect.intervene.loss import next_token_loss
from tests.inspect.intervene.models import decoder, texts


def test_shares_are_complete():
    model, ids = decoder(sharp=1), texts()
    loss_of = next_token_loss(model)
    found = integrated(model, [ids[:3], ids[3:]], loss_of, tolerance=1e-3)
    assert (found.residual.abs() <= 1e-3 * found.change.abs() + 1e-4).all()
    with torch.no_grad():
        before = loss_of(ids)
        with ablated(model, found.heads):
            change = before - loss_of(ids)
    assert torch.allclose(found.change, change.double(), atol=1e-6)


def test_shares_of_some_heads_are_complete():
    model, ids = decoder(sharp=1), texts()
    found = integrated(model, [ids], next_token_loss(model), [(1, 2), (0, 1)], tolerance=1e-3)
    assert found.heads == ((1, 2), (0, 1))
    assert found.residual.abs().max() < 1e-3 < found.change.abs().max()


def test_heads_may_be_named_by_their_module():
    model, ids = decoder(sharp=1), texts()
    by_number = integrated(model, [ids], next_token_loss(model), [(1, 2)]).shares
    by_path = integrated(model, [ids], next_token_loss(model), [("body.blocks.1.attention", 2)]).shares
    assert torch.equal(by_number, by_path)


def steep(q, v):
    """A loss that jumps where the gates are 0.05: tanh of the output, 400 times steeper than it is far."""
    return lambda batch: 3 * torch.tanh(400 * (attend(q, q, v).sum((1, 2, 3)) / v.sum() - 0.05))


def one_head():
    q = torch.zeros(1, 1, 1, 1).double()
    return q, torch.full((1, 1, 1, 1), 2.0).double()


def test_a_steep_path_is_complete_with_the_defaults():
    """16 fixed nodes give a residual of all of the change: the jump lies between two of them."""
    found = integrated(None, [None], steep(*one_head()))
    assert found.change.item() == pytest.approx(6)
    assert found.residual.abs().item() < 0.02 * 6
    assert found.shares.item() == pytest.approx(6, rel=0.02)
    assert 20 < found.evaluations < 200


def test_a_smooth_path_takes_few_evaluations():
    model, ids = decoder(sharp=1), texts()
    found = integrated(model, [ids], next_token_loss(model))
    assert found.evaluations < 60


def test_a_residual_that_is_small_by_chance_is_not_enough():
    """One head raises the loss by 6 at a node, another lowers it by 6 at the node across: the panels lack as much."""
    q, v = torch.zeros(1, 2, 1, 1).double(), torch.full((1, 2, 1, 1), 2.0).double()
    node = 1 / 16

    def loss(batch):
        up, down = (attend(q, q, v) / v)[:, :, 0, 0].unbind(1)
        return 3 * torch.tanh(400 * (up - node)) - 3 * torch.tanh(400 * (down - 1 + node)) + 0.3 * up

    found = integrated(None, [None], loss)
    assert found.change.item() == pytest.approx(0.3)
    assert found.shares.tolist()[0] == pytest.approx([6.3, -6], rel=0.01)


def test_what_is_not_complete_in_time_is_refused_with_its_residual():
    message = r"after \d+ evaluations; example 0: change 6, .*residual .* at gates of .* Allow more evaluations"
    with pytest.raises(RefusalError, match=message):
        integrated(None, [None], steep(*one_head()), most=23)


def test_a_result_prints_its_residual_in_a_few_lines():
    model, ids = decoder(sharp=1), texts()
    output = repr(integrated(model, [ids], next_token_loss(model)))
    assert len(output) < 900
    assert re.search(r"residual -?[\d.e-]+ \([\d.e-]+ % of the change\)", output)
    assert "largest mean shares: (" in output
    assert "evaluations" in output.splitlines()[0]


def test_evaluations_are_counted_and_shown():
    seen = []
    found = integrated(None, [None], steep(*one_head()), tick=lambda: seen.append(1))
    assert len(seen) == found.evaluations


def test_a_loss_that_is_not_finite_is_refused():
    q, v = one_head()
    with pytest.raises(ProblemError, match="is not finite where the gates are 0"):
        integrated(None, [None], lambda batch: attend(q, q, v).sum((1, 2, 3)).log())


def test_shares_of_a_product_are_halves():
    q = torch.zeros(1, 2, 1, 1).double()
    v = torch.tensor([3.0, 5.0]).double()[None, :, None, None]
    found = integrated(None, [None], lambda batch: attend(q, q, v).prod()[None])
    assert torch.allclose(found.shares, torch.tensor([[7.5, 7.5]]).double())


def test_shares_of_one_layer_are_the_outputs_times_their_gradients_along_the_way():
    torch.manual_seed(3)
    q, v = torch.randn(1, 2, 3, 4).double(), torch.randn(1, 2, 3, 4).double()
    z = attend(q, q, v)

    def after(out):
        return torch.tanh(out).sum((1, 2, 3)) ** 2

    found = integrated(None, [None], lambda batch: after(attend(q, q, v)), tolerance=1e-7)
    expected = torch.zeros(1, 2).double()
    for a in (torch.arange(2000).double() + 0.5) / 2000:
        at = (a * z).requires_grad_()
        (slope,) = torch.autograd.grad(after(at).sum(), at)
        expected += (z * slope).sum((2, 3)) / 2000
    assert torch.allclose(found.shares, expected, atol=1e-5)


@pytest.mark.parametrize("asked", [{"tolerance": 0}, {"tolerance": "2 %"}, {"most": 16}, {"most": 99.5}])
def test_a_tolerance_and_a_limit_there_must_be(asked):
    with pytest.raises(ProblemError, match="expected a share of the change above 0, and 17 evaluations or more"):
        integrated(None, [None], torch.ones_like, **asked)


def test_heads_that_do_not_exist_are_refused():
    model = decoder(sharp=1)
    with pytest.raises(ProblemError, match="no layer 5 attended"):
        integrated(model, [texts()], next_token_loss(model), [(5, 0)])
