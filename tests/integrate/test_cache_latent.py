"""Models with latent attention, whose queries go to the cached latents without expanding them."""

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import CompileConfig, StaticCache

from regard import ProblemError, observe_calls, replace_outputs
from regard.cache import ExpectedAttention, Knorm
from regard.calls import Call
from regard.integrate.cache import regard_cache
from regard.integrate.cache_latent import FixedLatentLayer, LatentLayer
from regard.integrate.cache_layers import StoredLayer
from regard.integrate.latent import flops, is_absorbed
from regard.integrate.transformers import use_regard
from regard.storage.codec import Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Latent, Paged, Rolling
from tests.integrate.quantised import quantise
from tests.integrate.writing import prompt, written
from tests.integrate.zoo import VOCABULARY, close, padding, with_cache

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "first_k_dense_replace": 2, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2,
}  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "axk1": ("AXK1Config", "AXK1ForCausalLM", {}),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM", MIXED | {"num_experts": 4, "head_dim": 8}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {}),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        MIXED | {"num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4},
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {"num_layers": 1, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 8, "ffn_hidden_size": 48}
        | {"head_dim": 8},
    ),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM", {}),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM", {}),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", {}),
}
"""All of transformers' that expand latents (`expand_kv`) and attend to all of them."""


@functools.cache
def latent(name: str, **more: Any) -> Any:
    """A tiny model of a family."""
    config, made, special = FAMILIES[name]
    if not hasattr(transformers, made):
        pytest.skip(f"this version of transformers has no {made}")
    torch.manual_seed(0)
    m = getattr(transformers, made)(getattr(transformers, config)(**SIZES | special | more)).eval()
    with torch.no_grad():
        for weight in m.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    return m


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "words", [{}, {"layout": Contiguous(capacity=40)}, {"codec": torch.float32}], ids=["growing", "fixed", "by handle"]
)
def test_logits_are_those_of_expanding_at_every_step(name: str, words: dict[str, Any]):
    m, ids, mask = latent(name), prompt(), padding("left")
    m.set_attn_implementation("eager")
    stock, scores = written(m, ids, None, attention_mask=mask)
    use_regard(m)
    cache = regard_cache(m, **words)
    ours, our_scores = written(m, ids, cache, attention_mask=mask)
    assert ours == stock
    assert close(our_scores, scores)
    assert {type(layer) for layer in cache.layers} & {LatentLayer, FixedLatentLayer}
    assert not any(type(layer) is StoredLayer for layer in cache.layers)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_with_transformers_own_cache_a_step_does_not_expand_latents_either(name: str, static: bool):
    m, ids, mask, calls = latent(name), prompt(), padding("left"), list[Call]()
    m.set_attn_implementation("eager")
    stock, scores = written(m, ids, None, attention_mask=mask)
    use_regard(m)
    cache = StaticCache(m.config, max_cache_len=24) if static else None
    with observe_calls(calls.append):
        ours, our_scores = written(m, ids, cache, attention_mask=mask)
    assert ours == stock
    assert close(our_scores, scores)
    assert {call.k.shape[1::2] for call in calls if call.q.shape[2] == 1} == {(1, 16 + 8)}


def test_what_may_be_replaced_is_the_output_of_each_head_and_no_latent():
    m, ids, widths = latent("deepseek_v3"), prompt(), list[int]()

    def change(call: Call) -> Tensor:
        widths.append(call.out.shape[3])
        return call.out

    use_regard(m)
    unchanged, _ = written(m, ids, regard_cache(m))
    with replace_outputs(change):
        found, _ = written(m, ids, regard_cache(m))
    assert found == unchanged
    assert set(widths) == {12}


def test_a_model_is_expanded_again_when_its_attention_is_no_longer_regards():
    m, ids = latent("deepseek_v3"), prompt()
    use_regard(m)
    m.set_attn_implementation("sdpa")
    module = m.model.layers[0].self_attn
    keys, values = module.expand_kv(torch.randn(2, 1, 5, 16), torch.randn(2, 1, 5, 8))
    assert (keys.shape, values.shape) == ((2, 4, 5, 24), (2, 4, 5, 12))
    written(m, ids, None)


def test_a_model_that_learns_has_the_gradients_of_eager_attention():
    m, ids, grads = latent("deepseek_v3"), prompt(), list[Tensor]()
    for implementation in ("eager", "regard"):
        use_regard(m) if implementation == "regard" else m.set_attn_implementation(implementation)
        m.zero_grad()
        m(ids, labels=ids).loss.backward()
        grads.append(m.model.layers[0].self_attn.kv_b_proj.weight.grad.clone())
    m.zero_grad()
    assert close(grads[1], grads[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda up: up.register_forward_hook(lambda *_: None), "hooks on its kv_b_proj must be called"),
        (lambda up: setattr(up, "forward", up.forward), "hooks on its kv_b_proj must be called"),
        (lambda up: setattr(up, "bias", torch.nn.Parameter(torch.zeros(112))), "its kv_b_proj has a bias"),
        (lambda up: setattr(up, "__class__", Adapted), "its kv_b_proj is a Adapted, which must be called"),
    ],
    ids=["a hook", "a forward of accelerate's", "a bias", "an adapter"],
)
@pytest.mark.parametrize("words", [{}, {"layout": Contiguous(capacity=24)}], ids=["growing", "fixed"])
def test_why_latents_are_expanded_is_reported(change: Any, message: str, words: dict[str, Any]):
    m = copy.deepcopy(latent("deepseek_v3"))
    use_regard(m)
    cache = regard_cache(m, **words)
    assert "latents, which queries meet without expanding them" in cache.explain()
    change(m.model.layers[1].self_attn.kv_b_proj)
    assert f"latents, which the model expands at every step: {message}" in cache.explain()
    m.set_attn_implementation("eager")
    assert "expands at every step: its attention is eager: use_regard(model)" in cache.explain()


@pytest.mark.parametrize("words", [None, {}, {"layout": Contiguous(capacity=24)}], ids=["stock", "growing", "fixed"])
def test_a_quantised_weight_is_left_to_its_module(words: dict[str, Any] | None):
    m, ids = copy.deepcopy(latent("deepseek_v3")), prompt()
    quantise(m.model.layers[1].self_attn.kv_b_proj)
    m.set_attn_implementation("eager")
    stock, scores = written(m, ids, None)
    use_regard(m)
    cache = None if words is None else regard_cache(m, **words)
    ours, our_scores = written(m, ids, cache)
    assert ours == stock
    assert close(our_scores, scores)
    if cache is not None:
        assert "every step: the weight of its kv_b_proj is a Quantised, so the module must" in cache.explain()


def test_policies_of_latents_need_the_weight():
    m = copy.deepcopy(latent("deepseek_v3"))
    quantise(m.model.layers[1].self_attn.kv_b_proj)
    use_regard(m)
    with pytest.raises(ProblemError, match="the weight of kv_b_proj, which is no matrix of floats"):
        regard_cache(m, evict=Knorm(24, sinks=2, recent=8))
    regard_cache(latent("deepseek_v3"), evict=Knorm(24, sinks=2, recent=8))


class Adapted(torch.nn.Linear):
    """A projection that something was added to."""


@pytest.mark.parametrize(
    "codec", [Int8(16, residual=0), Int4(16, residual=0), Fp8(16, residual=0)], ids=["int8", "int4", "fp8"]
)
def test_latents_may_be_quantised(codec: Any):
    m, ids = latent("deepseek_v3"), prompt(2, 37)
    use_regard(m)
    (_, exact), cache = written(m, ids, None), regard_cache(m, codec=codec)
    absorbed = written(m, ids, cache)[1]
    m.set_attn_implementation("eager")
    expanded = written(m, ids, regard_cache(m, codec=codec))[1]
    assert close(absorbed[1], expanded[1])
    assert 0 < (absorbed[0] - exact[0]).abs().max() < 0.1 * exact[0].abs().max()


def test_a_token_takes_a_latent_and_a_rotated_key():
    m = latent("deepseek_v3")
    cache = regard_cache(m)
    written(m, prompt(2, 37), cache)
    assert cache.bytes == 2 * 2 * 45 * (16 + 8) * 4  # layers, rows, tokens, numbers, bytes
    assert "Latent(rank=16), 96 bytes a token" in cache.explain()


def test_a_step_multiplies_about_a_hundred_times_less():
    """At 4,096 tokens and DeepSeek-V3's sizes of a head: 1/117 of the operations of attention, by torch's own count."""
    m = latent("deepseek_v3", num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, qk_rope_head_dim=64,
               qk_nope_head_dim=128, v_head_dim=128, num_hidden_layers=1, first_k_dense_replace=1,
               max_position_embeddings=8192)  # fmt: skip
    module, counted = m.model.layers[0].self_attn, {}
    c, r = torch.zeros(1, 1, 4096, 512), torch.zeros(1, 1, 4096, 64)
    x, turns = torch.randn(1, 1, 32), (torch.ones(1, 1, 64), torch.zeros(1, 1, 64))
    for attention in ("eager", "regard"):
        use_regard(m) if attention == "regard" else m.set_attn_implementation(attention)
        cache = regard_cache(m)
        with torch.no_grad():
            cache.update(c, r, 0)
            with FlopCounterMode(display=False) as count:
                module(x, position_embeddings=turns, attention_mask=None, **with_cache(cache))
        counted[attention] = count.get_total_flops()
    shared = 2 * (32 * 24 + 24 * 16 * 192 + 32 * 576 + 16 * 128 * 32)  # the projections of the token itself
    expanded, absorbed = (counted[attention] - shared for attention in ("eager", "regard"))
    assert (expanded, absorbed) == tuple(pytest.approx(n, rel=0.01) for n in flops(module, 1, 4097))
    assert 100 < expanded / absorbed < 130


def test_a_prompt_is_expanded():
    """Many queries on as many keys: expanding takes fewer operations."""
    module = latent("deepseek_v3").model.layers[0].self_attn
    assert (is_absorbed(module, 1, 64), is_absorbed(module, 64, 64)) == (True, False)


def test_hooks_on_the_projection_are_called():
    m, ids, seen = latent("deepseek_v3"), prompt(), []
    use_regard(m)
    _, plain = written(m, ids, regard_cache(m))
    handle = m.model.layers[1].self_attn.kv_b_proj.register_forward_hook(
        lambda module, args, out: seen.append(1) or out * 1.5
    )
    try:
        _, hooked = written(m, ids, regard_cache(m), use_cache=True)
        _, stock = written(m, ids, None)
    finally:
        handle.remove()
    assert len(seen) == 2 * 9
    assert close(hooked, stock)
    assert not close(hooked, plain)


@pytest.mark.exhaustive
def test_a_model_in_a_compiled_graph_writes_the_same():
    m, ids, mask = latent("deepseek_v3"), prompt(), padding("left")
    use_regard(m)
    stock, _ = written(m, ids, None, attention_mask=mask)
    options = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)  # type: ignore[arg-type]
    vars(options)["_compile_all_devices"] = True  # it compiles on accelerators alone by default
    cache = regard_cache(m, layout=Contiguous(capacity=24))
    assert cache.is_compileable
    ours, _ = written(m, ids, cache, attention_mask=mask, compile_config=options)
    assert ours == stock


def windows(**more: Any) -> Any:
    """A tiny Dots3-Note: the layers with a window have latents, and heads, of other sizes."""
    if not hasattr(transformers, "Dots3NoteForCausalLM"):
        pytest.skip("this version of transformers has no Dots3NoteForCausalLM")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 24, "head_dim": 24,
             "qk_nope_head_dim": 16, "v_head_dim": 20}  # fmt: skip
    own = {f"swa_{name}": size for name, size in sizes.items()} | {"sliding_window_size": 5, "use_dsa": False}
    words = {"layer_types": ["sliding_attention", "full_attention"], "shared_experts_intermediate_size": 8}
    torch.manual_seed(0)
    config = transformers.Dots3NoteTextConfig(**SIZES | {"head_dim": 24} | words | own | more)  # type: ignore[arg-type]
    m = transformers.Dots3NoteForCausalLM(config).eval()
    with torch.no_grad():
        for weight in m.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    return m


@pytest.mark.parametrize("words", [None, {}, {"layout": Contiguous(capacity=40)}], ids=["stock", "growing", "fixed"])
def test_layers_with_a_window_may_have_latents_of_another_size(words: dict[str, Any] | None):
    m, ids, mask = windows(), prompt(), padding("left")
    m.set_attn_implementation("eager")
    stock, scores = written(m, ids, None, attention_mask=mask)
    use_regard(m)
    cache = None if words is None else regard_cache(m, **words)
    if cache is not None:
        window, full = cache.explain().splitlines()[1:]
        assert "128 bytes a token" in window  # 24 + 8 elements of 4 bytes
        assert "96 bytes a token: latents, which queries meet without expanding them" in full
    ours, our_scores = written(m, ids, cache, attention_mask=mask)
    assert ours == stock
    assert close(our_scores, scores)


def test_latents_of_windows_alone_and_of_two_ranks_are_refused():
    with pytest.raises(
        ProblemError, match=r"keys regard can keep \(its layers are indexed_attention, sliding_attention"
    ):
        regard_cache(windows(use_dsa=True, index_topk=4, index_n_heads=2, index_head_dim=16))
    config = transformers.DeepseekV3Config(**SIZES, per_layer_config={1: {"kv_lora_rank": 24}})
    with pytest.raises(ProblemError, match="latents of ranks 16, 24 in layers of full attention: expected one rank"):
        regard_cache(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"layout": Paged(16)}, "whose keys and values are made of latents"),
        ({"layout": Rolling(64)}, "whose keys and values are made of latents"),
        ({"layout": Latent(17)}, r"Latent\(rank=17\) for DeepseekV3ForCausalLM, which has latents of rank 16"),
        ({"evict": ExpectedAttention(64)}, "latents have no values of their own. Use values=False"),
        ({"codec": Int8(rotate=True)}, "a rotation would mix the latent with the rotated key"),
    ],
    ids=["paged", "rolling", "rank", "norms of values", "rotated"],
)
def test_what_latents_do_not_combine_with_is_refused(words: dict[str, Any], message: str):
    with pytest.raises(ProblemError, match=message):
        regard_cache(latent("deepseek_v3"), **words)
