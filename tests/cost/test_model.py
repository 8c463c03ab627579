"""Shapes of models: the rows of models.toml against their published parameters, config.json against transformers."""

import json

import pytest

from regard.cost.config import from_config, read_config
from regard.cost.fields import from_fields
from regard.cost.model import Attention
from regard.cost.parameter_count import parameters
from regard.cost.published import find_model, load_model, model_names
from regard.errors import ProblemError

ROUNDED = {
    "transformer-base": 0.035,  # the paper rounds to 65 million, and leaves out the size of its vocabulary
    "transformer-big": 0.01,
    "gpt3": 0.005,
    "gpt3-13b": 0.005,
    "opt-175b": 0.005,
    "llama-4-scout": 0.02,  # published with the image encoder
    "llama-4-maverick": 0.01,
}
"""Relative error allowed where the source rounds; every other row has the exact parameters of a checkpoint."""


@pytest.mark.parametrize("name", model_names())
def test_a_published_model_has_its_published_parameters(name):
    model = find_model(name)
    assert model.source
    if model.published_parameters is not None:
        assert parameters(model).total == pytest.approx(model.published_parameters, rel=ROUNDED.get(name, 0))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "bert-base"),
        ("gpt2", "gpt2"),
        ("gptj", "gpt-j-6b"),
        ("gpt_neox", "gpt-neox-20b"),
        ("llama", "llama-7b"),
        ("llama4_text", "llama-4-scout"),
        ("gemma", "gemma-7b"),
        ("gemma2", "gemma-2-2b"),
        ("phi3", "phi-3-mini"),
        ("falcon", "falcon-7b"),
        ("gpt_oss", "gpt-oss-120b"),
        ("deepseek_v3", "deepseek-v3"),
        ("modernbert", "modernbert-base"),
    ],
)
def test_the_defaults_of_transformers_are_the_published_shapes(family, name):
    auto = pytest.importorskip("transformers.models.auto")
    config = auto.configuration_auto.CONFIG_MAPPING[family]().to_dict()
    if family == "phi3":
        config["sliding_window"] = 2047  # of the checkpoint, not of the class
    read, row = from_config(name, config), find_model(name)
    assert (read.layers, read.d_model, read.vocab, read.tied) == (row.layers, row.d_model, row.vocab, row.tied)


def test_a_family_that_is_not_known_is_read_as_llamas_with_a_note():
    entries = {"model_type": "newest", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = from_config("m", {**entries, "vocab_size": 7, "intermediate_size": 16})
    assert model.notes[0].startswith("model_type 'newest' is not known: it counts as a causal decoder")
    assert model.layers[0].mlp.gated


@pytest.mark.parametrize(
    ("written", "kv_heads"),
    [
        ({}, 4),
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 4),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"multi_query_attention": False, "multi_query_group_num": 2}, 4),
        ({"multi_query": True, "num_key_value_heads": 2}, 2),
    ],
)
def test_a_family_that_is_not_known_has_the_key_heads_that_its_entries_name(written, kv_heads):
    entries = {"model_type": "newest", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = from_config("m", {**entries, "vocab_size": 7, "intermediate_size": 16, **written})
    assert model.layers[0].attention.kv_heads == kv_heads


def test_latents_of_a_family_that_is_not_known_have_no_key_heads_of_their_own():
    entries = {"model_type": "newest", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    entries |= {"vocab_size": 7, "intermediate_size": 16, **latent}
    assert from_config("m", {**entries, "multi_query": True}).layers == from_config("m", entries).layers


def test_a_quantised_checkpoint_has_a_note():
    entries = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"vocab_size": 7, "intermediate_size": 16}
    model = from_config("m", {**entries, **sizes, "quantization_config": {"quant_method": "mxfp4"}})
    assert "quantised" in model.notes[0]


def test_the_text_part_of_a_model_with_images_is_read():
    text = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 7}
    text["intermediate_size"] = 16
    model = from_config("m", {"model_type": "seer", "text_config": text})
    assert (model.d_model, model.notes) == (64, ("The text model alone.",))


@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 2},
        {"model_type": "deepseek_v3", "q_lora_rank": None, "num_hidden_layers": 4},
    ],
)
def test_a_null_in_the_text_part_is_a_null(text):
    assert from_config("m", {"model_type": "seer", "text_config": text}).layers == from_config("m", text).layers


def test_a_quantised_checkpoint_of_a_model_with_images_has_a_note():
    model = from_config("m", {"text_config": {"model_type": "llama"}, "quantization_config": {"quant_method": "awq"}})
    assert any("quantised" in note for note in model.notes)


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ({"model_type": "roberta"}, "pooler"),
        ({"model_type": "roberta", "is_decoder": True}, "dense layer before the output"),
        ({"model_type": "modernbert-decoder"}, "dense layer before the output"),
    ],
)
def test_parts_that_count_as_parameters_alone_are_named_in_a_note(entries, part):
    assert any(part in note for note in from_config("m", entries).notes)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5, "head_dim": None}, "d_model 64 is no whole multiple of 5 heads"),
        ({"num_key_value_heads": 3}, "4 query heads and 3 key heads: query heads must be a whole multiple"),
        ({"num_hidden_layers": "32"}, "^m: num_hidden_layers is '32': expected a whole number.$"),
        ({"hidden_size": "x"}, "^m: hidden_size is 'x': expected a whole number.$"),
        ({"vocab_size": 1e9}, "^m: vocab_size is 1000000000.0: expected a whole number, 1000000000.$"),
        ({"num_hidden_layers": 0}, "^m: num_hidden_layers is 0: expected 1 or more.$"),
        ({"num_hidden_layers": 3_000_000}, "^m: num_hidden_layers is 3000000: expected 10,000 or fewer.$"),
        ({"num_hidden_layers": -3}, "^m: num_hidden_layers is -3: expected 1 or more.$"),
        ({"vocab_size": None}, "^m has no vocab_size: expected in a config.json of model_type 'llama'"),
        (
            {"model_type": "newest", "num_hidden_layers": None},
            r"^m has no num_hidden_layers \(or n_layer, n_layers, num_layers\): .*'newest', .* as the family llama.$",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "m has layers of 'linear_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding layers and no sliding_window"),
        ({"is_encoder_decoder": True}, "an encoder with a decoder"),
        ({"num_local_experts": 4, "num_experts_per_tok": 8}, "8 of 4 experts"),
        ({"model_type": "mixtral", "num_local_experts": 1}, "^m has one expert, with a router that is not counted: "),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 1}}, "^m has one expert"),
        ({"model_type": "dots1", "n_routed_experts": 1}, "^m has one expert"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 0}, "^m has no expert, with a router that is not counted: "),
        ({"model_type": "mixtral", "num_local_experts": 0}, "^m has no expert"),
        (
            {"model_type": "bart", "num_hidden_layers": None, "encoder_layers": 10**8},
            "^m: encoder_layers is 100000000: expected 10,000 or fewer",
        ),
        ({"model_type": "bart", "num_hidden_layers": 0}, "^m: encoder_layers is 0: expected 1 or more.$"),
        (
            {"model_type": "laguna", "num_attention_heads_per_layer": [4, 8]},
            r"^m: num_attention_heads_per_layer is \[4, 8\]: heads that differ between the layers are not counted.$",
        ),
        (
            {"model_type": "laguna", "num_attention_heads_per_layer": [4]},
            "^m: num_attention_heads_per_layer has a length of 1, with 2 layers: expected one entry for each.$",
        ),
        (
            {"model_type": "bart", "is_encoder_decoder": False},
            "^m has is_encoder_decoder false: the encoder or the",
        ),
        ({"model_type": "whisper", "architectures": ["WhisperForCausalLM"]}, "^m has architectures WhisperForCausalLM"),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "^m has architectures T5EncoderModel: the encoder"),
        ({"model_type": "mt5", "architectures": ["MT5ForTokenClassification"]}, "MT5ForTokenClassification: the"),
        (
            {"model_type": "whisper", "architectures": ["WhisperForAudioClassification"]},
            "WhisperForAudioClassification: the encoder",
        ),
        ({"model_type": "bart", "architectures": ["BartDecoder"]}, "^m has architectures BartDecoder: the encoder or"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "^m has add_cross_attention: attention to an encoder of"),
        ({"model_type": "bloom", "n_embed": "x"}, "^m: hidden_size is 'x': expected a whole number.$"),
        ({"model_type": "axk1", "moe_layer_freq": 0}, "^m: moe_layer_freq is 0: expected 1 or more.$"),
        (
            {"model_type": "gpt_neo", "attention_types": [["local"], 2]},
            r"attention_types is \[\['local'\], 2\]: expected a",
        ),
        ({"model_type": "gpt_neo", "attention_types": [[["local"], 3]]}, "attention_layers has a length of 3, with 2"),
        ({"num_attention_heads": 0}, "^m: num_attention_heads is 0: expected 1 or more.$"),
        ({"intermediate_size": [[1], [2]]}, r"^m: intermediate_size is \[\[1\], \[2\]\]: expected a whole number.$"),
        ({"layer_types": [["full_attention"]] * 2}, r"layer_types has \['full_attention'\]: expected a list of names"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention': expected a list of names, one for each"),
        ({"layer_types": ["full_attention"]}, "layer_types has a length of 1, with 2 layers: expected one entry for"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has a length of 3, with 2 layers"),
        ({**EXPERTS, "n_shared_experts": "2"}, "^m: n_shared_experts is '2': expected a whole number.$"),
        ({**EXPERTS, "n_shared_experts": 2.0}, "^m: n_shared_experts is 2.0: expected a whole number, 2.$"),
        ({**EXPERTS, "n_shared_experts": -1}, "^m: n_shared_experts is -1: expected 0 or more.$"),
        ({**EXPERTS, "mlp_layer_types": ["dense", "odd"]}, "^m has MLPs of 'odd': expected dense or sparse.$"),
        ({**EXPERTS, "mlp_layer_types": [1, 2]}, "mlp_layer_types has 1: expected a list of names"),
        ({**EXPERTS, "mlp_layer_types": ["dense"]}, "mlp_layer_types has a length of 1, with 2 layers"),
        ({**EXPERTS, "mlp_only_layers": 3}, "^m: mlp_only_layers is 3: expected a list of whole numbers.$"),
        ({**EXPERTS, "moe_layers": 3}, "moe_layers is 3: expected a list of whole numbers"),
        ({**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step is 0: expected 1 or more"),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0: expected 1"),
        ({"model_type": "llama4_text", "no_rope_layers": [1]}, "no_rope_layers has a length of 1, with 2 layers"),
        ({"model_type": "jamba", "attn_layer_period": 0}, "^m: attn_layer_period is 0: expected 1 or more.$"),
        ({"model_type": "bamba", "attn_layer_indices": 1}, "attn_layer_indices is 1: expected a list of whole numbers"),
        ({"model_type": "lfm2", "full_attn_idxs": ["1"]}, "full_attn_idxs has '1': expected a list of whole numbers"),
        ({"model_type": "smollm3", "no_rope_layers": 4}, "no_rope_layers is 4: expected a list of whole numbers"),
        ({"model_type": "qwen2", "max_window_layers": "a"}, "max_window_layers is 'a': expected a whole number"),
        ({"model_type": "qwen3_next", "full_attention_interval": -2}, "full_attention_interval is -2: expected 1"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": -3}, "sliding_window_pattern is -3: expected 1 or"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LXG"}, "is 'LXG': expected a text of L .* and G"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "is 'MX': expected a text of M .* and E"),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": "a"}, "block_ffn_dim_multiplier is 'a': expected a number"),
        ({"kv_lora_rank": 0}, "^m has no qk_rope_head_dim, qk_nope_head_dim: expected"),
    ],
)
def test_impossible_shapes_say_why(change, message):
    entries = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 7,
        "intermediate_size": 16,
    }  # fmt: skip
    with pytest.raises(ProblemError, match=message):
        from_config("m", entries | change)


def test_one_expert_is_a_dense_mlp_where_the_family_makes_one():
    jamba = {"model_type": "jamba", "num_experts": 1}
    assert {layer.mlp.experts for layer in from_config("m", jamba).layers} == {1}
    without = {"model_type": "qwen3_moe", "num_experts": 0}
    assert {layer.mlp.experts for layer in from_config("m", without).layers} == {1}
    dense = {"model_type": "hunyuan_v1_dense", "head_dim": 128}
    assert from_config("m", {**dense, "num_experts": 1}).layers == from_config("m", dense).layers


def test_unknown_models_list_near_names():
    with pytest.raises(ProblemError, match=r"unknown model 'llama-2-80b'. Near: llama-2-70b"):
        load_model("llama-2-80b")
    with pytest.raises(ProblemError, match=r"unknown model 'meta-llama/Llama-2-80b'. Near: llama-2-70b"):
        load_model("meta-llama/Llama-2-80b")
    with pytest.raises(ProblemError, match="there is no directory"):
        load_model("./nowhere")
    with pytest.raises(ProblemError, match="there is no directory path/to/folder, and no published model of this name"):
        load_model("path/to/folder")
    with pytest.raises(ProblemError, match=r"unknown field 'kv_head'. Near: kv_heads"):
        from_fields("m", "here", {"kv_head": 1})


@pytest.mark.parametrize("name", ["LLAMA-2-70B", "meta-llama/Llama_2_70b", "llama 2 70b"])
def test_names_are_read_in_any_spelling(name):
    assert find_model(name).name == "llama-2-70b"


def test_files_that_are_no_configuration_say_why(tmp_path):
    for text, message in (("{", "is no JSON"), ("[]", "has no settings"), ("[" * 100_000, "nested too deep")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ProblemError, match=message):
            load_model(str(tmp_path))
    with pytest.raises(ProblemError, match="cannot be read"):
        read_config(tmp_path / "other.json")
    with pytest.raises(ProblemError, match=r"py is no config\.json: expected one, its folder, or a published model"):
        load_model(__file__)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProblemError, match=r"empty has no config\.json: expected a folder as"):
        load_model(str(tmp_path / "empty"))
    (tmp_path / "shapes.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ProblemError, match=r"shapes has no num_hidden_layers \(or n_layer.*, vocab_size: expected"):
        read_config(tmp_path / "shapes.json")


def test_kinds_of_attention_have_the_fields_names():
    kinds = [Attention(8, n, 64, 64).kind for n in (8, 2, 1)]
    assert (kinds, find_model("deepseek-v3").layers[0].attention.kind) == (["MHA", "GQA-2", "MQA"], "MLA")
