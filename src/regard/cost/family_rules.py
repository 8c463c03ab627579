"""Entries of a config.json that one family alone has, or reads in a way of its own."""

from collections.abc import Callable, Mapping
from typing import Any

from regard.cost.config_fields import checked_value
from regard.cost.entries import check_length
from regard.errors import ProblemError

Entries = Mapping[str, Any]
Fields = dict[str, Any]

BERTS = (
    "bert", "bert-generation", "camembert", "data2vec-text", "ernie", "megatron-bert", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
"""Encoders that are decoders where `is_decoder` is true."""

MOST_WIDTHS = 1_000
"""A larger `block_ffn_dim_multiplier` is a damaged file."""


def add_family(name: str, family: str, config: Entries, fields: Fields) -> None:
    """Set the fields that the rule of the family says, if it has one.

    Raises:
        ProblemError: a model whose parts are not counted.
    """
    if "feed_forward_proj" in config:  # t5 and its family
        fields["gated"] = str(config["feed_forward_proj"]).startswith("gated")
    if family in RULES:
        RULES[family](name, config, fields)
    if "kv_rank" in fields:
        fields.pop("head_dim", None)
        fields.pop("kv_heads", None)


def add_key_heads(name: str, config: Entries, fields: Fields) -> None:
    """Set the key heads of a family that is not known, from other names that config.json files have for them."""
    if "kv_heads" in fields:
        return
    if config.get("multi_query_attention") and (groups := config.get("multi_query_group_num")) is not None:
        fields["kv_heads"] = checked_value(name, "kv_heads", "multi_query_group_num", groups)
    elif config.get("multi_query_attention") or config.get("multi_query"):
        fields["kv_heads"] = 1


def _bert(_name: str, config: Entries, fields: Fields) -> None:
    if config.get("is_decoder"):
        fields["causal"] = fields["has_output"] = True


def _falcon(name: str, config: Entries, fields: Fields) -> None:
    grouped = bool(config.get("new_decoder_architecture"))
    parallel = config.get("num_ln_in_parallel_attn") or (2 if grouped else 1)  # norms of a layer with one input
    fields["norms"] = 1 if config.get("parallel_attn", True) and parallel != 2 else 2
    if not grouped:
        _multi_query(name, config, fields)
    elif (times := fields.get("heads", 0) // (fields.get("kv_heads") or 1)) > 1:
        fields["notes"] = [f"transformers caches keys and values of all query heads, {times} times what is counted."]
    fields["qkv_bias"] = fields["out_bias"] = fields["mlp_bias"] = bool(config.get("bias", False))


def _gemma(_name: str, config: Entries, fields: Fields) -> None:
    """An encoder, such as EmbeddingGemma, whose windows have half of their tokens on each side."""
    if config.get("use_bidirectional_attention"):
        fields["causal"] = fields["has_output"] = False
        if "window" in fields:
            fields["window"] = fields["window"] // 2 + 1


def _granitemoehybrid(_name: str, config: Entries, fields: Fields) -> None:
    if "experts" not in fields:  # the shared network is the only one
        fields["mlp"] = config.get("shared_intermediate_size") or fields["mlp"]


def _laguna(name: str, config: Entries, fields: Fields) -> None:
    key = "num_attention_heads_per_layer"
    if (heads := config.get(key)) is not None:
        check_length(name, key, heads, fields.get("layers", 0))
        if len({*heads}) > 1:
            raise ProblemError(f"{name}: {key} is {heads}: heads that differ between the layers are not counted.")
        fields["heads"] = checked_value(name, "heads", key, heads)
    fields["gate"] = "head" if config.get("gating", True) in (True, "per-head") else "element"
    if fields["gate"] == "element":  # which has no bias
        fields["other_parameters"] = "-1 layers heads head_dim attention_bias"


def _lfm2(name: str, config: Entries, fields: Fields) -> None:
    if not config.get("block_auto_adjust_ff_dim"):
        return
    multiple, share = config.get("block_multiple_of", 256), config.get("block_ffn_dim_multiplier") or 1
    if not isinstance(share, int | float) or not 0 < share <= MOST_WIDTHS:
        expected = f"a number above 0, {MOST_WIDTHS:,} at most"
        raise ProblemError(f"{name}: block_ffn_dim_multiplier is {share!r}: expected {expected}.")
    fields["mlp"] = -(-int(share * (2 * fields["mlp"] // 3)) // multiple) * multiple


def _marian(_name: str, config: Entries, fields: Fields) -> None:
    if not config.get("share_encoder_decoder_embeddings", True):
        fields["other_parameters"] = fields.get("vocab", 0) * fields.get("d_model", 0)  # embeddings of the encoder
        fields["vocab"] = config.get("decoder_vocab_size") or fields.get("vocab", 0)


def _multi_query(_name: str, config: Entries, fields: Fields) -> None:
    fields["kv_heads"] = 1 if config.get("multi_query", True) else fields.get("heads", 0)


def _mvp(name: str, config: Entries, _fields: Fields) -> None:
    if config.get("use_prompt"):
        raise ProblemError(f"{name} has use_prompt: keys and values of learned prompts are not counted.")


def _nemotron_h(_name: str, config: Entries, _fields: Fields) -> None:
    if config.get("moe_latent_size"):
        raise ProblemError(
            f"moe_latent_size is {config['moe_latent_size']}: experts of another width than the layers are not counted."
        )


def _opt(_name: str, config: Entries, fields: Fields) -> None:
    if config.get("word_embed_proj_dim", fields.get("d_model")) != fields.get("d_model"):
        raise ProblemError(
            f"word_embed_proj_dim is {config['word_embed_proj_dim']} and hidden_size {fields.get('d_model')}: "
            "embeddings of another width than the layers are not counted."
        )
    if not config.get("enable_bias", True):
        fields["qkv_bias"] = fields["out_bias"] = fields["mlp_bias"] = False
    if not config.get("layer_norm_elementwise_affine", True):
        fields["norm_weights"] = 0
    if not config.get("do_layer_norm_before", True) or config.get("_remove_final_layer_norm"):
        fields["final_norm"] = False


def _stablelm(_name: str, config: Entries, fields: Fields) -> None:
    if config.get("use_parallel_residual"):
        fields["norms"] = 1


RULES: dict[str, Callable[[str, Entries, Fields], None]] = {
    **dict.fromkeys(BERTS, _bert),
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma3_text": _gemma,
    "gpt_bigcode": _multi_query,
    "granitemoehybrid": _granitemoehybrid,
    "laguna": _laguna,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "marian": _marian,
    "mvp": _mvp,
    "nemotron_h": _nemotron_h,
    "opt": _opt,
    "stablelm": _stablelm,
}
"""The rule of each family: a function of the model's name, its entries, and the fields, which it changes."""
