"""A tokenizer and models that are made in milliseconds, for the tests of surveys."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from regard.inspect.surveying.kinds import Head
from regard.inspect.surveying.report import Report

TEXT = "the cat sat on the mat, and the dog on the rug.\n"
VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
LLAMA: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": None}


def words() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>"], initial_alphabet=alphabet)
    made.train_from_iterator([TEXT] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def llama() -> Any:
    """Three layers of six heads on two key heads."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()


def small(kind: Any, config: Any, **more: Any) -> Any:
    """A model of another kind in the same sizes."""
    torch.manual_seed(1)
    return kind(config(**SIZES, max_position_embeddings=512, **more))


def agrees_with_eager(report: Report) -> bool:
    return report.run.eager_difference is not None and report.run.eager_difference < 1e-5


def assert_between(head: Head):
    """A score stands within its interval, where it has one."""
    for name, (value, _, low, high) in head.scores.items():
        if value is not None and low is not None and high is not None:
            assert low - 1e-6 <= value <= high + 1e-6, name
