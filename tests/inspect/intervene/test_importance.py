"""Importance: the absolute value of each example, then the mean; never the other way round."""

import pytest
import torch

from regard import attend
from regard.errors import ProblemError
from regard.inspect.intervene.importance import Importance, importance
from regard.inspect.intervene.loss import next_token_loss
from tests.inspect.intervene.models import Checkpointed, Stack, decoder, stack_input, texts


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


@pytest.mark.parametrize(
    ("reentrant", "message"),
    [
        (True, r"layer 0 ran without gradients: .* checkpointing \(use_reentrant=True\)"),
        (False, r"checkpointing runs layers again .*: switch it off first"),
    ],
)
def test_gradient_checkpointing_is_refused(reentrant, message):
    model, x = Checkpointed(reentrant), stack_input().requires_grad_()
    with pytest.raises(ProblemError, match=message):
        importance(model, [x], lambda x: model(x).sum((1, 2)))


def test_a_run_without_gradients_beside_one_with_them_has_no_effect():
    model, x = Stack(), stack_input()

    def loss_of(x):
        with torch.no_grad():
            target = model(x.flip(0))
        return (model(x) - target).square().sum((1, 2))

    target = model(x.flip(0)).detach()
    expected = importance(model, [x], lambda x: (model(x) - target).square().sum((1, 2)))
    assert torch.allclose(importance(model, [x], loss_of).slopes, expected.slopes)


def test_heads_of_another_model_have_no_importance():
    model, teacher, x = Stack(layers=2), Stack(layers=3), stack_input()
    found = importance(model, [x], lambda x: (model(x) - teacher(x)).square().sum((1, 2)))
    assert {layer for layer, _ in found.heads} == {0, 1}
