"""Modules and whole models with every cache: they attend to what it keeps; a call that fails leaves it as it was."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from regard import Alibi, Causal, Prefix, ProblemError, Rope, TensorMask, Window, attend
from regard.cache import ExpectedAttention, KVCache
from regard.cache.evict import Knorm, SinksAndRecent
from regard.cache.evict_by_attention import H2O, TOVA, SnapKV
from regard.cache.store import Policy
from regard.nn import Decoder, LatentAttention, MultiHeadAttention
from regard.rope import DynamicNTK
from regard.scores import Cosine, Dot
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling
from tests.own_rope import Mirrored

BATCH, WIDTH, TOKENS = 2, 48, 151

LAYOUTS = {"contiguous": Contiguous(), "with a capacity": Contiguous(capacity=160), "paged": Paged(16)}
CODECS = {
    "plain": None, "bfloat16": torch.bfloat16, "int8": Int8(16, 7), "int4": Int4(16, 7), "fp8": Fp8(16, 7),
    "int8 rotated": Int8(16, 7, rotate=True),
}  # fmt: skip
NEAR = {"plain": 1e-6, "bfloat16": 0.01, "int8": 0.01, "int4": 0.15, "fp8": 0.05, "int8 rotated": 0.01}


def attention(**words: object) -> MultiHeadAttention:
    return MultiHeadAttention(WIDTH, heads=6, kv_heads=3, position=Rope(8), mask=Causal(), **words)


def latent_attention(**words: object) -> LatentAttention:
    sizes = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 8} | words
    return LatentAttention(WIDTH, 6, position=Rope(4, interleaved=True), mask=Causal(), **sizes)


def near(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    return float((found - expected).norm()) <= share * float(expected.norm())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_any_cache_attention_is_near_what_one_shot_gives(layout: str, codec: str):
    module, x, cache = attention(), torch.randn(BATCH, TOKENS, WIDTH), KVCache(LAYOUTS[layout], CODECS[codec])
    with torch.no_grad():
        found = torch.cat([module(part, cache=cache) for part in x.split([70, 1, 1, 30, 1, 48], 1)], 1)
        expected = module(x)
    assert near(found, expected, NEAR[codec])
    assert near(found, expected, 1e-6) == (codec == "plain")
    assert cache.tokens == cache.tokens_seen == TOKENS


@pytest.mark.parametrize("absorbed", [None, True, False])
@pytest.mark.parametrize("codec", [c for c in CODECS if c != "int8 rotated"])
@pytest.mark.parametrize("layout", [Latent(16), Contiguous()], ids=repr)
def test_latents_lie_in_any_cache(layout: Layout, codec: str, absorbed: bool | None):
    module, x, cache = latent_attention(), torch.randn(BATCH, TOKENS, WIDTH), KVCache(layout, CODECS[codec])
    with torch.no_grad():
        parts = x.split([70, 1, 1, 30, 1, 48], 1)
        found = torch.cat([module(part, cache=cache, absorbed=absorbed) for part in parts], 1)
        expected = module(x)
    assert near(found, expected, NEAR[codec])
    if codec == "plain":
        assert cache.bytes == BATCH * TOKENS * (16 + 4) * 4


def test_latents_without_a_part_without_position_are_decoded():
    module, x = latent_attention(nope_dim=0), torch.randn(BATCH, TOKENS, WIDTH)
    for codec in (None, Int8(16, 7), Int8(16, 7, rotate=True)):
        cache = KVCache(codec=codec)
        with torch.no_grad():
            found = torch.cat([module(part, cache=cache, absorbed=True) for part in x.split([70, 1, 80], 1)], 1)
            assert near(found, module(x), 0.02)


@pytest.mark.parametrize("codec", [None, Int8(16, 7)], ids=["plain", "int8"])
@pytest.mark.parametrize("scaling", [None, DynamicNTK(4.0, 16)], ids=["plain rope", "dynamic NTK"])
def test_a_rolling_cache_is_the_module_on_what_is_kept(codec: Codec | None, scaling: DynamicNTK | None):
    """One layer's keys are made of its tokens alone, so the module on those that are kept is the paper's definition."""
    window, sinks, rope = 31, 4, Rope(8, scaling=scaling)
    module = MultiHeadAttention(WIDTH, heads=6, kv_heads=3, position=rope, mask=Causal())
    x, cache = torch.randn(BATCH, TOKENS, WIDTH), KVCache(Rolling(window, sinks, rope), codec)
    with torch.no_grad():
        for i in range(TOKENS):
            found = module(x[:, i : i + 1], cache=cache)
            kept = [*range(min(sinks, i + 1)), *range(max(sinks, i + 1 - (window - sinks)), i + 1)]
            if scaling is None or i < window:
                expected = module(x[:, kept])[:, -1:]
                assert near(found, expected, 2e-6 if codec is None and scaling is None else 0.2 if scaling else 0.02), i
    assert (cache.tokens, cache.tokens_seen) == (window, TOKENS)


def test_a_rolling_cache_must_turn_its_sinks_as_the_module_turns_keys():
    module, x = attention(), torch.randn(BATCH, 3, WIDTH)
    for rope in (None, Rope(8, base=5000.0), Rope(16)):
        cache = KVCache(Rolling(31, 4, rope))
        with pytest.raises(
            ProblemError, match=r"position is Rope\(dim=8\).*Rolling\(window=31, sinks=4, rope=Rope\(dim=8\)"
        ):
            module(x, cache=cache)
        assert cache.tokens_seen == 0
    with pytest.raises(ProblemError, match=r"the module's position is None"):
        MultiHeadAttention(WIDTH, 6)(x, cache=KVCache(Rolling(31, 4, Rope(8))))
    with pytest.raises(ProblemError, match=r"Rolling.*the last ones carry the position"):
        latent_attention()(x, cache=KVCache(Rolling(31)))
    with pytest.raises(ProblemError, match=r"Latent\(rank=8\).*latents have 16 dimensions"):
        latent_attention()(x, cache=KVCache(Latent(8)))


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize(
    "policy", [SinksAndRecent(31), Knorm(31), H2O(31), TOVA(31), SnapKV(31, window=8, once=False)], ids=repr
)
@pytest.mark.parametrize("module", [attention, latent_attention], ids=["heads", "latents"])
def test_policies_see_the_queries_and_forget(policy: Policy, module: object):
    for codec in (None, Int8(16, 7)):
        made, x, cache = module(), torch.randn(BATCH, TOKENS, WIDTH), KVCache(codec=codec, evict=policy)
        with torch.no_grad():
            found = [made(part, cache=cache) for part in x.split([70, 1, 1, 30, *[1] * 49], 1)]
        assert all(part.isfinite().all() for part in found)
        assert cache.tokens < 31 + 3
        assert cache.tokens_seen == TOKENS


@pytest.mark.parametrize(
    "words", [{}, {"scale": 1.3}, {"mask": Causal()}, {"mask": Window(9, 9)}, {"score": Dot()}, {"sink": True}], ids=str
)
def test_heavy_hitters_are_those_of_the_weights_of_the_module(words: dict[str, Any]):
    module, x = MultiHeadAttention(12, heads=4, kv_heads=2, **words), torch.randn(BATCH, 23, 12)
    identity = torch.eye(23).expand(BATCH, 2, 23, 23)
    with torch.no_grad():
        module.k_proj.weight.mul_(5)
        q, k = (p(x).unflatten(2, (-1, 3)).transpose(1, 2) for p in (module.q_proj, module.k_proj))
        weights = attend(q, k, identity, mask=words.get("mask"), scale=module.scale)
        cache = KVCache(evict=H2O(9, sinks=0, recent=0))
        module(x, cache=cache)
        cache.forget()
    kept = weights.sum(2).unflatten(1, (2, 2)).mean(2).topk(9).indices.sort().values
    assert torch.equal(cache.append(k[:, :, :0], k[:, :, :0])[0], k.take_along_dim(kept[..., None], 2))


def test_heavy_hitters_of_latents_without_a_mask_are_those_of_all_queries():
    module, x, none = latent_attention(), torch.randn(BATCH, 23, WIDTH), torch.zeros(BATCH, 1, 0, 20)
    module.mask = None
    kept: list[torch.Tensor] = []
    with torch.no_grad():
        for mask in (None, Prefix(23), Causal()):
            cache = KVCache(evict=H2O(9, sinks=0, recent=0))
            module(x, mask=mask, cache=cache)
            cache.forget()
            kept.append(cache.append(none, none[..., :0])[0])
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (attention, {"bias": Alibi(6)}),
        (attention, {"score": Cosine()}),
        (attention, {"softcap": 5.0}),
        (latent_attention, {"softcap": 5.0}),
    ],
)
def test_a_policy_whose_weights_would_not_be_those_of_the_module_is_refused(
    form: Callable[..., MultiHeadAttention | LatentAttention], words: dict[str, object]
):
    module, x, option = form(**words), torch.randn(BATCH, 40, WIDTH), next(iter(words))
    for policy in (H2O(11), TOVA(11), SnapKV(11, window=2), ExpectedAttention(11)):
        cache = KVCache(evict=policy)
        with pytest.raises(ProblemError, match=rf"{type(policy).__name__}.*they have a {option}. Use a"):
            module(x, cache=cache)
        assert cache.tokens_seen == 0
    for policy in (SinksAndRecent(11), Knorm(11)):
        cache = KVCache(evict=policy)
        with torch.no_grad():
            module(x, cache=cache)
        assert cache.tokens_seen == 40


def test_a_bias_of_the_call_is_refused_like_one_of_the_module():
    with pytest.raises(ProblemError, match=r"they have a bias\. Use a policy that reads no queries"):
        attention()(torch.randn(BATCH, 5, WIDTH), bias=Alibi(6), cache=KVCache(evict=H2O(11)))


@pytest.mark.parametrize(
    "cache",
    [
        KVCache(),
        KVCache(codec=Int8(16, 7)),
        KVCache(Rolling(31, 4, Rope(8))),
        KVCache(Paged(16)),
        KVCache(evict=H2O(31)),
    ],
    ids=["contiguous", "int8", "rolling", "paged", "H2O"],
)
def test_a_call_that_fails_can_be_made_again(cache: KVCache):
    cache.reset()
    module, x = attention(), torch.randn(BATCH, 5, WIDTH)
    with torch.no_grad():
        module(torch.randn(BATCH, 100, WIDTH), cache=cache)
        seen, forgets = cache.tokens_seen, cache.evict or isinstance(cache.layout, Rolling)
        with pytest.raises(ProblemError, match=r"TensorMask"):
            module(x, mask=TensorMask(torch.ones(3, 3, dtype=torch.bool)), cache=cache)
        assert cache.tokens_seen == seen
        if not forgets:
            assert cache.tokens == 100
        out = module(x, cache=cache)
        assert out.isfinite().all()
        assert cache.tokens_seen == 105


@pytest.mark.parametrize("made", [attention, latent_attention], ids=["heads", "latents"])
@pytest.mark.parametrize("policy", [None, H2O(31), SnapKV(31, window=8, once=False)], ids=repr)
def test_a_call_whose_last_projection_fails_can_be_made_again(made: Callable[[], Any], policy: Policy | None):
    module, x, cache, never_failed = made(), torch.randn(BATCH, 5, WIDTH), KVCache(evict=policy), KVCache(evict=policy)

    def fail(*of: object) -> None:
        raise RuntimeError("no memory")

    with torch.no_grad():
        prompt = torch.randn(BATCH, 100, WIDTH)
        for each in (cache, never_failed):
            module(prompt, cache=each)
        handle = module.o_proj.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            module(x, cache=cache)
        assert cache.tokens_seen == 100
        handle.remove()
        for step in (x, *torch.randn(3, BATCH, 1, WIDTH)):
            assert torch.equal(module(step, cache=cache), module(step, cache=never_failed))


# ---- whole models ----------------------------------------------------------------------------------------------------


def model(layers: int = 3, **words: object) -> Decoder:
    return Decoder(29, WIDTH, layers, 6, kv_heads=3, **({"position": Rope(8)} | words))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_is_the_same_in_every_plain_cache(layout: str):
    made, prompt = model(), torch.randint(29, (BATCH, 23))
    expected = made.generate(prompt, 60)
    assert torch.equal(made.generate(prompt, 60, caches=made.caches(LAYOUTS[layout])), expected)


def test_generation_with_latents_is_the_same_in_their_own_layout():
    attention_of = partial(LatentAttention, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8)
    made = Decoder(29, WIDTH, 2, 6, position=Rope(4), attention=attention_of)
    prompt = torch.randint(29, (BATCH, 23))
    assert torch.equal(made.generate(prompt, 40, caches=made.caches(Latent(16))), made.generate(prompt, 40))


def test_generation_goes_on_from_what_caches_hold():
    made, prompt = model(), torch.randint(29, (BATCH, 23))
    expected, caches = made.generate(prompt, 20), made.caches()
    first = made.generate(prompt, 8, caches=caches)
    rest = made.generate(first[:, -1:], 12, caches=caches)
    assert torch.equal(torch.cat([first, rest], 1), expected)


@pytest.mark.parametrize("words", [{}, {"codec": Int8(16, 7)}, {"codec": torch.bfloat16}], ids=str)
def test_a_rolling_model_runs_on_with_constant_memory(words: dict[str, object]):
    """A model of one layer attends as on what is kept; deeper ones run far beyond the window at the same size."""
    made, held = model(2), set[int]()
    caches = made.caches(Rolling(31, 4), **words)
    assert all(pair.own.layout == Rolling(31, 4, Rope(8)) for pair in caches)
    token = torch.randint(29, (BATCH, 1))
    for step in range(200):
        token = made.generate(token, 1, caches=caches)
        if step > 40:
            held.add(sum(pair.own.allocated_bytes for pair in caches))
    assert len(held) == 1
    assert all((pair.own.tokens, pair.own.tokens_seen) == (31, 200) for pair in caches)


def test_a_window_and_sinks_as_a_mask_are_a_rolling_cache_until_tokens_are_forgotten():
    made, prompt = model(), torch.randint(29, (BATCH, 23))
    assert torch.equal(made.generate(prompt, 9, caches=made.caches(Rolling(32))), made.generate(prompt, 9))


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "int8 rotated"])
def test_logits_with_codes_are_near(codec: str):
    made, tokens = model(), torch.randint(29, (BATCH, TOKENS))
    caches = made.caches(codec=CODECS[codec])
    with torch.no_grad():
        found = torch.cat([made(part, caches=caches) for part in tokens.split([100, 1, 1, 49], 1)], 1)
        assert near(found, made(tokens), 2 * NEAR[codec])


def test_a_failing_block_takes_all_caches_back():
    made, tokens = model(), torch.randint(29, (BATCH, 23))
    caches = made.caches(Contiguous(capacity=30))
    caches[2] = made.caches(Contiguous(capacity=25))[2]
    with torch.no_grad():
        made(tokens, caches=caches)
        with pytest.raises(ProblemError, match="capacity=25"):
            made(tokens[:, :5], caches=caches)
        assert [pair.own.tokens_seen for pair in caches] == [23, 23, 23]
        found = made(tokens[:, :2], caches=caches)
        assert torch.allclose(found, made(torch.cat([tokens, tokens[:, :2]], 1))[:, -2:], atol=1e-5)


def test_a_context_is_kept_whole_whatever_forgets():
    made, context = model(context_dim=13), torch.randn(BATCH, 17, 13)
    caches = made.caches(Rolling(11, 2), Int8(16, 0, 0))
    made.generate(torch.randint(29, (BATCH, 23)), 20, context=context, caches=caches)
    assert all((pair.own.tokens, pair.cross.tokens) == (11, 17) for pair in caches)


def test_masks_count_keys_inside_a_rolling_cache():
    """A window of the mask that is shorter than the cache's sees the last tokens only."""
    made, x = attention(), torch.randn(BATCH, TOKENS, WIDTH)
    cache = KVCache(Rolling(31, 4, Rope(8)))
    with torch.no_grad():
        for i in range(TOKENS - 1):
            made(x[:, i : i + 1], cache=cache)
        found = made(x[:, -1:], mask=Window(9), cache=cache)
        expected = made(x[:, -9:])[:, -1:]
    assert near(found, expected, 2e-6)


@pytest.mark.parametrize(
    ("position", "rope"),
    [(Rope(8), Rope(8)), (None, None), (Rope(8, scaling=DynamicNTK(2.0, 64)), None), (Mirrored(8), None)],
    ids=["a rope", "none", "one that changes with the length", "one that rotates in its own way"],
)
def test_expected_attention_is_given_the_rotation(position: Rope | None, rope: Rope | None):
    made = model(position=position)
    caches = made.caches(evict=ExpectedAttention(31))
    assert all(pair.own.evict == ExpectedAttention(31, rope=rope) for pair in caches)
    made.generate(torch.randint(29, (BATCH, 23)), 20, caches=caches)
    assert all(pair.own.tokens <= 32 for pair in caches)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, partial(torch.compile, backend="eager")])
def test_caches_get_the_rope_of_an_attention_in_a_wrapper(wrap: Callable[[Any], Any]):
    model = Decoder(19, 16, 2, heads=4, position=Rope(4))
    for block in model.body.blocks:
        block.attention = wrap(block.attention)
    assert [pair.own.layout for pair in model.caches(Rolling(16))] == [Rolling(16, rope=Rope(4))] * 2
    assert [pair.own.evict for pair in model.caches(evict=ExpectedAttention(9))] == [
        ExpectedAttention(9, rope=Rope(4))
    ] * 2
