"""Tiny models with random weights, one per way of attending that transformers' models have. No network."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from regard.integrate.cache_argument import usual_name
from regard.integrate.transformers import use_regard

VOCABULARY = 101

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_MIXTURE = {"num_local_experts": 2, "num_experts_per_tok": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_ROUTED = {"first_k_dense_replace": 2, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, "forced_eos_token_id": None,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
}  # fmt: skip
_T5GEMMA = _GROUPED | _ALTERNATING | {"head_dim": 8, "eos_token_id": None}
_BERT = _SIZES | {"model_type": "bert"}

# name: (config class, model class, config). What is special about each stands behind it.
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),  # grouped heads
    "mistral": ("MistralConfig", "MistralForCausalLM", _GROUPED | {"sliding_window": 5}),  # every layer a window
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED | {"head_dim": 16}),  # heads x head_dim is not hidden_size
    "gemma2": (  # softcap, windows in turns
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _GROUPED | _ALTERNATING | {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GROUPED | _ALTERNATING | {"head_dim": 16}),
    "gemma3n": (  # layers that read the keys of earlier ones
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        _GROUPED | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 5, "head_dim": 16}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 8}
        | {"altup_num_inputs": 2},
    ),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", _GROUPED | _ALTERNATING | _MIXTURE | {"head_dim": 16}),  # sinks
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),  # output_attentions goes no further than the layer
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _SIZES),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}),  # asks the interface since transformers 5.24
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _GROUPED | {"sliding_window": 5}),
    "cohere": ("CohereConfig", "CohereForCausalLM", _GROUPED),
    "opt": ("OPTConfig", "OPTForCausalLM", _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "llama4": (  # chunks
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        _GROUPED | _MIXTURE | {"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"]}
        | {"head_dim": 16, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
    ),
    "deepseek_v3": (  # latent attention: v_dim is not qk_dim
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _SIZES | _LATENT | _ROUTED | {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    ),
    "doge": ("DogeConfig", "DogeForCausalLM", _GROUPED | {"keep_window_size": 6}),  # computes with its mask
}  # fmt: skip
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForMaskedLM", _SIZES),
    "modernbert": (  # windows to both sides
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        _SIZES | {"local_attention": 6, "global_attn_every_n_layers": 2},
    ),
}
PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5 | {"decoder_start_token_id": 0}),  # position_bias, scale 1
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART | {"decoder_start_token_id": 2}),  # cross-attention
    "nllb_moe": (  # whose router finds padding by the mask
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        _BART | {"decoder_start_token_id": 2, "num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1},
    ),
    "t5gemma": (  # a decoder whose config does not tell of an encoder
        "T5GemmaConfig",
        "T5GemmaForConditionalGeneration",
        {"encoder": _T5GEMMA, "decoder": _T5GEMMA, "vocab_size": VOCABULARY, "eos_token_id": None},
    ),
    "bert_to_bert": (  # two models in one
        "EncoderDecoderConfig",
        "EncoderDecoderModel",
        {"encoder": _BERT, "decoder": _BERT | {"is_decoder": True, "add_cross_attention": True}}
        | {"decoder_start_token_id": 2, "pad_token_id": 0},
    ),
}
ADDING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bigbird_pegasus": (  # adds the mask to the scores of its encoder
        "BigBirdPegasusConfig", "BigBirdPegasusForConditionalGeneration", _BART | {"decoder_start_token_id": 2},
    ),
    "git": (  # adds the mask to all scores
        "GitConfig", "GitForCausalLM",
        _SIZES | {"vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
                    | {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}},
    ),
    "deepseek_v4": (  # joins the mask and a bias of 0 and -inf
        "DeepseekV4Config", "DeepseekV4ForCausalLM",
        _GROUPED | {"head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 24, "moe_intermediate_size": 8}
        | {"n_routed_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5, "index_n_heads": 2}
        | {"o_groups": 2, "o_lora_rank": 8, "index_head_dim": 16, "index_topk": 3}
        | {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}
        | {"compress_rates": {"heavily_compressed_attention": 4, "compressed_sparse_attention": 2}},
    ),
}  # fmt: skip
BY_THEMSELVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "falcon": (
        "FalconConfig", "FalconForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    ),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_layers": 1, "n_heads": 4}),
}  # fmt: skip


@functools.cache
def model(name: str) -> Any:
    """The model of that name, in evaluation mode, with eager attention."""
    config_class, model_class, sizes = (DECODERS | ENCODERS | PAIRS | ADDING | BY_THEMSELVES)[name]
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    made = getattr(transformers, model_class)(getattr(transformers, config_class)(**tokens | sizes)).eval()
    with torch.no_grad():
        for label, weight in made.named_parameters():
            if "sinks" in label:
                weight.copy_(torch.randn_like(weight))
            elif weight.ndim > 1 and name != "t5":
                weight.mul_(3)  # as initialised, 0.02, all attention would be as good as uniform
    if name not in BY_THEMSELVES:
        made.set_attn_implementation("eager")
    return made


def both(name: str, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(what `run(model)` gives with transformers' eager attention, and with regard's)."""
    subject = model(name)
    subject.set_attn_implementation("eager")
    torch.manual_seed(1)
    eager = run(subject)
    use_regard(subject)
    torch.manual_seed(1)
    return eager, run(subject)


def tokens(rows: int = 2, length: int = 13) -> Tensor:
    """Token ids, none of them special."""
    return torch.randint(3, VOCABULARY, (rows, length))


def padding(side: str, rows: int = 2, length: int = 13) -> Tensor:
    """An attention mask [rows, length] whose first row is shorter by 4 tokens, or lacks one in the middle."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, {"left": slice(0, 4), "right": slice(length - 4, length), "hole": slice(5, 6)}[side]] = 0
    return mask


def with_cache(cache: Any) -> dict[str, Any]:
    """A cache as an argument, by its name in the installed transformers."""
    return {usual_name(): cache}


def close(ours: Tensor, eager: Tensor) -> bool:
    """Whether they differ by no more than 1e-5, or as much of the largest where that is above 1."""
    return float((ours - eager).abs().max()) <= 1e-5 * max(1.0, float(eager.abs().max()))
