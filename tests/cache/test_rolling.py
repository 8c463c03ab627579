"""The rolling cache: the paper's definition, computed directly; the same time and memory however long it runs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import ProblemError, Rope, attend
from regard.cache import KVCache
from regard.cache.store import CachedTensor
from regard.rope import NTK, DynamicNTK, Linear, Llama3, LongRope, Yarn
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Rolling, StoredTensor
from tests.own_rope import Halving, Mirrored
from tests.stored import dense

BATCH, HEADS, QUERY_HEADS, DIM, V = 2, 3, 6, 8, 5


def tokens_of(count: int, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, count, DIM, dtype=dtype), torch.randn(batch, HEADS, count, V, dtype=dtype)


ROPES = {
    "plain": Rope(DIM),
    "interleaved": Rope(DIM, interleaved=True),
    "a part": Rope(DIM, fraction=0.5),
    "a part, interleaved": Rope(DIM, fraction=0.5, interleaved=True),
    "linear": Rope(DIM, scaling=Linear(4.0)),
    "NTK": Rope(DIM, scaling=NTK(4.0)),
    "yarn, with an attention factor": Rope(DIM, scaling=Yarn(4.0, 32)),
    "frequencies of a user": Halving(DIM),
    "llama 3": Rope(DIM, base=500.0, scaling=Llama3(8.0, original=64)),
}


LIKE_OTHERS = ("interleaved", "a part", "linear", "NTK")


def places(count: int, window: int, sinks: int) -> list[int]:
    """Of so many tokens those that are kept: the sinks and the last ones."""
    return [*range(min(sinks, count)), *range(max(count - (window - sinks), sinks), count)]


def by_definition(q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> Tensor:
    """What a query finds in the tokens that are kept, all rotated by their places inside the cache, in float64.

    Args:
        q: [batch, heads, 1, dim], not rotated; the token is the last of k and v.
        k: [batch, kv_heads, kept, dim], not rotated.
    """
    k, v, q = k.double(), v.double(), q.double()
    if rope is not None:
        q, k = rope.rotate(q, k.shape[2] - 1), rope.rotate(k)
    return attend(q, k, v, backend="reference64")


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("far", [0, 1_000_000])
@pytest.mark.parametrize(
    "name",
    [None, *(pytest.param(name, marks=pytest.mark.exhaustive) if name in LIKE_OTHERS else name for name in ROPES)],
)
def test_it_is_the_paper_s_definition_over_hundreds_of_steps(name: str | None, far: int):
    """Positions inside the cache, keys rotated anew from what they were: what the cache never does.

    Far out, a chunk of a million tokens came and was forgotten between the sinks and what is attended to.
    """
    rope, window, sinks, steps = None if name is None else ROPES[name], 23, 4, 211
    q, (k, v) = torch.randn(BATCH, QUERY_HEADS, steps, DIM), tokens_of(steps)
    cache, worst, skipped = KVCache(Rolling(window, sinks, rope)), 0.0, 0
    for i in range(steps):
        here = slice(i, i + 1)
        if i == window and far:
            cache.append(*(torch.zeros(1).expand(BATCH, HEADS, far, dim) for dim in (DIM, V)))
            skipped = far
        turned = (t if rope is None else rope.rotate(t, i + skipped) for t in (q[:, :, here], k[:, :, here]))
        query, key = turned
        found = cache.append(key, v[:, :, here])
        assert cache.tokens == found[0].shape[2] == min(i + 1, window)
        assert cache.tokens_seen == i + 1 + skipped
        if skipped and i < 2 * window:
            continue  # zeros of the chunk are still kept
        kept = places(i + 1, window, sinks)
        expected = by_definition(q[:, :, here], k[:, :, kept], v[:, :, kept], rope)
        worst = max(worst, float((attend(query, *found) - expected).abs().max()))
    assert worst < 2e-6


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize(
    "codec",
    [
        Int4(16, 0),
        pytest.param(Int8(16, 5, rotate=True), marks=pytest.mark.exhaustive),
        *(pytest.param(codec, marks=pytest.mark.exhaustive) for codec in (Int8(16, 5), Fp8(16, 16))),
    ],
    ids=repr,
)
@pytest.mark.parametrize("window", [23, 67])
def test_with_codes_the_sinks_stay_plain_and_the_rest_is_near(codec: Codec, window: int):
    rope, sinks, steps = Rope(DIM), 3, 307
    k, v = tokens_of(steps)
    plain, coded = KVCache(Rolling(window, sinks, rope)), KVCache(Rolling(window, sinks, rope), codec)
    for i in range(steps):
        here = slice(i, i + 1)
        key = rope.rotate(k[:, :, here], i)
        for near, exact in zip(coded.append(key, v[:, :, here]), plain.append(key, v[:, :, here]), strict=True):
            assert isinstance(near, StoredTensor)
            assert isinstance(exact, Tensor)
            assert near.shape == exact.shape
            turned = 1e-6 if codec.rotate else 0
            torch.testing.assert_close(near.dense()[:, :, :sinks], exact[:, :, :sinks], rtol=0, atol=turned)
            last = near.shape[2] - min(codec.residual, near.shape[2] - min(sinks, i + 1))
            torch.testing.assert_close(near.dense()[:, :, last:], exact[:, :, last:], rtol=0, atol=turned)
            off = (near.dense() - exact).abs().amax() / exact.abs().amax()
            assert off < (0.15 if codec.kind == "int4" else 0.05)
        assert (coded.tokens, coded.tokens_seen) == (plain.tokens, plain.tokens_seen)


def test_what_is_kept_is_the_same_however_the_tokens_came():
    """In steps, in chunks below and beyond the window, in one shot: after the next token nothing tells."""
    rope, window, (k, v) = Rope(DIM), 23, tokens_of(211)
    k = rope.rotate(k)
    for sinks in (0, 1, 4, 22):
        found: list[tuple[CachedTensor, CachedTensor]] = []
        for chunks in ([210], [1] * 210, [7] * 30, [100, 3, 7, 100], [22, 23, 24, 141], [3, 207]):
            cache, at = KVCache(Rolling(window, sinks, rope)), 0
            for n in (*chunks, 1):
                end = at + n
                keys, _ = cache.append(k[:, :, at:end], v[:, :, at:end])
                assert keys.shape[2] == min(at, window - 1) + n
                at = end
            found.append(cache.append(k[:, :, :0], v[:, :, :0]))
        for keys, values in found[1:]:
            assert torch.equal(keys, found[0][0])
            assert torch.equal(values, found[0][1])


@pytest.mark.parametrize(
    "codec",
    [*(pytest.param(each, marks=pytest.mark.exhaustive) for each in (None, torch.bfloat16)), Int8(16, 3)],
    ids=repr,
)
def test_memory_stays_the_same_over_a_long_stream(codec: Codec | torch.dtype | None):
    cache, held = KVCache(Rolling(29, 4, Rope(DIM)), codec), set[int]()
    k, v = tokens_of(1, batch=1)
    for step in range(7_000):
        cache.append(k, v)
        if step >= 29:
            held.add(cache.allocated_bytes)
    assert len(held) == 1
    assert (cache.tokens, cache.tokens_seen) == (29, 7_000)


@pytest.mark.parametrize("is_cropped", [False, True], ids=["forgotten", "cropped"])
def test_after_a_long_prompt_the_memory_shrinks_again(is_cropped: bool):
    plain, coded = KVCache(Rolling(29)), KVCache(Rolling(29), Int8(16, 0))
    for cache in (plain, coded):
        cache.append(*tokens_of(1))
        usual = cache.allocated_bytes
        cache.append(*tokens_of(1009))
        assert cache.allocated_bytes > usual
        if is_cropped:
            cache.crop(1)
        for _ in range(23):
            cache.append(*tokens_of(1))
        assert cache.allocated_bytes == usual


STEPS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([0, 1, 1, 1, 2, 5, 11, 40, 97])),
    st.tuples(st.just("crop"), st.integers(0, 50)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
)


@pytest.mark.parametrize("sinks", [0, 4])
@given(steps=st.lists(STEPS, min_size=1, max_size=14))
@settings(max_examples=60)
def test_it_is_a_list_of_tokens(sinks: int, steps: list[tuple[str, Any]]):
    """Without a rope nothing turns, so what is kept is what came; with codes its sinks and its latest tokens are."""
    window, residual = 23, 7
    caches = KVCache(Rolling(window, sinks)), KVCache(Rolling(window, sinks), Int8(16, residual))
    kept: list[tuple[Tensor, Tensor]] = []
    gone, batch = 0, BATCH
    for step, what in steps:
        if step == "append":
            new = tokens_of(what, batch)
            found = [cache.append(*new) for cache in caches]
            if what:
                over = max(len(kept) - window + 1, 0)
                kept, gone = kept[:sinks] + kept[sinks + over :], gone + over
            kept += list(zip(*(t.unbind(2) for t in new), strict=True))
            for side in range(2 if kept else 0):
                expected = torch.stack([token[side] for token in kept], 2)
                assert torch.equal(dense(found[0][side]), expected)
                coded = dense(found[1][side])
                assert torch.equal(coded[:, :, :sinks], expected[:, :, :sinks])
                plain = min(residual, len(kept)) if step == "append" and what >= residual else 0
                assert torch.equal(coded[:, :, len(kept) - plain :], expected[:, :, len(kept) - plain :])
                torch.testing.assert_close(coded, expected, rtol=0, atol=0.03)
        elif step == "crop":
            left = max(gone + len(kept) - what, 0)
            if gone and 0 < left < gone + window - 1:
                for cache in caches:
                    with pytest.raises(ProblemError, match=rf"crop\({left}\): expected {gone + window - 1}"):
                        cache.crop(left)
                continue
            for cache in caches:
                cache.crop(left)
            kept, gone = kept[: max(left - gone, 0)], gone if left else 0
            batch = batch if left else BATCH
        elif kept:
            rows = torch.tensor(what) % batch
            for cache in caches:
                cache.select(rows)
            kept, batch = [(k[rows], v[rows]) for k, v in kept], len(rows)
        for cache in caches:
            assert (cache.tokens, cache.tokens_seen) == (len(kept), gone + len(kept))


@pytest.mark.parametrize("codec", [None, Int8(16, 3)], ids=["plain", "int8"])
@pytest.mark.parametrize("drafts", [1, 5, 29, 101])
def test_a_crop_gives_the_cache_without_the_drafts_or_is_refused(codec: Codec | None, drafts: int):
    """Where tokens that the next query should see are gone, the cache would be shorter than its window."""
    k, v = tokens_of(200)
    refused = 0
    for left in range(60, 70 + drafts):
        cache, expected = KVCache(Rolling(23, 3), codec), KVCache(Rolling(23, 3), codec)
        for start, end in ((0, 60), (60, 70), (70, 70 + drafts)):
            cache.append(k[:, :, start:end], v[:, :, start:end])
            if start < left:
                expected.append(k[:, :, start : min(end, left)], v[:, :, start : min(end, left)])
        if left < cache.min_crop:
            refused += 1
            before = [dense(side) for side in cache.append(k[:, :, :0], v[:, :, :0])]
            with pytest.raises(ProblemError, match=rf"crop\({left}\): expected {cache.min_crop} .*Rolling"):
                cache.crop(left)
            assert all(map(torch.equal, before, (dense(side) for side in cache.append(k[:, :, :0], v[:, :, :0]))))
            continue
        cache.crop(left)
        new = k[:, :, 199:], v[:, :, 199:]
        for found, wanted in zip(cache.append(*new), expected.append(*new), strict=True):
            assert found.shape == wanted.shape
            near = 0 if codec is None else 0.03  # drafts may have made tokens old enough to become codes
            torch.testing.assert_close(dense(found), dense(wanted), rtol=0, atol=near)
    assert refused == 10  # the 10 tokens before the drafts: with those, what they had pushed out


def test_a_call_that_fails_is_made_again_with_the_same_result():
    rope, (k, v) = Rope(DIM), tokens_of(60)
    for codec in (None, Int8(16, 3)):
        caches = KVCache(Rolling(23, 4, rope), codec), KVCache(Rolling(23, 4, rope), codec)
        for cache in caches:
            cache.append(k[:, :, :31], v[:, :, :31])
        failing, plain = caches
        for start, end in ((31, 32), (32, 41), (41, 60)):
            failing.append(k[:, :, start:end] + 1, v[:, :, start:end] + 1)
            failing.crop(start)
            expected = plain.append(k[:, :, start:end], v[:, :, start:end])
            for one, other in zip(failing.append(k[:, :, start:end], v[:, :, start:end]), expected, strict=True):
                assert torch.equal(dense(one), dense(other))


@pytest.mark.parametrize("codec", [None, Int8(16, 3)], ids=["plain", "int8"])
def test_scalings_that_look_at_the_length_see_that_of_the_cache(codec: Codec | None):
    """In the cache the sequence is never longer than the window, so frequencies for short ones serve."""
    short, long = (1.0,) * 4, (3.0,) * 4
    for scaling in (LongRope(short, long, original=32, factor=4.0), DynamicNTK(4.0, 32)):
        rope, plain = Rope(DIM, scaling=scaling), Rope(DIM)
        sinks = [KVCache(Rolling(23, 4, word), codec) for word in (rope, plain)]
        k, v = tokens_of(101)
        first, second = (cache.append(plain.rotate(k), v) and cache.append(k[:, :, :1], v[:, :, :1]) for cache in sinks)
        torch.testing.assert_close(dense(first[0])[:, :, :4], dense(second[0])[:, :, :4])


@pytest.mark.parametrize("codec", [None, pytest.param(Int8(16, 3), marks=pytest.mark.exhaustive)], ids=repr)
def test_sinks_turn_in_compiled_steps(codec: Codec | None):
    rope, (k, v), q = Rope(DIM), tokens_of(30), torch.randn(BATCH, QUERY_HEADS, 30, DIM)
    compiled, plain = (KVCache(Rolling(23, 4, rope), codec) for _ in range(2))

    def step(cache: KVCache, start: int, end: int) -> Tensor:
        return attend(q[:, :, start:end], *cache.append(k[:, :, start:end], v[:, :, start:end]))

    for cache in (compiled, plain):
        step(cache, 0, 25)
    for i in range(25, 30):
        out = torch.compile(step, backend="eager")(compiled, i, i + 1)
        torch.testing.assert_close(out, step(plain, i, i + 1))


def test_a_rope_of_another_width_is_refused():
    with pytest.raises(ProblemError, match=r"rope=Rope\(dim=16.*expected the Rope\(8\)"):
        KVCache(Rolling(23, 4, Rope(16))).append(*tokens_of(1))
    with pytest.raises(ProblemError, match=r"rope=10000.*expected the Rope\(8\)"):
        KVCache(Rolling(23, 4, 10000)).append(*tokens_of(1))


def test_a_rope_that_rotates_in_its_own_way_is_refused():
    with pytest.raises(ProblemError, match=r"rope=Mirrored\(dim=8.*Mirrored has a rotate of its own: use another lay"):
        KVCache(Rolling(23, 4, Mirrored(8))).append(*tokens_of(1))


def test_numbers_that_cannot_be_written_change_nothing():
    """Neither are they added, nor is anything forgotten for them."""
    cache, (k, v) = KVCache(Rolling(29, 4), Int8(16, 3)), tokens_of(70)
    before = [dense(side) for side in cache.append(k, v)]
    bad, message = tokens_of(40), repr(cache)
    bad[0][1, 2, 5, 3] = torch.inf
    with pytest.raises(ProblemError, match="infinite"):
        cache.append(*bad)
    assert repr(cache) == message
    for side, was in zip(cache.append(*tokens_of(0)), before, strict=True):
        assert torch.equal(dense(side), was)


@pytest.mark.parametrize("codec", [None, Int8(16, 3)], ids=["plain", "int8"])
def test_sinks_of_rows_in_a_new_order_turn_on(codec: Codec | None):
    rope, (k, v), rows = Rope(DIM), tokens_of(120), torch.tensor([1, 0])
    moved, expected = KVCache(Rolling(23, 4, rope), codec), KVCache(Rolling(23, 4, rope), codec)
    for i in range(120):
        new = k[:, :, i : i + 1], v[:, :, i : i + 1]
        if i == 60:
            moved.select(rows)
        found = moved.append(*(new if i < 60 else (t[rows] for t in new)))
        for one, other in zip(found, expected.append(*new), strict=True):
            assert torch.equal(dense(one), dense(other) if i < 60 else dense(other)[rows])
