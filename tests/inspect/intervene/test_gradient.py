"""Gradient x attention equals the formula on matrices whose gradients autograd kept."""

from functools import partial

import pytest
import torch

from regard import Causal, attend
from regard.calls import observe_calls
from regard.errors import ProblemError
from regard.inspect.intervene.relevance import _weighted_by_gradient, gradient_attention, through
from regard.inspect.weights.lazy import Weights
from regard.integrate.transformers import use_regard
from regard.nn import Decoder, MultiHeadAttention
from tests.inspect.intervene.memory import Largest, small_tiles
from tests.inspect.intervene.models import Checkpointed, Hiding, Layer, Stack, decoder, stack_input, texts
from tests.integrate import zoo


def in_full(model, x, target):
    out, matrices = model.in_full(x)
    target(out).sum().backward()
    product = torch.eye(x.shape[1]).double()
    for matrix in matrices:
        product = product + (matrix.grad * matrix).clamp(min=0).mean(1) @ product
    return product


@pytest.mark.parametrize("sink", [False, True])
def test_it_is_the_formula(sink):
    model, x = Stack(sink=sink), stack_input()

    def target(out):
        return out[:, -1, 3] ** 2 - out[:, 4, 1]

    expected = in_full(model, x, target)
    found = gradient_attention(model, lambda: target(model(x)), [-1, 4])
    assert torch.allclose(found.values, expected[:, [10, 4]].detach(), atol=1e-10)
    assert (found.values - torch.eye(11)[[10, 4]]).abs().max() > 0.01
    assert "Compare with ablation" in str(found)


def test_no_matrix_is_made(monkeypatch):
    calls, q = [], torch.randn(1, 2, 200, 3)
    with observe_calls(calls.append):
        attend(q, q, q, mask=Causal())
    small_tiles(monkeypatch)
    with Largest() as largest:
        through(torch.ones(1, 3, 200), Weights.of(calls[0]), _weighted_by_gradient(q, torch.randn(1, 2, 200, 3)))
    assert largest.numel < 200 * 200 / 8


def test_every_sequence_has_a_target_of_its_own():
    model, x = Stack(), stack_input()
    together = gradient_attention(model, lambda: model(x)[:, -1, 3], [-1]).values
    alone = [gradient_attention(model, lambda s=s: model(s[None])[:, -1, 3], [-1]).values for s in x]
    assert torch.allclose(together, torch.cat(alone), atol=1e-12)


def test_frozen_models_have_gradients_in_their_attention():
    model, x = Stack(), stack_input()
    before = gradient_attention(model, lambda: model(x)[:, -1, 3], [-1]).values
    model.requires_grad_(False)
    assert torch.allclose(gradient_attention(model, lambda: model(x)[:, -1, 3], [-1]).values, before, atol=1e-12)


def test_models_of_transformers_have_it():
    model, ids = zoo.model("gemma2"), zoo.tokens()
    use_regard(model)
    found = gradient_attention(model, lambda: model(ids).logits[:, -1, 7], [-1])
    assert found.values.shape == (2, 1, 13)
    assert (found.values >= 0).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_targets_that_are_no_number_per_sequence_are_reported():
    model, ids = decoder(), texts()
    with pytest.raises(ProblemError, match=r"target is \[5, 19\]: expected one scalar per sequence, \[5\]"):
        gradient_attention(model, lambda: model(ids)[:, -1], [-1])
    with pytest.raises(ProblemError, match=r"without torch\.no_grad"):
        gradient_attention(model, lambda: model(ids).detach()[:, -1, 3], [-1])
    with pytest.raises(ProblemError, match=r"rows is 0: expected a list, such as \[0\]"):
        gradient_attention(model, lambda: model(ids)[:, -1, 3], 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match="no attention of regard's"):
        gradient_attention(None, lambda: torch.ones(1, requires_grad=True), [-1])


def test_weights_that_are_dropped_are_no_weights():
    model = Decoder(19, 32, 2, 4, attention=partial(MultiHeadAttention, dropout=0.5))
    with pytest.raises(ProblemError, match=r"call model.eval\(\) first"):
        gradient_attention(model.train(), lambda: model(texts())[:, -1, 3], [-1])


def test_layers_that_run_without_gradients_are_refused():
    model, x = Checkpointed(reentrant=True), stack_input().requires_grad_()
    with pytest.raises(ProblemError, match=r"layer 0 ran without gradients: .* checkpointing \(use_reentrant=True\)"):
        gradient_attention(model, lambda: model(x)[:, -1, 3], [-1])
    model = Stack()
    with pytest.raises(ProblemError, match="layer 0 ran without gradients"):
        gradient_attention(model, lambda: torch.no_grad()(model)(x)[:, -1, 3], [-1])


def test_a_run_without_gradients_beside_the_one_with_them_is_a_constant():
    model, x = Stack(), stack_input()

    def gain():
        with torch.no_grad():
            base = model(x.flip(1))[:, -1, 3]
        return model(x)[:, -1, 3] - base

    found, expected = (gradient_attention(model, y, [-1]).values for y in (gain, lambda: model(x)[:, -1, 3]))
    assert torch.equal(found, expected)


def test_layers_that_run_again_with_gradients_are_as_they_were():
    plain, model, x = Stack(), Checkpointed(reentrant=False), stack_input()
    model.load_state_dict(plain.state_dict())
    found, expected = (gradient_attention(m, lambda m=m: m(x)[:, -1, 3], [-1]).values for m in (model, plain))
    assert torch.allclose(found, expected, atol=1e-12)


class Twice(Layer):
    """A module that attends twice in a run."""

    def forward(self, x):
        return super().forward(x) - super().forward(x.flip(-1))


def test_a_layer_that_attends_more_than_once_is_refused():
    model, x, message = Stack(), stack_input(), r"layer 0 attended more than once: .* layers attend once each"
    with pytest.raises(ProblemError, match=message):  # two forward passes
        gradient_attention(model, lambda: model(x)[:, -1, 3] + model(x)[:, -1, 4], [-1])
    model.layers[0] = Twice(sink=False).double()
    with pytest.raises(ProblemError, match=message):
        gradient_attention(model, lambda: model(x)[:, -1, 3], [-1])


def test_hidden_values_that_are_nan_do_not_count():
    model, x = Hiding(4), torch.randn(1, 6, 8)
    clean = gradient_attention(model, lambda: model(x, 0.0)[:, 3, 0], [3]).values
    found = gradient_attention(model, lambda: model(x, torch.nan)[:, 3, 0], [3]).values
    assert torch.equal(found, clean)
