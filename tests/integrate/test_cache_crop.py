"""Tokens of a model's cache that are taken back, what a call that failed leaves in it, and starting anew."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from regard import ProblemError, RefusalError
from regard.integrate.cache import regard_cache
from regard.integrate.transformers import use_regard
from regard.storage.codec import Int8
from regard.storage.stored import Contiguous, Layout, Paged, Rolling
from tests.integrate.writing import on_regard, prompt, written
from tests.integrate.zoo import VOCABULARY, model, tokens, with_cache


@pytest.mark.parametrize(
    "words", [{}, {"layout": Paged(3)}, {"layout": Contiguous(capacity=24)}], ids=["growing", "paged", "fixed"]
)
def test_the_last_tokens_can_be_taken_back(words: dict[str, Any]):
    m, ids, cache = on_regard("llama"), prompt(), regard_cache(model("llama"), **words)
    with torch.no_grad():
        whole = m(ids, use_cache=False).logits
        m(torch.cat([ids[:, :9], tokens(2, 4)], dim=1), **with_cache(cache))
        cache.crop(-4)
        assert (int(cache.get_seq_length()), cache.is_croppable) == (9, True)
        assert torch.allclose(m(ids[:, 9:], **with_cache(cache)).logits, whole[:, 9:], atol=1e-5)
    cache.crop(0)
    assert int(cache.get_seq_length()) == 13
    with pytest.raises(ProblemError, match=r"crop\(-5\)"):
        cache.crop(5)
    cache.crop(-99)
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_a_window_or_chunk_of_a_fixed_size_takes_tokens_back_until_one_has_left_it(name: str):
    """They are of 5 tokens."""
    m, ids, cache = on_regard(name), prompt(), regard_cache(model(name), layout=Contiguous(capacity=24))
    with torch.no_grad():
        whole = m(ids, use_cache=False).logits
        m(torch.cat([ids[:, :2], tokens(2, 3)], dim=1), **with_cache(cache))
        cache.crop(-3)
        assert torch.allclose(m(ids[:, 2:], **with_cache(cache)).logits, whole[:, 2:], atol=1e-5)
        with pytest.raises(ProblemError, match=r"crop\(-1\): the first 8 of 13 tokens have left the window of 5"):
            cache.crop(-1)
        assert {int(layer.get_seq_length()) for layer in cache.layers} == {13}
        cache.crop(0)
        cache.crop(-99)
        assert {int(layer.get_seq_length()) for layer in cache.layers} == {0}
        assert torch.allclose(m(ids, **with_cache(cache)).logits, whole, atol=1e-5)


def test_drafts_go_into_memory_of_a_fixed_size_until_tokens_would_leave_a_window():
    m, ids = on_regard("mistral"), prompt(1, 3)
    for capacity, works in ((3, True), (5, True), (6, False)):  # the window has 5 tokens
        cache = regard_cache(m, layout=Contiguous(capacity=capacity))
        if works:
            cache.activate_past_recording()
            with torch.no_grad():
                m(ids, **with_cache(cache))
            cache.crop(-2)
            assert int(cache.get_seq_length()) == 1
        else:
            with pytest.raises(RefusalError, match="in memory of a fixed size"):
                cache.activate_past_recording()


def test_states_of_linear_attention_do_not_go_back():
    m = qwen3_next(layer_types=["full_attention", "linear_attention"])
    cache = regard_cache(m)
    cache.crop(-2)  # nothing
    cache.activate_past_recording()
    with torch.no_grad():
        m(prompt(), **with_cache(cache))
    cache.crop(0)
    with pytest.raises(ProblemError, match=r"crop\(-2\): layers 1 of Qwen3NextForCausalLM keep a state.*reset"):
        cache.crop(-2)
    assert cache.get_seq_length() == 13


def lfm2(layer_types: list[str]) -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Lfm2Config(**sizes, **heads, num_hidden_layers=len(layer_types), layer_types=layer_types)
    return use_regard(Lfm2ForCausalLM(config).eval())


def fail_before(layer: int, m: Any, ids: Tensor, cache: Any) -> None:
    """Make a call that fails before one of the model's layers."""

    def stop(*_: object) -> None:
        raise MemoryError

    hook = m.model.layers[layer].register_forward_pre_hook(stop)
    with pytest.raises(MemoryError):
        m(ids, **with_cache(cache))
    hook.remove()


BETWEEN_LAYERS = [  # where a call that fails leaves all lengths equal
    (["conv", "full_attention", "conv"], 1),
    (["full_attention", "conv", "conv"], 1),
    (["full_attention", "conv", "conv"], 2),
    (["conv", "full_attention", "full_attention"], 1),
]


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("words", [{}, {"layout": Contiguous(30)}], ids=str)
@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("before", [0, 9])
@pytest.mark.parametrize(("layer_types", "layer"), BETWEEN_LAYERS)
def test_a_call_that_failed_beside_a_state_is_an_error_before_the_next(
    layer_types: list[str], layer: int, before: int, new: int, words: dict[str, Any]
):
    m, ids = lfm2(layer_types), prompt()
    cache, other = regard_cache(m, **words), regard_cache(m, **words)
    with torch.no_grad():
        if before:
            m(ids[:, :before], **with_cache(cache))
        fail_before(layer, m, ids[:, before : before + new], cache)
        reached, others = ("0" if layer == 1 else "0-1"), ("1-2" if layer == 1 else "2")
        message = (
            rf"layers {reached} of .* have its tokens, in keys or in states, and layers {others} do not\. Start anew"
        )
        for each in (copy.deepcopy(cache), cache):
            with pytest.raises(ProblemError, match=message):
                m(ids[:, before:], **with_cache(each))
            if before:
                with pytest.raises(ProblemError, match="keep a state of all tokens"):
                    each.crop(-new)
        cache.reset()
        assert torch.equal(m(ids, **with_cache(cache)).logits, m(ids, **with_cache(other)).logits)


def test_after_a_failed_call_states_that_do_not_go_back_leave_reset_alone():
    m, ids = lfm2(["conv", "full_attention", "conv", "full_attention"]), prompt()
    cache = regard_cache(m)
    with torch.no_grad():
        m(ids[:, :9], **with_cache(cache))
        fail_before(2, m, ids[:, 9:11], cache)
        with pytest.raises(ProblemError, match=r"have 11 tokens and others 9.*cannot be removed: start anew"):
            m(ids[:, 9:], **with_cache(cache))


@pytest.mark.parametrize("layer_types", [["full_attention"] * 2 + ["conv"], ["conv", "full_attention"] * 2], ids=str)
def test_of_recorded_states_only_those_that_a_failed_call_reached_go_back(layer_types: list[str]):
    m, ids = lfm2(layer_types), prompt()
    cache, expected = regard_cache(m), regard_cache(m)
    with torch.no_grad():
        for one in (cache, expected):
            one.activate_past_recording()
            m(ids[:, :9], **with_cache(one))
        fail_before(len(layer_types) // 2, m, ids[:, 9:11], cache)
        with pytest.raises(ProblemError, match=r"have 11 tokens and others 9.*Remove its tokens, crop\(-2\), or"):
            m(ids[:, 9:], **with_cache(cache))
        cache.crop(-2)
        assert torch.equal(m(ids[:, 9:], **with_cache(cache)).logits, m(ids[:, 9:], **with_cache(expected)).logits)


def test_recorded_states_alone_do_not_tell_how_many_tokens_a_failed_call_had():
    m, ids = lfm2(["conv", "full_attention", "conv"]), prompt()
    cache = regard_cache(m)
    cache.activate_past_recording()
    with torch.no_grad():
        m(ids[:, :9], **with_cache(cache))
        fail_before(1, m, ids[:, 9:11], cache)
        with pytest.raises(ProblemError, match=r"layers 0 of .* have its tokens"):
            cache.crop(-2)


def test_a_model_that_keeps_its_states_itself_is_not_taken_for_one_that_failed():
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "lru_width": 32}
    m = use_regard(RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes, **heads)).eval())
    ids, cache = prompt(), regard_cache(m)
    with torch.no_grad():
        steps = [m(ids[:, part], **with_cache(cache)).logits for part in (slice(9), slice(9, 10), slice(10, 11))]
        assert torch.allclose(torch.cat(steps, 1), m(ids[:, :11], use_cache=False).logits, atol=1e-5)


def test_states_of_a_convolution_go_back_where_they_were_recorded():
    m, ids = lfm2(["full_attention", "conv"]), prompt()
    cache, recording = regard_cache(m), regard_cache(m)
    recording.activate_past_recording()
    with torch.no_grad():
        m(ids, **with_cache(cache))
        with pytest.raises(ProblemError, match=r"layers 1 of Lfm2ForCausalLM keep a state.*activate_past_recording"):
            cache.crop(-2)
        assert cache.get_seq_length() == 13
        whole = m(ids, **with_cache(recording)).logits
        recording.crop(-2)
        assert torch.allclose(m(ids[:, 11:], **with_cache(recording)).logits, whole[:, 11:], atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", [None, Rolling(9), Paged(16), Contiguous(30)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "deepseek_v3"])
def test_another_batch_is_refused_and_changes_nothing(name: str, layout: Layout | None, batch: int):
    m = on_regard(name)
    try:
        cache = regard_cache(m, layout=layout)
    except ProblemError:
        return  # no layers of full attention, or latents
    with torch.no_grad():
        m(prompt(), **with_cache(cache))
        seen = int(cache.get_seq_length())
        with pytest.raises(ProblemError, match=rf"k is float32 \[{batch}, .*only the number of tokens may differ"):
            m(tokens(batch, 1), **with_cache(cache))
    assert int(cache.get_seq_length()) == seen


@pytest.mark.parametrize(
    "words", [{}, {"layout": Rolling(9)}, {"layout": Paged(16), "codec": Int8()}, {"layout": Contiguous(30)}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_after_a_reset_it_starts_anew(name: str, words: dict[str, Any]):
    m = on_regard(name)
    cache = regard_cache(m, **words)
    first = written(m, prompt(), cache)
    cache.reset()
    assert (int(cache.get_seq_length()), cache.get_mask_sizes(3, 0)[1]) == (0, 0)
    again = written(m, prompt(), cache)
    assert again[0] == first[0]
    assert torch.equal(again[1], first[1])


def qwen3_next(layer_types: list[str]) -> Any:
    torch.manual_seed(3)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16)
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_attention_heads"), 2)
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3NextConfig(
        **sizes, **heads, vocab_size=VOCABULARY, num_hidden_layers=len(layer_types), layer_types=layer_types,
        num_experts=2, num_experts_per_tok=1, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return use_regard(Qwen3NextForCausalLM(config).eval())


def test_after_a_reset_layers_of_linear_attention_take_a_batch_of_another_size():
    m = qwen3_next(["linear_attention"] * 3 + ["full_attention"])
    cache = regard_cache(m)
    written(m, prompt(1), cache)
    cache.activate_past_recording()
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert all(cache.is_recording_past(index) for index in range(3))
    found, expected = written(m, prompt(3), cache), written(m, prompt(3), regard_cache(m))
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
