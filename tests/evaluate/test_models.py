"""Models of transformers and of regard.nn with every cache: shared prefixes change no bit."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
)

from regard import Rope
from regard.cache import TOVA, SnapKV
from regard.errors import ProblemError
from regard.evaluate import CacheOptions, Needle, Passkey, Reader, as_model, evaluate, task_of
from regard.evaluate.answer import Trunk, answers, target_logits
from regard.integrate.cache import regard_cache
from regard.integrate.checkpoint import load
from regard.nn import Decoder
from regard.storage.codec import Int8
from regard.storage.stored import Paged, Rolling
from tests.cli import tiny
from tests.integrate.zoo import with_cache

CACHES = {
    "dense": CacheOptions(),
    "pages": CacheOptions(layout=Paged(16)),
    "int8": CacheOptions(codec=Int8()),
    "window": CacheOptions(layout=Rolling(64)),
    "snapkv": CacheOptions(evict=SnapKV(64)),
    "tova": CacheOptions(evict=TOVA(64, every=16)),
}
TASK = Needle((700,), (0.0, 0.5, 1.0), samples=2, haystack="noise")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, max_position_embeddings=1024)
    return load(str(folder))


def decoder():
    torch.manual_seed(1)
    return Decoder(260, 32, 2, 4, kv_heads=2, position=Rope(8)).eval()


def logits(model, task, *, share):
    """The logits of every token of every answer."""
    examples, trunk = list(task.examples(model)), Trunk(model)
    for example, after in zip(examples, [*examples[1:], None], strict=True):
        reader = trunk.reader_of(example.context, after.context if share and after else None)
        yield target_logits(model, reader, example)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["transformers", "regard"])
def test_a_shared_prefix_changes_no_bit(made, kind, cache):
    model, tokenizer, _ = made
    model = as_model(model if kind == "transformers" else decoder(), tokenizer, cache=CACHES[cache])
    for shared, plain in zip(logits(model, TASK, share=True), logits(model, TASK, share=False), strict=True):
        assert torch.equal(shared, plain)


class Counting(Reader):
    """A reader that counts the tokens that it and its copies read."""

    def __init__(self, inner, counts):
        self.inner, self.counts = inner, counts

    def read(self, ids, last):
        self.counts.append(len(ids))
        return self.inner.read(ids, last)

    def copy(self):
        return Counting(self.inner.copy(), self.counts)


def test_a_prefix_that_is_shared_is_read_once(made):
    plain, counts = as_model(made[0], made[1]), {True: [], False: []}
    for share, count in counts.items():
        model = dataclasses.replace(plain, start=lambda count=count: Counting(plain.start(), count))
        assert len(evaluate(TASK, model, share=share).records) == 6
    assert sum(counts[False]) == 6 * 699
    assert sum(counts[True]) < 0.85 * sum(counts[False])


@pytest.mark.parametrize("kind", ["transformers", "regard"])
def test_the_logits_are_those_of_the_model_itself(made, kind):
    whole, tokenizer, _ = made
    whole = whole if kind == "transformers" else decoder()
    model = as_model(whole, tokenizer)
    for example, found in zip(TASK.examples(model), logits(model, TASK, share=True), strict=True):
        ids = torch.tensor([example.tokens + example.target])
        with torch.no_grad():
            expected = whole(ids)
        expected = getattr(expected, "logits", expected)[0, len(example.tokens) - 1 : -1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", CACHES)
def test_a_stream_goes_on_under_every_cache(made, cache, tmp_path):
    model, tokenizer, _ = made
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 90)
    task = task_of("stream", lengths=(400,), samples=2, haystack=str(tmp_path / "book.txt"))
    results = evaluate(task, model, tokenizer, cache=CACHES[cache])
    assert 100 < results.perplexity.value < 3000
    assert all(sum(record["counts"]) == 400 for record in results.records)


def test_a_stream_that_forgets_goes_past_the_positions_of_the_model(tmp_path):
    tiny.save(tmp_path, max_position_embeddings=128)
    model, tokenizer, _ = load(str(tmp_path))
    task = Passkey((600,), (0.5,), samples=1)
    with pytest.raises(ProblemError, match=r"has 6.. tokens, and .* has 128 positions"):
        evaluate(task, model, tokenizer)
    assert len(evaluate(task, model, tokenizer, cache=CACHES["window"]).records) == 1


def test_the_tokens_of_another_tokenizer_are_refused(made):
    model, _, _ = made
    other = type("Far", (), {"encode": lambda self, text: [9999] * 20, "decode": lambda self, ids: ""})()
    with pytest.raises(ProblemError, match=r"has the token 9,999, and .* knows 2.. *: give the tokenizer of the model"):
        evaluate(Passkey((100,), (0.5,), samples=1), model, other)


def test_a_model_that_was_made_takes_another_label_alone():
    model = as_model(lambda tokens: tokens)
    assert as_model(model, label="other").label == "other"
    with pytest.raises(ProblemError, match="cache= and positions= beside the Model 'test_a_model"):
        as_model(model, cache=CACHES["int8"], positions=8)


def test_a_plain_callable_has_no_cache():
    with pytest.raises(ProblemError, match="a plain callable has no KV cache"):
        as_model(lambda tokens: tokens, cache=CACHES["int8"])


@pytest.mark.parametrize("name", ["perplexity", "extrapolation"])
def test_a_policy_that_evicts_after_the_text_is_refused(made, name, tmp_path):
    model, tokenizer, _ = made
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 90)
    options = {"lengths": (300,), "context": 128} if name == "perplexity" else {"trained": 128, "multiples": (1,)}
    task = task_of(name, haystack=str(tmp_path / "book.txt"), **options)
    with pytest.raises(ProblemError, match=r"the policy SnapKV\(.*change none of its losses: give the task stream"):
        evaluate(task, model, tokenizer, cache=CACHES["snapkv"])
    assert len(evaluate(task, model, tokenizer, cache=CACHES["window"]).records)


class Dropping(nn.Module):
    """A model of bytes with dropout, of which one part is in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.table, self.dropout, self.still = nn.Embedding(256, 256), nn.Dropout(0.5), nn.Dropout(0.5).eval()

    def forward(self, tokens):
        return self.dropout(self.table(tokens))


def dropping_gpt2():
    config = GPT2Config(vocab_size=256, n_positions=512, n_embd=16, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel(config).train()


@pytest.mark.parametrize("make", [Dropping, dropping_gpt2])
def test_a_model_in_training_is_evaluated_without_dropout_and_stays_in_training(make, tmp_path):
    torch.manual_seed(0)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 90)
    task, model = task_of("stream", lengths=(100,), samples=1, haystack=str(tmp_path / "book.txt")), make()
    modes = [each.training for each in model.modules()]
    found = evaluate(task, model).loss
    assert [each.training for each in model.modules()] == modes
    assert found == evaluate(task, model.eval()).loss


def test_a_decoder_in_training_stays_in_training():
    model, modes = decoder().train(), []
    model.body.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    evaluate(Passkey((400,), (0.5,), samples=1), model)
    assert set(modes) == {False}
    assert model.training


class Switched(Dropping):
    """A model that counts how often it is set to a mode."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def train(self, mode=True):
        self.times += 1
        return super().train(mode)


def test_a_model_is_set_to_evaluation_mode_once_for_all_its_calls():
    model = Switched()
    assert len(evaluate(Passkey((400,), (0.0, 1.0), samples=2), model).records) == 4
    assert model.times == 1
    assert model.training


def test_a_model_that_fails_stays_in_training():
    model = Dropping()
    model.register_forward_hook(lambda *_: torch.full((), torch.nan))
    with pytest.raises(ProblemError, match="returned"):
        evaluate(Passkey((400,), (0.5,), samples=1), model)
    assert [each.training for each in model.modules()] == [True, True, True, False]


def test_a_policy_evicts_before_the_question_or_after_it(made):
    model, tokenizer, _ = made
    (example,) = Needle((400,), (0.5,), samples=1, haystack="noise").examples(as_model(model, tokenizer))
    for with_question in (False, True):
        ours = as_model(model, tokenizer, cache=CacheOptions(evict=TOVA(64), with_question=with_question))
        ((_, found),) = answers(ours, [example])
        pieces = [example.tokens[:-1], example.tokens[-1:]] if with_question else [example.context, example.question]
        cache = regard_cache(model, evict=TOVA(64))
        with torch.no_grad():
            steps = [*pieces, *([token] for token in example.target[:-1])]
            read = [model(torch.tensor([list(step)]), **with_cache(cache)).logits[0, -1:] for step in steps]
        losses = F.cross_entropy(torch.cat(read[1:]), torch.tensor(example.target), reduction="sum")
        assert found["nll"] == pytest.approx(float(losses), rel=1e-5)


SMALL: Any = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
BART: Any = {
    "vocab_size": 256, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: BartForConditionalGeneration(BartConfig(**BART)),
        lambda: BertLMHeadModel(BertConfig(**SMALL)),
        lambda: BertForMaskedLM(BertConfig(**SMALL)),
    ],
    ids=["encoder-decoder", "not causal", "masked"],
)
def test_a_model_that_sees_later_tokens_is_refused(make):
    model = make().eval()
    with pytest.raises(ProblemError, match=rf"is a {type(model).__name__}: expected a causal language model"):
        as_model(model)


def test_a_model_without_a_head_is_refused():
    made = as_model(LlamaModel(LlamaConfig(**SMALL)).eval())
    with pytest.raises(ProblemError, match=r"is a LlamaModel: expected a causal language model"):
        made.start().read([1, 2], 1)


def test_a_bert_that_is_a_decoder_sees_no_later_tokens():
    torch.manual_seed(0)
    made = as_model(BertLMHeadModel(BertConfig(**SMALL, is_decoder=True)).eval())
    one, other = (made.start().read([*range(20), last], 21) for last in (30, 40))
    assert torch.equal(one[:-1], other[:-1])


def test_a_model_that_computes_its_own_attention_can_be_given_in_a_function():
    model = BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=4)).eval()
    with pytest.raises(ProblemError, match=r"evaluate: lambda tokens: model\(tokens\).logits"):
        as_model(model)
    as_model(lambda tokens: model(tokens).logits, label="bloom").start().read([1, 2], 1)
