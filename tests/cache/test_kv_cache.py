"""The front of all caches: any layout with any codec and policy, what goes together, and what comes in."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from regard import Causal, ProblemError, Rope, attend, explain
from regard.cache import KVCache, PagePool, StoredTensor
from regard.cache.evict import Knorm, SinksAndRecent
from regard.cache.expected_attention import ExpectedAttention
from regard.cache.store import CachedTensor
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling
from tests.stored import dense

BATCH, HEADS, QK, V = 2, 3, 8, 5

LAYOUTS = {
    "contiguous": Contiguous(),
    "with a capacity": Contiguous(capacity=1024),
    "rolling": Rolling(61, 3),
    "rolling with a rope": Rolling(61, 3, Rope(QK)),
    "paged": Paged(16),
    "latent": Latent(5),
}
CODECS = {
    "plain": None,
    "bfloat16": torch.bfloat16,
    "int8": Int8(16, 7),
    "int4": Int4(16, 16),
    "fp8": Fp8(32, 0, 0),
    "int8 per token": Int8(16, 7, keys="token"),
    "int8 rotated": Int8(16, 7, rotate=True),
}
POLICIES = {"none": None, "recent": SinksAndRecent(61), "small keys": Knorm(61)}


class Int6(Codec):
    """A codec of a user, which no kernel decodes."""

    kind = "int6"


def tokens_of(layout: Layout, count: int, batch: int = BATCH) -> tuple[Tensor, Tensor | None]:
    k = torch.randn(batch, HEADS, count, QK)
    return k, None if isinstance(layout, Latent) else torch.randn(batch, HEADS, count, V)


def goes_together(layout: str, codec: str, policy: str) -> bool:
    if "rolling" in layout and policy != "none":
        return False
    return not (layout == "latent" and codec == "int8 rotated")


@pytest.mark.exhaustive(per="layout codec")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_every_codec_and_policy(layout: str, codec: str, policy: str):
    """A prompt, steps, drafts, beams: sizes are right, the latest tokens are what came, and copies go their own way."""
    words = LAYOUTS[layout], CODECS[codec], POLICIES[policy]
    if not goes_together(layout, codec, policy):
        with pytest.raises(ProblemError, match=r"leave one of the two out|rotate=False"):
            KVCache(*words)
        return
    cache, seen = KVCache(*words), 0
    exact = codec in {"plain", "int8", "int8 per token"}
    forgets = policy != "none" or "rolling" in layout
    for count in (0, 50, 1, 1, 33, 1, 100, 1, 1):
        k, v = tokens_of(words[0], count)
        expected = cache.keys_after(count)
        found = cache.append(k, v)
        seen += count
        assert cache.tokens_seen == seen
        assert found[0].shape == (BATCH, HEADS, cache.tokens, QK)
        assert found[1].shape[:3] == found[0].shape[:3]
        assert cache.tokens == expected if policy == "none" else cache.tokens <= expected
        assert cache.tokens <= (61 + count if forgets else seen)
        for side, x in zip(found, (k, k[..., :5] if v is None else v), strict=True):
            last = min(count, 7)
            torch.testing.assert_close(
                dense(side)[:, :, side.shape[2] - last :], x[:, :, count - last :],
                rtol=0, atol=0 if exact else 0.5,
            )  # fmt: skip
    before = [dense(side).clone() for side in found]
    branch = copy.deepcopy(cache)
    cache.append(*tokens_of(words[0], 3))
    cache.crop(seen)
    read = tokens_of(words[0], 0)
    for one in (cache, branch):
        kept = [dense(side) for side in one.append(*read)]
        if not forgets:
            assert all(map(torch.equal, kept, before))
    rows = torch.tensor([1, 1, 0])
    old = [dense(side).clone() for side in cache.append(*read)]
    cache.select(rows)
    for side, was in zip(cache.append(*tokens_of(words[0], 0, 3)), old, strict=True):
        assert torch.equal(dense(side), was[rows])
    assert branch.append(*read)[0].shape[0] == BATCH
    assert 0 < cache.bytes <= cache.allocated_bytes
    cache.reset()
    assert (cache.tokens, cache.tokens_seen, cache.bytes, cache.allocated_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", ["contiguous", "paged", "latent"])
def test_the_first_tokens_after_a_prompt_need_no_new_memory(layout: str, codec: str):
    if not goes_together(layout, codec, "none"):
        return
    cache = KVCache(LAYOUTS[layout], CODECS[codec])
    cache.append(*tokens_of(LAYOUTS[layout], 1000))
    allocated = cache.allocated_bytes
    for _ in range(100):
        cache.append(*tokens_of(LAYOUTS[layout], 1))
    assert allocated <= cache.allocated_bytes < 1.1 * allocated  # the few plain pages of a codec may have doubled
    assert cache.allocated_bytes < 1.3 * cache.bytes


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "int8 rotated"])
@pytest.mark.parametrize("layout", ["contiguous", "rolling with a rope", "paged", "latent"])
def test_attention_to_what_a_cache_gives_is_that_to_its_numbers_bit_by_bit(layout: str, codec: str):
    """After crops into codes, dropped tokens and beams: whatever parts there are then."""
    for q, k, v in handed_out(layout, codec):
        assert torch.equal(attend(q, k, v, mask=Causal()), attend(q, dense(k), dense(v), mask=Causal()))


@pytest.mark.parametrize("layout", ["contiguous", "rolling with a rope", "paged"])
def test_attention_to_rotated_numbers_is_near_that_to_their_originals(layout: str):
    """Queries are turned instead of keys, and what comes out instead of values: other roundings."""
    for q, k, v in handed_out(layout, "int8 rotated"):
        expected = attend(q, dense(k), dense(v), mask=Causal())
        torch.testing.assert_close(attend(q, k, v, mask=Causal()), expected, rtol=1e-5, atol=1e-5)


def handed_out(layout: str, codec: str) -> Iterator[tuple[Tensor, CachedTensor, CachedTensor]]:
    """Queries, and what a cache hands out after much has been done to it."""
    cache = KVCache(LAYOUTS[layout], CODECS[codec])
    for count in (100, 33, 1, 7, 1):
        cache.append(*tokens_of(LAYOUTS[layout], count))
        cache.crop(cache.tokens_seen - count // 3)
        cache.select(torch.tensor([1, 0]))
        yield torch.randn(BATCH, 2 * HEADS, 2, QK), *cache.append(*tokens_of(LAYOUTS[layout], 2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"layout": Rolling}, r"layout is the class Rolling: did you mean Rolling\(\.\.\.\)\?$"),
        ({"layout": "paged"}, "layout is 'paged'"),
        ({"layout": Int8()}, r"layout is Int8\(.*expected Contiguous\(\)"),
        ({"codec": Int8}, r"codec is the class Int8: did you mean Int8\(\.\.\.\)\?$"),
        ({"codec": torch.int8}, r"codec is torch.int8: expected Int8\(\)"),
        ({"codec": "int8"}, "codec is 'int8'"),
        ({"codec": Codec()}, r"codec is Codec\(.*expected Int8\(\), Int4\(\), Fp8\(\)"),
        ({"codec": Int6()}, r"codec is Int6\(.*expected Int8\(\), Int4\(\), Fp8\(\)"),
        ({"evict": Knorm}, r"evict is the class Knorm: expected a policy, such as Knorm\(1024\)"),
        ({"evict": 1024}, "evict is 1024"),
        ({"layout": Rolling(64), "evict": Knorm(64)}, r"Rolling\(window=64.*evicts tokens by itself.*evict=Knorm"),
        ({"codec": Int8(keys="channel"), "evict": Knorm(64)}, 'keys="token"'),
        (
            {"layout": Latent(8), "evict": ExpectedAttention(64)},
            "no values of their own. Use values=False",
        ),
        ({"layout": Paged(1), "codec": Int8()}, "pages of 1 tokens with Int8.*16 would do"),
        ({"layout": Paged(24), "codec": Fp8(), "evict": Knorm(64)}, "pages of 24 tokens with Fp8.*32 would do"),
        ({"codec": torch.float8_e8m0fnu}, r"codec is torch.float8_e8m0fnu, without scales: .*codec=Fp8\(\)"),
        ({"layout": Paged(16), "codec": torch.float8_e5m2}, r"codec is torch.float8_e5m2, .*codec=Fp8\(\)"),
        ({"layout": Paged(16, "pool")}, "expected a regard.cache.PagePool"),
        ({"layout": Paged(16, PagePool(page=32))}, r"pages of its pool have 32 tokens: expected Paged\(page=32"),
        ({"layout": Paged(16, PagePool()), "codec": Int8()}, "Give both the same codec"),
        (
            {"layout": Paged(16, PagePool(codec=Int8())), "codec": Int8(), "evict": Knorm(64)},
            "Give both the same codec",
        ),
    ],
    ids=str,
)
def test_words_that_make_no_cache_are_named(words: dict[str, object], message: str):
    with pytest.raises(ProblemError, match=message):
        KVCache(**words)


def test_a_policy_gives_each_key_scales_of_its_own():
    assert KVCache(codec=Int8(), evict=Knorm(64))._stored_as == Int8(keys="token")
    assert KVCache(codec=Int8())._stored_as == Int8(keys="channel")
    assert KVCache(codec=Int8()).codec == Int8()


@pytest.mark.parametrize("layout", [Contiguous(), Rolling(61, 3), Paged(16)], ids=repr)
@pytest.mark.parametrize("codec", [None, Int8(16, 7)], ids=["plain", "int8"])
def test_bad_tokens_change_nothing(layout: Layout, codec: Codec | None):
    k, v = torch.randn(BATCH, HEADS, 9, QK), torch.randn(BATCH, HEADS, 9, V)
    wrong = {
        "another batch": (k[:1], v[:1]),
        "other heads": (k[:, :2], v[:, :2]),
        "other keys": (k[..., :7], v),
        "other values": (k, v[..., :4]),
        "another type": (k.double(), v.double()),
        "another device": (k.to("meta"), v.to("meta")),
        "keys of another type": (k.double(), v),
        "values of another device": (k, v.to("meta")),
        "fewer values": (k, v[:, :, :8]),
        "no values": (k, None),
        "no batch": (k[0], v[0]),
        "no tensor": (k.tolist(), v),
        "gradients": (k.clone().requires_grad_(), v),
        "gradients of values": (k, v.clone().requires_grad_()),
    }
    cache = KVCache(layout, codec)
    cache.append(k, v)
    message, held = repr(cache), [dense(side).clone() for side in cache.append(k[:, :, :0], v[:, :, :0])]
    for name, pair in wrong.items():
        with pytest.raises(ProblemError, match=r"k is|v is|is for inference"):
            cache.append(*pair)
        assert repr(cache) == message, name
    for side, was in zip(cache.append(k[:, :, :0], v[:, :, :0]), held, strict=True):
        assert torch.equal(dense(side), was)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_append_inside_a_transform_of_torch_is_refused(layout: str, transform: str, started: bool):
    cache, (k, v) = KVCache(LAYOUTS[layout]), tokens_of(LAYOUTS[layout], 9)
    if started:
        cache.append(k, v)

    def total(k: Tensor) -> Tensor:
        with torch.no_grad():
            return dense(cache.append(k, v)[0]).sum()

    run = {
        "grad": lambda: torch.func.grad(total)(k),
        "jvp": lambda: torch.func.jvp(total, (k,), (k,)),
        "vmap": lambda: torch.vmap(total)(torch.stack((k, k))),
    }
    with pytest.raises(ProblemError, match="outside of vmap" if transform == "vmap" else "before the derivative"):
        run[transform]()
    assert cache.tokens == (9 if started else 0)
    cache.append(k, v)
    assert cache.tokens == (18 if started else 9)


def test_a_pool_and_steps_refuse_an_append_inside_a_transform_of_torch():
    pool, cache = PagePool(), KVCache()
    k = torch.randn(1, 2, 7, 8)
    sequence = pool.sequence()
    cache.append(k, k)
    steps = cache.steps(31)
    for append in (lambda k: pool.append([sequence], k, k), lambda k: steps.append(k[:, :, :1], k[:, :, :1])):
        with pytest.raises(ProblemError, match=r"inside torch\.func\.grad, jvp"):
            torch.func.jvp(lambda k, append=append: dense(append(k)[0]), (k,), (k,))


def test_tokens_that_vmap_does_not_map_over_are_appended_inside_it():
    cache, k, q = KVCache(), torch.randn(1, 2, 7, 8), torch.randn(3, 1, 2, 1, 8)
    found = torch.vmap(lambda q: attend(q, *cache.append(k, k)))(q)
    assert cache.tokens == 7
    assert torch.allclose(found, torch.stack([attend(each, k, k) for each in q]), atol=1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "rolling", "paged", "latent"])
@pytest.mark.parametrize("policy", ["none", "recent"])
def test_selected_and_evicted_tokens_keep_their_tangents(layout: str, policy: str):
    if not goes_together(layout, "plain", policy):
        return
    cache, (k, v) = KVCache(LAYOUTS[layout], evict=POLICIES[policy]), tokens_of(LAYOUTS[layout], 90)
    rows = torch.tensor([1, 0, 0])
    with dual_level():
        cache.append(make_dual(k, 2 * k), None if v is None else make_dual(v, 2 * v))
        cache.select(rows)
        more = [None if t is None else t[rows][:, :, :1] for t in (k, v)]
        assert more[0] is not None
        for side in cache.append(more[0], more[1]):
            found = unpack_dual(dense(side))
            assert torch.equal(found.tangent[:, :, :-1], 2 * found.primal[:, :, :-1])


def test_a_copy_of_a_cache_that_would_lose_tangents_is_refused():
    k = torch.randn(1, 2, 7, 8)
    with dual_level():
        for layout, codec in ((Contiguous(), None), (Rolling(61, 3), None), (Contiguous(), Int8())):
            cache = KVCache(layout, codec)
            cache.append(k, make_dual(k, k))
            with pytest.raises(ProblemError, match="lose the tangents"):
                copy.copy(cache)
        for layout in (Contiguous(), Paged(16)):
            cache = KVCache(layout)
            cache.append(k, k if isinstance(layout, Contiguous) else make_dual(k, k))
            assert copy.copy(cache).tokens == 7


@pytest.mark.parametrize("k", [torch.ones(2, 3, 4, 5, dtype=torch.int64), torch.ones(3, 4, 5), None, "k"], ids=str)
def test_what_is_no_tensor_of_floats_makes_no_cache(k: object):
    cache = KVCache()
    with pytest.raises(ProblemError, match="k is"):
        cache.append(k, k)
    assert repr(cache) == "KVCache(0 tokens)"


def test_crop_and_select_say_what_they_want():
    cache = KVCache()
    cache.select(torch.tensor([1, 5]))  # nothing is stored, so nothing is anywhere
    cache.crop(0)
    with pytest.raises(ProblemError, match=r"crop\(1\): expected 0 to 0, the tokens"):
        cache.crop(1)
    cache.append(torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 5))
    for wrong in (8, -1):
        with pytest.raises(ProblemError, match=rf"crop\({wrong}\): expected 0 to 7, the tokens"):
            cache.crop(wrong)
    for wrong in (2.0, True, None):
        with pytest.raises(ProblemError, match=f"crop is {wrong}: expected a whole number of tokens"):
            cache.crop(wrong)
    for wrong, message in (
        (torch.tensor([0, 2]), r"\[0, 2\].*rows 0 to 1"),
        (torch.tensor([-1]), r"\[-1\].*rows 0 to 1"),
        (torch.tensor([], dtype=torch.int64), r"\[\].*rows 0 to 1"),
        (torch.tensor([0.0]), r"float32 \[1\].*int64 \[new batch\]"),
        (torch.tensor(0), r"int64 \[\].*int64 \[new batch\]"),
        ([0], r"select\(\[0\]\).*int64 \[new batch\]"),
    ):
        with pytest.raises(ProblemError, match=message):
            cache.select(wrong)
    assert (cache.tokens, cache.append(torch.randn(2, 3, 0, 8), torch.randn(2, 3, 0, 5))[0].shape[0]) == (7, 2)


@pytest.mark.parametrize("tokens", [-1, 1.5, None, "3", True])
def test_keys_after_counts_whole_tokens(tokens: int):
    with pytest.raises(ProblemError, match=r"^keys_after\(tokens\) is .*: expected .* tokens"):
        KVCache().keys_after(tokens)


def test_after_tokens_were_forgotten_a_crop_goes_back_as_far_as_they_are_known():
    cache = KVCache(evict=SinksAndRecent(61))
    cache.append(*tokens_of(Contiguous(), 100))
    cache.append(*tokens_of(Contiguous(), 9))
    cache.crop(100 - 57)  # of the 61, four are sinks
    assert (cache.tokens, cache.tokens_seen) == (4, 43)
    cache = KVCache(evict=Knorm(61, recent=0))
    cache.append(*tokens_of(Contiguous(), 100))
    cache.append(*tokens_of(Contiguous(), 9))
    with pytest.raises(ProblemError, match=r"crop\(99\): expected 100 to 109, .* by the policy"):
        cache.crop(99)
    cache.crop(100)
    assert (cache.tokens, cache.tokens_seen) == (61, 100)


def test_queries_are_shown_to_policies_that_look_at_them():
    plain = KVCache()
    plain.observe(torch.randn(1, 2, 3, 4))  # nobody looks
    cache = KVCache(evict=SinksAndRecent(61))
    cache.observe(torch.randn(1, 2, 3, 4))  # nothing is there
    cache.append(*tokens_of(Contiguous(), 7))
    cache.observe(torch.randn(BATCH, 2 * HEADS, 7, QK), Causal())
    for wrong in ((1, HEADS, 7, QK), (BATCH, 4, 7, QK), (BATCH, HEADS, 7, 9), (HEADS, 7, QK)):
        with pytest.raises(ProblemError, match="q is float32"):
            cache.observe(torch.randn(wrong))
    with pytest.raises(ProblemError, match="q is list"):
        cache.observe([1.0])  # pyright: ignore[reportArgumentType]


def test_it_says_all_about_itself():
    cache = KVCache(Rolling(61, 3), Int8(16, 7, sinks=0))
    message = (
        "KVCache(Rolling(window=61, sinks=3, rope=None), Int8(group=16, residual=7, sinks=0, keys=None, rotate=False), "
    )
    assert repr(cache) == message + "0 tokens)"
    cache.append(*tokens_of(Rolling(61), 1000))
    cache.append(*tokens_of(Rolling(61), 1))
    assert repr(cache).startswith(message + "61 tokens of 1,001, k [2, 3, 61, 8], v [2, 3, 61, 5], float32: ")
    assert repr(KVCache(codec=torch.bfloat16)) == "KVCache(bfloat16, 0 tokens)"
    assert repr(KVCache(evict=Knorm(61))) == "KVCache(Knorm(budget=61, sinks=4, every=1, recent=14), 0 tokens)"


def sizes_of(cache: KVCache, device: str) -> list[object]:
    """What a prompt, steps and a crop come to."""
    found = list[object]()
    for count in (200, 1, 40, 1):
        k = torch.zeros(BATCH, HEADS, count, QK, device=device)
        v = None if isinstance(cache.layout, Latent) else torch.zeros(BATCH, HEADS, count, V, device=device)
        keys, values = cache.append(k, v)
        found += [keys.shape, values.shape, str(keys) if isinstance(keys, StoredTensor) else keys.stride()]
        found += [cache.tokens, cache.tokens_seen, cache.bytes, cache.allocated_bytes]
        q = torch.zeros(BATCH, 2 * HEADS, count, QK, device=device)
        found += [attend(q, keys, values, mask=Causal()).shape, explain(q, keys, values, mask=Causal()).bytes]
    if not isinstance(cache.layout, Rolling):
        cache.crop(150)
    return [*found, cache.tokens, cache.bytes, cache.allocated_bytes]


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_tensors_tell_sizes_before_there_is_memory(layout: str, codec: str):
    if goes_together(layout, codec, "none"):
        words = LAYOUTS[layout], CODECS[codec]
        assert sizes_of(KVCache(*words), "meta") == sizes_of(KVCache(*words), "cpu")


@pytest.mark.parametrize("word", [Knorm(61), SinksAndRecent(61)], ids=repr)
@pytest.mark.parametrize("layout", [Contiguous(), Paged(16)], ids=repr)
def test_what_goes_by_numbers_is_refused_on_meta(layout: Layout, word: Knorm | SinksAndRecent):
    cache = KVCache(layout, Int8(16, 7), word)
    k = torch.zeros(BATCH, HEADS, 80, QK, device="meta")
    cache.append(k, k)
    with pytest.raises(ProblemError, match="reads elements, and a tensor on meta, or a fake one, has none: leave it"):
        cache.append(k, k)
    assert (cache.tokens, cache.tokens_seen) == (80, 80)
    with pytest.raises(ProblemError, match="select reads elements"):
        cache.select(torch.zeros(1, dtype=torch.int64, device="meta"))


def test_a_rolling_cache_of_fake_tensors_leaves_nothing_behind():
    """Angles of sinks are kept from call to call, but not those that are fake."""
    words, k = (Rolling(29, 3, Rope(QK, base=977.0)), Int8(16, 7, rotate=True)), torch.randn(1, 1, 38, QK)
    with FakeTensorMode() as mode:
        fake, x = KVCache(*words), mode.from_tensor(k)
        for part in x.split([37, 1], dim=2):
            fake.append(part, part)
    cache = KVCache(*words)
    cache.append(k[:, :, :37], k[:, :, :37])
    keys, _ = cache.append(k[:, :, 37:], k[:, :, 37:])
    assert type(dense(keys)) is Tensor


@pytest.mark.parametrize(
    ("layout", "evict"),
    [
        (Contiguous(), None),
        (Contiguous(), Knorm(12)),
        (Paged(page=16), None),
        (Paged(page=16), Knorm(12)),
        (Rolling(window=64, sinks=2), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("codec", [None, Int8(group=16, residual=0, sinks=0)], ids=str)
def test_a_default_device_changes_nothing(layout: Layout, codec: Codec | None, evict: Knorm | None) -> None:
    def appended() -> Tensor:
        cache = KVCache(layout, codec, evict)
        for t in tokens:
            cache.append(t, t)
        steps = cache if evict else cache.steps(None if isinstance(layout, Rolling) else 100)
        keys, _ = steps.append(one, one)
        return keys.dense() if isinstance(keys, StoredTensor) else keys

    tokens, one = [torch.randn(1, 2, n, 8) for n in (19, 1, 33, 1)], torch.randn(1, 2, 1, 8)
    expected = appended()
    with torch.device("meta"):
        assert torch.equal(appended(), expected)
