"""Layers of transformers as modules of regard: the same outputs; and each type of rotation as its word."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from regard.cache import KVCache
from regard.describe.position import Rope
from regard.describe.rope_scaling import DynamicNTK, Linear, Llama3, LongRope, Proportional, Yarn
from regard.errors import ProblemError, RefusalError
from regard.integrate.modules import attention_of, rope_of, scaling_of, with_weights_of
from regard.nn.latent import LatentAttention
from regard.nn.share_heads import share_heads
from regard.nn.to_latent import to_latent

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 14, "q_lora_rank": 11, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
    "v_head_dim": 5, "first_k_dense_replace": 2, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "head_dim": 6}),
    "llama 3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "llama of which every token sees every other": ("llama", {"is_causal": False}),
    "mistral with a window to both sides": ("mistral", {"sliding_window": 5, "is_causal": False}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),
    "qwen2 whose other layer has the window": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("qwen3", {"head_dim": 10, "rms_norm_eps": 1e-2}),
    "arcee": ("arcee", {}),
    "gemma": ("gemma", {"head_dim": 6}),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "mixtral": ("mixtral", EXPERTS | {"sliding_window": 5}),
    "nemotron": ("nemotron", {}),
    "qwen2_moe": ("qwen2_moe", EXPERTS),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 6}),
    "seed_oss": ("seed_oss", {"head_dim": 6, "attention_bias": True, "attention_out_bias": False}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "phi3": ("phi3", {"sliding_window": 5}),
    "phi3 longrope": ("phi3", {"original_max_position_embeddings": 7, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 7}}),
    "gpt_neox": ("gpt_neox", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "nemotron that rotates a quarter": ("nemotron", {"rope_parameters": {
        "rope_theta": 500.0, "partial_rotary_factor": 0.25}}),
    "llama, which ignores the share to rotate": ("llama", {"rope_parameters": {
        "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "gpt_neox without biases": ("gpt_neox", {"attention_bias": False}),
    "deepseek_v2": ("deepseek_v2", LATENT),
    "deepseek_v2 without a latent of queries": ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "deepseek_v2 yarn": ("deepseek_v2", LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3 with biases": ("deepseek_v3", LATENT | {"attention_bias": True}),
    "deepseek_v3 of which every token sees every other": ("deepseek_v3", LATENT | {"is_causal": False}),
    "deepseek_v3 yarn": ("deepseek_v3", LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3 side by side": ("deepseek_v3", LATENT | {"rope_interleave": False, "q_lora_rank": None}),
}  # fmt: skip


def watched(name: str, tokens: int = 13, unbiased: Sequence[str] = ()) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """(the second attention layer of a model, its config, what it is given there, what it gives).

    Args:
        unbiased: the names of projections of the layer whose biases are removed.
    """
    kind, more = LAYERS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **(SIZES | more)), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for label, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.4 + (1.0 if "norm" in label and "weight" in label else 0.0))
    layers = getattr(model, "gpt_neox", None) or model.model
    layer = getattr(layers.layers[1], "attention", None) or layers.layers[1].self_attn
    for part in unbiased:
        getattr(layer, part).bias = None
    seen: list[torch.Tensor] = []

    def see(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen.extend([kwargs.get("hidden_states", args[0] if args else None), out[0]])

    layer.register_forward_hook(see, with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(3, 101, (2, tokens)))
    return layer, model.config, seen[0], seen[1]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_taken_over_computes_the_same(name):
    layer, config, x, expected = watched(name)
    with torch.no_grad():
        torch.testing.assert_close(attention_of(layer, config)(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("name", [name for name in LAYERS if "deepseek" in name and "every" not in name])
def test_both_forms_of_a_latent_layer_compute_what_transformers_does_step_by_step(name, absorbed):
    layer, config, x, expected = watched(name)
    module, cache = attention_of(layer, config), KVCache()
    assert isinstance(module, LatentAttention)
    with torch.no_grad():
        steps = [module(part, cache=cache, absorbed=absorbed) for part in x.split([5, 1, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "without"),
    [("llama", "k_proj"), ("llama", "q_proj"), ("deepseek_v3", "q_a_proj"), ("deepseek_v3", "kv_a_proj_with_mqa")],
)
def test_a_projection_without_a_bias_beside_others_has_one_of_zeros(name: str, without: str):
    layer, config, x, expected = watched(f"{name} with biases", unbiased=[without])
    with torch.no_grad():
        torch.testing.assert_close(attention_of(layer, config)(x), expected, rtol=1e-5, atol=1e-5)


def test_a_bias_after_the_latent_is_refused():
    layer, config, *_ = watched("deepseek_v3")
    layer.kv_b_proj.bias = nn.Parameter(torch.ones(layer.kv_b_proj.out_features))
    with pytest.raises(ProblemError, match="kv_b_proj has a bias"):
        attention_of(layer, config)


def test_what_is_taken_over_is_a_copy():
    layer, config, x, expected = watched("llama")
    module = attention_of(layer, config)
    with torch.no_grad():
        layer.q_proj.weight.zero_()
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_a_trained_layer_can_be_pooled_and_factorised():
    layer, config, x, expected = watched("llama with biases")
    module = attention_of(layer, config)
    with torch.no_grad():
        assert share_heads(module, 1)(x).shape == expected.shape
        latent = to_latent(module, kv_rank=12).module  # 2 heads x 6 values, all keys turn
        torch.testing.assert_close(latent(x), expected, rtol=1e-4, atol=1e-5)


PROJECTIONS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "phi3": ["qkv_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "deepseek_v2 without a latent of queries": ["q_proj"],
}
EACH = [(kind, name) for kind, names in PROJECTIONS.items() for name in names]


class Adapted(nn.Linear):
    """A projection with an adapter, which its weight does not contain."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name of nn.Linear
        return super().forward(input) + input.sum(-1, keepdim=True)


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_projection_that_computes_more_than_its_weight_is_refused(kind: str, name: str):
    layer, config, _, _ = watched(kind)
    plain = getattr(layer, name)
    hook = plain.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(RefusalError, match=f"{name} has a forward hook, which may change its input or output"):
        attention_of(layer, config)
    hook.remove()
    plain.forward = lambda x: 2 * x
    with pytest.raises(RefusalError, match=f"{name} has a forward other than that of its class"):
        attention_of(layer, config)
    setattr(layer, name, Adapted(plain.in_features, plain.out_features, plain.bias is not None))
    with pytest.raises(RefusalError, match=f"{name} is a Adapted with a forward of its own: merge the adapter first"):
        attention_of(layer, config)
    with pytest.raises(ProblemError, match="a projection is a Adapted with a forward of its own"):
        with_weights_of(layer, config)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_weights_are_read_beside_the_hooks_of_an_observer(kind: str):
    layer, config, x, expected = watched(kind)
    for module in layer.modules():
        module.register_forward_hook(lambda module, args, out: None)
    with torch.no_grad():
        torch.testing.assert_close(with_weights_of(layer, config)(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PROJECTIONS)
@pytest.mark.parametrize("enabled", [True, False])
def test_weights_are_trained_where_those_of_the_layer_are(kind: str, enabled: bool):
    layer, config, _, _ = watched(kind)
    with torch.set_grad_enabled(enabled):
        assert all(weight.requires_grad for weight in attention_of(layer, config).parameters())
        layer.requires_grad_(False)
        assert not any(weight.requires_grad for weight in attention_of(layer, config).parameters())
        output = layer.dense if kind == "gpt_neox" else layer.o_proj
        output.weight.requires_grad_(True)
        trained = [name for name, p in attention_of(layer, config).named_parameters() if p.requires_grad]
    assert trained == ["o_proj.weight"]


def test_a_layer_of_another_model_is_refused():
    with pytest.raises(ProblemError, match="an attention layer of a gpt2 model: expected one of arcee, gemma"):
        attention_of(torch.nn.Identity(), transformers.GPT2Config())


ROTATIONS: dict[str, tuple[dict[str, Any], Rope]] = {
    "default": ({}, Rope(16, 700.0)),
    "linear": ({"factor": 3.0}, Rope(16, 700.0, Linear(3.0))),
    "proportional": ({"partial_rotary_factor": 0.5}, Rope(16, 700.0, Proportional(0.5))),
    "dynamic": ({"factor": 3.0}, Rope(16, 700.0, DynamicNTK(3.0, 64))),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        Rope(16, 700.0, Llama3(8.0, 1.0, 4.0, 32)),
    ),
    "longrope": (
        {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)],
         "original_max_position_embeddings": 32},
        Rope(16, 700.0, LongRope(tuple(1 + i / 8 for i in range(8)), tuple(1.0 + i for i in range(8)), 32, 2.0)),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0},
        Rope(16, 700.0, Yarn(4.0, 32, 4.0, attention_factor=1.1386294361119891)),
    ),
}  # fmt: skip
YARNS = [
    {"mscale": 1.0, "mscale_all_dim": 0.5},
    {"mscale": 0.7},
    {"mscale_all_dim": 0.7},
    {"attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": None},
    {"truncate": False},
]


def config_with(**rope: Any) -> Any:
    return transformers.LlamaConfig(
        head_dim=16, max_position_embeddings=64, rope_parameters={"rope_theta": 700.0} | rope
    )


@pytest.mark.parametrize("kind", ROTATIONS)
def test_a_rotation_becomes_its_word(kind):
    parameters, word = ROTATIONS[kind]
    assert rope_of(config_with(rope_type=kind, **parameters)) == word


@pytest.mark.parametrize(
    "parameters",
    [{"rope_type": kind} | parameters for kind, (parameters, _) in ROTATIONS.items() if kind != "default"]
    + [{"rope_type": "yarn"} | ROTATIONS["yarn"][0] | more for more in YARNS],
)
@pytest.mark.parametrize("tokens", [31, 97])
def test_the_rope_has_the_frequencies_and_the_factor_of_transformers(parameters, tokens):
    config = config_with(**parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=tokens)
    rope = rope_of(config)
    torch.testing.assert_close(rope.frequencies(tokens).float(), frequencies, rtol=1e-5, atol=1e-8)
    assert rope.attention_factor(tokens) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 1.0}}, "expected one rotation"),
        ({"rope_theta": 500.0, "rope_type": "spiral"}, "rope_type 'spiral' is not known"),
    ],
)
def test_a_rotation_that_no_rope_has_is_refused(parameters, why):
    config = config_with()
    config.rope_parameters = parameters
    with pytest.raises(ProblemError, match=why):
        rope_of(config)


@pytest.mark.parametrize(
    "parameters",
    [{"original_max_position_embeddings": 8, "beta_slow": 2.0, "truncate": False},  # every pair turns slowly
     {"original_max_position_embeddings": 100_000, "rope_theta": 10.0}],  # every pair turns fast
)  # fmt: skip
def test_a_ramp_of_transformers_that_falls_is_refused(parameters):
    config = config_with(rope_type="yarn", factor=4.0, **parameters)
    base, scaling = config.rope_parameters["rope_theta"], scaling_of(config.rope_parameters, config)
    frequencies, _ = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert not torch.allclose(Rope(16, base, scaling).frequencies().float(), frequencies)
    with pytest.raises(ProblemError, match="transformers' ramp falls there"):
        rope_of(config)


@pytest.mark.parametrize("config", [transformers.CohereConfig(), transformers.GlmConfig(), transformers.GPTJConfig()])
def test_the_rotation_of_a_model_that_is_not_taken_over_is_refused(config):
    with pytest.raises(ProblemError, match=f"the rotation of a {config.model_type} model: expected one of arcee"):
        rope_of(config)
