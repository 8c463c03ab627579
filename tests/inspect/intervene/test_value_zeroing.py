"""Value zeroing equals the layer run again with a value that is zero."""

from functools import partial
from threading import Thread

import pytest
import torch

from regard.errors import ProblemError
from regard.inspect.intervene.ablate import ablated
from regard.inspect.intervene.value_zeroing import value_zeroing
from regard.inspect.observing.observe import observe
from regard.integrate.transformers import use_regard
from regard.nn import Decoder, MultiHeadAttention
from tests.inspect.intervene.models import DRAWN, Hiding, Stack, albert, decoder, dropping, stack_input, texts
from tests.integrate import zoo


def by_hand(model, ids, block, values, token, run=0):
    """The cosine distances of a layer's outputs, with a token's value zeroed behind the projection `values`.

    Args:
        run: which run of the block is the layer, where layers share weights.
    """
    found, projected = [], []

    def zero(module, arguments, output):
        projected.append(output)
        return output.index_fill(1, torch.tensor([token]), 0.0) if len(projected) == run + 1 else None

    take = block.register_forward_hook(lambda m, a, out: found.append(out))
    with torch.no_grad():
        model(ids)
        hook = values.register_forward_hook(zero)
        model(ids)
    hook.remove()
    take.remove()
    before, after = found[run], found[len(found) // 2 + run]
    return 1 - torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)


@pytest.mark.parametrize("layer", [0, 1])
def test_it_is_the_layer_without_the_value(layer):
    model, ids, ticks = zoo.model("llama"), zoo.tokens(), []
    use_regard(model)
    found = value_zeroing(model, lambda: model(ids), layer, [0, 5, -1], tick=lambda: ticks.append(1))
    assert found.tokens == (0, 5, 12)
    assert found.module == f"model.layers.{layer}"
    block = model.model.layers[layer]
    for place, token in enumerate(found.tokens):
        expected = by_hand(model, ids, block, block.self_attn.v_proj, token)
        assert torch.allclose(found.distances[:, place], expected, atol=1e-6)
    assert found.distances[:, 1, 5:].min() > 1e-6
    assert len(ticks) == 4


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_with_shared_weights_is_one_run_of_its_module(layer):
    model, ids = albert(), texts()
    block = model.encoder.albert_layer_groups[0].albert_layers[0]
    expected = by_hand(model, ids, block, block.attention.value, 4, run=layer)
    use_regard(model)
    found = value_zeroing(model, lambda: model(ids), layer, [4])
    assert found.module == "encoder.albert_layer_groups.0"
    torch.testing.assert_close(found.distances[:, 0], expected, atol=1e-9, rtol=0)


def test_the_path_of_a_module_that_runs_several_times_is_its_first_run():
    model, ids = albert(), texts()
    use_regard(model)
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    first, named = (value_zeroing(model, lambda: model(ids), layer, [4]).distances for layer in (0, path))
    assert torch.equal(named, first)


def test_rows_that_do_not_see_the_token_do_not_change():
    model, ids = decoder(sharp=1), texts()
    found = value_zeroing(model, lambda: model(ids), 1, [6]).distances
    assert found[..., :6].abs().max() < 1e-12 < found[..., 6:].min()


def test_the_rest_of_the_model_does_not_run():
    model, ids, ran = decoder(), texts(), []
    hook = model.body.blocks[1].register_forward_hook(lambda m, a, out: ran.append(1))
    value_zeroing(model, lambda: model(ids), 0, [0, 1, 2])
    hook.remove()
    assert len(ran) == 1  # to see which layers there are


def test_blocks_around_it_go_on_with_the_right_layers():
    model, ids = decoder(), texts()
    with torch.no_grad(), observe(model) as calls:
        value_zeroing(model, lambda: model(ids), 0, [0])
        before = len(calls)
        model(ids)
    assert [call.layer for call in calls[before:]] == [0, 1]
    with ablated(model, [(0, 1)]):
        found = value_zeroing(model, lambda: model(ids), 1, [0, 5])
    with torch.no_grad():
        model.body.blocks[0].attention.o_proj.weight[:, 8:16] = 0
    expected = value_zeroing(model, lambda: model(ids), 1, [0, 5]).distances
    torch.testing.assert_close(found.distances, expected, atol=1e-12, rtol=0)


def test_another_thread_that_runs_the_model_runs_to_its_end():
    model, ids, outputs = decoder(), texts(), []
    expected = value_zeroing(model, lambda: model(ids), 0, [3]).distances
    whole = model(ids)
    other = Thread(target=lambda: outputs.append(model(ids)))

    def run_other(module, arguments):
        if other.ident is None:
            other.start()
            other.join()

    runs = iter([lambda: None, lambda: model.body.blocks[0].mlp.register_forward_pre_hook(run_other), lambda: None])

    def run():
        next(runs)()
        model(ids)

    assert torch.equal(value_zeroing(model, run, 0, [3]).distances, expected)
    assert torch.equal(outputs[0], whole)


def test_dropout_is_refused():
    ids = texts()
    model = Decoder(19, 32, 2, 4, attention=partial(MultiHeadAttention, dropout=0.5)).train()
    with pytest.raises(ProblemError, match=r"layer 1 drops weights \(dropout 0\.5\): call model\.eval\(\) first"):
        value_zeroing(model, lambda: model(ids), 1, [3])
    model = dropping()
    with pytest.raises(ProblemError, match=DRAWN):
        value_zeroing(model, lambda: model(ids), 0, [3])
    assert value_zeroing(model.eval(), lambda: model(ids), 0, [3]).distances.shape == (5, 1, 11)


def test_another_module_can_be_compared():
    model, x = Stack(), stack_input()
    found = value_zeroing(model, lambda: model(x), 1, [0], module="layers.2")
    assert found.module == "layers.2"
    assert not torch.allclose(found.distances, value_zeroing(model, lambda: model(x), 1, [0]).distances)


def test_cross_attention_is_named_by_its_path():
    model, ids = zoo.model("t5"), zoo.tokens()
    use_regard(model)
    path = "decoder.block.1.layer.1.EncDecAttention"
    found = value_zeroing(model, lambda: model(ids, decoder_input_ids=ids[:, :5]), path, [12])
    assert found.module == "decoder.block.1"
    assert found.distances.shape == (2, 1, 5)
    assert found.distances.min() > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": 7}, "no layer 7 attended"),
        ({"layer": 1.5}, r"layer is 1\.5: expected its number from 0, or the path"),
        ({"tokens": [0.5]}, r"token 0\.5 does not exist"),
        ({"tokens": [11]}, "token 11 does not exist: there are 11, expected 0 to 10"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": 0}, r"tokens is 0: expected a list, such as \[0\]"),
        ({"tokens": 3}, "tokens is 3: expected a list"),
        ({"module": "body.blocks.5"}, "no module 'body.blocks.5'"),
        ({"module": "body.blocks"}, "did not run"),
        ({"module": "body.embedding"}, "'body.embedding' did not run after layer 0 attended"),
    ],
)
def test_what_does_not_exist_is_reported(changed, message):
    model, ids = decoder(), texts()
    with pytest.raises(ProblemError, match=message):
        value_zeroing(model, lambda: model(ids), **{"layer": 0, "tokens": [0]} | changed)


def test_tokens_may_be_a_tensor():
    model, ids = decoder(), texts()
    found, expected = (value_zeroing(model, lambda: model(ids), 1, named) for named in (torch.tensor([0, -1]), [0, -1]))
    assert found.tokens == (0, 10)
    assert torch.equal(found.distances, expected.distances)


def test_nothing_stays_on_the_model():
    model, ids = decoder(), texts()
    before = model(ids)
    value_zeroing(model, lambda: model(ids), 0, [3])
    assert torch.equal(model(ids), before)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_hidden_values_that_are_nan_do_not_count():
    model, x = Hiding(4), torch.randn(1, 6, 8)
    found, clean = (
        value_zeroing(model, lambda v=v: model(x, v), 0, [0, 5], module="layers.0").distances for v in (torch.nan, 0.0)
    )
    assert torch.equal(found, clean)
    assert found[:, 1].abs().max() < 1e-12 < found[:, 0].max()  # no query sees token 5
