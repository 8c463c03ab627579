"""The shapes of a model from its config.json, as transformers writes it.

What models of a family share (biases, norms, gated MLPs) is not in a config.json: it comes from the families of
models.toml, by `model_type`. A family that is not there is read as Llama's, with a note; layers that are no softmax
attention raise an error.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from regard.cost.entries import INTERVALS, KINDS, SHARED_EXPERTS, check_length, checked_entries
from regard.cost.families import Family, default_entries, entry, find_family, is_sum, value_of
from regard.cost.fields import from_fields, missing_fields
from regard.cost.model import Model
from regard.cost.recurrent import Recurrent, recurrent_layer
from regard.errors import ProblemError

NAMES = {
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "mlp": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx"),
    "chunk": ("attention_chunk_size",),
    "kv_rank": ("kv_lora_rank",),
    "q_rank": ("q_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "v_dim": ("v_head_dim",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "expert_mlp": ("moe_intermediate_size",),
    "shared_mlp": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace", "num_dense_layers"),
    "shared_cache_layers": ("num_kv_shared_layers",),
    "tied": ("tie_word_embeddings",),
    "qkv_bias": ("attention_bias",),
    "out_bias": ("attention_bias",),
    "mlp_bias": ("mlp_bias",),
}
"""Our fields, and their names in config.json; the first that has a value counts."""

LETTERS = {
    "full_attention": "f", "attention": "f", "global": "f", "sliding_attention": "s", "local": "s",
    "chunked_attention": "c", "linear_attention": "r", "mamba": "r", "conv": "r", "mlp": "n", "moe": "n",
}  # fmt: skip
"""Kinds of layers of transformers, as letters of `from_fields`; MLPs where they are layers of their own."""

MLP_LETTERS = {"dense": "d", "sparse": "e"}
"""`mlp_layer_types` of transformers, as letters of `from_fields`."""

TEXT_CONFIGS = ("text_config", "llm_config")
"""Entries with the text model of a model for images or sounds."""

OUTER = ("tie_word_embeddings", "quantization_config")
"""Entries of such a model that hold for its text model, whatever its own entries are."""

FLAGS = ("tied", "qkv_bias", "out_bias", "mlp_bias", "router_bias", "sink", "shared_gate")
"""Fields that are true or false."""

AT_LEAST_ONE = ("d_model", "layers", "heads", "vocab", "window")
"""Fields that are not zero."""


def read_config(path: Path) -> Model:
    """The model that a config.json describes."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProblemError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ProblemError(f"{path} is no JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ProblemError(f"{path} has no settings: expected a JSON object, as save_pretrained writes it.")
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return from_config(name, cast("dict[str, Any]", content), source=str(path))


def from_config(name: str, config: Mapping[str, Any], source: str = "its config.json") -> Model:
    """The model that the entries of a config.json describe.

    >>> entries = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    ...            "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100}
    >>> from_config("tiny", entries).layers[1].attention.kind
    'GQA-2'
    """
    notes: list[str] = []
    nested = next((each for each in TEXT_CONFIGS if isinstance(config.get(each), dict)), None)
    if nested is not None:
        config = {**config[nested], **{each: config[each] for each in OUTER if config.get(each) is not None}}
        notes.append("The text model alone.")
    family = _family(name, str(config.get("model_type", "")), notes)
    is_known = config.get("model_type") == family.name
    config = checked_entries(name, family.name if is_known else None, config)
    if missing := [each for each in family.needs if not config.get(each)]:
        raise ProblemError(f"{name} has no {', '.join(missing)}: expected what {family.name} has there.")
    if is_known:
        config = _with_defaults(config, family.name, notes)
    if config.get("is_encoder_decoder") and "encoder_layers" not in family.read:
        raise ProblemError(f"{name}: {family.name} is an encoder with a decoder, which is not read from a config.json.")
    if config.get("add_cross_attention") and "encoder_layers" not in family.read:
        raise ProblemError(f"{name} has add_cross_attention: attention to an encoder of another model is not counted.")
    if config.get("quantization_config"):
        notes.append("The checkpoint is quantised; its weights count in the type of the option.")
    fields: dict[str, Any] = dict(family.fields)
    names = {**NAMES, **family.read}
    for field, keys in names.items():
        key = next((each for each in keys if each and entry(config, each) is not None), None)
        if key is not None:
            fields[field] = _checked(name, field, key, entry(config, key))
    fields = {key: value for key, value in fields.items() if key not in family.when or entry(config, family.when[key])}
    fields.setdefault("mlp", 4 * fields.get("d_model", 0))
    if family.recurrent:
        fields["recurrent"] = _recurrent(family.recurrent, config, fields)
    _add_pattern(name, family.name, config, fields)
    _check_experts(name, family, fields)
    _add_experts(name, family.name, config, fields)
    _add_family(name, family.name, config, fields)
    if missing := missing_fields(fields):
        lacks = ", ".join(_alternatives(names[field]) for field in missing)
        raise ProblemError(
            f"{name} has no {lacks}: expected in a config.json of model_type {config.get('model_type', '')!r}, "
            f"which is read as the family {family.name}."
        )
    return from_fields(name, source, {**_computed(config, fields), "notes": [*fields.get("notes", ()), *notes]})


def _alternatives(keys: Sequence[str]) -> str:
    """The keys that a field may have in a config.json: `num_hidden_layers (or n_layer, n_layers)`."""
    first, *others = filter(None, keys)
    return f"{first} (or {', '.join(others)})" if others else first


def _with_defaults(config: Mapping[str, Any], family: str, notes: list[str]) -> Mapping[str, Any]:
    """The entries, completed by the defaults of the family: transformers writes only those that differ."""
    groups = {each: names for names in (*NAMES.values(), SHARED_EXPERTS) for each in names}  # names of one value
    missing = {
        key: value
        for key, value in default_entries(family).items()
        if key not in config and not any(each in config for each in groups.get(key, ()))
    }
    sizes = [f"{key} {value:,}" for key, value in missing.items() if key in SIZES]
    if sizes:
        notes.append(f"Defaults of {family}: {', '.join(sizes)}.")
    entries = {**missing, **config}
    return {key: _automatic(key, entries) if value == "auto" else value for key, value in entries.items()}


def _automatic(key: str, entries: Mapping[str, Any]) -> Any:
    """What "auto" means for an entry."""
    width, heads = entries.get("hidden_size") or 0, entries.get("mamba_n_heads") or 1
    if key == "mamba_d_head":
        return (entries.get("mamba_d_ssm") or width * entries.get("mamba_expand", 2)) // heads
    return -(-width // 16) if key in ("mamba_dt_rank", "time_step_rank") else "auto"


SIZES = {each for field in ("d_model", "layers", "heads", "kv_heads", "mlp", "vocab") for each in NAMES[field]}
"""Entries that a reader of a cost wants to know to be defaults."""


def _recurrent(sizes: Mapping[str, Any], config: Mapping[str, Any], fields: Mapping[str, Any]) -> Recurrent:
    entries = _entries(config, _computed(config, fields))
    numbers = {key: value_of(str(text), entries) for key, text in sizes.items() if key != "kind"}
    return recurrent_layer(sizes["kind"], fields.get("d_model", 0), numbers)


def _family(name: str, family: str, notes: list[str]) -> Family:
    try:
        found = find_family(family)
    except ProblemError as error:
        raise ProblemError(f"{name}: {error}") from None
    if found is None:
        notes.append(f"model_type {family!r} is not known: biases, norms and MLP count as Llama's.")
        found = find_family("llama")
        assert found is not None
    return found


def _entries(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What sums of products may name: entries of the config.json, fields, the size of a head, layers with experts."""
    head_dim = fields.get("head_dim") or fields.get("d_model", 0) // (fields.get("heads") or 1)
    pattern, layers = fields.get("mlp_pattern"), fields.get("layers", 0)
    expert_layers = layers - fields.get("dense_layers", 0) if pattern is None else str(pattern).count("e")
    untied = not fields.get("tied", False)
    return {**config, **fields, "head_dim": head_dim, "expert_layers": expert_layers, "untied": untied}


def _computed(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with sums of products computed."""
    entries = _entries(config, fields)
    return {key: value_of(value, entries) if is_sum(key, value) else value for key, value in fields.items()}


def _checked(name: str, field: str, key: str, value: Any) -> Any:
    """The value of a key of the config.json as the value of a field."""
    if isinstance(value, list) and value:
        first, *others = cast("list[Any]", value)
        if not isinstance(first, list) and all(each == first for each in others):  # one for each layer, all equal
            value = first
    kind = bool if field in FLAGS else int
    if type(value) is not kind:
        whole = f", {int(value)}" if isinstance(value, float) and value.is_integer() else ""
        expected = "true or false" if kind is bool else f"a whole number{whole}"
        raise ProblemError(f"{name}: {key} is {value!r}: expected {expected}.")
    if value < (least := int(field in AT_LEAST_ONE)):
        raise ProblemError(f"{name}: {key} is {value}: expected {least} or more.")
    return value


def _add_pattern(name: str, family: str, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """The pattern of each layer: `layer_types`, or the settings that families had before these."""
    window = fields.get("window") or config.get("sliding_window") or (config.get("local_attention") or 0) // 2
    if window:
        window = _checked(name, "window", "sliding_window", window)
    if family == "modernbert" and window:
        window += 1  # the key at a distance of half the window is seen as well
    if config.get("use_sliding_window") is False or (family == "llama4_text" and not fields.get("chunk")):
        window = None
    key = next((each for each in KINDS if config.get(each)), None)
    if key is not None:
        kinds = config[key]
        known = {kind for kind, letter in LETTERS.items() if letter != "r" or fields.get("recurrent")}
        unknown = next((kind for kind in kinds if kind not in known), None)
        if unknown is not None:
            raise ProblemError(
                f"{name} has layers of {unknown!r}: expected {', '.join(sorted(known))}; others are not counted."
            )
        letters = "".join(LETTERS[kind] for kind in kinds)
        if family == "nemotron_h" or "n" in letters:  # each layer is a mixer or an MLP
            fields["layers"] = len(kinds)
            fields["mlp_pattern"] = "".join({"mlp": "d", "moe": "e"}.get(kind, "n") for kind in kinds)
        elif "layers" in fields:
            check_length(name, key, kinds, fields["layers"])
    elif "pattern" in fields and not any(config.get(each) for each in INTERVALS):
        letters = str(fields["pattern"])
    else:
        if family in ("llama4_text", "smollm3") and (rotated := config.get("no_rope_layers")):
            check_length(name, "no_rope_layers", rotated, fields.get("layers", 0))
        letters = _letters_by_rule(family, config, bool(window), fields.get("layers", 0))
    if window:
        fields["window"] = window
    if "s" in letters and not window:
        raise ProblemError(f"{name} has sliding layers and no sliding_window.")
    if "c" not in letters:
        fields.pop("chunk", None)
    fields["pattern"] = letters


def _letters_by_rule(family: str, config: Mapping[str, Any], has_window: bool, layers: int) -> str:
    every = config.get("sliding_window_pattern")
    if isinstance(every, str):
        return every.replace("L", "s").replace("G", "f") if has_window else "f"
    if family in ("llama4_text", "smollm3"):  # layers without RoPE differ
        rotated = config.get("no_rope_layers") or [1] * (config.get("no_rope_layer_interval", 4) - 1) + [0]
        chunk = "c" if family == "llama4_text" and config.get("attention_chunk_size") else "f"
        plain = "s" if family == "smollm3" and has_window else "f"
        return "".join(chunk if each else plain for each in rotated)
    if family == "lfm2" and config.get("full_attn_idxs") is not None:
        return "".join("f" if index in config["full_attn_idxs"] else "r" for index in range(layers))
    if interval := config.get("full_attention_interval"):  # of qwen3_next: other layers are recurrent
        return "r" * (interval - 1) + "f"
    if family == "jamba":
        period, offset = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
        return "".join("f" if index % period == offset else "r" for index in range(layers))
    if family == "bamba":
        full = config.get("attn_layer_indices") or []
        return "".join("f" if index in full else "r" for index in range(layers))
    if not has_window:
        return "f"
    if family in ("gemma2", "gpt_oss"):
        return "sf"
    if family in ("modernbert", "modernbert-decoder"):
        return "f" + "s" * (config.get("global_attn_every_n_layers", 3) - 1)
    if family in ("gemma3_text", "gemma3n_text", "cohere2", "olmo3") or isinstance(every, int):
        default = {"cohere2": 4, "olmo3": 4, "gemma3n_text": 5}.get(family, 6)
        letters = "s" * ((every if isinstance(every, int) else default) - 1) + "f"
        if family == "cohere2_moe" and (dense := config.get("first_k_dense_replace")):  # these count on their own
            before = "s" * (config.get("prefix_dense_sliding_window_pattern", 1) - 1) + "f"
            return _repeated(before, dense) + _repeated(letters, layers - dense)
        return letters
    if family in ("qwen2", "qwen2_moe", "qwen3", "dots1"):
        first = min(config.get("max_window_layers", layers), layers)
        if family == "qwen2_moe":  # windows before that layer, in every second one
            return _repeated("sf", first) + "f" * (layers - first)
        return "f" * first + "s" * (layers - first)
    return "s"


def _repeated(letters: str, layers: int) -> str:
    return (letters * layers)[: max(layers, 0)]


def _check_experts(name: str, family: Family, fields: Mapping[str, Any]) -> None:
    """Raise `ProblemError` for a mixture of one expert, which has a router all the same; a jamba is dense then."""
    if fields.get("experts") != 1 or family.name in ("jamba", "nemotron_h"):  # of nemotron_h, layers may have none
        return
    of_mixtures = {"experts", *family.read.get("experts", NAMES["experts"]), *NAMES["expert_mlp"]}
    if of_mixtures & {*family.fields, *default_entries(family.name)}:
        raise ProblemError(f"{name} has one expert, with a router that is not counted: expected 2 experts or more.")


def _add_experts(name: str, family: str, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    if fields.get("experts", 1) <= 1:
        for field in ("experts", "active", "expert_mlp", "shared_mlp", "dense_layers", "shared_gate"):
            fields.pop(field, None)
        return
    layers = fields.get("layers", 0)
    fields.setdefault("active", 1)
    shared = next((config[each] for each in SHARED_EXPERTS if config.get(each) is not None), 0)
    if family == "hy_v3" and not shared:  # transformers makes a whole MLP of none
        fields["shared_mlp"] = fields["mlp"]
    if family == "nemotron_h" and fields.get("shared_mlp") == 0:  # and here of a width of 0
        fields["shared_mlp"] = fields["mlp"]
    if shared and "shared_mlp" not in fields:
        fields["shared_mlp"] = shared * fields.get("expert_mlp", fields["mlp"])
    if kinds := config.get("mlp_layer_types"):
        if unknown := next((kind for kind in kinds if kind not in MLP_LETTERS), None):
            raise ProblemError(f"{name} has MLPs of {unknown!r}: expected {' or '.join(MLP_LETTERS)}.")
        check_length(name, "mlp_layer_types", kinds, layers)
        fields["mlp_pattern"] = "".join(MLP_LETTERS[kind] for kind in kinds)
    if "moe_layer_start_index" in config:  # ernie4_5_moe
        first, last = config["moe_layer_start_index"], config.get("moe_layer_end_index", -1)
        every = config.get("moe_layer_interval", 1)
        last = layers - 1 if last == -1 else last
        has_experts = (not (i + 1) % every and first <= i <= last for i in range(layers))
        fields["mlp_pattern"] = "".join("e" if each else "d" for each in has_experts)
    if "expert_layer_period" in config:  # jamba
        period, offset = config["expert_layer_period"], config.get("expert_layer_offset", 1)
        fields["mlp_pattern"] = "".join("e" if i % period == offset else "d" for i in range(layers))
    if config.get("decoder_sparse_step", 1) > 1:
        fields["moe_every"] = config["decoder_sparse_step"]
    if family == "axk1" and not config.get("mlp_layer_types") and (every := config.get("moe_layer_freq", 1)) > 1:
        first = fields.get("dense_layers", 0)
        fields["mlp_pattern"] = "".join("e" if i >= first and not i % every else "d" for i in range(layers))
    if "interleave_moe_layer_step" in config:  # llama4_text: intermediate_size is that of an expert
        fields["moe_every"] = config["interleave_moe_layer_step"]
        fields["shared_mlp"] = fields["expert_mlp"] = fields["mlp"]
        fields["dense_mlp"] = config.get("intermediate_size_mlp", fields["mlp"])
    if (with_experts := config.get("moe_layers")) is not None:  # of llama4_text
        fields["mlp_pattern"] = "".join("e" if i in with_experts else "d" for i in range(layers))
    if only_dense := config.get("mlp_only_layers"):
        every = fields.get("moe_every", 1)
        has_experts = (i not in only_dense and not (i + 1) % every for i in range(layers))
        fields["mlp_pattern"] = "".join("e" if each else "d" for each in has_experts)


def _add_family(name: str, family: str, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """What a setting of one family alone says."""
    if family == "falcon":
        grouped = bool(config.get("new_decoder_architecture"))
        parallel = config.get("num_ln_in_parallel_attn") or (2 if grouped else 1)  # norms of a layer with one input
        fields["norms"] = 1 if config.get("parallel_attn", True) and parallel != 2 else 2
        if not grouped:
            fields["kv_heads"] = 1 if config.get("multi_query", True) else fields.get("heads", 0)
        fields["qkv_bias"] = fields["out_bias"] = fields["mlp_bias"] = bool(config.get("bias", False))
    if "feed_forward_proj" in config:  # t5 and its family
        fields["gated"] = str(config["feed_forward_proj"]).startswith("gated")
    if family in ("lfm2", "lfm2_moe") and config.get("block_auto_adjust_ff_dim"):
        multiple, share = config.get("block_multiple_of", 256), config.get("block_ffn_dim_multiplier") or 1
        if not isinstance(share, int | float) or share < 0:
            raise ProblemError(f"{name}: block_ffn_dim_multiplier is {share!r}: expected a number above 0.")
        fields["mlp"] = -(-int(share * (2 * fields["mlp"] // 3)) // multiple) * multiple
    if family == "gpt_bigcode":
        fields["kv_heads"] = 1 if config.get("multi_query", True) else fields.get("heads", 0)
    if family == "granitemoehybrid" and "experts" not in fields:  # the shared network is the only one
        fields["mlp"] = config.get("shared_intermediate_size") or fields["mlp"]
    if family == "opt" and config.get("word_embed_proj_dim", fields.get("d_model")) != fields.get("d_model"):
        raise ProblemError(
            f"word_embed_proj_dim is {config['word_embed_proj_dim']} and hidden_size {fields.get('d_model')}: "
            "embeddings of another width than the layers are not counted."
        )
    if family == "opt":
        if not config.get("enable_bias", True):
            fields["qkv_bias"] = fields["out_bias"] = fields["mlp_bias"] = False
        if not config.get("layer_norm_elementwise_affine", True):
            fields["norm_weights"] = 0
        if not config.get("do_layer_norm_before", True) or config.get("_remove_final_layer_norm"):
            fields["final_norm"] = False
    if family == "laguna":
        fields["gate"] = "head" if config.get("gating", True) in (True, "per-head") else "element"
        if fields["gate"] == "element":  # which has no bias
            fields["other_parameters"] = "-1 layers heads head_dim attention_bias"
    if family == "marian" and not config.get("share_encoder_decoder_embeddings", True):
        fields["other_parameters"] = fields.get("vocab", 0) * fields.get("d_model", 0)  # embeddings of the encoder
        fields["vocab"] = config.get("decoder_vocab_size") or fields.get("vocab", 0)
    if family == "mvp" and config.get("use_prompt"):
        raise ProblemError(f"{name} has use_prompt: keys and values of learned prompts are not counted.")
    if family == "bert-generation" and config.get("is_decoder"):
        fields["causal"] = fields["has_output"] = True
    if family == "nemotron_h" and config.get("moe_latent_size"):
        raise ProblemError(
            f"moe_latent_size is {config['moe_latent_size']}: experts of another width than the layers are not counted."
        )
    if family == "stablelm" and config.get("use_parallel_residual"):
        fields["norms"] = 1
    if "kv_rank" in fields:
        fields.pop("head_dim", None)
        fields.pop("kv_heads", None)
