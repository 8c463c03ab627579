"""Heads are named the same way everywhere."""

import pytest
import torch

from regard.errors import ProblemError
from regard.inspect import ablated, ablation_effects, integrated, next_token_loss, observe
from regard.inspect.intervene import adversary, greedy, permuted, prune_curve
from regard.inspect.names import group_text, head_text, read_head, read_heads, read_layer
from tests.inspect.intervene.models import decoder, texts


@pytest.mark.parametrize("name", [(18, 6), "18.6", " 18.6 ", (torch.tensor(18), torch.tensor(6))])
def test_a_name_is_a_pair_or_text(name):
    assert read_head(name) == (18, 6)


def test_a_path_of_a_module_may_have_numbers():
    assert read_head("decoder.block.0.layer.1.EncDecAttention.1") == ("decoder.block.0.layer.1.EncDecAttention", 1)
    assert read_head("encoder.layer.0.2") == ("encoder.layer.0", 2)


@pytest.mark.parametrize("name", ["", "18", "18.", ".6", "18.six", "L18H6", "18.6.", "18.-1"])
def test_other_text_names_no_head(name):
    with pytest.raises(ProblemError, match=r"names no head: expected \(layer, head\), such as"):
        read_head(name)


def test_text_with_commas_names_several_heads():
    assert read_heads("18.6,3.1") == read_heads(["18.6", (3, 1)]) == ((18, 6), (3, 1))


@pytest.mark.parametrize("name", [(18, 6), ("encoder.layer.0", 2)])
def test_names_are_written_as_they_are_read(name):
    assert read_head(head_text(name)) == name
    assert group_text([name, (0, 1)]) == f"{head_text(name)} + 0.1"


def test_a_layer_is_a_number_or_a_path():
    assert [read_layer(layer) for layer in (3, "3", torch.tensor(3), "encoder.layer.0")] == [3, 3, 3, "encoder.layer.0"]


def test_every_intervention_reads_names_as_text():
    model, ids = decoder(), texts()
    loss, last = next_token_loss(model), lambda: model(ids)[:, -1]
    with torch.no_grad():
        with ablated(model, [(0, 2), (1, 3)]):
            pairs = model(ids)
        with ablated(model, "0.2, 1.3"):
            assert torch.equal(model(ids), pairs)
    assert [effect.heads for effect in ablation_effects(model, [ids], loss, ["0.2", ["1.0", (1, 1)]])] == [
        ((0, 2),),
        ((1, 0), (1, 1)),
    ]
    assert next(greedy(model, [ids], loss, ["0.2"])).heads == ((0, 2),)
    assert adversary(model, last, "1.0", steps=1, starts=1).heads == ((1, 0),)
    assert permuted(model, last, ["1.0"], draws=1).heads == ((1, 0),)
    assert integrated(model, [ids], loss, "1.0", tolerance=1.0).heads == ((1, 0),)
    assert prune_curve(model, [ids], loss, "1.0, 0.2", at=(0, 1), draws=1).order == ((1, 0), (0, 2))


def test_what_was_observed_gives_the_weights_of_heads_by_name():
    model, ids = decoder(), texts()
    with observe(model) as calls, torch.no_grad():
        model(ids)
    with observe(model, each=lambda look: look.heads("1.2").dense(), layers=1) as seen, torch.no_grad():
        model(ids)
    own = calls[1].weights.dense()
    assert torch.equal(calls[1].heads(["1.2", (1, 0)]).dense(), own[:, [2, 0]])
    assert torch.equal(calls[1].heads(2).dense(), own[:, [2]])
    assert torch.equal(calls[1].heads((calls[1].module, 2)).dense(), own[:, [2]])
    assert torch.equal(seen[0].value, own[:, [2]])
    with pytest.raises(ProblemError, match=r"head 0\.2 is not in layer 1"):
        calls[1].heads("0.2")
