"""Losses come one per example, and of what is no text nothing is counted."""

import pytest
import torch
from torch.nn import functional as F

from regard.errors import ProblemError
from regard.inspect.intervene import (
    ablation_effects,
    gradient_attention,
    importance,
    mean_outputs,
    outputs_of,
    permuted,
    rank_collapse,
    rollout,
    value_zeroing,
)
from regard.inspect.intervene.loss import all_of, losses, next_token_loss, of_examples
from tests.inspect.intervene.models import decoder, texts
from tests.integrate import zoo

MODEL, IDS = decoder(), texts()


def test_the_loss_of_an_example_is_its_own():
    model, ids = decoder(), texts()
    together = losses([ids], next_token_loss(model))
    assert torch.allclose(together, torch.cat([losses([row[None]], next_token_loss(model)) for row in ids]))
    logits = model(ids)[0, :-1].float()
    assert torch.allclose(together[0], F.cross_entropy(logits, ids[0, 1:]).double(), atol=1e-6)


def test_padding_is_no_target():
    model, ids, kept = zoo.model("llama"), zoo.tokens(), zoo.padding("right")
    loss = next_token_loss(model)({"input_ids": ids, "attention_mask": kept})
    assert torch.allclose(loss[0], next_token_loss(model)(ids[:1, :9])[0], atol=1e-5)
    assert torch.allclose(loss[1], next_token_loss(model)(ids[1:])[0], atol=1e-5)


def test_a_text_without_a_next_token_has_no_loss():
    with pytest.raises(ProblemError, match=r"example 0 of token ids \[5, 1\] has no token that follows another"):
        next_token_loss(decoder())(texts(tokens=1))


def test_a_text_that_is_all_padding_but_one_token_has_no_loss():
    kept = torch.ones(2, 13, dtype=torch.int64)
    kept[1, 1:] = 0
    with pytest.raises(ProblemError, match=r"example 1 of .* 2 tokens or more, padding not counted"):
        next_token_loss(zoo.model("llama"))({"input_ids": zoo.tokens(), "attention_mask": kept})


@pytest.mark.parametrize("given", [torch.ones(2, 3), torch.ones(2, dtype=torch.int64), 1.0])
def test_what_is_no_loss_per_example_is_reported(given):
    with pytest.raises(ProblemError, match="expected the loss of each example"):
        of_examples(given)


@pytest.mark.parametrize("given", [torch.ones(2, 3), {"input_ids": 1}, []])
def test_what_is_no_list_of_batches_is_reported(given):
    with pytest.raises(ProblemError, match="batch"):
        all_of(given)


@pytest.mark.parametrize("given", [[[1, 2]], {"ids": 1}])
def test_what_is_no_batch_of_texts_is_reported(given):
    with pytest.raises(ProblemError, match=r"a batch is a (list|dict): expected token ids"):
        next_token_loss(decoder())(given)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: next_token_loss(None), "^model is None: expected a causal language model"),
        (lambda: importance(MODEL, [IDS], torch.zeros(2)), r"^loss_of is .*: expected a function"),
        (lambda: list(ablation_effects(MODEL, [IDS], None)), "^loss_of is None: expected a function .* of a batch"),
        (lambda: list(ablation_effects(MODEL, 3, next_token_loss(MODEL))), "^batches is 3: expected a list of batches"),
        (lambda: ablation_effects(MODEL, [IDS], next_token_loss(MODEL), 3), "^groups is 3: expected lists of heads"),
        (lambda: mean_outputs(MODEL, [IDS], None), "^run is None: expected a function that runs the model on a batch"),
        (lambda: mean_outputs(MODEL, [IDS], MODEL, rows=IDS > 3), "^rows is .*: expected a function of a batch"),
        (lambda: outputs_of(MODEL, MODEL(IDS)), r"^run is .*: expected .*, as lambda: model\(ids\)"),
        (lambda: value_zeroing(MODEL, None, 1, [0]), r"^run is None: expected .*, as lambda: model\(ids\)"),
        (lambda: rank_collapse(MODEL, 3), r"^run is 3: expected .*, as lambda: model\(ids\)"),
        (lambda: permuted(MODEL, None, [(0, 1)]), "^predict is None: expected a function that .* returns logits"),
        (
            lambda: gradient_attention(MODEL, MODEL(IDS)[:, -1, 3], [-1]),
            r"^target is a tensor .* \[5\]: expected a function",
        ),
        (lambda: rollout(3, [-1]), r"^weights is 3: expected those of each layer, \[call.weights for call in calls\]"),
    ],
)
def test_what_is_no_function_is_named(call, says):
    with pytest.raises(ProblemError, match=says):
        call()
