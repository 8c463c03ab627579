"""Heads have names; what does not exist is refused; a model is left as it was."""

import numpy as np
import pytest
import torch

from regard import attend
from regard.errors import ProblemError
from regard.inspect.intervene.heads import edit_outputs, heads_of, module_at, whole_layer
from regard.integrate.transformers import use_regard
from tests.inspect.intervene.models import decoder, texts
from tests.integrate import zoo


def test_heads_are_named_layer_by_layer():
    model = decoder()
    assert heads_of(model, lambda: model(texts())) == tuple((layer, head) for layer in (0, 1) for head in range(4))


def test_calls_of_a_function_are_counted():
    q = torch.randn(1, 2, 5, 3)
    assert heads_of(None, lambda: (attend(q, q, q), attend(q, q, q))) == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_modules_that_share_a_number_are_named_by_their_path():
    model = zoo.model("t5")
    use_regard(model)
    ids = zoo.tokens()
    layers = dict.fromkeys(layer for layer, _ in heads_of(model, lambda: model(ids, decoder_input_ids=ids)))
    assert len(layers) == 6
    assert "decoder.block.1.layer.1.EncDecAttention" in layers


def test_a_number_that_fits_several_modules_is_asked_back():
    model, ids = zoo.model("t5"), zoo.tokens()
    use_regard(model)
    message = pytest.raises(ProblemError, match=r"number 0 fits several modules.*SelfAttention.*Name the module")
    with message, edit_outputs(model, lambda site, call: None, [(0, 1)]):
        model(ids, decoder_input_ids=ids)


def test_a_path_names_one_module_of_several():
    model, ids = zoo.model("t5"), zoo.tokens()
    use_regard(model)
    named = ("decoder.block.0.layer.1.EncDecAttention", 1)
    with edit_outputs(model, lambda site, call: None, [named]) as sites:
        model(ids, decoder_input_ids=ids)
    assert [site.module for site in sites.heads if sites.of(site)] == [named[0]]


@pytest.mark.parametrize("name", [(0, 4), (1, -1)])
def test_a_head_that_a_layer_does_not_have_is_reported(name):
    model = decoder()
    with (
        pytest.raises(ProblemError, match=rf"layer {name[0]} has 4 heads, 0 to 3"),
        edit_outputs(model, lambda s, c: None, [name]),
    ):
        model(texts())


def test_a_layer_that_never_attends_is_reported():
    model = decoder()
    message = pytest.raises(ProblemError, match="no layer 7 attended, only layers 0, 1")
    with message, edit_outputs(model, lambda site, call: None, [(7, 0)]):
        model(texts())


@pytest.mark.parametrize("name", [3, "L0H1", (0,), (0, 1, 2), (0, 1.0), (None, 1), (0, True)])
def test_what_is_no_name_is_reported(name):
    with pytest.raises(ProblemError, match="names no head"), edit_outputs(None, lambda site, call: None, [name]):
        pass


@pytest.mark.parametrize("name", [(np.int64(1), np.int32(3)), (torch.tensor(1), torch.tensor(3))])
def test_whatever_counts_as_an_integer_names_a_head(name):
    model = decoder()
    with edit_outputs(model, lambda site, call: None, [name]) as sites:
        model(texts())
    assert sites.named == ((1, 3),)
    assert [type(part) for part in sites.named[0]] == [int, int]


def test_what_is_no_list_of_names_is_reported():
    with (
        pytest.raises(ProblemError, match="heads is 3: expected a list of names"),
        edit_outputs(None, lambda s, c: None, 3),
    ):
        pass


def test_attention_that_is_not_regards_is_reported():
    model = zoo.model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ProblemError, match="none of its attention is regard's"):
        heads_of(model, lambda: model(zoo.tokens()))
    with pytest.raises(ProblemError, match="called no attention"):
        heads_of(None, lambda: 1)


def test_calls_of_another_model_are_left_and_add_no_heads():
    model, other, ids = decoder(), decoder(), texts()
    before, of_other = model(ids), other(ids)
    with edit_outputs(model, lambda site, call: call.out * 0, [(1, 0)]) as sites:
        assert torch.equal(other(ids), of_other)
        assert not torch.equal(model(ids), before)
        assert torch.equal(other(ids), of_other)
    assert sites.names() == tuple((layer, head) for layer in (0, 1) for head in range(4))


def test_a_failure_inside_is_what_comes_out():
    model = decoder()
    with pytest.raises(KeyError), edit_outputs(model, lambda site, call: None, [(7, 0)]):
        raise KeyError


def test_nothing_stays_on_the_model():
    model, ids = decoder(), texts()
    before = model(ids)
    with edit_outputs(model, lambda site, call: call.out * 0):
        assert not torch.equal(model(ids), before)
    assert torch.equal(model(ids), before)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_layer_is_the_path_up_to_its_first_number():
    assert whole_layer("transformer.h.11.attn") == "transformer.h.11"
    assert whole_layer("encoder.block.0.layer.1.SelfAttention") == "encoder.block.0"
    assert whole_layer("attention") == "attention"


def test_modules_are_found_by_path():
    model = decoder()
    assert module_at(model, "body.blocks.1") is model.body.blocks[1]
    with pytest.raises(ProblemError, match=r"no module 'body\.blocks\.9'"):
        module_at(model, "body.blocks.9")
