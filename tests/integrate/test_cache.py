"""Models write with regard's caches what they write with transformers' own."""

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from regard import Causal, attend
from regard.cache import Knorm
from regard.integrate import cache as cache_module
from regard.integrate.cache import regard_cache
from regard.integrate.transformers import use_regard
from regard.storage.codec import Int8
from regard.storage.stored import Contiguous, Paged
from tests.integrate.writing import WAYS, on_regard, prompt, written
from tests.integrate.zoo import DECODERS, PAIRS, close, model, padding, tokens, with_cache

# ---- every way to generate ------------------------------------------------------------------------------------------


THOROUGHLY = ["llama", "gemma3", "deepseek_v3", "t5"]


@pytest.mark.representative
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in THOROUGHLY for way in WAYS),
        *((name, "with beams") for name in [*DECODERS, *PAIRS] if name not in THOROUGHLY),
    ],
)
def test_tokens_and_scores_are_those_with_the_stock_cache(name: str, way: str):
    """To the bit: a plain cache hands the same numbers to the same attention."""
    alone = way == "by looking up the prompt"  # transformers' rule
    ids, mask = prompt(1 if alone else 2), padding("right" if name in PAIRS else "left", 1 if alone else 2)
    m = on_regard(name)
    stock, scores = written(m, ids, None, attention_mask=mask, **WAYS[way])
    ours, our_scores = written(m, ids, regard_cache(m), attention_mask=mask, **WAYS[way])
    assert ours == stock
    assert float((our_scores - scores).abs().max()) <= (1e-5 if name == "deepseek_v3" else 0)  # which absorbs


@pytest.mark.parametrize("way", ["greedily", "with beams", "by looking up the prompt"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("gemma3", "eager"), ("deepseek_v3", "sdpa"), ("t5", "eager"), ("llama4", "sdpa")],
)
def test_stock_attention_reads_the_cache_too(name: str, way: str, attention: str):
    alone = way == "by looking up the prompt"
    ids, mask = prompt(1 if alone else 2), padding("right" if name in PAIRS else "left", 1 if alone else 2)
    m = model(name)
    m.set_attn_implementation(attention)
    words = {"codec": Int8(group=16, residual=0, sinks=0)} if way == "with beams" else {}
    stock, _ = written(m, ids, None, attention_mask=mask, **WAYS[way])
    ours, _ = written(m, ids, regard_cache(m, **words), attention_mask=mask, **WAYS[way])
    assert ours == stock


def test_an_assistant_may_have_a_cache_of_its_own_kind():
    m, draft, ids = on_regard("gemma3"), copy.deepcopy(on_regard("gemma3")), prompt(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)  # it errs now and then, so drafts are taken back
    draft.generation_config.num_assistant_tokens = 4
    stock, _ = written(m, ids, None, max_new_tokens=24)
    ours, _ = written(m, ids, regard_cache(m), max_new_tokens=24, assistant_model=draft)
    assert ours == stock


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_text_may_be_gone_on_with(name: str):
    """In a second call of `generate`, as chats do."""
    m, more = on_regard(name), prompt(2, 5)
    stock, ours = DynamicCache(config=m.config), regard_cache(m)
    first = [torch.tensor(written(m, prompt(2, 11), cache)[0]) for cache in (stock, ours)]
    second = [written(m, torch.cat([ids, more], dim=1), c) for ids, c in zip(first, (stock, ours), strict=True)]
    assert second[0][0] == second[1][0]
    assert torch.equal(second[0][1], second[1][1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("words", [{}, {"layout": Contiguous(capacity=40)}], ids=["growing", "fixed"])
def test_a_text_may_come_in_pieces(name: str, words: dict[str, Any]):
    m, ids, mask = on_regard(name), prompt(2, 21), padding("left", length=21)
    pieces: list[Tensor] = []
    with torch.no_grad():
        whole = m(ids, attention_mask=mask, use_cache=False).logits
        cache, start = regard_cache(m, **words), 0
        for end in (9, 10, 16, 17, 21):
            pieces.append(m(ids[:, start:end], attention_mask=mask[:, :end], **with_cache(cache)).logits)
            start = end
    real = mask.bool()
    assert torch.allclose(torch.cat(pieces, dim=1)[real], whole[real], atol=1e-5)


def test_a_prompt_in_chunks_gives_the_bits_of_one_in_whole():
    """As far as attention goes: the same queries, keys and values, handed in by pieces."""
    q, k, v = (torch.randn(2, heads, 29, 8) for heads in (4, 2, 2))
    seen: list[Tensor] = []
    for ends in ((29,), (7, 8, 29)):
        cache, start, parts = regard_cache(on_regard("llama")), 0, []
        for end in ends:
            here = slice(start, end)
            parts.append(attend(q[:, :, here], *cache.update(k[:, :, here], v[:, :, here], 0), mask=Causal()))
            start = end
        seen.append(torch.cat(parts, dim=2))
    assert torch.equal(*seen)


def test_what_a_prompt_frees_goes_back_to_the_system_once(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    cache = regard_cache(on_regard("llama"))
    monkeypatch.setattr(cache_module, "trim_heap", lambda: calls.append(cache.get_seq_length()))

    def read(*passes: int, rows: int = 1) -> list[int]:
        calls.clear()
        for new, layer in itertools.product(passes, range(len(cache.layers))):
            cache.update(*torch.randn(2, rows, 2, new, 8), layer)
        return calls

    assert read(1, 1, 1, 255, 1, 1, 1) == []
    assert read(300, 1, 1, 1, 1) == [261 + 301]  # before the second token after it is stored
    assert read(256, 256, 1, 5, 1) == [565 + 513]
    cache.reset()
    assert read(64, 1, 1, rows=4) == [65]  # tokens of all rows count


@pytest.mark.parametrize("words", [{}, {"codec": Int8(16, 64)}, {"layout": Paged(3)}, {"evict": Knorm(20)}], ids=str)
def test_under_autocast_keys_and_values_have_its_type(words: dict[str, Any]):
    m, ids = on_regard("llama"), tokens(2, 13)
    plain, cache = DynamicCache(), regard_cache(m, **words)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, found = (
            torch.cat([m(part, **with_cache(one)).logits for part in ids.split(6, dim=1)], 1) for one in (plain, cache)
        )
    assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype == torch.bfloat16
    assert torch.equal(found, expected)


# ---- models that read the cache themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("is_recording", [False, True])
@pytest.mark.parametrize("length", [3, 4, 5, 13])
def test_the_keys_of_a_window_are_those_that_a_next_token_sees(length: int, is_recording: bool):
    m, ids = on_regard("mistral"), tokens(2, length)  # a window of 5
    stock, ours = DynamicCache(config=m.config), regard_cache(m)
    for cache in (stock, ours):
        if is_recording:
            cache.activate_past_recording()
        with torch.no_grad():
            m(ids, **with_cache(cache))
    kept = min(length, 4)
    assert ours.get_mask_sizes(0, 0) == (kept, length - kept)
    for layer, other in zip(ours.layers, stock.layers, strict=True):
        for side in ("keys", "values"):
            assert torch.equal(getattr(layer, side), getattr(other, side)[:, :, -kept:])


@pytest.mark.skipif(not hasattr(transformers, "DiffusionGemmaConfig"), reason="this transformers has no DiffusionGemma")
@pytest.mark.parametrize("words", [{}, {"layout": Paged(3)}], ids=str)
@pytest.mark.parametrize("side", [None, "left"])
def test_a_decoder_that_joins_its_own_keys_to_those_of_a_cache(side: str | None, words: dict[str, Any]):
    """DiffusionGemma's, whose layers read the keys of the prompt out of the cache, and append nothing."""
    m, given = _diffusion_gemma(), {"input_ids": tokens(2, 13), "decoder_input_ids": tokens(2, 6)}
    if side is not None:
        real = padding(side)
        given |= {"attention_mask": real, "decoder_attention_mask": torch.cat([real, torch.ones_like(real[:, :6])], 1)}

    def run(**cache: Any) -> Tensor:
        with torch.no_grad():
            return m(**given, **cache).logits

    expected = run()
    use_regard(m)
    assert close(run(**with_cache(regard_cache(m, **words))), expected)


def _diffusion_gemma() -> Any:
    text = {
        "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "per_layer_config": None,
        "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=None, canvas_length=6)
    return transformers.DiffusionGemmaForBlockDiffusion(config).eval()
