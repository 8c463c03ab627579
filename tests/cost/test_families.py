"""Every architecture of transformers that generates text: counted right from its config.json, or refused by name."""

import pytest

from regard.cost.config import load_model
from regard.cost.families import family_names, refusals
from regard.cost.parameter_count import parameters
from regard.errors import ProblemError

auto = pytest.importorskip("transformers.models.auto")
torch = pytest.importorskip("torch")

DECODERS = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
BOTH = {**auto.modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "whisper": "WhisperForConditionalGeneration"}
ENCODERS = (
    "bert", "bert-generation", "camembert", "data2vec-text", "ernie", "megatron-bert", "modernbert", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip

NOT_OF_TRANSFORMERS = {"transformer"}
"""Families of models.toml that have no configuration there."""

WITHOUT_A_MODEL = {"dbrx", "emu3_text_model"}
"""dbrx: transformers 5.23 cannot make it (no `rope_theta`); emu3_text_model: only within emu3."""

NEEDED = {
    "dbrx": {"attn_config": {"kv_n_heads": 8}},
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


def make(family, **settings):
    """(config, model on the meta device) of a family, the text part of a model with images or sounds."""
    config = auto.configuration_auto.CONFIG_MAPPING[family](**{**NEEDED.get(family, {}), **settings})
    text = getattr(config, "text_config", None)
    kind = auto.AutoModelForCausalLM
    if family in ENCODERS:
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


def test_every_architecture_that_generates_is_counted_or_refused_by_name():
    counted, refused = set(family_names()), set(refusals())
    assert not counted & refused
    assert {text_family(family) for family in {*DECODERS, *BOTH}} - counted - refused == set()


def test_every_name_is_a_family_of_transformers():
    names = {*auto.configuration_auto.CONFIG_MAPPING.keys()} | NOT_OF_TRANSFORMERS
    assert {*family_names(), *refusals()} - names == set()


@pytest.mark.parametrize("family", ["emu3", "gemma3", "llama4", "qwen2_audio", "qwen3_5", "qwen3_5_moe", "voxtral"])
def test_of_a_model_with_images_or_sounds_the_text_model_is_counted(family, tmp_path):
    config = auto.configuration_auto.CONFIG_MAPPING[family]()
    config.save_pretrained(tmp_path)
    text = config.text_config
    text.save_pretrained(tmp_path / "text")
    assert parameters(load_model(str(tmp_path))).total == parameters(load_model(str(tmp_path / "text"))).total


COUNTED = sorted({*family_names()} - NOT_OF_TRANSFORMERS - WITHOUT_A_MODEL)


@pytest.mark.parametrize(
    ("family", "settings"),
    [*((family, {}) for family in COUNTED), *SETTINGS.items()],
    ids=[*COUNTED, *(f"{family}-special" for family in SETTINGS)],
)
def test_a_config_json_has_the_parameters_that_transformers_makes_of_it(family, settings, tmp_path):
    config, made = make(family, **settings)
    config.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert parameters(model).total == sum({id(p): p.numel() for p in made.parameters()}.values())
    kinds = getattr(config, "layer_types", None)
    if kinds:
        assert [kind_of(layer) for layer in model.layers] == list(kinds)


def kind_of(layer):
    """The kind of a layer in the names of transformers."""
    if layer.recurrent:
        return "hybrid" if layer.attention else "linear_attention" if layer.recurrent.state else "conv"
    if layer.attention is None:
        return "moe" if layer.mlp.experts > 1 else "mlp"
    pattern = layer.attention.pattern
    return "sliding_attention" if pattern.window else "chunked_attention" if pattern.chunk else "full_attention"


@pytest.mark.parametrize("family", refusals())
def test_a_family_that_is_not_counted_says_why(family, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}", "hidden_size": 64}}')
    with pytest.raises(ProblemError, match=f"models of '{family}' are not counted: "):
        load_model(str(tmp_path))
