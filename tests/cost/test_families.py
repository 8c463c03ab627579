"""Every architecture of transformers that generates text: counted right from its config.json, or refused by name."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest

from regard.cost import config as config_module
from regard.cost import cost, family_rules, find_model, layer_patterns, load_model, mixtures
from regard.cost.config import from_config
from regard.cost.config_fields import NAMES
from regard.cost.entries import SHARED_EXPERTS
from regard.cost.families import default_entries, find_family, is_sum, refusals
from regard.cost.parameter_count import parameters
from regard.cost.recurrent import recurrent_layer
from regard.cost.tables import table
from regard.cost.work import forward, prompt_call
from regard.errors import ProblemError

auto = pytest.importorskip("transformers.models.auto")
torch = pytest.importorskip("torch")

DECODERS = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
FILL_MASKS = auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
BOTH = {**auto.modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "whisper": "WhisperForConditionalGeneration"}
ENCODERS = (
    "bert", "bert-generation", "camembert", "data2vec-text", "ernie", "megatron-bert", "modernbert", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip

FAMILIES = set(table("families.toml")["families"])
"""The families that can be counted."""

NOT_OF_TRANSFORMERS = {"transformer"}
"""Families of models.toml that have no configuration there."""

WITHOUT_A_MODEL = {"emu3_text_model"}
"""A text model that transformers makes only within emu3."""

NEEDED = {
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 10000.0}},
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
"""Settings without which a family cannot be made."""

SMALL = {"num_hidden_layers": 4}
SETTINGS = {
    "gpt2": {"n_layer": 3},
    "gptj": {"n_layer": 2},
    "gpt_neox": SMALL,
    "opt": SMALL,
    "bert": SMALL,
    "modernbert": SMALL | {"layer_types": None},
    "llama": SMALL | {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "mistral": SMALL | {"tie_word_embeddings": True},
    "mixtral": SMALL,
    "ministral": SMALL | {"head_dim": 128},
    "smollm3": SMALL,
    "granite": SMALL,
    "seed_oss": SMALL,
    "llama4_text": SMALL | {"interleave_moe_layer_step": 2},
    "qwen2": SMALL,
    "qwen2_moe": SMALL,
    "qwen3": SMALL | {"num_key_value_heads": 8},
    "qwen3_moe": SMALL | {"head_dim": 128, "num_experts": 16},
    "gemma": SMALL,
    "gemma2": SMALL,
    "gemma3_text": SMALL,
    "phi": SMALL,
    "phi3": SMALL,
    "falcon": SMALL,
    "olmo2": SMALL | {"num_key_value_heads": 8},
    "olmo3": SMALL | {"sliding_window": 512},
    "starcoder2": SMALL,
    "cohere": SMALL,
    "cohere2": SMALL,
    "deepseek_v2": SMALL | {"first_k_dense_replace": 1, "attention_bias": True},
    "deepseek_v3": SMALL,
    "gpt_oss": SMALL,
}
"""Settings beside the defaults, so that a family is also compared with what its defaults leave out."""

FORMS = [
    ("beam", {"attention_bias": True, "num_hidden_layers": 4}),
    *((family, {"is_decoder": True}) for family in family_rules.BERTS),
    ("bert", {"is_decoder": True, "tie_word_embeddings": False}),
    ("bert-generation", {"is_decoder": True, "tie_word_embeddings": False}),
    ("megatron-bert", {"is_decoder": True, "tie_word_embeddings": False}),
    ("cohere", {"use_qk_norm": True}),
    ("cohere2_moe", {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 100}),
    ("llama4_text", {"moe_layers": [1, 3], "num_hidden_layers": 4}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "use_bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 71, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 71}),
    ("falcon", {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
    ("falcon", {"num_ln_in_parallel_attn": 2, "num_hidden_layers": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "parallel_attn": False}),
    ("falcon_h1", {"mamba_proj_bias": True, "projectors_bias": True}),
    ("falcon_mamba", {"expand": 16, "intermediate_size": 1536}),
    ("gemma3_text", {"num_hidden_layers": 7}),
    ("gpt2", {"n_inner": 1000, "tie_word_embeddings": False}),
    ("granitemoehybrid", {"num_local_experts": 0, "shared_intermediate_size": 512}),
    ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"] * 16}),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "moe"]}),
    ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    ("modernbert", {"norm_bias": True}),
    ("modernbert-decoder", {"norm_bias": True, "classifier_bias": True, "decoder_bias": False}),
    ("nemotron_h", {"attention_bias": True, "layers_block_type": ["full_attention", "mlp"]}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"enable_bias": False}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("olmo2", {"num_key_value_heads": 8, "attention_bias": True}),
    ("persimmon", {"qk_layernorm": False}),
    ("phi", {"qk_layernorm": True}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 2]}),
    ("qwen3_moe", {"mlp_only_layers": [3, 5]}),
    ("qwen3_next", {"attention_bias": True}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True}),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("bart", {"tie_word_embeddings": False}),
    ("whisper", {"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 100}),
    ("hy_v3", {"num_shared_experts": 0}),
    ("hy_v3", {"num_shared_experts": 2}),
    ("kimi_linear", {"num_shared_experts": 2}),
    ("laguna", {"gating": False}),
    ("laguna", {"gating": False, "attention_bias": True}),
    ("laguna", {"gating": "per-element"}),
    ("laguna", {"gating": "per-head"}),
    ("laguna", {"num_attention_heads_per_layer": [16] * 40}),
    ("marian", {"share_encoder_decoder_embeddings": False}),
    ("marian", {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 60_000}),
    ("marian", {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}),
    ("mpt", {"expansion_ratio": 8}),
    ("nemotron_h", {"tie_word_embeddings": True}),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention"]}),
    ("nemotron_h", {"layers_block_type": ["moe"], "moe_shared_expert_intermediate_size": 0}),
    ("opt", {"_remove_final_layer_norm": True}),
]
"""Settings that change which weights there are."""


def make(family, **settings):
    """(config, model on the meta device) of a family, the text part of a model with images or sounds."""
    config = auto.configuration_auto.CONFIG_MAPPING[family](**{**NEEDED.get(family, {}), **settings})
    text = getattr(config, "text_config", None)
    kind = auto.AutoModelForCausalLM
    if family in ENCODERS and not settings.get("is_decoder"):
        kind = auto.AutoModel
    elif family == "whisper":
        kind = auto.AutoModelForSpeechSeq2Seq
    elif family in BOTH and text is None:
        kind = auto.AutoModelForSeq2SeqLM
    with torch.device("meta"):
        return config, kind.from_config(text or config)


def text_family(family):
    """The family of the text part: where a config.json has one, its `model_type` counts."""
    if family in refusals():  # some of these have no defaults
        return family
    text = getattr(auto.configuration_auto.CONFIG_MAPPING[family](), "text_config", None)
    return family if text is None else text.model_type


def test_every_architecture_that_generates_or_fills_masks_is_counted_or_refused_by_name():
    counted, refused = FAMILIES, set(refusals())
    assert not counted & refused
    assert {text_family(family) for family in {*DECODERS, *BOTH, *FILL_MASKS}} - counted - refused == set()


LIKE_LLAMA = {
    "chameleon", "cosmos3_edge_text", "deepseek_ocr2_text", "glm4v_text", "glm_image_text", "glm_ocr_text",
    "granite4_vision_text", "granite_docling_text", "hunyuan_vl_text", "mistral4", "molmo2_text",
    "muse_glimmer_text", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text",
    "qwen3_vl_moe_text", "qwen3_vl_text",
}  # fmt: skip
"""Families that are neither counted nor refused by name, and that count as Llama's: causal decoders, all of them."""


def test_families_that_count_as_llamas_are_causal_decoders():
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.24."):
        pytest.skip(f"the families are those of transformers 5.24, and this is {transformers.__version__}")
    found = set()
    for family in {*auto.configuration_auto.CONFIG_MAPPING.keys()} - {*FAMILIES, *refusals()}:
        with contextlib.suppress(Exception):  # of a configuration that its defaults cannot make, and refused entries
            entries = auto.configuration_auto.CONFIG_MAPPING[family]().to_dict()
            if from_config("m", entries).notes[0].startswith("model_type"):
                found.add(family)
    assert found == LIKE_LLAMA


def test_every_name_is_a_family_of_transformers():
    names = {*auto.configuration_auto.CONFIG_MAPPING.keys()} | NOT_OF_TRANSFORMERS
    assert {*FAMILIES, *refusals()} - names == set()


@pytest.mark.parametrize("family", ["emu3", "gemma3", "llama4", "qwen2_audio", "qwen3_5", "qwen3_5_moe", "voxtral"])
def test_of_a_model_with_images_or_sounds_the_text_model_is_counted(family, tmp_path):
    config = auto.configuration_auto.CONFIG_MAPPING[family]()
    config.save_pretrained(tmp_path)
    text = config.text_config
    text.save_pretrained(tmp_path / "text")
    assert parameters(load_model(str(tmp_path))).total == parameters(load_model(str(tmp_path / "text"))).total


COUNTED = sorted(FAMILIES - NOT_OF_TRANSFORMERS - WITHOUT_A_MODEL)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *(pytest.param(each, {}, marks=[pytest.mark.exhaustive] if i % 16 else []) for i, each in enumerate(COUNTED)),
        *SETTINGS.items(),
        *FORMS,
    ],
    ids=[
        *COUNTED,
        *(f"{each}-special" for each in SETTINGS),
        *(f"{each}-form-{i}" for i, (each, _) in enumerate(FORMS)),
    ],
)
def test_a_config_json_has_the_parameters_that_transformers_makes_of_it(family, settings, tmp_path):
    config, made = make(family, **settings)
    config.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert parameters(model).total == sum({id(p): p.numel() for p in made.parameters()}.values())
    kinds = getattr(config, "layer_types", None)
    if kinds:
        assert [kind_of(layer) for layer in model.layers] == list(kinds)


LISTS = {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4], "short_conv_kernel_size": 3}
KIMI = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "linear_attn_config": LISTS}
"""Entries of a kimi_linear as its authors write them: layers count from 1."""

T5S = ("t5", "mt5", "umt5")
BARTS = (
    "bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp", "pegasus", "plbart", "whisper",
)  # fmt: skip

OLDER = [
    ("axk1", {"first_k_dense_replace": 1, "moe_layer_freq": 2, "num_hidden_layers": 4}),
    ("bloom", {"n_embed": 1024, "num_attention_heads": 16}),
    ("bloom", {"n_embed": 1024, "hidden_size": 64, "num_attention_heads": 16}),
    ("dbrx", {"attn_config": {"rope_theta": 10000.0}, "ffn_config": None}),
    ("dbrx", {"ffn_config": {"moe_num_experts": 8}}),
    ("falcon", {"n_embed": 1024, "num_attention_heads": 16}),
    ("internlm3", {"bias": True, "qkv_bias": True}),
    ("kimi_linear", KIMI),
    ("kimi_linear", KIMI | {"linear_attn_config": {**LISTS, "head_dim": 64, "num_heads": 16}}),
    ("lfm2", {"block_ff_dim": 6656, "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 16}),
    ("lfm2", {"block_ff_dim": 6656, "intermediate_size": 100}),
    ("lfm2", {"tie_embedding": False}),
    ("lfm2_moe", {"tie_embedding": False}),
    ("minicpm3", {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}),
    ("nemotron_h", {"hybrid_override_pattern": "M-*", "mamba_conv_bias": False}),
    ("nemotron_h", {"hybrid_override_pattern": "M-*", "mamba_d_conv": 3}),
    ("nemotron_h", {"hybrid_override_pattern": "M-*", "mamba_n_groups": 4}),
    *((family, {"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}) for family in T5S),
    ("t5", {"num_hidden_layers": 3, "num_layers": 2, "num_heads": 2}),
    ("t5", {"num_hidden_layers": 3, "num_decoder_layers": 2}),
    *((family, {"num_hidden_layers": 3}) for family in BARTS),
    ("bart", {"num_hidden_layers": 3, "encoder_layers": 2, "decoder_layers": 4}),
]
"""Entries of config.json that transformers reads and does not write, or that it completes by others."""


@pytest.mark.parametrize(("family", "settings"), OLDER, ids=map(str, OLDER))
def test_a_config_json_of_the_authors_has_the_parameters_that_transformers_makes_of_it(family, settings):
    _, made = make(family, **settings)
    read = from_config("m", {"model_type": family, **NEEDED.get(family, {}), **settings})
    assert parameters(read).total == sum({id(p): p.numel() for p in made.parameters()}.values())


FOREIGN = [
    ("aria_text", {"moe_intermediate_size": 24}),
    ("bert", {"num_key_value_heads": 2}),
    ("cohere2_moe", {"moe_intermediate_size": 24}),
    ("dbrx", {"attention_bias": True}),
    ("deepseek_v3", {"shared_expert_intermediate_size": 28}),
]
"""Entries of other families."""


@pytest.mark.parametrize(("family", "settings"), FOREIGN, ids=map(str, FOREIGN))
def test_an_entry_that_a_family_does_not_read_changes_nothing(family, settings):
    entries = {"model_type": family, **NEEDED.get(family, {})}
    assert from_config("m", entries | settings) == from_config("m", entries)


BOTH_WAYS = {
    "use_bidirectional_attention": True, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "vocab_size": 50, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(("family", "settings"), [("gemma", {}), ("gemma3_text", {"sliding_window": 8})])
def test_a_gemma_that_attends_both_ways_is_an_encoder_with_the_pairs_of_transformers(family, settings):
    entries, tokens = BOTH_WAYS | settings, torch.arange(1, 14)[None]
    made = auto.AutoModel.from_config(auto.configuration_auto.CONFIG_MAPPING[family](**entries)).eval()
    pairs = 0
    with torch.no_grad():
        before = made(tokens).last_hidden_state
        for key in range(13):
            after = made(tokens + 20 * (torch.arange(13) == key)).last_hidden_state
            pairs += int((before != after).any(-1).sum())
    found = cost(from_config("m", {"model_type": family, **entries}), context=13)
    assert found.model.attention.pattern.pairs(queries=13, keys=13) == pairs
    assert (found.cache_bytes, found.step, found.prompt.logits.flops) == (0, None, 0)


def test_the_text_model_of_a_paligemma_generates():
    """transformers writes into its text_config that it attends both ways, which holds for its prompt alone."""
    entries = auto.configuration_auto.CONFIG_MAPPING["paligemma"]().to_dict()
    assert entries["text_config"]["use_bidirectional_attention"]
    assert from_config("m", entries).is_causal


@pytest.mark.parametrize("family", family_rules.BERTS)
def test_a_bert_that_is_a_decoder_has_a_cache_and_decodes(family):
    entries = {"model_type": family, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    decoder = cost(from_config("m", entries | {"is_decoder": True}), context=100)
    assert decoder.cache_bytes == 2 * 2 * 64 * 2 * 100
    assert decoder.step.logits.flops == 2 * 64 * decoder.model.vocab
    assert cost(from_config("m", entries), context=100).step is None


def kind_of(layer):
    """The kind of a layer in the names of transformers."""
    if layer.recurrent:
        return "hybrid" if layer.attention else "linear_attention" if layer.recurrent.state else "conv"
    if layer.attention is None:
        return "moe" if layer.mlp.experts > 1 else "mlp"
    pattern = layer.attention.pattern
    return "sliding_attention" if pattern.window else "chunked_attention" if pattern.chunk else "full_attention"


# ---- entries that are missing ---------------------------------------------------------------------------------------

READ = r"(?:config|entries)\.get\(\"(\w+)\"|config\[\"(\w+)\"\]|\"(\w+)\" in config"
"""How an entry is read by its name."""

READERS = (config_module, family_rules, layer_patterns, mixtures)
"""The modules that read entries."""


def entries_that_are_read(family):
    """Names of the entries of a config.json that its model is computed from."""
    source = "".join(Path(module.__file__).read_text() for module in READERS)
    names = {each for group in re.findall(READ, source) for each in group if each}
    names |= {each for group in (*NAMES.values(), SHARED_EXPERTS) for each in group}
    names |= {f"moe_layer_{each}" for each in ("start_index", "end_index", "interval")}
    row = find_family(family)
    names |= {each for group in row.read.values() for each in group} | {*row.when.values()}
    texts = [value for key, value in row.fields.items() if is_sum(key, value)] + [*(row.recurrent or {}).values()]
    return names | {factor for text in texts for factor in str(text).split()}


def defaults_of_transformers():
    """The content of config_defaults.json: defaults of a class, not what an instance computes from other entries."""
    found = {}
    for family in sorted(FAMILIES - NOT_OF_TRANSFORMERS):
        fields, read = dataclasses.fields(auto.configuration_auto.CONFIG_MAPPING[family]), entries_that_are_read(family)
        plain = [each for each in fields if type(each.default) in (int, bool, str) and each.name in read]
        found[family] = {each.name: each.default for each in plain if each.name != "model_type"}
    return found


def test_defaults_are_those_of_transformers():
    """`python -m tests.cost.test_families` writes them."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.24."):
        pytest.skip(f"the defaults are those of transformers 5.24, and this is {transformers.__version__}")
    assert {
        family: dict(default_entries(family)) for family in defaults_of_transformers()
    } == defaults_of_transformers()


@pytest.mark.parametrize("family", [family for family in COUNTED if family not in NEEDED])
def test_an_empty_config_json_is_that_of_the_defaults(family, tmp_path):
    config = auto.configuration_auto.CONFIG_MAPPING[family]()
    config.save_pretrained(tmp_path)
    whole = load_model(str(tmp_path))
    empty = {key: value for key, value in config.to_dict().items() if value is None}
    if needed := find_family(family).needs:
        with pytest.raises(ProblemError, match=f"m has no {', '.join(needed)}: expected what {family} has"):
            from_config("m", {"model_type": family})
        empty |= {each: getattr(config, each) for each in needed}
    read = from_config("m", {"model_type": family, **empty})
    assert parameters(read).total == parameters(whole).total
    assert [kind_of(layer) for layer in read.layers] == [kind_of(layer) for layer in whole.layers]


KINDS = [
    ("cohere2", {"sliding_window_pattern": 3}),
    ("cohere2_moe", {"sliding_window_pattern": 3}),
    ("cohere2_moe", {"first_k_dense_replace": 4, "prefix_dense_sliding_window_pattern": 2}),
    ("dots1", {"sliding_window": 64}),
    ("dots1", {"sliding_window": 64, "max_window_layers": 3}),
    ("dots1", {"sliding_window": None, "max_window_layers": 3}),
    ("exaone4", {"sliding_window_pattern": 3}),
    ("gemma3_text", {"sliding_window_pattern": 3}),
    ("lfm2", {"full_attn_idxs": [1, 4]}),
    ("lfm2", {"full_attn_idxs": []}),
    ("llama4_text", {"no_rope_layer_interval": 3}),
    ("llama4_text", {"no_rope_layers": [1, 0, 0, 1, 1, 0, 1]}),
    ("llama4_text", {"no_rope_layers": [1, 0, 0, 1, 1, 0, 1], "attention_chunk_size": None}),
    ("modernbert-decoder", {"global_attn_every_n_layers": 2}),
    ("lara_mini", {"full_attention_interval": 2}),
    ("olmo3", {"sliding_window_pattern": 6}),
    ("qwen2_moe", {"use_sliding_window": True}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}),
    ("qwen3_next", {"full_attention_interval": 3, "sliding_window_pattern": 2}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [1, 0, 0, 1, 1, 0, 1]}),
    ("smollm3", {"use_sliding_window": True, "no_rope_layer_interval": 2}),
]
"""Settings that families had before `layer_types`, and that a config.json may have in its place."""


@pytest.mark.parametrize(("family", "settings"), KINDS, ids=map(str, KINDS))
def test_a_config_json_without_layer_types_has_the_layers_that_transformers_makes(family, settings):
    config = auto.configuration_auto.CONFIG_MAPPING[family](num_hidden_layers=7, **settings)
    read = from_config("m", {"model_type": family, "num_hidden_layers": 7, **settings})
    assert [kind_of(layer) for layer in read.layers] == config.layer_types


def test_a_kimi_linear_has_the_layers_of_its_lists():
    config = auto.configuration_auto.CONFIG_MAPPING["kimi_linear"](**KIMI)
    read = from_config("m", {"model_type": "kimi_linear", **KIMI})
    assert [kind_of(layer) for layer in read.layers] == config.layer_types
    assert [layer.mlp.experts > 1 for layer in read.layers] == [kind == "sparse" for kind in config.mlp_layer_types]


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        ([], r"linear_attn_config is \[\]: expected an object with full_attn_layers and kda_layers"),
        ({"full_attn_layers": [1]}, "linear_attn_config.kda_layers is None: expected a list of whole numbers"),
        ({"full_attn_layers": [1], "kda_layers": ["2"]}, "kda_layers has '2': expected a list of whole numbers"),
        ({"full_attn_layers": [1, 2], "kda_layers": [2, 3, 4]}, "expected each of the layers 1 to 5 once"),
        ({"full_attn_layers": [0], "kda_layers": [1, 2, 3, 4]}, "expected each of the layers 1 to 5 once"),
        ({"full_attn_layers": [1], "kda_layers": [2]}, "layer_types has a length of 2, with 5 layers"),
    ],
)
def test_lists_of_a_kimi_linear_that_name_no_layers_are_refused(linear, message):
    with pytest.raises(ProblemError, match=message):
        from_config("m", {"model_type": "kimi_linear", **KIMI, "linear_attn_config": linear})


@pytest.mark.parametrize("listed", [False, True])
def test_the_full_layers_of_a_minimax_have_its_window(listed):
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2} if listed else {}
    entries = {"model_type": "minimax", "num_hidden_layers": 4, "sliding_window": 8, **kinds}
    layers = from_config("m", entries).layers
    assert {kind_of(layer) for layer in layers} == {"linear_attention", "sliding_attention"}


def test_a_note_says_whose_cache_is_larger_in_transformers():
    settings = {"new_decoder_architecture": True, "num_attention_heads": 16, "hidden_size": 256}
    grouped, all_heads = (from_config("m", {"model_type": "falcon", **settings, "num_kv_heads": n}) for n in (2, 16))
    expected = "transformers caches keys and values of all query heads, 8 times what is counted."
    assert expected in grouped.notes
    assert not any("transformers" in each for each in all_heads.notes)
    assert expected.replace("8 times", "29 times") in find_model("falcon-180b").notes
    kept = "transformers, and regard_cache, keep all tokens in the layers with a window, more than is counted."
    assert kept in from_config("m", {"model_type": "gpt_neo"}).notes


def test_a_gpt_neo_has_the_layers_of_its_groups():
    groups = [[["local"], 2], [["global", "local"], 1]]
    config = auto.configuration_auto.CONFIG_MAPPING["gpt_neo"](num_layers=4, attention_types=groups)
    read = from_config("m", {"model_type": "gpt_neo", "num_layers": 4, "attention_types": groups})
    kinds = {"global": "full_attention", "local": "sliding_attention"}
    assert [kind_of(layer) for layer in read.layers] == [kinds[each] for each in config.attention_layers]


def test_shared_experts_have_one_number_by_any_of_their_names():
    """A config.json of the authors has the name that transformers maps to its own, which has a default."""
    sizes = [
        parameters(from_config("m", {"model_type": "kimi_linear", "num_shared_experts": number, **mixed_layers(27)}))
        for number in (0, 1, 2)
    ]
    null = {"model_type": "deepseek_v3", "n_shared_experts": None}
    assert from_config("m", null).layers == from_config("m", null | {"n_shared_experts": 0}).layers
    one = 3 * 2304 * 1024 * 26  # of each layer but the first
    assert [after.total - before.total for before, after in itertools.pairwise(sizes)] == [one, one]


def mixed_layers(count):
    return {
        "layer_types": ["linear_attention", "full_attention"] * (count // 2) + ["linear_attention"] * (count % 2),
        "mlp_layer_types": ["dense"] + ["sparse"] * (count - 1),
    }


def test_a_nemotron_h_with_the_letters_of_its_layers_is_that_with_their_kinds():
    letters = "M-*EM"
    config = auto.configuration_auto.CONFIG_MAPPING["nemotron_h"](hybrid_override_pattern=letters)
    written = {"model_type": "nemotron_h", "hybrid_override_pattern": letters, "num_hidden_layers": 52}
    read = from_config("m", written)
    assert [kind_of(layer) for layer in read.layers] == config.layers_block_type
    assert read == from_config("m", {"model_type": "nemotron_h", "layers_block_type": config.layers_block_type})
    assert read == from_config("m", {"model_type": "nemotron_h", "layer_types": config.layers_block_type})


def test_a_pattern_of_exaone_may_be_a_text():
    entries = {"model_type": "exaone4", "num_hidden_layers": 7}
    texts, numbers = ({**entries, "sliding_window_pattern": each} for each in ("LLG", 3))
    assert from_config("m", texts).layers == from_config("m", numbers).layers


ODD = (0, -1, "a", [], [[1]], ["x"], [1, 2], {}, 1.5, None, True, False)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=[pytest.mark.exhaustive] if i % 32 and each not in {"jamba", "nemotron_h"} else [])
        for i, each in enumerate(COUNTED)
    ],
)
def test_a_config_json_with_any_entry_wrong_is_counted_or_refused_in_words(family):
    layers = default_entries(family).get("num_hidden_layers", 4)
    base = {"model_type": family, **NEEDED.get(family, {})}
    base |= {each: 4 for each in find_family(family).needs if each.startswith("linear_")}
    if "layer_types" in find_family(family).needs:
        base |= mixed_layers(layers) | {"mlp_only_layers": [0]}
    if family == "nemotron_h":
        base["layers_block_type"] = ["mlp", "linear_attention", "moe", "full_attention"]
    for key in {*default_entries(family), *entries_that_are_read(family)} - {"model_type"}:
        for value in ODD:
            with contextlib.suppress(ProblemError):
                model = from_config("m", {**base, key: value})
                assert parameters(model).total > 0
                assert forward(model, prompt_call(64)).total.flops > 0


FAR = [
    ("gemma3_text", {"sliding_window_pattern": 10**30}, "sliding_window_pattern is 10*: expected 10,000 or fewer"),
    ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 10**30}, "pattern is 10*: expected 10,000 or fewer"),
    ("qwen3_next", {"full_attention_interval": 10**30}, "full_attention_interval is 10*: expected 10,000 or fewer"),
    ("modernbert", {"global_attn_every_n_layers": 10**30}, "n_layers is 10*: expected 10,000 or fewer"),
    ("smollm3", {"no_rope_layer_interval": 10**30}, "no_rope_layer_interval is 10*: expected 10,000 or fewer"),
    ("gpt_neo", {"attention_types": [[["global"], 10**30]]}, "attention_layers has a length of 10001, with 24 layers"),
    *(
        ("lfm2", {"block_ffn_dim_multiplier": each}, "expected a number above 0, 1,000 at most")
        for each in (math.nan, math.inf, 1e30, -1.0)
    ),
    ("bert", {"is_decoder": "false"}, "is_decoder is 'false': expected true or false"),
    ("falcon", {"parallel_attn": "true"}, "parallel_attn is 'true': expected true or false"),
    ("llama", {"is_encoder_decoder": "false"}, "is_encoder_decoder is 'false': expected true or false"),
]
"""Numbers that no model has, and texts for true and false."""


@pytest.mark.parametrize(("family", "settings", "message"), FAR, ids=[f"{each[0]}-{i}" for i, each in enumerate(FAR)])
def test_numbers_that_no_model_has_and_texts_for_true_and_false_are_refused(family, settings, message):
    with pytest.raises(ProblemError, match=f"^m: .*{message}"):
        from_config("m", {"model_type": family, **settings})


def test_a_cohere2_moe_may_have_only_dense_layers():
    first, all_dense = ({"first_k_dense_replace": each, "num_hidden_layers": 7} for each in (10**30, 7))
    assert (
        from_config("m", {"model_type": "cohere2_moe", **first}).layers
        == from_config("m", {"model_type": "cohere2_moe", **all_dense}).layers
    )


def test_sizes_of_recurrent_layers_are_checked():
    with pytest.raises(ProblemError, match="recurrent layers of 'mamba' have a state of 0: expected 1 or more"):
        from_config("m", {"model_type": "mamba", "state_size": 0})
    with pytest.raises(ProblemError, match="recurrent layers of 'delta' have no kernel"):
        recurrent_layer("delta", 64, {"value_heads": 2, "value_dim": 8, "key_heads": 2, "key_dim": 8})
    with pytest.raises(ProblemError, match="recurrent layers of 'liquid': expected one of mamba"):
        recurrent_layer("liquid", 64, {})


def test_embeddings_of_another_width_are_refused():
    with pytest.raises(ProblemError, match="word_embed_proj_dim is 512 and hidden_size 1024"):
        from_config("opt-350m", {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512})
    with pytest.raises(ProblemError, match="m has use_prompt: keys and values of learned prompts are not counted"):
        from_config("m", {"model_type": "mvp", "use_prompt": True})
    with pytest.raises(ProblemError, match="moe_latent_size is 64: experts of another width"):
        from_config("m", {"model_type": "nemotron_h", "layers_block_type": ["moe"], "moe_latent_size": 64})


def test_automatic_sizes_are_computed():
    entries = {"model_type": "bamba", "hidden_size": 256, "mamba_n_heads": 8, "mamba_d_head": "auto", "head_dim": 8}
    assert from_config("m", entries | {"num_hidden_layers": 2}).layers[0].recurrent.state == 2 * 256 * 256
    heads = {"model_type": "falcon_h1", "hidden_size": 256, "mamba_n_heads": 8, "mamba_d_head": "auto"}
    sizes = [from_config("m", {**heads, "mamba_d_ssm": each}).layers[0].recurrent.state for each in (None, 512)]
    assert sizes == [2 * 256 * 256] * 2
    rank = {"model_type": "mamba", "hidden_size": 100, "time_step_rank": "auto"}
    assert (
        from_config("m", rank).layers[0].recurrent == from_config("m", rank | {"time_step_rank": 7}).layers[0].recurrent
    )


def test_defaults_of_sizes_are_named_in_a_note():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    model = from_config("m", {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}})
    published = find_model("gemma-3-4b")
    assert [layer.attention for layer in model.layers] == [layer.attention for layer in published.layers]
    note = "Defaults of gemma3_text: vocab_size 262,208, num_attention_heads 8, num_key_value_heads 4."
    assert note in model.notes


@pytest.mark.parametrize("outer", [True, False])
def test_the_entry_of_the_outer_config_json_says_whether_the_output_is_tied(outer):
    text = {"model_type": "gemma", "num_hidden_layers": 2, "vocab_size": 1000, "tie_word_embeddings": not outer}
    config = auto.configuration_auto.CONFIG_MAPPING["paligemma"](text_config=text, tie_word_embeddings=outer)
    with torch.device("meta"):
        made = auto.AutoModelForImageTextToText.from_config(config)
    read = from_config("m", {"model_type": "paligemma", "text_config": text, "tie_word_embeddings": outer})
    assert read.tied == (made.lm_head.weight is made.get_input_embeddings().weight) == outer


def test_without_an_entry_the_output_of_a_text_model_is_tied_as_in_its_family():
    text = {"model_type": "smollm3"}
    assert from_config("m", {"model_type": "seer", "text_config": text}).tied
    assert not from_config("m", {"model_type": "seer", "text_config": {**text, "tie_word_embeddings": False}}).tied


@pytest.mark.parametrize("family", refusals())
def test_a_family_that_is_not_counted_says_why(family, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}", "hidden_size": 64}}')
    with pytest.raises(ProblemError, match=f"models of '{family}' are not counted: "):
        load_model(str(tmp_path))


if __name__ == "__main__":
    path = Path(config_module.__file__).parent / "config_defaults.json"
    lines = (f" {json.dumps(family)}: {json.dumps(each)}" for family, each in defaults_of_transformers().items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
