"""Tokenizers and models that are made in milliseconds, for the tests of `regard generate`."""

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<says>{% endif %}"
)
POSITIONS = 97


def byte_level(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """As GPT-2 has it: every byte a token, and some of them merged; the last token ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(a + b for a, b in merges)]
    tokenizer: Any = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: words with their space in front, and bytes for what is no word."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁ca", "▁au", "f", "▁lait", "s", "é"]
    tokenizer: Any = Tokenizer(
        BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _wrapped(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT has it: `##` marks what belongs to the piece before."""
    words = ["[UNK]", "play", "##ing", "##s", "a", "'", "don", "t", ",", ".", "game"]
    tokenizer: Any = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def save(
    folder: Any, config: Any = None, kind: Any = LlamaForCausalLM, *, template: str | None = None, **more: Any
) -> Any:
    """A random model and a byte-level tokenizer, saved to a folder; the model comes back."""
    tokenizer = byte_level(("Ġ", "a"), ("e", "r"), ("i", "n"))
    tokenizer.chat_template = template
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 47, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "initializer_range": 0.3}
    model = kind(config or LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes | more))
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
