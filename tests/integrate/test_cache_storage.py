"""Layouts and codecs of caches in transformers models: what they change, which is nothing, or as little as they say."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import ProblemError
from regard.attention import attend
from regard.calls import Call, observe_calls
from regard.integrate import attention_function as ours
from regard.integrate import sinks
from regard.integrate.cache import regard_cache
from regard.integrate.cache_layers import StoredLayer, WindowLayer
from regard.integrate.layer_call import run_layer
from regard.storage.codec import Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Paged, StoredTensor
from tests.integrate.writing import WAYS, on_regard, prompt, written
from tests.integrate.zoo import PAIRS, padding, with_cache

EXACT: dict[str, dict[str, Any]] = {
    "paged": {"layout": Paged(page=3)},
    "in room made at once": {"layout": Contiguous(41)},
}
NEAR: dict[str, dict[str, Any]] = {
    "int8": {"codec": Int8(group=16, residual=0, sinks=0)},
    "int4": {"codec": Int4(group=16, residual=3)},
    "fp8": {"codec": Fp8(group=16, residual=3)},
    "bfloat16": {"codec": torch.bfloat16},
    "int8 in pages": {"codec": Int8(group=16, residual=5), "layout": Paged(16)},
    "int8 by token": {"codec": Int8(group=16, residual=5, keys="token")},
}


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("llama", way) for way in WAYS),
        ("gemma3", "with beams"),
        ("gpt2", "by looking up the prompt"),
        ("gpt_oss", "greedily"),
        ("t5", "with beams, two of them returned"),
    ],
)
@pytest.mark.parametrize("words", EXACT)
def test_layouts_change_no_bit(name: str, words: str, way: str):
    alone = way == "by looking up the prompt"
    ids, mask = prompt(1 if alone else 2), padding("right" if name in PAIRS else "left", 1 if alone else 2)
    m = on_regard(name)
    stock, scores = written(m, ids, None, attention_mask=mask, **WAYS[way])
    made, our_scores = written(m, ids, regard_cache(m, **EXACT[words]), attention_mask=mask, **WAYS[way])
    assert made == stock
    assert torch.equal(our_scores, scores)


@pytest.mark.parametrize(
    ("name", "words"), [*(("llama", words) for words in NEAR), ("gemma3", "int8"), ("gpt2", "int4"), ("doge", "fp8")]
)
def test_what_is_quantised_is_read_as_what_it_stands_for(name: str, words: str):
    """Handles, read where they lie, give the bits of the tensors that they stand for, and are near the exact cache."""
    m, ids, mask = on_regard(name), prompt(2, 37), padding("left", length=37)
    _, exact = written(m, ids, None, attention_mask=mask)
    by_handle = written(m, ids, regard_cache(m, **NEAR[words]), attention_mask=mask)
    cache = regard_cache(m, **NEAR[words])
    for layer in cache.layers:
        layer._is_read_by_regard = lambda: False
    by_tensor = written(m, ids, cache, attention_mask=mask)
    assert torch.equal(by_handle[1], by_tensor[1])
    gap = float((by_handle[1][0] - exact[0]).abs().max())
    assert 0 < gap < 0.1 * float(exact[0].abs().max())


def read_as(m: Any, cache: Any, monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """What each layer's attention was given for keys in one pass."""
    found: list[type] = []

    def spied(q: Tensor, k: Any, v: Any, **words: Any) -> Tensor:
        found.append(type(k))
        return attend(q, k, v, **words)

    def spied_layer(q: Tensor, k: Any, *others: Any) -> Tensor:
        found.append(type(k))
        out = run_layer(q, k, *others)
        others[1].known = None  # so that the next layer comes here, too
        return out

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(sinks, "attend", spied)
        patch.setattr(ours, "run_layer", spied_layer)
        m(prompt(2, 37), **with_cache(cache))
    return found


def test_handles_travel_through_the_model(monkeypatch: pytest.MonkeyPatch):
    m = on_regard("llama")
    assert read_as(m, regard_cache(m, codec=Int8(group=16, residual=0)), monkeypatch) == [StoredTensor, StoredTensor]
    assert read_as(m, regard_cache(m.config, layout=Paged(16)), monkeypatch) == [StoredTensor, StoredTensor]
    assert read_as(m, regard_cache(m), monkeypatch) == [Tensor, Tensor]


def test_a_model_that_computes_with_its_keys_gets_tensors(monkeypatch: pytest.MonkeyPatch):
    m = on_regard("doge")
    cache = regard_cache(m, codec=Int8(group=16, residual=0))
    assert read_as(m, cache, monkeypatch) == [Tensor, Tensor]
    assert "for the model computes with keys or values: value_states.transpose(1, 2)" in cache.explain()


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3"])
def test_weights_over_a_quantised_cache_are_those_of_eager(name: str):
    """Which is given what the codes stand for; latents are expanded for it."""
    m, ids, seen = on_regard(name), prompt(2, 37), []
    for attention in ("regard", "eager"):
        m.set_attn_implementation(attention)
        cache = regard_cache(m, codec=Int8(group=16, residual=0, sinks=0))
        with torch.no_grad():
            m(ids[:, :36], **with_cache(cache))
            seen.append(torch.stack(m(ids[:, 36:], **with_cache(cache), output_attentions=True).attentions))
    assert seen[0].shape == (2, 2, 4, 1, 37)
    assert torch.allclose(*seen, atol=1e-5)


def test_a_batch_of_one_gives_the_attention_of_a_batch_of_eight():
    """Of rows that are stored and read together no one changes another: with a codec, in pages, behind each other."""
    m, ids = on_regard("llama"), prompt(8, 37)
    words: dict[str, Any] = {"codec": Int8(group=16, residual=3), "layout": Paged(16)}
    caches = [regard_cache(m, **words) for _ in range(9)]
    outs: list[Call] = []
    with torch.no_grad(), observe_calls(outs.append):
        m(ids, **with_cache(caches[0]))
        for row in range(8):
            m(ids[row : row + 1], **with_cache(caches[row + 1]))
    first = next(call for call in outs if call.q.shape[0] == 8)
    alone = [call for call in outs if call.q.shape[0] == 1][::2]
    assert torch.equal(torch.cat([call.q for call in alone]), first.q)  # else there is nothing to compare
    assert torch.equal(torch.cat([call.out for call in alone]), first.out)


def test_beams_are_what_is_computed_anew():
    """The scores of what beam search wrote are those of reading it in one pass, without a cache."""
    m, ids = on_regard("llama"), prompt()
    torch.manual_seed(0)
    made = m.generate(
        ids, **with_cache(regard_cache(m, layout=Paged(3))), num_beams=3, max_new_tokens=7, do_sample=False,
        eos_token_id=None, pad_token_id=0, output_scores=True, return_dict_in_generate=True, length_penalty=0.0,
    )  # fmt: skip
    with torch.no_grad():
        logits = m(made.sequences, use_cache=False).logits.log_softmax(-1)[:, 12:-1]
    anew = logits.gather(2, made.sequences[:, 13:, None]).sum((1, 2))
    assert torch.allclose(anew, made.sequences_scores, atol=1e-5)


# ---- windows --------------------------------------------------------------------------------------------------------


def test_layers_with_a_window_keep_just_that():
    m = on_regard("gemma3")
    cache = regard_cache(m, codec=Int8(group=16, residual=0))
    written(m, prompt(2, 37), cache)
    sliding, full = cache.layers
    assert (type(sliding), type(full)) == (WindowLayer, StoredLayer)
    assert (sliding.kv.tokens, full.kv.tokens) == (5, 45)  # the window, that is the one to come and four before it
    assert (sliding.kv.codec, full.kv.codec) == (None, Int8(group=16, residual=0))
    assert (sliding.get_seq_length(), full.get_seq_length()) == (45, 45)


@pytest.mark.parametrize("steps", [(31,), (3, 17, 11), (9, 2, 20), (5, 26)])
def test_a_prompt_beyond_the_window_is_read_and_not_stored(steps: tuple[int, ...]):
    """The window is 5: after each step its last tokens are stored, whatever was read."""
    layer, start = regard_cache(on_regard("mistral")).layers[0], 0
    k = torch.randn(1, 2, 31, 8)
    for size in steps:
        seen = layer.get_mask_sizes(size)
        found = layer.update(k[:, :, start : start + size], -k[:, :, start : start + size])
        before = min(start, 4)
        assert seen == (before + size, start - before)
        assert torch.equal(found[0][:, :, -before - size :], k[:, :, start - before : start + size])
        assert torch.equal(found[1], -found[0])
        start += size
        assert (layer.get_seq_length(), layer.kv.tokens) == (start, min(start, 5) if size > 5 else layer.kv.tokens)
    assert layer.kv.bytes == 2 * 5 * 2 * 8 * 4
    with pytest.raises(ProblemError, match="at most 1 can be removed"):
        layer.crop(-2)
    layer.crop(-1)
    assert torch.equal(layer.update(k[:, :, 30:], k[:, :, 30:])[0][:, :, -5:], k[:, :, 26:])


def test_a_model_of_windows_alone_takes_a_codec():
    m = on_regard("mistral")
    cache = regard_cache(m, codec=torch.bfloat16)
    (_, scores), (_, exact) = written(m, prompt(), cache), written(m, prompt(), None)
    assert 0 < (scores[0] - exact[0]).abs().max() < 0.02
    assert cache.layers[0].kv.codec == torch.bfloat16


def test_drafts_may_go_beyond_the_window():
    """The window is 5: what leaves it while a draft is tried out comes back when the draft is not accepted."""
    layer = regard_cache(on_regard("mistral")).layers[0]
    k = torch.randn(1, 2, 31, 8)
    layer.activate_past_recording()
    for start, end in ((0, 9), (9, 17), (17, 18)):
        layer.update(k[:, :, start:end], k[:, :, start:end])
    layer.crop(-7)
    assert layer.get_mask_sizes(2) == (6, 7)
    keys, values = layer.update(k[:, :, 20:22], k[:, :, 20:22])
    expected = torch.cat([k[:, :, 7:11], k[:, :, 20:22]], dim=2)
    assert torch.equal(keys, expected)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("is_recording", [False, True])
def test_a_window_takes_back_what_leaves_it_whole_and_nothing_else(is_recording: bool):
    """The window is 5, so a next token looks back on 4."""
    layer = regard_cache(on_regard("mistral")).layers[0]
    k = torch.randn(1, 2, 31, 8)
    if is_recording:
        layer.activate_past_recording()
    for start, end in ((0, 9), (9, 17), (17, 18)):
        layer.update(k[:, :, start:end], k[:, :, start:end])
        if is_recording and end == 17:
            layer.crop(0)
    with pytest.raises(ProblemError, match=r"crop\(-2\).*at most 1 can be removed"):
        layer.crop(-2)
    assert layer.get_seq_length() == 18
    layer.crop(-1)
    keys, _ = layer.update(k[:, :, 20:21], k[:, :, 20:21])
    assert torch.equal(keys, torch.cat([k[:, :, 13:17], k[:, :, 20:21]], dim=2))
    layer.crop(-99)
    assert (layer.get_seq_length(), layer.is_initialized) == (0, False)


def test_a_crop_that_one_layer_refuses_changes_none():
    m, ids = on_regard("gemma3"), prompt()
    cache = regard_cache(m)
    with torch.no_grad():
        m(ids, **with_cache(cache))
        m(ids[:, :1], **with_cache(cache))
    with pytest.raises(ProblemError, match=r"crop\(-3\)"):
        cache.crop(-3)
    assert {layer.get_seq_length() for layer in cache.layers} == {ids.shape[1] + 1}


def test_a_long_text_with_drafts_costs_no_more_than_its_window():
    layer = regard_cache(on_regard("mistral")).layers[0]
    layer.activate_past_recording()
    for _ in range(40):
        layer.update(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))
        layer.crop(-3)
    assert layer.get_seq_length() == 40
    assert layer.kv.tokens <= 12
