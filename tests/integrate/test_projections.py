"""Projections of attention layers, against what the layers of transformers compute with them."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from regard.errors import ProblemError
from regard.inspect.measures.circuits import circuits, parts_of
from regard.integrate.projections import affine_of, has_matrix, output_projection, projections_of
from tests.integrate.quantised import Quantised, quantise

HEADS = 6
SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS}
GPT: dict[str, Any] = {"vocab_size": 37, "n_positions": 8, "n_embd": 24, "n_layer": 2, "n_head": HEADS}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
WIDE: dict[str, Any] = SIZES | {"intermediate_size": 16, "num_key_value_heads": 3}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WIDE, **ENDS)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**WIDE, **ENDS)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**WIDE, **ENDS)),
    "stablelm": lambda: StableLmForCausalLM(StableLmConfig(**WIDE, **ENDS)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **ENDS, intermediate_size=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT, **ENDS)),
    "gpt_bigcode of one key head": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**GPT, **ENDS)),
    "gpt_bigcode": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**GPT, **ENDS, multi_query=False)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, **ENDS, ffn_dim=16, word_embed_proj_dim=24)),
    "falcon of one key head": lambda: FalconForCausalLM(FalconConfig(**SIZES, **ENDS)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SIZES, **ENDS, multi_query=False, parallel_attn=False)),
    "falcon of three key heads": lambda: FalconForCausalLM(
        FalconConfig(**SIZES, **ENDS, new_decoder_architecture=True, num_kv_heads=3)
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=37, hidden_size=24, n_layer=2, n_head=HEADS, **ENDS)),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(5)
    made = MODELS[request.param]().eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    return made


def ran(model):
    """Inputs and outputs of each module on two texts of one token, where attention is value and output projection."""
    found: dict[nn.Module, tuple[Any, Any]] = {}

    def keep(module, given, named, out):
        into = given[0] if given else named.get("hidden_states")
        found[module] = into, out[0] if isinstance(out, tuple) else out

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in model.modules()]
    with torch.no_grad():
        model(input_ids=torch.tensor([[3], [5]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def test_values_and_outputs_are_those_of_the_layer(model):
    found = ran(model)
    for attention, norm in parts_of(model).layers:
        o, v = projections_of(attention, model.config).o, projections_of(attention, model.config).v
        (x, y), residual = found[attention], found[norm][0]
        y = y - residual if model.config.model_type == "bloom" else y  # which adds it within attention
        width = o.weight.shape[1] // HEADS
        values = nn.functional.linear(x, *v).unflatten(-1, (-1, width))
        values = values.repeat_interleave(HEADS // values.shape[-2], dim=-2).flatten(-2)
        torch.testing.assert_close(nn.functional.linear(values, *o), y.view_as(values), atol=1e-5, rtol=1e-5)


def test_the_norms_of_circuits_are_those_that_ran_before_attention_and_last(model):
    found, parts = ran(model), parts_of(model)
    for attention, norm in parts.layers:
        assert torch.equal(found[norm][1], found[attention][0])
    assert torch.equal(found[parts.last][1], found[model.get_output_embeddings()][0])
    assert len(circuits(model)[0]) == 2


def test_the_direct_path_of_a_token_is_what_circuits_say(model):
    """Without biases and positions: embedding, norm, values, output, last norm, unembedding; up to a factor."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    parts, (made, vocabulary) = parts_of(model), circuits(model)
    with torch.no_grad():
        for (attention, norm), circuit in zip(parts.layers, made, strict=True):
            e = parts.embedding if parts.embedding_norm is None else parts.embedding_norm(parts.embedding)
            o, v = projections_of(attention, model.config).o, projections_of(attention, model.config).v
            values = (norm(e) @ v.weight.mT).unflatten(-1, (-1, circuit.w_o.shape[1]))
            group = HEADS // values.shape[1]
            heads = values.repeat_interleave(group, dim=1) * nn.functional.one_hot(torch.tensor(4), HEADS)[:, None]
            theirs = model.get_output_embeddings()(parts.last(heads.flatten(1) @ o.weight.mT))
            ours = vocabulary.embedding @ circuit.w_v[4 // group].mT @ circuit.w_o[4] @ vocabulary.unembedding.mT
            unit = nn.functional.normalize
            torch.testing.assert_close(unit(ours, dim=-1), unit(theirs, dim=-1), atol=2e-3, rtol=0)


def test_a_projection_that_is_no_matrix_of_floats_is_refused():
    quantised = nn.Linear(4, 4)
    quantised.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ProblemError, match="whose weight is no matrix of floats: load the model without quantisation"):
        affine_of(quantised)


def test_a_quantised_weight_that_says_it_is_of_floats_is_refused():
    layer, sharded = nn.Linear(4, 4), nn.Linear(4, 4)
    quantise(layer)
    assert layer.weight.is_floating_point()
    with pytest.raises(ProblemError, match="a projection is Linear, whose weight is no matrix of floats"):
        affine_of(layer)
    quantise(sharded)
    sharded.weight.__class__ = type("DTensor", (Quantised,), {})
    assert has_matrix(sharded)


def test_a_projection_with_an_adapter_is_refused():
    class Adapted(nn.Linear):
        def forward(self, input):  # noqa: A002  # the name of nn.Linear
            return 2 * super().forward(input)

    with pytest.raises(ProblemError, match="a projection is a Adapted with a forward of its own: merge the adapter"):
        affine_of(Adapted(4, 4))


def test_an_output_of_another_width_is_none():
    layer = nn.Module()
    layer.dense = nn.Linear(12, 4)
    found = output_projection(layer, 12)
    assert found is not None
    assert found.weight is layer.dense.weight
    assert output_projection(layer, 8) is None
