"""The shapes of a model from its config.json, as transformers writes it.

What models of a family share (biases, norms, gated MLPs) is not in a config.json: it comes from the families of
models.toml, by `model_type`. A family that is not there is read as Llama's, with a note; layers that are no softmax
attention raise an error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from regard.cost.model import Model, family_fields, find_model, from_fields
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
    "dense_layers": ("first_k_dense_replace",),
    "shared_cache_layers": ("num_kv_shared_layers",),
    "tied": ("tie_word_embeddings",),
    "mlp_bias": ("mlp_bias",),
}
"""Our fields, and their names in config.json; the first that has a value counts."""

LETTERS = {"full_attention": "f", "sliding_attention": "s", "chunked_attention": "c", "global": "f", "local": "s"}
"""`layer_types` of transformers, as letters of `from_fields`."""

LEARNED_POSITIONS = {"gpt2": 0, "bert": 0, "opt": 2}
"""Families with learned positions, and the positions beyond the context."""


def load_model(name: str) -> Model:
    """A published model by name, or the one of a folder or file with a config.json.

    Raises:
        ProblemError: there is no such model; the file is no configuration, or one that cannot be counted.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return read_config(path / "config.json" if path.is_dir() else path)
    if name.startswith((".", "/", "~")) or "\\" in name:
        raise ProblemError(f"there is no directory {name}.")
    return find_model(name)


def read_config(path: Path) -> Model:
    """The model that a config.json describes."""
    try:
        content: object = json.loads(path.read_text())
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
    if isinstance(config.get("text_config"), dict):
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **config["text_config"]}
        config = {key: value for key, value in config.items() if value is not None}
        notes.append("The text model alone.")
    family = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        raise ProblemError(f"{name}: {family} is an encoder with a decoder, which is not read from a config.json.")
    shared = family_fields(family)
    if shared is None:
        shared = family_fields("llama") or {}
        notes.append(f"model_type {family!r} is not known: biases, norms and MLP count as Llama's.")
    if config.get("quantization_config"):
        notes.append("The checkpoint is quantised; its weights count in the type of the option.")
    fields: dict[str, Any] = dict(shared)
    for field, names in NAMES.items():
        value = next((config[each] for each in names if config.get(each) is not None), None)
        if value is not None:
            fields[field] = _checked(name, field, value)
    fields.setdefault("mlp", 4 * fields.get("d_model", 0))
    _add_pattern(name, family, config, fields)
    _add_experts(config, fields)
    _add_family(family, config, fields)
    return from_fields(name, source, {**fields, "notes": notes})


def _checked(name: str, field: str, value: Any) -> Any:
    if isinstance(value, list) and value and len(set(cast("list[Any]", value))) == 1:  # one for each layer, all equal
        value = cast("list[Any]", value)[0]
    kind = bool if field in ("tied", "mlp_bias") else int
    if type(value) is not kind:
        raise ProblemError(f"{name}: {field} is {value!r}: expected {'true or false' if kind is bool else 'a number'}.")
    return value


def _add_pattern(name: str, family: str, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """The pattern of each layer: `layer_types`, or the settings that families had before these."""
    window = config.get("sliding_window") or (config.get("local_attention") or 0) // 2
    if family == "modernbert" and window:
        window += 1  # the key at a distance of half the window is seen as well
    if config.get("use_sliding_window") is False or (family == "llama4_text" and not fields.get("chunk")):
        window = None
    kinds = config.get("layer_types")
    if kinds:
        unknown = next((kind for kind in kinds if kind not in LETTERS), None)
        if unknown is not None:
            raise ProblemError(
                f"{name} has layers of {unknown!r}: expected {', '.join(LETTERS)}; others are not counted."
            )
        letters = "".join(LETTERS[kind] for kind in kinds)
    else:
        letters = _letters_by_rule(family, config, bool(window), fields.get("layers", 0))
    if window:
        fields["window"] = _checked(name, "window", window)
    if "s" in letters and not window:
        raise ProblemError(f"{name} has sliding layers and no sliding_window.")
    if "c" not in letters:
        fields.pop("chunk", None)
    fields["pattern"] = letters


def _letters_by_rule(family: str, config: Mapping[str, Any], has_window: bool, layers: int) -> str:
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if family == "llama4_text" and config.get("attention_chunk_size"):
        return "cccf"
    if not has_window:
        return "f"
    if family in ("gemma2", "gpt_oss"):
        return "sf"
    if family == "modernbert":
        return "f" + "s" * (config.get("global_attn_every_n_layers", 3) - 1)
    if family in ("gemma3_text", "gemma3n_text", "cohere2", "olmo3") or every:
        default = {"cohere2": 4, "olmo3": 4, "gemma3n_text": 5}.get(family, 6)
        return "s" * ((every or default) - 1) + "f"
    if family in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        first = min(config.get("max_window_layers", layers), layers)
        return "f" * first + "s" * (layers - first)
    return "s"


def _add_experts(config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    if fields.get("experts", 1) <= 1:
        for field in ("experts", "active", "expert_mlp", "shared_mlp", "dense_layers"):
            fields.pop(field, None)
        return
    fields.setdefault("active", 1)
    if config.get("n_shared_experts"):
        fields["shared_mlp"] = config["n_shared_experts"] * fields["expert_mlp"]
    if config.get("decoder_sparse_step", 1) > 1:
        fields["moe_every"] = config["decoder_sparse_step"]
    if "interleave_moe_layer_step" in config:  # llama4_text: intermediate_size is that of an expert
        fields["moe_every"] = config["interleave_moe_layer_step"]
        fields["shared_mlp"] = fields["expert_mlp"] = fields["mlp"]
        fields["dense_mlp"] = config.get("intermediate_size_mlp", fields["mlp"])
    only_dense = config.get("mlp_only_layers")
    if only_dense:
        if only_dense != list(range(len(only_dense))):
            raise ProblemError(f"mlp_only_layers {only_dense}: expected the first layers.")
        fields["dense_layers"] = len(only_dense)


def _add_family(family: str, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """What a setting of one family alone says."""
    if config.get("attention_bias") is not None and family != "gpt_neox":
        fields["qkv_bias"] = fields["out_bias"] = bool(config["attention_bias"])
    if family == "seed_oss":
        fields["out_bias"] = bool(config.get("attention_out_bias", False))
    if family in LEARNED_POSITIONS:
        fields["positions"] = fields.get("context", 0) + LEARNED_POSITIONS[family]
    if family in ("phi", "gptj"):
        fields["other_parameters"] = fields.get("vocab", 0)  # the bias of the output
    if family == "bert":
        width = fields.get("d_model", 0)
        fields["other_parameters"] = width * (config.get("type_vocab_size", 2) + 2 + width + 1)
    if family == "falcon":
        grouped = bool(config.get("new_decoder_architecture"))
        fields["norms"] = 2 if grouped or not config.get("parallel_attn", True) else 1
        if not grouped:
            fields["kv_heads"] = 1 if config.get("multi_query", True) else fields.get("heads", 0)
        fields["qkv_bias"] = fields["out_bias"] = fields["mlp_bias"] = bool(config.get("bias", False))
    if "kv_rank" in fields:
        fields.pop("head_dim", None)
        fields.pop("kv_heads", None)
