"""Copying: circuits whose effect is known, and the circuits of models against what their own modules compute."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils.prune import l1_unstructured
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from regard.errors import ProblemError
from regard.inspect.measures import Circuit, Vocabulary, circuit_of, circuits, copying, copying_eigenvalues
from regard.integrate.modules import attention_of
from regard.nn import Decoder, LatentAttention, MultiHeadAttention

EYE = torch.eye(40)


def head(effect):
    """The circuit of a head that adds `effect` [x, y] to the expectation of y when it looks at x."""
    return Circuit(EYE[None], effect.float()[None])


def test_a_head_that_raises_what_it_looks_at_copies():
    tokens = Vocabulary(EYE, EYE)
    assert copying(head(EYE), tokens).value.tolist() == [[1.0]] * 8
    assert copying(head(EYE + 1), tokens).value.tolist() == [[1.0]] * 8  # raising all tokens alike is no raising
    assert copying_eigenvalues(head(EYE), tokens).value.item() == pytest.approx(1)


def test_a_head_that_lowers_what_it_looks_at_does_the_opposite():
    tokens = Vocabulary(EYE, EYE)
    assert copying(head(-EYE), tokens).value.tolist() == [[0.0]] * 8
    assert copying_eigenvalues(head(-EYE), tokens).value.item() == pytest.approx(-1)


def test_a_head_that_raises_the_next_token_does_not_copy():
    """The eigenvalues of a cycle are the roots of unity, whose sum is 0."""
    found = copying(head(EYE.roll(1, 1)), Vocabulary(EYE, EYE))
    assert found.value.tolist() == [[0.0]] * 8
    assert copying_eigenvalues(head(EYE.roll(1, 1)), Vocabulary(EYE, EYE)).value.item() == pytest.approx(0, abs=1e-6)


def test_half_of_what_is_raised():
    """Pairs of tokens that raise each other as much as themselves; only these are drawn, all of them."""
    pairs = torch.arange(24)
    effect = torch.zeros(40, 40)
    effect[pairs, pairs] = effect[pairs, pairs ^ 1] = 1
    found = copying(head(effect), Vocabulary(EYE, EYE, drawn_from=pairs))
    torch.testing.assert_close(found.value, torch.full((8, 1), 0.5))
    assert found.chance[0, 0].item() == pytest.approx(1 / 24)


def test_random_heads_score_about_their_chance():
    torch.manual_seed(0)
    tokens = Vocabulary(torch.randn(500, 16), torch.randn(500, 16))
    random = Circuit(torch.randn(64, 4, 16), torch.randn(64, 4, 16))
    score = copying(random, tokens)
    assert score.chance.unique().item() == pytest.approx(1 / 25)
    assert score.mean().mean().item() == pytest.approx(1 / 25, abs=0.01)
    assert copying_eigenvalues(random, tokens).value.mean().item() == pytest.approx(0, abs=0.1)


def test_eigenvalues_are_those_of_the_matrix_of_the_vocabulary():
    torch.manual_seed(1)
    tokens = Vocabulary(torch.randn(31, 8), torch.randn(31, 8))
    circuit = Circuit(torch.randn(2, 3, 8), torch.randn(4, 3, 8))
    found = copying_eigenvalues(circuit, tokens).value[0]
    for h in range(4):
        whole = tokens.unembedding @ circuit.w_o[h].mT @ circuit.w_v[h // 2] @ tokens.embedding.mT
        eigenvalues = torch.linalg.eigvals(whole.double())
        assert found[h].item() == pytest.approx((eigenvalues.sum().real / eigenvalues.abs().sum()).item(), abs=1e-4)


SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 6}
SHARED = SIZES | {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0}
LATENT = SIZES | {
    "num_key_value_heads": 6, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 5, "first_k_dense_replace": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHARED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHARED)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=3, pad_token_id=0, eos_token_id=1)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHARED)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, rope_parameters=ROPE)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT)),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(2)
    made = MODELS[request.param]().eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:  # gains that differ, and no biases: a circuit has none
            torch.nn.init.zeros_(parameter) if name.endswith("bias") else torch.nn.init.normal_(parameter, 0.7, 0.3)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    return made


def direct(model, layer):
    """What head h raises when it looks at token x, by the model's own modules: [heads, x, y], up to a factor per x."""
    attention = attention_of(layer.self_attn if hasattr(layer, "self_attn") else layer.attention, model.config)
    last = model.base_model.final_layer_norm if hasattr(model.base_model, "final_layer_norm") else model.base_model.norm
    x = layer.input_layernorm(model.get_input_embeddings().weight)
    if isinstance(attention, LatentAttention):
        assert attention.kv_norm is not None
        v = attention.v_up(attention.kv_norm(attention.kv_down(x))).unflatten(1, (attention.kv_heads, -1))
    else:
        v = attention.v_proj(x).unflatten(1, (attention.kv_heads, -1))
    v = v.repeat_interleave(attention.heads // attention.kv_heads, dim=1)  # [x, heads, v_dim]
    found = []
    for h in range(attention.heads):
        alone = torch.zeros_like(v)
        alone[:, h] = v[:, h]
        found.append(model.get_output_embeddings()(last(attention.o_proj(alone.flatten(1)))))
    return torch.stack(found)


@torch.no_grad()
def test_the_circuits_of_a_model_are_its_direct_path(model):
    made, tokens = circuits(model)
    for circuit, layer in zip(made, model.base_model.layers, strict=True):
        group = len(circuit.w_o) // len(circuit.w_v)
        v = torch.einsum("xm,hvm->hxv", tokens.embedding, circuit.w_v).repeat_interleave(group, dim=0)
        ours = v @ circuit.w_o @ tokens.unembedding.mT
        theirs = direct(model, layer)
        unit = torch.nn.functional.normalize
        torch.testing.assert_close(unit(ours, dim=-1), unit(theirs, dim=-1), atol=2e-3, rtol=0)  # eps of small norms
        assert copying(circuit, tokens).value.shape == (8, 6)


@torch.no_grad()
@pytest.mark.parametrize("attention", [MultiHeadAttention, "latent"])
def test_the_circuits_of_a_decoder(attention):
    torch.manual_seed(3)

    def latent(d_model, heads, **words):
        return LatentAttention(d_model, heads, kv_rank=8, nope_dim=4, rope_dim=0, v_dim=5, norm=False, **words)

    model = Decoder(37, 24, layers=2, heads=4, attention=latent if attention == "latent" else attention)
    made, tokens = circuits(model)
    x = model.body.blocks[0].attention_norm(model.body.embedding.weight * 24**0.5)
    one: Any = model.body.blocks[0].attention
    v = one.v_up(one.kv_down(x)) if attention == "latent" else one.v_proj(x)
    alone = v.unflatten(1, (4, -1)) * torch.tensor([0.0, 1, 0, 0])[:, None]
    theirs = model.unembedding(model.body.norm(one.o_proj(alone.flatten(1))))
    ours = tokens.embedding @ made[0].w_v[1].mT @ made[0].w_o[1] @ tokens.unembedding.mT
    unit = torch.nn.functional.normalize
    torch.testing.assert_close(unit(ours, dim=-1), unit(theirs, dim=-1), atol=2e-3, rtol=0)


def test_what_has_no_circuit_is_refused():
    bert = BertForMaskedLM(BertConfig(**SIZES))
    with pytest.raises(ProblemError, match=r"BertForMaskedLM \(bert\): expected a Decoder .* llama"):
        circuits(bert)
    after = {"do_layer_norm_before": False, "ffn_dim": 16, "word_embed_proj_dim": 24}
    opt = OPTForCausalLM(OPTConfig(**SIZES, **after, pad_token_id=0, bos_token_id=0, eos_token_id=0))
    with pytest.raises(ProblemError, match=r"\(opt\) of this config differs: its norms come after"):
        circuits(opt)
    with pytest.raises(ProblemError, match=r"are not loaded \(on the meta device\)"):
        circuits(LlamaForCausalLM(LlamaConfig(**SHARED)).to("meta"))
    with pytest.raises(ProblemError, match="has a gate"):
        circuit_of(MultiHeadAttention(8, heads=2, gate=True))
    with pytest.raises(ProblemError, match="1 tokens to draw from"):
        copying(head(EYE), Vocabulary(EYE, EYE, drawn_from=torch.tensor([3])))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"drawn_from": [1, 3, 99]}, "drawn_from has ids up to 99: expected 0 to"),
        ({"drawn_from": torch.rand(5)}, "tokens is torch.float32"),
        ({"sequences": 0}, "0 sequences, .* expected 1 and 2 at least"),
    ],
)
def test_tokens_that_cannot_be_copied_are_refused(asked, message):
    drawn_from, sequences = asked.get("drawn_from"), asked.get("sequences", 8)
    with pytest.raises(ProblemError, match=message):
        copying(head(EYE), Vocabulary(EYE, EYE, drawn_from), sequences=sequences)


@pytest.mark.parametrize("measure", [copying, copying_eigenvalues])
def test_a_circuit_and_a_vocabulary_are_of_one_width(measure):
    with pytest.raises(ProblemError, match=r"w_v is .* expected \[kv_heads, v_dim, d_model\]"):
        measure(head(EYE), Vocabulary(EYE[:, :3], EYE[:, :3]))


@pytest.mark.parametrize(
    "kind", [MultiHeadAttention, partial(LatentAttention, kv_rank=5, nope_dim=4, rope_dim=0, v_dim=4)]
)
def test_a_circuit_has_the_pruned_weights_of_now(kind):
    module = kind(8, heads=2)
    values, before = module.v_proj if kind is MultiHeadAttention else module.v_up, circuit_of(module).w_v.clone()
    l1_unstructured(values, "weight", 0.0)
    with torch.no_grad():
        values.weight_orig.mul_(2)
    torch.testing.assert_close(circuit_of(module).w_v, 2 * before)


@pytest.mark.parametrize("kind", ["regard", "transformers"])
def test_a_vocabulary_has_the_pruned_weights_of_now(kind):
    torch.manual_seed(3)
    if kind == "regard":
        model: Any = Decoder(37, 24, layers=1, heads=4)
        table = model.unembedding
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        table = model.lm_head
    before = circuits(model)[1].unembedding.clone()
    l1_unstructured(table, "weight", 0.0)
    with torch.no_grad():
        table.weight_orig.mul_(2)
    torch.testing.assert_close(circuits(model)[1].unembedding, 2 * before)
