"""Fields of `regard.cost.fields`, and the entries of a config.json that have their values."""

from typing import Any, cast

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

FLAGS = ("tied", "qkv_bias", "out_bias", "mlp_bias", "router_bias", "sink", "shared_gate")
"""Fields that are true or false."""

AT_LEAST_ONE = ("d_model", "layers", "encoder_layers", "heads", "vocab", "window")
"""Fields that are not zero."""

MOST_LAYERS = 10_000
"""More layers are a damaged file: each is a value in memory, and the costs of 10,000 take some seconds."""


def checked_value(name: str, field: str, key: str, value: Any) -> Any:
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
    if field in ("layers", "encoder_layers") and value > MOST_LAYERS:
        raise ProblemError(f"{name}: {key} is {value}: expected {MOST_LAYERS:,} or fewer.")
    return value
