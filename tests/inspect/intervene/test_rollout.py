"""Rollout, row by row and tile by tile, is the product of the matrices in full."""

import numpy as np
import pytest
import torch

from regard import Causal, attend
from regard.errors import ProblemError
from regard.inspect.intervene.relevance import rollout
from regard.inspect.observing.observe import observe
from regard.integrate.transformers import use_regard
from tests.inspect.intervene.memory import Largest, small_tiles
from tests.inspect.intervene.models import Stack, stack_input
from tests.integrate import zoo


def kept(model, x):
    with observe(model, lambda look: look.weights) as seen:
        model(x)
    return [one.value for one in seen]


@pytest.mark.parametrize("sink", [False, True])
def test_rollout_is_the_product_of_all_layers(sink, monkeypatch):
    model, x, ticks = Stack(sink=sink), stack_input(), []
    _, matrices = model.in_full(x)
    product = torch.eye(11).double()
    for matrix in matrices:
        product = (matrix.mean(1) + torch.eye(11)) / 2 @ product
    found = rollout(kept(model, x), [-1, 4], tick=lambda: ticks.append(1))
    assert found.rows == (10, 4)
    assert torch.allclose(found.values, product[:, [10, 4]], atol=1e-10)
    assert len(ticks) == 3
    assert torch.allclose(found.values.sum(-1), torch.ones(2, 2).double()) is not sink


def test_tiles_change_nothing(monkeypatch):
    model, x = Stack(), stack_input(tokens=37)
    whole = rollout(kept(model, x), [-1]).values
    small_tiles(monkeypatch)
    assert torch.allclose(rollout(kept(model, x), [-1]).values, whole, atol=1e-12)


def test_no_matrix_is_made(monkeypatch):
    model, x = Stack(), stack_input(tokens=200, batch=1)
    layers = kept(model, x)
    small_tiles(monkeypatch)
    with Largest() as largest:
        rollout(layers, [-1, 100])
    assert largest.numel < 200 * 200 / 8


def test_rows_that_see_only_themselves_keep_themselves():
    found = rollout(kept(Stack(), stack_input()), [0]).values
    assert torch.equal(found, torch.nn.functional.one_hot(torch.zeros(2, 1, dtype=torch.int64), 11).double())


def test_models_of_transformers_roll_out():
    model, ids = zoo.model("llama"), zoo.tokens()
    use_regard(model)
    eager = model(ids, output_attentions=True).attentions
    product = torch.eye(13)
    for matrix in eager:
        product = (matrix.mean(1) + torch.eye(13)) / 2 @ product
    assert torch.allclose(rollout(kept(model, ids), [-1]).values[:, 0], product[:, -1], atol=1e-6)


def test_the_caveat_is_shown():
    assert "not importance" in str(rollout(kept(Stack(), stack_input()), [-1]))


def test_layers_must_be_over_one_text():
    model = Stack()
    with pytest.raises(ProblemError, match="there are no layers"):
        rollout([], [-1])
    with pytest.raises(ProblemError, match=r"layer 1 has .* the same 11 tokens"):
        rollout([kept(model, stack_input())[0], kept(model, stack_input(7))[0]], [-1])
    with observe(each=lambda look: look.weights) as seen:
        attend(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), mask=Causal())
    with pytest.raises(ProblemError, match="3 queries at position 2 and 5 keys"):
        rollout([seen[0].value], [-1])


@pytest.mark.parametrize("rows", [torch.tensor([1, -2]), np.array([1, -2]), range(1, 10, 8)], ids=repr)
def test_rows_are_whatever_lists_them(rows):
    layers = kept(Stack(), stack_input())
    found = rollout(layers, rows)
    assert found.rows == (1, 9)
    assert torch.equal(found.values, rollout(layers, [1, 9]).values)


def test_recorded_calls_are_no_weights():
    model, x = Stack(), stack_input()
    with observe(model) as calls:
        model(x)
    with pytest.raises(ProblemError, match=r"layer 0 is a RecordedCall: expected Weights, .*call\.weights for call"):
        rollout(calls, [-1])  # pyright: ignore[reportArgumentType]
    assert rollout([call.weights for call in calls], [-1]).values.shape == (2, 1, 11)


def test_the_weights_of_one_layer_are_no_list():
    with pytest.raises(ProblemError, match="weights are those of one layer: pass a list"):
        rollout(kept(Stack(), stack_input())[0], [-1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([11], "row 11 does not exist"),
        ([-12], "row -12"),
        ([], "no rows"),
        (torch.tensor([], dtype=torch.int64), "no rows"),
        (0, "rows is 0: expected a list, such as \\[0\\]"),
        (5, "rows is 5: expected a list"),
        (torch.tensor(5), "rows is a tensor"),
        ("0", "rows is '0': expected a list"),
        (None, "rows is None: expected a list"),
    ],
)
def test_rows_that_do_not_exist_are_refused(rows, message):
    with pytest.raises(ProblemError, match=message):
        rollout(kept(Stack(), stack_input()), rows)
