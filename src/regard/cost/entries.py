"""Entries of a config.json that say which layers a model has: what each may be, checked before any of them is used.

Entries with the value null count as missing, so that the defaults of their family hold, but for those of `NONE`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from regard.cost.config_fields import MOST_LAYERS, checked_value
from regard.cost.families import default_entries
from regard.errors import ProblemError

KINDS = ("layer_types", "layers_block_type", "attention_layers")
"""Entries with the kind of each layer."""

SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""Names of the number of experts that every token takes."""

EXAONE = ("exaone4", "exaone_moe")
"""Families whose `sliding_window_pattern` may be a text such as LLLG: L for a sliding layer, G for a full one."""

INTERVALS = {
    "full_attention_interval": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    "sliding_window_pattern": ("cohere2", "cohere2_moe", "gemma3_text", *EXAONE),
    "global_attn_every_n_layers": ("modernbert", "modernbert-decoder"),
}
"""Entries that say which layers are of full attention where no list does, each with the families that read it."""

LEAST = {
    **dict.fromkeys(INTERVALS, 1), **dict.fromkeys(SHARED_EXPERTS, 0), "attn_layer_offset": 0, "attn_layer_period": 1,
    "block_multiple_of": 1, "decoder_sparse_step": 1, "decoder_vocab_size": 1, "expert_layer_offset": 0,
    "expert_layer_period": 1, "hidden_size": 1, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 1,
    "local_attention": 0, "mamba_d_ssm": 1, "mamba_expand": 1, "mamba_n_heads": 1, "max_source_positions": 1,
    "max_window_layers": 0, "moe_layer_end_index": -1, "moe_layer_freq": 1, "moe_layer_interval": 1,
    "moe_layer_start_index": 0, "no_rope_layer_interval": 1, "num_ln_in_parallel_attn": 1, "num_mel_bins": 1,
    "prefix_dense_sliding_window_pattern": 1, "relative_attention_num_buckets": 0, "task_type_vocab_size": 0,
    "type_vocab_size": 0,
}  # fmt: skip
"""Entries that are whole numbers, and the least that each may be."""

SPANS = (*INTERVALS, "no_rope_layer_interval", "prefix_dense_sliding_window_pattern")
"""Entries that are numbers of layers."""

NONE = ("local_attention", "mamba_d_ssm", *SHARED_EXPERTS)
"""Entries in which null says that there is none, whatever the default."""

LISTS = (
    "attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "moe_layers", "no_rope_layers",
    "num_attention_heads_per_layer",
)  # fmt: skip
"""Entries that are lists of whole numbers."""

KIND_LISTS = (*KINDS, "mlp_layer_types")
"""Entries that are lists of names."""

WITH_ENCODERS = (
    "bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp", "pegasus", "plbart", "whisper",
)  # fmt: skip
OF_ENCODERS = {"num_hidden_layers": "encoder_layers", "num_attention_heads": "encoder_attention_heads"}
"""Other names of entries of these families."""

T5S = ("mt5", "t5", "umt5")
OF_T5 = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "head_dim": "d_kv"}
"""Other names of entries of T5 and its family."""

OTHER_NAMES = {
    **dict.fromkeys(WITH_ENCODERS, OF_ENCODERS),
    **dict.fromkeys(T5S, OF_T5),
    "bloom": {"n_embed": "hidden_size"},
    "falcon": {"n_embed": "hidden_size"},
    "internlm3": {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    "lfm2": {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "nemotron_h": {
        "mamba_conv_bias": "use_conv_bias", "mamba_d_conv": "conv_kernel", "mamba_n_groups": "n_groups",
    },
}  # fmt: skip
"""Other names of entries by family, each with the usual one; where a config.json has both, the other one counts."""

BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`, as older files of nemotron_h write the kinds of their layers."""

KIMI_LINEAR = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip
"""Sizes in the `linear_attn_config` of a kimi_linear, each with the name that transformers writes."""


def checked_entries(name: str, family: str | None, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of a config.json that its family reads, after a check of their values.

    Args:
        family: None for one that is not known, which may read any entry.

    Raises:
        ProblemError: an entry is no whole number, no list, or smaller than it can be.

    >>> checked_entries("m", "jamba", {"attn_layer_period": 0})
    Traceback (most recent call last):
    regard.errors.ProblemError: m: attn_layer_period is 0: expected 1 or more.
    """
    if family in T5S and config.get("num_decoder_layers") is None:
        default = default_entries(family)["num_layers"]  # not num_hidden_layers, which transformers reads later
        config = {**config, "num_decoder_layers": config.get("num_layers", default)}
    config = _renamed(config, OTHER_NAMES.get(family or "", {}))
    if family == "nemotron_h":
        config = _with_blocks(name, config)
    if family == "kimi_linear":
        config = _with_linear_layers(name, config)
    if family == "gpt_neo":
        config = _with_kinds(name, config)
    left_out = _ignored(family, config)
    left_out |= {key for key in (*LEAST, *LISTS, *KIND_LISTS) if config.get(key) is None and key not in NONE}
    config = {key: value for key, value in config.items() if key not in left_out}
    _check_flags(name, config, default_entries(family or ""))
    for key, value in config.items():
        if value is None:
            continue
        if key == "sliding_window_pattern" and family in EXAONE and isinstance(value, str):
            _check_letters(name, key, value, "LG", "L (sliding layers) and G (full layers), or a whole number")
        elif key in LEAST:
            _check_number(name, key, value)
        elif key in LISTS:
            _check_list(name, key, value, int, "whole numbers")
        elif key in KIND_LISTS:
            _check_list(name, key, value, str, "names, one for each layer")
    return config


def check_length(name: str, key: str, entries: Sequence[Any], layers: int) -> None:
    """Raise `ProblemError` unless there is an entry for each layer, as transformers demands."""
    if len(entries) != layers:
        count = len(entries)
        raise ProblemError(f"{name}: {key} has a length of {count}, with {layers} layers: expected one entry for each.")


def _ignored(family: str | None, config: Mapping[str, Any]) -> set[str]:
    """Entries that say nothing: of other families, and rules where a list has the kind of each layer."""
    if any(config.get(each) for each in KINDS):
        return {*INTERVALS, "max_window_layers"}
    return {each for each, families in INTERVALS.items() if family is not None and family not in families}


def _check_number(name: str, key: str, value: Any) -> None:
    if type(value) is not int:
        whole = f", {int(value)}" if isinstance(value, float) and value.is_integer() else ""
        raise ProblemError(f"{name}: {key} is {value!r}: expected a whole number{whole}.")
    if value < LEAST[key]:
        raise ProblemError(f"{name}: {key} is {value}: expected {LEAST[key]} or more.")
    if key in SPANS and value > MOST_LAYERS:
        raise ProblemError(f"{name}: {key} is {value}: expected {MOST_LAYERS:,} or fewer.")


def _check_flags(name: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise `ProblemError` for a text in place of true or false, but for the gates of laguna, which have names."""
    for key, default in defaults.items():
        if isinstance(default, bool) and isinstance(config.get(key), str) and key != "gating":
            raise ProblemError(f"{name}: {key} is {config[key]!r}: expected true or false.")


def _check_list(name: str, key: str, value: Any, kind: type, expected: str) -> None:
    if not isinstance(value, list):
        raise ProblemError(f"{name}: {key} is {value!r}: expected a list of {expected}.")
    for each in cast("list[Any]", value):
        if not isinstance(each, kind):
            raise ProblemError(f"{name}: {key} has {each!r}: expected a list of {expected}.")


def _check_letters(name: str, key: str, value: Any, letters: str, expected: str) -> None:
    if not isinstance(value, str) or not value or set(value) - set(letters):
        raise ProblemError(f"{name}: {key} is {value!r}: expected a text of {expected}.")


def _renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    older = {newer: config[each] for each, newer in names.items() if config.get(each) is not None}
    return {**config, **older}


def _with_kinds(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of a gpt_neo with `attention_layers`, computed from `attention_types` as transformers does."""
    groups = config.get("attention_types")
    if groups is None:
        return config
    try:
        kinds = [kind for group, count in groups for kind in [*group] * min(count, MOST_LAYERS + 1)]
    except (TypeError, ValueError):
        expected = 'a list of groups of layers, as [[["global", "local"], 12]]'
        raise ProblemError(f"{name}: attention_types is {groups!r}: expected {expected}.") from None
    return {**config, "attention_layers": kinds}


def _with_blocks(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of a nemotron_h with `layers_block_type`, which other names may have in its place."""
    letters = config.get("hybrid_override_pattern")
    if config.get("layers_block_type"):
        return config
    if config.get("layer_types"):
        return {**config, "layers_block_type": config["layer_types"]}
    if letters is None:
        return config
    expected = "M (recurrent layers), * (attention), - (MLPs) and E (experts)"
    _check_letters(name, "hybrid_override_pattern", letters, "".join(BLOCKS), expected)
    return {**config, "layers_block_type": [BLOCKS[each] for each in letters]}


def _with_linear_layers(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of a kimi_linear as transformers writes them; its authors list the layers of a kind, from 1 on."""
    linear = config.get("linear_attn_config")
    if linear is None:
        return config
    if not isinstance(linear, Mapping):
        expected = "an object with full_attn_layers and kda_layers"
        raise ProblemError(f"{name}: linear_attn_config is {linear!r}: expected {expected}.")
    found = cast("Mapping[str, Any]", linear)
    config = {**config, **{ours: found[each] for each, ours in KIMI_LINEAR.items() if found.get(each) is not None}}
    if not config.get("layer_types"):
        kinds: dict[int, str] = {}
        lists = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
        for key, kind in lists.items():
            _check_list(name, f"linear_attn_config.{key}", found.get(key), int, "whole numbers")
            kinds |= dict.fromkeys(found[key], kind)
        numbers = [*found["full_attn_layers"], *found["kda_layers"]]
        if sorted(numbers) != [*range(1, len(numbers) + 1)]:
            lacking = f"{' and '.join(lists)} name the layers {sorted(numbers)}"
            raise ProblemError(f"{name}: {lacking}: expected each of the layers 1 to {len(numbers)} once.")
        config = {**config, "layer_types": [kinds[number] for number in sorted(kinds)]}
    if not config.get("mlp_layer_types") and isinstance(config["layer_types"], list):
        dense = checked_value(name, "dense_layers", "first_k_dense_replace", config.get("first_k_dense_replace", 1))
        kinds_of_mlps = ["dense" if i < dense else "sparse" for i in range(len(config["layer_types"]))]
        config = {**config, "mlp_layer_types": kinds_of_mlps}
    return config
