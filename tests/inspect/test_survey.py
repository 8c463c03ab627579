"""A survey, end to end, on small random models: what it reports is so, and it leaves the model as it was."""

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

from regard.errors import ProblemError
from regard.inspect import Report, survey
from regard.inspect.layer import Layer, measured_layer, numbered
from regard.inspect.observe import observe
from regard.integrate.transformers import use_regard

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


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>"], initial_alphabet=alphabet)
    words.train_from_iterator([TEXT] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")


def agrees_with_eager(report: Report) -> bool:
    return report.run.eager_difference is not None and report.run.eager_difference < 1e-5


@pytest.fixture
def llama():
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()


def test_a_decoder_is_run_checked_and_measured(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=5)
    prompt = tokenizer(TEXT)["input_ids"]
    run = report.run
    assert (run.layers, run.heads, run.kv_heads, run.head_dim) == (3, 6, 2, 4)
    assert run.parameters == sum(p.numel() for p in llama.parameters())
    assert len(run.backends) == 3
    assert agrees_with_eager(report)
    n = len(prompt) + 5
    assert run.pairs == 3 * 6 * n * (n + 1) // 2
    assert run.attention_gflop == pytest.approx(run.pairs * 4 * 4 / 1e9)  # q.k and a.v: 2 x 2 x 4 dimensions a pair
    assert list(run.seconds) == ["prompt", "continuation", "comparison", "layers", "induction"]
    assert run.tokens_per_second > 0
    assert run.decode_tokens_per_second is not None
    assert report.prompt_tokens == len(prompt)
    assert "".join(report.tokens[: len(prompt)]) == TEXT
    assert len(report.heads) == 18
    assert {(h.layer, h.head, h.kv_head) for h in report.heads} == {(a, b, b // 3) for a in range(3) for b in range(6)}
    assert all(h.induction and 0 < h.induction < 1 for h in report.heads)
    chance = sum((i - 1) // 25 / (i + 1) for i in range(26, 101)) / 75  # earlier periods, of the keys that a row sees
    assert all(h.induction_chance == pytest.approx(chance) for h in report.heads)


def test_attention_that_differs_from_eager_is_noticed(llama, tokenizer, monkeypatch):
    exact = modeling_llama.eager_attention_forward

    def off(*args: Any, **kwargs: Any) -> Any:
        out, weights = exact(*args, **kwargs)
        return out * 1.5, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", off)
    assert not agrees_with_eager(survey(llama, tokenizer, TEXT, new_tokens=1))


def test_the_continuation_is_the_greedy_one(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=7)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    written = llama.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert report.continuation == tokenizer.decode(written)
    assert len(report.tokens) == ids.shape[1] + 7


def test_a_continuation_ends_where_the_model_ends_it(llama, tokenizer):
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    third = llama.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)[0, -1]
    llama.generation_config.eos_token_id = int(third)
    report = survey(llama, tokenizer, TEXT, new_tokens=9)
    assert len(report.tokens) <= ids.shape[1] + 2


def test_scores_and_pictures_are_those_of_the_eager_weights(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=0)
    llama.set_attn_implementation("eager")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        eager = llama(ids, output_attentions=True).attentions
    for head in report.heads:
        weights = eager[head.layer][0, head.head].double()
        assert head.sink == pytest.approx(float(weights[1:, 0].mean()), abs=1e-6)
        assert head.previous == pytest.approx(float(weights.diagonal(-1).mean()), abs=1e-6)
        assert head.entropy == pytest.approx(float(torch.special.entr(weights).sum(-1).mean()), abs=1e-6)
    for picture in report.pictures:
        assert (picture.size, picture.pooled) == (ids.shape[1], 1)
        exact = eager[picture.layer][0, picture.head].numpy()
        assert np.abs(picture.weights / 255 - np.sqrt(exact)).max() <= 0.5 / 255 + 1e-4


def test_long_texts_are_pooled(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT * 14, new_tokens=3, compare_eager=False)
    assert len(report.tokens) > 192
    assert {(p.size, p.pooled) for p in report.pictures} == {(-(-len(report.tokens) // 2), 2)}


def test_the_model_is_left_as_it_was(llama, tokenizer):
    llama.train()
    llama.model.layers[1].eval()
    llama.set_attn_implementation("eager")
    before = {name: module.training for name, module in llama.named_modules()}
    survey(llama, tokenizer, TEXT, new_tokens=2)
    assert llama.config._attn_implementation == "eager"
    assert {name: module.training for name, module in llama.named_modules()} == before
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in llama.modules())
    with pytest.raises(ProblemError):
        survey(llama, tokenizer, "")
    assert llama.config._attn_implementation == "eager"
    assert llama.training


def test_progress_is_told_by_stage(llama, tokenizer):
    told = []
    survey(llama, tokenizer, TEXT, new_tokens=4, progress=lambda *step: told.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == [
        "prompt", "continuation", "comparison", "layers", "induction",
    ]  # fmt: skip
    for stage, total in (("continuation", 4), ("layers", 3), ("induction", 3)):
        steps = [(done, of) for name, done, of in told if name == stage]
        assert steps[0] == (0, total)
        assert steps[-1] == (total, total)
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)


@pytest.mark.parametrize(
    ("text", "new_tokens", "message"),
    [
        ("", 3, "text is empty"),
        (" \n ", 3, "text is empty"),
        ("t", 3, "is 1 token"),
        (TEXT, -1, "new_tokens is -1"),
        (TEXT * 40, 24, r"\d{3} tokens and 24 are to be written, .* 256 positions: shorten the text to 232 tokens"),
    ],
)
def test_texts_that_cannot_be_surveyed_are_refused(llama, tokenizer, text, new_tokens, message):
    with pytest.raises(ProblemError, match=message):
        survey(llama, tokenizer, text, new_tokens=new_tokens)


def test_what_is_no_model_is_refused(tokenizer):
    with pytest.raises(ProblemError, match="Linear"):
        survey(torch.nn.Linear(2, 2), tokenizer, TEXT)


def small(kind, config, **more):
    torch.manual_seed(1)
    return kind(config(**SIZES, max_position_embeddings=512, **more))


def test_an_encoder_has_no_continuation_and_no_induction(tokenizer):
    report = survey(small(BertForMaskedLM, BertConfig), tokenizer, TEXT)
    assert report.continuation == ""
    assert report.run.decode_tokens_per_second is None
    assert len(report.heads) == 18
    assert all(h.induction is None and h.induction_chance is None for h in report.heads)
    assert agrees_with_eager(report)
    assert report.heads[0].previous_chance == pytest.approx(1 / len(report.tokens))


def test_layers_that_share_weights_are_layers(tokenizer):
    report = survey(small(AlbertModel, AlbertConfig, embedding_size=8), tokenizer, TEXT)
    assert sorted({h.layer for h in report.heads}) == [0, 1, 2]


def test_layers_that_share_a_number_are_counted_in_order(llama, tokenizer):
    layers: list[Layer] = []
    with observe(llama.model, lambda look: layers.append(measured_layer(look))):
        use_regard(llama)
        llama(torch.tensor([[5, 6, 7]]))
    assert [layer.layer for layer in numbered(layers)] == [0, 1, 2]
    assert [layer.layer for layer in numbered([layers[2], layers[1]])] == [2, 1]
    assert [layer.layer for layer in numbered([layers[2], layers[2]])] == [0, 1]


def test_a_model_without_a_head_is_measured(tokenizer):
    torch.manual_seed(1)
    report = survey(LlamaModel(LlamaConfig(**LLAMA)), tokenizer, TEXT)
    assert report.continuation == ""
    assert report.heads[0].induction is not None


def test_windows_and_learned_positions(tokenizer):
    torch.manual_seed(1)
    windowed = survey(MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=5)), tokenizer, TEXT, new_tokens=9)
    assert agrees_with_eager(windowed)
    n = len(windowed.tokens)
    assert windowed.heads[0].entropy_chance == pytest.approx(np.log(np.minimum(np.arange(n) + 1, 5)).mean())
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=24, n_layer=2, n_head=4, eos_token_id=None)
    gpt2 = survey(GPT2LMHeadModel(config), tokenizer, TEXT, new_tokens=4)
    assert agrees_with_eager(gpt2)
    assert (gpt2.run.layers, gpt2.run.heads) == (2, 4)


def test_of_an_encoder_and_decoder_the_encoder_is_measured(tokenizer):
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 24}
    heads: dict[str, Any] = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    t5 = T5ForConditionalGeneration(T5Config(**sizes, d_kv=4, d_ff=16, num_layers=2, num_heads=6))
    bart = BartForConditionalGeneration(BartConfig(**sizes, **heads, encoder_layers=3))
    for model, layers in ((t5, 2), (bart, 3)):
        before = model.config._attn_implementation
        report = survey(model, tokenizer, TEXT)
        assert report.run.layers == layers
        assert report.heads[0].induction is None
        assert agrees_with_eager(report)
        assert model.config._attn_implementation == before
