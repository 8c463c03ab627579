"""What a model's cache says of itself, which requests it refuses, and the small change of a transformers cache."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CompileConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import regard.integrate
from regard import ProblemError, RefusalError, Rope
from regard.cache import ExpectedAttention, Knorm, SinksAndRecent
from regard.integrate import decoder
from regard.integrate.cache import regard_cache
from regard.integrate.transformers import use_regard
from regard.storage.codec import Int4, Int8
from regard.storage.stored import Contiguous, Latent, Paged, Rolling
from tests.integrate.writing import on_regard, prompt, written
from tests.integrate.zoo import model, padding, tokens, with_cache

INT8 = Int8(group=16, residual=0, sinks=0)

# ---- what it says ---------------------------------------------------------------------------------------------------


def test_it_explains_what_each_layer_keeps():
    m = on_regard("gemma3")
    cache = regard_cache(m, codec=INT8)
    assert cache.explain().splitlines() == [
        "Gemma3ForCausalLM, 2 layers: 0 tokens, 0 bytes",
        "  0  sliding attention  the last 4 tokens, exactly, 256 bytes a token: tensors, views of the cache",
        f"  1  full attention  Contiguous(capacity=None), {INT8!r}, 72 bytes a token: stored tensors, read in place",
    ]
    written(m, prompt(1, 24), cache)
    first, sliding, full = cache.explain().splitlines()
    assert first == f"Gemma3ForCausalLM, 2 layers: 32 tokens, {cache.bytes:,} bytes"
    assert "exactly, 256 bytes a token: tensors" in sliding  # 2 heads of 16 channels of 4 bytes, keys and values
    assert "72 bytes a token: stored tensors" in full  # 2 heads of 16 + 16 codes, and 2 + 2 bytes of scales


def test_it_counts_the_tokens_of_windows_of_a_fixed_size():
    m, cache = on_regard("mistral"), regard_cache(model("mistral"), layout=Contiguous(capacity=24))
    written(m, prompt(), cache)
    assert cache.explain().splitlines() == [
        "MistralForCausalLM, 2 layers: 21 tokens, 2,560 bytes",
        "  0-1  sliding attention  fixed in size, 128 bytes a token: tensors",
    ]


def test_sizes_that_are_the_same_for_all_layers_may_come_once(monkeypatch: pytest.MonkeyPatch):
    """As transformers gives them up to 5.18."""
    of_layers = decoder.get_layer_types_and_kwargs

    def of_all(config: Any) -> Any:
        kinds, details = of_layers(config)
        return kinds, {name: size for each in details for name, size in each.items()}

    m = on_regard("mistral")
    expected = written(m, prompt(), regard_cache(m))[0]
    monkeypatch.setattr(decoder, "get_layer_types_and_kwargs", of_all)
    assert written(m, prompt(), regard_cache(m))[0] == expected


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        ("llama", "sdpa", "a dense copy at each step, for the model's attention is sdpa: use_regard(model)"),
        (
            "doge",
            "regard",
            "a dense copy at each step, for the model computes with keys or values: value_states",
        ),
        ("llama", "regard", "stored tensors, read in place"),
    ],
)
def test_it_says_who_gets_tensors_and_why(name: str, attention: str, message: str):
    use_regard(model(name))
    model(name).set_attn_implementation(attention)
    cache = regard_cache(model(name), codec=INT8)
    written(model(name), prompt(), cache)
    assert message in cache.explain()


def test_a_decoder_with_fewer_layers_than_its_encoder_has_a_cache_of_its_own_layers():
    sizes: dict[str, Any] = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    config = T5Config(**sizes, num_layers=3, num_decoder_layers=2, decoder_start_token_id=0)
    torch.manual_seed(0)
    m: Any = T5ForConditionalGeneration(config).eval()
    settings: Any = {"max_new_tokens": 5, "do_sample": False}
    expected = m.generate(prompt(), **settings)
    cache: Any = regard_cache(m)
    assert len(cache.self_attention_cache.layers) == 2
    assert torch.equal(m.generate(prompt(), **with_cache(cache), **settings), expected)


def test_it_prints_in_a_line():
    m = on_regard("llama")
    cache = regard_cache(m, layout=Paged(16), codec=INT8, evict=Knorm(20))
    head, tail = (
        "RegardCache(LlamaForCausalLM, Paged(page=16, pool=None), ",
        "Knorm(budget=20, sinks=4, every=1, recent=4): ",
    )
    assert repr(cache) == str(cache) == f"{head}{INT8!r}, {tail}2 layers, 0 bytes)"
    assert repr(regard_cache(on_regard("t5"))).startswith("PairedCache(RegardCache(T5ForConditionalGeneration, ")


def test_the_bytes_are_those_of_the_formula():
    """2 * layers * kv_heads * head_dim * tokens * bytes, per row."""
    cache = regard_cache(on_regard("llama"))
    written(model("llama"), prompt(), cache)
    assert cache.bytes == 2 * 2 * 2 * 8 * 21 * 4 * 2


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "deepseek_v3", "t5"])
@pytest.mark.parametrize("codec", [None, torch.bfloat16, INT8, Int4(group=16, residual=0, sinks=0)], ids=repr)
def test_the_bytes_that_are_predicted_are_those_that_are_kept(name: str, codec: Any):
    m = on_regard(name)
    cache = regard_cache(m, codec=codec)
    layer, message = layers_of(cache)[0], re.compile("([0-9,]+) bytes a token")
    before = message.search(cache.explain())
    heads, k_dim, v_dim = {"llama": (2, 8, 8), "qwen3": (2, 16, 16), "deepseek_v3": (1, 16, 8)}.get(name, (4, 8, 8))
    layer.update(torch.randn(1, heads, 64, k_dim), torch.randn(1, heads, 64, v_dim))
    after = message.search(cache.explain())
    assert before is not None
    assert after is not None
    assert before[1] == after[1]


@pytest.mark.skipif(
    not hasattr(LlamaConfig, "per_layer_config"), reason="this transformers has one config for all layers"
)
def test_layers_may_have_sizes_of_their_own():
    rotations = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    layers: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    config = Gemma4TextConfig(hidden_size=32, num_kv_shared_layers=0, rope_parameters=rotations, **heads, **layers)
    message = regard_cache(config).explain()
    assert re.findall("([0-9,]+) bytes a token", message) == [f"{2 * 2 * 8 * 4}", f"{2 * 2 * 16 * 4}"]
    rope = Rope(16, 1e6)
    assert regard_cache(config, evict=ExpectedAttention(9)).layers[1].kv.evict == ExpectedAttention(9, rope=rope)
    assert regard_cache(config, layout=Rolling(9, 2)).layers[1].kv.layout == Rolling(9, 2, rope)


def test_the_bytes_of_a_model_that_was_saved_are_predicted(tmp_path: Path):
    m = copy.deepcopy(model("llama"))  # saving changes the config
    before = regard_cache(m).explain()
    m.save_pretrained(tmp_path)
    assert regard_cache(m).explain() == before


def test_both_halves_of_an_encoder_decoder_are_reported():
    m = on_regard("t5")
    cache = regard_cache(m, codec=INT8)
    written(m, prompt(), cache)
    last = cache.explain().splitlines()[-1]
    cross = 2 * 2 * 2 * 13 * 4 * 8 * 4  # keys and values, layers, rows, tokens read, heads, channels, bytes
    assert last == f"  cross-attention, as transformers keeps it: {cross:,} bytes"
    assert cache.bytes == cross + cache.self_attention_cache.bytes


def test_the_names_are_at_the_door_and_load_nothing_before():
    assert regard.integrate.regard_cache is regard_cache
    assert regard.integrate.use_regard is use_regard
    with pytest.raises(AttributeError, match="has no attribute 'cashe'"):
        regard.integrate.cashe  # noqa: B018  # type: ignore[attr-defined]


class Passing(nn.Module):
    """A wrapper that names the ids and passes on what else there is, as PEFT's do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Tensor, **words: Any) -> Any:
        return self.inner(input_ids, **words)


def test_a_wrapper_takes_the_cache_that_the_model_in_it_takes():
    m, ids = Passing(on_regard("llama")), prompt()
    cache = regard_cache(m)
    with torch.no_grad():
        m(ids, **with_cache(cache))
    assert cache.get_seq_length() == ids.shape[1]
    with pytest.raises(ProblemError, match="Passing takes no"):
        regard_cache(Passing(model("modernbert")))


# ---- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        (nn.Linear(2, 2), {}, r"regard_cache\(model\) got Linear: expected a model of transformers"),
        ("llama", {}, r"regard_cache\(model\) got str"),
        (MambaConfig(num_hidden_layers=2), {}, "Mamba (takes no|has no layers of attention)"),
        (LlamaConfig(), {"layout": Latent(8)}, r"Latent\(rank=8\) for Llama, which has no latents"),
        (LlamaConfig(), {"layout": "paged"}, "layout is 'paged': expected Contiguous"),
        (LlamaConfig(), {"codec": "int8"}, "codec is 'int8': expected Int8"),
        (LlamaConfig(), {"layout": Rolling(9), "evict": Knorm(9)}, "evicts tokens by itself"),
        (LlamaConfig(), {"codec": Int8(keys="channel"), "evict": Knorm(9)}, "tokens that share scales"),
    ],
    ids=["module", "name", "mamba", "latent", "layout", "codec", "twice", "channels"],
)
def test_what_makes_no_sense_is_refused(given: Any, words: dict[str, Any], message: str):
    with pytest.raises(ProblemError, match=message):
        regard_cache(given, **words)


def test_a_model_with_a_cache_of_its_own_is_refused():
    config = MiniMaxConfig(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, head_dim=8, vocab_size=11,
        intermediate_size=8, num_local_experts=2, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(ProblemError, match="MiniMaxForCausalLM has a cache of its own"):
        regard_cache(MiniMaxForCausalLM(config))


@pytest.mark.parametrize("words", [{"layout": Rolling(9)}, {"evict": Knorm(9)}, {"layout": Paged()}], ids=str)
def test_windows_alone_leave_nothing_to_forget(words: dict[str, Any]):
    with pytest.raises(ProblemError, match="every layer of MistralForCausalLM looks back over a window"):
        regard_cache(model("mistral"), **words)


def test_a_batch_of_another_size_is_a_problem():
    m, cache = on_regard("llama"), regard_cache(model("llama"))
    written(m, prompt(), cache)
    with pytest.raises(ProblemError, match="only the number of tokens may differ"), torch.no_grad():
        m(tokens(3, 1), **with_cache(cache))
    assert cache.get_seq_length() == 21


def test_a_full_cache_is_a_problem_and_loses_nothing():
    m, cache = on_regard("llama"), regard_cache(model("llama"), layout=Contiguous(capacity=15))
    with pytest.raises(ProblemError, match=r"room for 15 tokens, and 15 \+ 1 are 16"):
        written(m, prompt(), cache)
    assert int(cache.get_seq_length()) == 15


@pytest.mark.parametrize("name", ["mistral", "llama4"])
def test_memory_smaller_than_a_window_or_chunk_is_a_problem_when_it_is_full(name: str):
    """They are of 5 tokens."""
    m, ids, cache = on_regard(name), prompt(), regard_cache(model(name), layout=Contiguous(capacity=4))
    with torch.no_grad():
        expected = m(ids[:, :4], use_cache=False).logits
        found = [m(ids[:, :3], **with_cache(cache)).logits, m(ids[:, 3:4], **with_cache(cache)).logits]
        with pytest.raises(ProblemError, match=r"room for 4 tokens, and 4 \+ 1 are 5"):
            m(ids[:, 4:5], **with_cache(cache))
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-5)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {4}
    assert repr(cache.layers[0]) == "FixedWindowLayer(4 tokens, memory for 4)"


def test_gradients_do_not_go_through_a_cache():
    with pytest.raises(ProblemError, match=r"torch\.no_grad"):
        on_regard("llama")(prompt(), **with_cache(regard_cache(model("llama"))))


def test_windows_of_a_fixed_size_take_no_drafts_back():
    with pytest.raises(RefusalError, match="layers 0 keep a window in memory of a fixed size"):
        written(
            on_regard("gemma3"),
            prompt(1),
            regard_cache(model("gemma3"), layout=Contiguous(40)),
            prompt_lookup_num_tokens=3,
        )


# ---- what transformers asks of a cache ------------------------------------------------------------------------------


def layers_of(cache: Any) -> list[Any]:
    return getattr(cache, "self_attention_cache", cache).layers


def kept(cache: Any) -> Tensor:
    return torch.cat([torch.cat([layer.keys, layer.values], dim=-1) for layer in cache.layers])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", {}),
        ("llama", {"layout": Paged(3)}),
        ("llama", {"codec": INT8}),
        ("llama", {"layout": Contiguous(capacity=24)}),
        ("mistral", {"layout": Contiguous(capacity=24)}),
    ],
    ids=["growing", "paged", "int8", "fixed", "fixed windows"],
)
def test_rows_are_put_in_order_repeated_and_left_out(name: str, words: dict[str, Any]):
    m, cache = on_regard(name), regard_cache(model(name), **words)
    with torch.no_grad():
        m(prompt(3, 19), **with_cache(cache))
    first = kept(cache).unflatten(0, (2, 3))
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(kept(cache).unflatten(0, (2, 3)), first[:, [2, 0, 0]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(kept(cache).unflatten(0, (2, 6)), first[:, [2, 2, 0, 0, 0, 0]])
    cache.batch_select_indices(torch.tensor([1, 5]))
    assert torch.equal(kept(cache).unflatten(0, (2, 2)), first[:, [2, 0]])
    cache.batch_select_indices(torch.tensor([False, True]))
    assert torch.equal(kept(cache).unflatten(0, (2, 1)), first[:, [0]])
    assert cache.get_seq_length() == 19


def test_its_sizes_are_those_that_transformers_asks_for():
    m = on_regard("gemma3")
    cache, rolling, fixed = (regard_cache(m, **w) for w in ({}, {"layout": Rolling(9)}, {"layout": Contiguous(24)}))
    for made in (cache, rolling, fixed):
        written(m, prompt(), made)
    assert [made.get_max_length(1) for made in (cache, rolling, fixed)] == [-1, -1, 24]
    assert [made.is_sliding for made in (cache, rolling, fixed)] == [[True, False]] * 3
    assert [made.is_compileable for made in (cache, rolling, fixed)] == [False, False, True]
    assert [made.is_croppable for made in (cache, rolling, fixed)] == [True, False, False]
    assert [made.get_mask_sizes(2, 1) for made in (cache, rolling, fixed)] == [(23, 0), (10, 13), (24, 0)]
    assert [made.get_mask_sizes(2, 0) for made in (cache, rolling)] == [(6, 17)] * 2
    assert [made.batch_size for made in (cache, rolling, fixed)] == [2, 2, 2]
    assert len(cache) == 2


def test_a_copy_goes_its_own_way():
    m = on_regard("llama")
    cache = regard_cache(m, codec=INT8)
    written(m, prompt(), cache)
    other = copy.deepcopy(cache)
    before = kept(cache)
    with torch.no_grad():
        m(tokens(2, 5), **with_cache(other))
    assert (cache.get_seq_length(), other.get_seq_length()) == (21, 26)
    assert torch.equal(kept(cache), before)


@pytest.mark.exhaustive
def test_in_memory_of_a_fixed_size_a_model_can_be_compiled():
    m, ids, mask = on_regard("gemma3"), prompt(), padding("left")
    stock, _ = written(m, ids, None, attention_mask=mask, max_new_tokens=4)
    options = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)  # type: ignore[arg-type]
    vars(options)["_compile_all_devices"] = True  # it compiles on accelerators alone by default
    torch._dynamo.utils.counters.clear()
    cache = regard_cache(m, layout=Contiguous(capacity=24))
    ours, _ = written(m, ids, cache, attention_mask=mask, max_new_tokens=4, compile_config=options)
    assert ours == stock
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_the_rope_of_a_model_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    regard_cache(on_regard("llama"), layout=Rolling(9))
    assert torch.equal(torch.rand(1), expected)


# ---- a policy for each layer ----------------------------------------------------------------------------------------


def test_each_layer_may_have_a_policy_of_its_own():
    m = on_regard("llama")
    cache = regard_cache(m, evict=[None, Knorm(12)])
    _, logits = written(m, prompt(2, 24), cache)
    assert [layer.kv.tokens for layer in cache.layers] == [32, 13]
    turned = regard_cache(m, evict=[Knorm(12), None])
    written(m, prompt(2, 24), turned)
    assert [layer.kv.tokens for layer in turned.layers] == [13, 32]
    both = written(m, prompt(2, 24), regard_cache(m, evict=[Knorm(12), Knorm(12)]))
    assert torch.equal(both[1], written(m, prompt(2, 24), regard_cache(m, evict=Knorm(12)))[1])
    assert not torch.equal(both[1], logits)
    assert torch.equal(
        written(m, prompt(2, 24), regard_cache(m, evict=[None, None]))[1],
        written(m, prompt(2, 24), regard_cache(m))[1],
    )


@pytest.mark.parametrize("order", [1, -1])
def test_layers_of_other_policies_take_a_padded_batch(order: int):
    m, ids, mask = on_regard("llama"), prompt(2, 17), torch.ones(2, 17, dtype=torch.int64)
    mask[0, :5] = 0
    evict = [None, SinksAndRecent(11)][::order]
    together = written(m, ids, regard_cache(m, evict=evict), attention_mask=mask)[1]
    for row, own in enumerate((ids[:1, 5:], ids[1:])):
        assert torch.allclose(together[:, row], written(m, own, regard_cache(m, evict=evict))[1][:, 0], atol=1e-5)


def test_policies_of_layers_are_printed():
    m = on_regard("gemma3")
    cache = regard_cache(m, evict=[None, Knorm(12)], codec=INT8)
    assert f"{Knorm(12)!r} in layers 1: 2 layers" in repr(cache)
    assert cache.explain().count("Knorm") == 1
    assert repr(regard_cache(m, evict=[None, None])) == repr(regard_cache(m))


@pytest.mark.parametrize(
    ("name", "evict", "message"),
    [
        ("llama", [Knorm(12)], "evict lists 1 policies and LlamaForCausalLM has 2 layers: give one for each"),
        ("llama", [], "evict lists 0 policies"),
        ("llama", [None, "knorm"], "'knorm'"),
        (
            "gemma3",
            [Knorm(12), None],
            "for layer 0 of Gemma3ForCausalLM, whose kind is sliding_attention.* attention, 1",
        ),
    ],
)
def test_policies_that_do_not_fit_the_layers_are_refused(name: str, evict: list[Any], message: str):
    with pytest.raises(ProblemError, match=message):
        regard_cache(on_regard(name), evict=evict)
