"""The weights that are observed in models: those that the modules used, and those that transformers' eager code has."""

import copy

import pytest
import torch

from regard import Alibi, Causal, KeyLengths, Rope, T5Bias, Window
from regard.inspect.observing.observe import observe
from regard.integrate.cache import regard_cache
from regard.integrate.transformers import use_regard
from regard.nn import Decoder, Encoder, LatentAttention, MultiHeadAttention, Transformer
from regard.scores import Cosine
from regard.storage.codec import Int8
from regard.storage.stored import Contiguous, Paged, Rolling
from tests.inspect.dense import definition
from tests.integrate.zoo import model, padding, tokens, with_cache


def are_the_definition(look):
    """Whether the weights of a call are those of its words, and give its output."""
    exact, dense = definition(look.call).weights, look.weights.dense().double()
    v = look.call.v.double().repeat_interleave(exact.shape[1] // look.call.v.shape[1], dim=1)
    right = torch.allclose(dense, exact, atol=1e-6, rtol=0)
    return right and torch.allclose(dense @ v, look.call.out.double(), atol=1e-5, rtol=1e-5)


MODULES = {
    "grouped heads, rotated": lambda: MultiHeadAttention(48, 6, kv_heads=2, position=Rope(8), mask=Causal()),
    "sinks, softcap, windows": lambda: MultiHeadAttention(48, 6, mask=Causal() & Window(5), softcap=2.0, sink=True),
    "a bias and a gate": lambda: MultiHeadAttention(48, 6, bias=Alibi(6), gate=True, mask=Causal()),
    "latent": lambda: LatentAttention(48, 4, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8, mask=Causal()),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_observed(name):
    module, x = MODULES[name]().eval(), torch.randn(2, 11, 48)
    with torch.no_grad(), observe(module, are_the_definition) as seen:
        module(x)
    assert [(s.layer, s.value) for s in seen] == [(0, True)]


def test_cosine_is_observed_in_a_module():
    module = MultiHeadAttention(48, 6, score=Cosine(), scale=3.0, mask=Causal()).eval()
    with torch.no_grad(), observe(module, values=True) as seen:
        module(torch.randn(2, 11, 48))
    torch.testing.assert_close(seen[0].weights.dense() @ seen[0].v, seen[0].out, atol=1e-5, rtol=1e-5)


def test_a_stack_of_blocks_is_observed_layer_by_layer():
    table = T5Bias(torch.randn(32, 4))
    model = Transformer(Encoder(19, 32, 2, 4, position=table), Decoder(23, 32, 2, 4, kv_heads=2, context_dim=32)).eval()
    source, target = torch.randint(19, (2, 7)), torch.randint(23, (2, 5))
    with torch.no_grad(), observe(model, are_the_definition) as seen:
        model(source, target, mask=KeyLengths(torch.tensor([7, 4])))
    assert [(s.layer, s.module.partition(".")[0]) for s in seen] == [
        (0, "encoder"), (1, "encoder"), (0, "decoder"), (0, "decoder"), (1, "decoder"), (1, "decoder"),
    ]  # fmt: skip
    assert all(s.value for s in seen)


def test_a_decoder_that_writes_with_a_cache_is_observed_step_by_step():
    model = Decoder(23, 32, 2, 4, kv_heads=2).eval()
    with observe(model, lambda look: (are_the_definition(look), look.weights.shape[2:])) as seen:
        model.generate(torch.randint(23, (1, 5)), 3)
    assert [s.layer for s in seen] == [0, 1] * (len(seen) // 2)
    assert all(right for right, _ in (s.value for s in seen))
    assert [shape for _, shape in (s.value for s in seen)][::2] == [(5, 5), (1, 6), (1, 7)]


@pytest.mark.parametrize("absorbed", [False, True])
def test_latents_are_observed_as_the_keys_that_they_are_read_as(absorbed):
    module = LatentAttention(48, 4, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8, mask=Causal()).eval()
    x = torch.randn(1, 11, 48)
    with torch.no_grad(), observe(module) as whole:
        module(x)
    with torch.no_grad(), observe(module) as other:
        module(x, absorbed=absorbed)
    torch.testing.assert_close(whole[0].weights.dense(), other[0].weights.dense(), atol=1e-6, rtol=0)


ONE_STEP = {
    "llama": None, "mistral": None, "gemma2": None, "gemma3": None, "gpt_oss": None, "gpt2": None, "gpt_neox": None,
    "llama4": None, "deepseek_v3": None, "bert": None, "modernbert": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_STEP)
@pytest.mark.parametrize("padded", [None, "left"])
def test_weights_are_those_of_eager_attention(name, padded):
    # padded eager rows overflow in float64, and so do experts that torch has no product for
    narrow = padded is not None or name == "gpt_oss"
    subject = model(name) if narrow else copy.deepcopy(model(name)).double()
    ids, mask = tokens(), None if padded is None else padding(padded)
    subject.set_attn_implementation("eager")
    with torch.no_grad():
        eager = subject(ids, attention_mask=mask, output_attentions=True).attentions
        use_regard(subject)
        with observe(subject) as seen:
            subject(ids, attention_mask=mask)
    assert [kept.layer for kept in seen] == list(range(len(eager)))
    for kept, exact in zip(seen, eager, strict=True):
        sees = kept.weights.visible.expand(kept.weights.shape[:3]) > 0  # eager averages where nothing may be seen
        atol = 1e-5 if narrow else 1e-6
        torch.testing.assert_close(kept.weights.dense()[sees], exact[sees], atol=atol, rtol=0)


@pytest.mark.parametrize("name", ONE_STEP)
def test_in_float32_they_are_the_definition_of_what_was_called(name):
    subject = model(name)
    use_regard(subject)
    with torch.no_grad(), observe(subject, are_the_definition) as seen:
        subject(tokens(), attention_mask=padding("left"))
    assert all(s.value for s in seen)
    assert seen


def test_t5_is_observed_with_its_bias_and_across():
    subject, ids = copy.deepcopy(model("t5")).double(), tokens()
    inputs = {"input_ids": ids, "decoder_input_ids": tokens(2, 5), "attention_mask": padding("right")}
    subject.set_attn_implementation("eager")
    with torch.no_grad():
        eager = subject(**inputs, output_attentions=True)
        use_regard(subject)
        with observe(subject) as seen:
            subject(**inputs)
    kinds = {"encoder": eager.encoder_attentions, "SelfAttention": eager.decoder_attentions}
    kinds["EncDecAttention"] = eager.cross_attentions
    for kept in seen:
        kind = "encoder" if kept.module.startswith("encoder") else kept.module.rpartition(".")[2]
        torch.testing.assert_close(kept.weights.dense(), kinds[kind][kept.layer], atol=1e-6, rtol=0)
    assert len(seen) == 6


def written(subject, cache, **options):
    with torch.no_grad(), observe(subject, options.pop("each", None)) as seen:
        subject.generate(
            tokens(2, 11), attention_mask=padding("left", length=11), **with_cache(cache), max_new_tokens=4,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return seen


CACHES = {
    "stock": lambda m: None,
    "in room made at once": lambda m: regard_cache(m, layout=Contiguous(41)),
    "paged": lambda m: regard_cache(m, layout=Paged(page=3)),
    "int8": lambda m: regard_cache(m, codec=Int8(group=16, residual=0, sinks=0)),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_step_of_generation_is_observed_over_all_that_the_cache_holds(name, cache):
    subject = model(name)
    use_regard(subject)
    seen = written(subject, CACHES[cache](subject), each=are_the_definition)
    assert [s.layer for s in seen] == [0, 1] * 4
    assert all(s.value for s in seen)


@pytest.mark.parametrize("cache", CACHES)
def test_what_was_kept_of_a_step_is_not_changed_by_the_steps_after_it(cache):
    subject = model("llama")
    use_regard(subject)
    torch.manual_seed(3)
    kept = written(subject, CACHES[cache](subject))
    torch.manual_seed(3)
    passed = written(subject, CACHES[cache](subject), each=lambda look: look.weights.dense())
    assert [k.weights.shape[2] for k in kept[::2]] == [11, 1, 1, 1]
    for before, then in zip(kept, passed, strict=True):
        assert torch.equal(before.weights.dense(), then.value)


def test_a_reused_cache_does_not_change_what_was_kept():
    subject = model("llama")
    use_regard(subject)
    cache = regard_cache(subject, layout=Contiguous(41))
    first = written(subject, cache)
    before = [kept.weights.dense() for kept in first]
    cache.reset()
    written(subject, cache)
    assert all(torch.equal(kept.weights.dense(), exact) for kept, exact in zip(first, before, strict=True))


def test_rows_of_a_cache_that_forgets_are_of_one_layer():
    subject = model("llama")
    use_regard(subject)
    seen = written(subject, regard_cache(subject, layout=Rolling(9, sinks=2)), each=lambda look: look.weights.shape)
    assert {s.layer for s in seen} == {0, 1}
