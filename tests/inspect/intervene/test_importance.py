"""Importance: the absolute value of each example, then the mean; never the other way round."""

import torch

from regard import attend
from regard.inspect.intervene.importance import Importance, importance
from regard.inspect.intervene.loss import next_token_loss
from tests.inspect.intervene.models import decoder, texts


def test_opposite_effects_do_not_cancel():
    q = torch.zeros(2, 1, 3, 4)
    v = torch.ones(2, 1, 3, 4)
    sign = torch.tensor([1.0, -1.0])
    found = importance(None, [None], lambda batch: attend(q, q, v).sum((1, 2, 3)) * sign)
    assert torch.equal(found.slopes, torch.tensor([[12.0], [-12.0]]).double())
    assert found.scores.item() == 12


def test_batches_are_one_dataset():
    model, ids, ticks = decoder(), texts(), []
    loss_of = next_token_loss(model)
    parts = importance(model, [ids[:2], ids[2:]], loss_of, tick=lambda: ticks.append(1))
    assert torch.allclose(parts.slopes, importance(model, [ids], loss_of).slopes, atol=1e-6)
    assert len(ticks) == 2


def test_the_least_important_head_comes_first():
    found = Importance(((0, 0), (0, 1), (1, 0), (1, 1)), torch.tensor([[3.0, -4.0, 0.3, 0.1], [-3.0, -4.0, 0.3, 0.1]]))
    assert found.order == ((1, 1), (1, 0), (0, 0), (0, 1))


def test_within_layers_scores_have_norm_1():
    found = Importance(((0, 0), (0, 1), (1, 0), (1, 1)), torch.tensor([[3.0, -4.0, 0.3, 0.1]]).double())
    assert torch.allclose(found.scores_within_layers[:2], torch.tensor([0.6, 0.8]).double())
    assert found.scores_within_layers[2:].norm().item() == 1
