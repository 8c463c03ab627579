"""The rotation of a model's keys as a word, or a refusal; never a wrong one."""

from typing import Any

import pytest
import torch
import transformers

from regard import ProblemError
from regard.cache import ExpectedAttention
from regard.describe.position import Rope
from regard.describe.rope_scaling import Linear, Llama3, Proportional, Yarn
from regard.integrate.cache import regard_cache
from regard.integrate.cache_rope import rope_for
from regard.integrate.transformers import use_regard
from regard.storage.stored import Rolling
from tests.integrate.writing import on_regard
from tests.integrate.zoo import tokens, with_cache

SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}

GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}

FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16}

TRAINED = {"original_max_position_embeddings": 64}


def rope(kind: str, **more: Any) -> Rope:
    config = transformers.AutoConfig.for_model(kind, **SIZES | more)
    return rope_for(config)


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("llama", {}, Rope(8)),
        ("llama", scaled("linear", factor=3.0), Rope(8, 500.0, Linear(3.0))),
        (
            "llama",
            scaled("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **TRAINED),
            Rope(8, 500.0, Llama3(4.0, 1.0, 4.0, 64)),
        ),
        (
            "qwen3",
            scaled("yarn", factor=4.0, **TRAINED) | {"head_dim": 16},
            Rope(16, 500.0, Yarn(4.0, 64, attention_factor=0.1 * torch.tensor(4.0).log().item() + 1)),
        ),
        ("gpt_neox", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}, Rope(8, fraction=0.5)),
        ("phi", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}, Rope(8, fraction=0.5)),
        ("cohere", {}, Rope(8, 500000.0, interleaved=True)),
        ("gemma4_text", GEMMA4, Rope(32, 1000000.0, Proportional(0.25))),
        ("granitemoehybrid", FULL | MAMBA | {"position_embedding_type": "rope"}, Rope(8)),
        ("granite_swa", FULL, Rope(8)),
        ("moshi", {}, Rope(8)),
        ("dory", {"head_dim": 8, "num_hidden_layers": 4}, Rope(8, 10000000.0)),
        ("gemma3_text", {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}, Rope(16, 1000000.0)),
    ],
    ids=[
        "plain", "linear", "llama3", "yarn", "half of gpt_neox", "half of phi", "neighbours", "a share of the pairs",
        "a type of position", "a base for each layer", "own angles", "layers that run again", "per kind of layer",
    ],
)  # fmt: skip
def test_a_rotation_is_written_as_a_rope(kind: str, more: dict[str, Any], expected: Rope):
    found = rope(kind, **more)
    x = torch.randn(1, 1, 3, found.dim)
    assert torch.allclose(found.rotate(x, 5), expected.rotate(x, 5), atol=1e-5)
    assert (found.dim, found.fraction, found.interleaved) == (expected.dim, expected.fraction, expected.interleaved)


def test_a_config_of_several_decoders_is_refused():
    with pytest.raises(ProblemError, match="its config does not tell its layers"):
        rope_for(transformers.AutoConfig.for_model("blt"))


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("gpt2", {}, "a gpt2 model: its keys are not rotated by a rotary embedding"),
        ("opt", {}, "its keys are not rotated by a rotary embedding"),
        ("t5", {}, "its keys are not rotated by a rotary embedding"),
        ("bloom", {}, "its keys are not rotated by a rotary embedding"),
        ("llama", scaled("dynamic", factor=2.0), "the angles of DynamicNTK change as the text grows"),
        ("cohere2", {"num_hidden_layers": 4}, "Cohere2Attention does not rotate the keys of all layers"),
        ("smollm3", {"num_hidden_layers": 4}, "SmolLM3Attention does not rotate the keys of all layers"),
        ("exaone4", {"num_hidden_layers": 4}, "Exaone4Attention does not rotate the keys of all layers"),
        ("granitemoehybrid", FULL | MAMBA, "position_embedding_type is None, so the keys of some layers"),
        ("granite_swa", FULL | {"layer_rope_theta": [0, 0]}, "layer_rope_theta is .0, 0., so the keys"),
        ("granite_swa", FULL | {"layer_rope_theta": [10000.0, 500.0]}, "layer_rope_theta is .10000.0, 500.0., so"),
        ("muse_glimmer_text", {}, "layer_rope_theta is .10000.0, 0., so the keys of some layers"),
        ("lara_mini", {}, "its attention runs without angles as well, so the keys of some layers"),
        ("qwen2_vl_text", {}, "one position per token|cannot be tried by itself"),
        ("falcon", {}, "its attention cannot be tried by itself"),
    ],
    ids=[
        "gpt2", "opt", "t5", "bloom", "dynamic", "cohere2", "smollm3", "exaone4", "no angles", "bases of 0",
        "two bases", "a base of 0", "perhaps no angles", "three positions", "falcon",
    ],
)  # fmt: skip
def test_another_way_is_refused_with_what_to_do(kind: str, more: dict[str, Any], message: str):
    with pytest.raises(ProblemError, match=message) as raised:
        rope(kind, **more)
    assert "evict=" in str(raised.value)


@pytest.mark.parametrize(("name", "expected"), [("llama", Rope(8)), ("gpt2", None)])
def test_expected_attention_is_given_the_rotation_that_there_is(name: str, expected: Rope | None):
    cache = regard_cache(on_regard(name), evict=ExpectedAttention(11))
    assert [layer.kv.evict for layer in cache.layers] == [ExpectedAttention(11, rope=expected)] * 2


def test_a_rotation_that_expected_attention_has_already_stays():
    given = ExpectedAttention(11, rope=Rope(8, 77.0))
    assert regard_cache(on_regard("llama"), evict=given).layers[0].kv.evict == given


def test_keys_that_are_scaled_by_channel_after_their_rotation_are_refused():
    """HunYuan has its norm there: a Rope that rotates such keys on gives other ones."""
    with pytest.raises(ProblemError, match="HunYuanDenseV1Attention rotates keys in another way than a Rope does"):
        rope("hunyuan_v1_dense", head_dim=8)


def test_a_forward_that_is_wrapped_is_tried_like_any_other(monkeypatch: pytest.MonkeyPatch):
    """No source of it can be read."""
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    forward = attention.forward

    def scaled_keys(self: Any, hidden_states: Any, position_embeddings: Any, cache: Any = None) -> Any:
        cos, sin = position_embeddings
        return forward(self, hidden_states, (cos, -sin), None, cache)

    monkeypatch.setattr(attention, "forward", scaled_keys)
    with pytest.raises(ProblemError, match="LlamaAttention rotates keys in another way"):
        rope("llama")


def test_a_layer_rotates_its_keys_or_not_by_its_own_kind():
    sizes = SIZES | {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "sliding_window": 4}
    with pytest.raises(ProblemError, match="does not rotate the keys of all layers"):
        rope("cohere2", **sizes)
    assert rope("smollm3", num_hidden_layers=4, no_rope_layers=[1] * 4) == Rope(8, 2000000.0)


def test_the_sinks_of_gemma_4_are_rotated_by_what_was_dropped():
    sizes: dict[str, Any] = {"vocab_size": 101, "intermediate_size": 48, "vocab_size_per_layer_input": 101}
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**SIZES | GEMMA4 | sizes, hidden_size_per_layer_input=8)
    m = use_regard(transformers.Gemma4ForCausalLM(config).eval())
    ids, rolling, whole = tokens(1, 30), regard_cache(m, layout=Rolling(9, sinks=2)), regard_cache(m)
    with torch.no_grad():
        for one in ids.split(1, dim=1):
            m(one, **with_cache(rolling))
        m(ids[:, :2], **with_cache(whole))
    sinks, first = rolling.layers[1].keys[:, :, :2], whole.layers[1].keys
    rope = rolling.layers[1].kv.layout.rope
    assert torch.allclose(rope.rotate(first, torch.full((1, 2), 30 - 9)), sinks, atol=1e-5)
    assert not torch.allclose(first, sinks, atol=1e-2)
    assert regard_cache(m, evict=ExpectedAttention(9)).layers[1].kv.evict.rope == rope
