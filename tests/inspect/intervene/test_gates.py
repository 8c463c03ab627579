"""Slopes in the gates of heads: those that finite differences find, of each example by itself."""

import pytest
import torch

from regard import Causal, attend
from regard.errors import ProblemError
from regard.inspect.intervene.heads import edit_outputs
from regard.inspect.intervene.importance import slopes
from regard.inspect.intervene.loss import next_token_loss
from regard.integrate.cache_argument import cache_of
from regard.integrate.transformers import use_regard
from tests.inspect.intervene.models import decoder, texts
from tests.integrate import zoo
from tests.integrate.zoo import with_cache


def turned(model, batch, head, by):
    """The losses with one head's gate at 1 + by."""

    def change(site, call):
        gates = torch.ones(call.out.shape[1], dtype=call.out.dtype)
        if site.layer == head[0]:
            gates[head[1]] += by
        return call.out * gates[:, None, None]

    with torch.no_grad(), edit_outputs(model, change):
        logits = model(batch)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none").mean(1)


def loss64(model):
    return lambda ids: torch.nn.functional.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def test_slopes_are_what_finite_differences_find():
    model, ids = decoder(), texts(batch=3)
    found = slopes(model, ids, loss64(model))
    for place, head in enumerate(found.heads):
        difference = (turned(model, ids, head, 1e-5) - turned(model, ids, head, -1e-5)) / 2e-5
        assert torch.allclose(found.values[:, place], difference, atol=1e-8)


def test_each_example_has_slopes_of_its_own():
    model, ids = decoder(), texts(batch=3)
    together = slopes(model, ids, loss64(model)).values
    alone = torch.cat([slopes(model, row[None], loss64(model)).values for row in ids])
    assert torch.allclose(together, alone, atol=1e-12)


def test_slopes_are_the_outputs_times_their_gradients():
    q, v = torch.randn(2, 3, 5, 4).double(), torch.randn(2, 3, 5, 4).double()
    weigh = torch.randn(3, 5, 4).double()
    found = slopes(None, None, lambda batch: (attend(q, q, v, mask=Causal()) * weigh).sum((1, 2, 3)))
    assert torch.allclose(found.values, (attend(q, q, v, mask=Causal()) * weigh).sum((2, 3)), atol=1e-12)


def test_the_gradients_of_the_model_stay_as_they_were():
    model, ids = decoder(), texts()
    slopes(model, ids, loss64(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_models_have_slopes():
    model, ids = decoder(), texts()
    before = slopes(model, ids, loss64(model)).values
    model.requires_grad_(False)
    assert torch.equal(slopes(model, ids, loss64(model)).values, before)


def test_models_of_transformers_have_slopes():
    model, ids = zoo.model("gpt_oss"), zoo.tokens()
    use_regard(model)
    found = slopes(model, ids, next_token_loss(model))
    assert found.values.shape == (2, 8)
    assert (found.values != 0).all()


def test_a_text_that_comes_in_parts_has_one_gate():
    model, ids = zoo.model("llama"), zoo.tokens()
    use_regard(model)

    def in_parts(batch):
        first = model(batch[:, :4], use_cache=True)
        second = model(batch[:, 4:], **with_cache(cache_of(first)))
        logits = torch.cat([first.logits, second.logits], 1)
        return torch.nn.functional.cross_entropy(logits[:, :-1].mT, batch[:, 1:], reduction="none").mean(1)

    whole = slopes(model, ids, next_token_loss(model)).values
    assert torch.allclose(slopes(model, ids, in_parts).values, whole, atol=1e-5)


def test_a_head_that_the_loss_does_not_meet_has_slope_0():
    q = torch.randn(2, 3, 5, 4)
    found = slopes(None, None, lambda batch: (attend(q, q, q), attend(q, q, q))[0].sum((1, 2, 3)))
    assert (found.values[:, :3] != 0).all()
    assert (found.values[:, 3:] == 0).all()


def test_the_mean_of_a_batch_is_not_taken_for_the_losses_of_its_examples():
    model = decoder()
    with pytest.raises(ProblemError, match="1 losses of 5 examples: expected one for each, not their mean"):
        slopes(model, texts(), lambda ids: loss64(model)(ids).mean())


def test_losses_without_gradients_are_reported():
    model = decoder()
    with pytest.raises(ProblemError, match=r"without torch.no_grad"):
        slopes(model, texts(), lambda ids: loss64(model)(ids).detach())


def test_no_attention_is_reported():
    with pytest.raises(ProblemError, match="no attention of regard's"):
        slopes(None, None, lambda batch: torch.ones(2, requires_grad=True))
