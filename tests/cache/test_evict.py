"""What all policies of eviction have in common, and the two that look at no query."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, ProblemError, attend
from regard.cache.evict import Eviction, Knorm, SinksAndRecent, highest
from regard.cache.evict_by_attention import H2O, TOVA, SnapKV
from regard.cache.expected_attention import ExpectedAttention
from regard.cache.kv_cache import KVCache
from regard.describe.position import Rope
from regard.storage.stored import Contiguous, Layout, Paged
from tests.cache.evicted import append, by_definition, feed, inside, kept_by, stream

WORDS = [
    pytest.param(SinksAndRecent, {}, id="SinksAndRecent"),
    pytest.param(Knorm, {}, id="Knorm"),
    pytest.param(Knorm, {"recent": 3}, id="Knorm with recent"),
    pytest.param(H2O, {}, id="H2O"),
    pytest.param(TOVA, {}, id="TOVA"),
    pytest.param(SnapKV, {"window": 3, "once": False}, id="SnapKV"),
    pytest.param(ExpectedAttention, {}, id="ExpectedAttention"),
    pytest.param(ExpectedAttention, {"rope": Rope(8), "values": False}, id="ExpectedAttention with rope"),
]
every_word = pytest.mark.parametrize(("kind", "options"), WORDS)
SIZES = [23, 1, 1, 5, 1, 1, 1, 7, 1]


@every_word
def test_the_budget_is_exact_and_sinks_and_recent_tokens_stay(kind: type[Eviction], options: dict[str, object]):
    @settings(max_examples=25)
    @given(
        sizes=st.lists(st.integers(1, 29), min_size=2, max_size=9),
        budget=st.integers(9, 19),
        sinks=st.integers(0, 4),
        every=st.integers(1, 6),
        seed=st.integers(0, 99),
    )
    def law(sizes: list[int], budget: int, sinks: int, every: int, seed: int):
        word = kind(budget, sinks=sinks, every=every, **options)
        before, start = 0, 0
        for size, kept in zip(sizes, kept_by(word, stream(sum(sizes), seed=seed, batch=1), sizes), strict=True):
            assert kept.shape[2] == (budget if before >= budget + every else before)
            assert (kept.diff(dim=2) > 0).all()
            assert (kept[:, :, :sinks] == torch.arange(min(sinks, kept.shape[2]))).all()
            last = min(word.last(budget), kept.shape[2])
            assert (kept[:, :, kept.shape[2] - last :] == torch.arange(start - last, start)).all()
            before, start = kept.shape[2] + size, start + size

    law()


@every_word
def test_batch_rows_do_not_know_of_each_other(kind: type[Eviction], options: dict[str, object]):
    s, word = stream(sum(SIZES), batch=3), kind(11, **options)
    together = kept_by(word, s, SIZES)
    for row in range(3):
        alone = kept_by(word, s.rows([row]), SIZES)
        assert all(torch.equal(a, t[row : row + 1]) for a, t in zip(alone, together, strict=True))


@every_word
def test_rows_in_a_new_order_go_on_as_if_they_had_always_been_so(kind: type[Eviction], options: dict[str, object]):
    s, word, order = stream(sum(SIZES), batch=3), kind(11, **options), [2, 0, 0, 1]
    expected = kept_by(word, s.rows(order), SIZES)
    for at in range(1, len(SIZES)):
        cache, start = KVCache(evict=word), sum(SIZES[:at])
        feed(cache, s, SIZES[:at])
        cache.select(torch.tensor(order))
        found = feed(cache, s.rows(order), SIZES[at:], start)
        assert all(map(torch.equal, found, expected[at:]))


@every_word
def test_drafts_that_were_cropped_leave_no_trace(kind: type[Eviction], options: dict[str, object]):
    s, other, word = stream(sum(SIZES)), stream(sum(SIZES) + 9, seed=1), kind(11, **options)
    expected = kept_by(word, s, SIZES)
    cache, start = KVCache(evict=word), 0
    for size, kept in zip(SIZES, expected, strict=True):
        step = s.tokens(start, start + size)
        drafts = other.tokens(start, start + 9)
        k, v = (torch.cat(pair, dim=2) for pair in zip(step[1:], drafts[1:], strict=True))
        _, values = append(cache, k, v)
        cache.observe(torch.cat([step.q, drafts.q], dim=2))
        start += size
        cache.crop(start)
        assert torch.equal(values[:, :, : kept.shape[2], 0].long(), kept)


@every_word
def test_what_stays_is_whole(kind: type[Eviction], options: dict[str, object]):
    """Keys and values of a token stay together, and attention over them is that over the kept tokens."""
    s, cache = stream(31), KVCache(evict=kind(13, **options))
    feed(cache, s, [29])
    q, k, v = s.tokens(29, 31)
    keys, values = append(cache, k, v)
    index = values[..., 0].long()[..., None]
    own_k, own_v = (t.gather(2, index.expand(-1, -1, -1, t.shape[3])) for t in s[1:])
    assert torch.equal(keys, own_k)
    assert torch.equal(values, own_v)
    out = attend(q, keys, values, mask=Causal())
    torch.testing.assert_close(out, attend(q, own_k, own_v, mask=Causal()))


@every_word
def test_one_policy_serves_many_caches(kind: type[Eviction], options: dict[str, object]):
    word = kind(11, **options)
    assert word == kind(11, **options)
    assert len({word, kind(11, **options), kind(12, **options)}) == 2
    streams = [stream(sum(SIZES), seed=seed) for seed in range(2)]
    apart = [kept_by(word, s, SIZES) for s in streams]
    caches, start = [KVCache(evict=word) for _ in streams], 0
    for step, size in enumerate(SIZES):
        for cache, s, kept in zip(caches, streams, apart, strict=True):
            assert torch.equal(feed(cache, s, [size], start)[0], kept[step])
        start += size


@every_word
def test_a_copy_goes_its_own_way_and_reset_forgets_all(kind: type[Eviction], options: dict[str, object]):
    s, word = stream(sum(SIZES)), kind(11, **options)
    expected = kept_by(word, s, SIZES)
    cache = KVCache(evict=word)
    feed(cache, stream(31, seed=5, batch=1), [29, 1, 1])
    cache.reset()
    feed(cache, s, SIZES[:4])
    branch = copy.deepcopy(cache)
    feed(branch, stream(17, seed=7), [17])
    assert all(map(torch.equal, feed(cache, s, SIZES[4:], sum(SIZES[:4])), expected[4:]))


@every_word
def test_it_works_in_and_out_of_inference_mode(kind: type[Eviction], options: dict[str, object]):
    s, word = stream(sum(SIZES)), kind(11, **options)
    expected = kept_by(word, s, SIZES)
    cache, start = KVCache(evict=word), 0
    for step, size in enumerate(SIZES):
        with torch.inference_mode(mode=step % 2 == 0):
            assert torch.equal(feed(cache, s, [size], start)[0], expected[step])
        start += size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_word
def test_every_float_type_is_served(kind: type[Eviction], options: dict[str, object], dtype: torch.dtype):
    q, k, v = (t.to(dtype) for t in stream(31))
    cache = KVCache(evict=kind(13, **options))
    for step in (slice(0, 29), slice(29, 30), slice(30, 31)):
        cache.append(k[:, :, step], v[:, :, step])
        cache.observe(q[:, :, step])
    assert cache.tokens == 14


@every_word
def test_memory_is_freed(kind: type[Eviction], options: dict[str, object]):
    s, cache = stream(2003), KVCache(evict=kind(101, **options))
    feed(cache, s, [2000])
    before, allocated = cache.bytes, cache.allocated_bytes
    feed(cache, s, [1], 2000)
    assert cache.tokens == 102
    assert cache.bytes == 102 * before // 2000
    assert cache.allocated_bytes < allocated / 10


@every_word
def test_no_prompt_is_kept_alive(kind: type[Eviction], options: dict[str, object]):
    s, cache = stream(1009), KVCache(evict=kind(101, **options))
    for start, size in ((0, 1000), (1000, 1)):
        feed(cache, s, [size], start)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(inside(cache)[0])}
        assert sum(held.values()) < s.q.nbytes / 8


def _tensors(thing: object) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        return [t for part in thing.values() for t in _tensors(part)]
    if isinstance(thing, list | tuple):
        return [t for part in thing for t in _tensors(part)]
    return _tensors(vars(thing)) if hasattr(thing, "__dict__") else []


def test_tokens_gather_until_there_are_every_too_many():
    cache, found = KVCache(evict=SinksAndRecent(11, every=5)), list[int]()
    feed(cache, stream(50), [10])
    for step in range(14):
        feed(cache, stream(50), [1], 10 + step)
        found.append(cache.tokens)
    assert found == [11, 12, 13, 14, 15, 16, 12, 13, 14, 15, 16, 12, 13, 14]


@pytest.mark.parametrize("every", [1, 4])
def test_the_first_and_the_last_tokens_stay(every: int):
    s = stream(sum(SIZES))
    found = kept_by(SinksAndRecent(11, sinks=3, every=every), s, SIZES)
    by_place = by_definition(
        s, SIZES, lambda b, h, alive, shown: dict.fromkeys(alive, 0), budget=11, sinks=3, recent=8, every=every
    )
    assert all(map(torch.equal, found, by_place))
    assert found[1][0, 0].tolist() == [0, 1, 2, *range(15, 23)]


@pytest.mark.parametrize(("every", "recent"), [(1, 0), (1, 4), (3, 0)])
def test_the_smallest_keys_stay(every: int, recent: int):
    s = stream(sum(SIZES))

    def score(b: int, h: int, alive: list[int], shown: list[int]) -> dict[int, float]:
        return {j: -float(s.k[b, h, j].norm()) for j in alive}

    found = kept_by(Knorm(11, recent=recent, every=every), s, SIZES)
    expected = by_definition(s, SIZES, score, budget=11, sinks=4, recent=recent, every=every)
    assert all(map(torch.equal, found, expected))


@every_word
def test_a_share_of_the_tokens_that_were_seen(kind: type[Eviction], options: dict[str, object]):
    cache, s = KVCache(evict=kind(0.25, **options)), stream(400)
    feed(cache, s, [201])
    feed(cache, s, [1], 201)
    assert cache.tokens == 51 + 1  # a quarter of 201, rounded up, and the new one
    feed(cache, s, [99], 202)
    feed(cache, s, [1], 301)
    assert cache.tokens == 76 + 1


@pytest.mark.parametrize("percent", range(1, 100))
def test_a_share_is_exact_where_its_float_is_not(percent: int):
    """0.55 * 100 is 55.00000000000001: 55 tokens stay of 100, and not 56. Others are rounded up."""
    policy = Knorm(percent / 100, sinks=0, recent=0)
    for seen in range(1, 500):
        assert policy.kept(seen) == -(-percent * seen // 100)


def test_a_share_never_goes_below_what_always_stays():
    cache, s = KVCache(evict=Knorm(0.1, recent=3)), stream(40)
    feed(cache, s, [20])
    feed(cache, s, [1], 20)
    assert cache.tokens == 4 + 3 + 1 + 1


@pytest.mark.parametrize(
    ("word", "recent"),
    [
        pytest.param(word, recent, id=type(word).__name__)
        for word, recent in (
            (SinksAndRecent(11), 7), (Knorm(11, recent=3), 3), (H2O(11), 3), (TOVA(11), 0),
            (SnapKV(11, window=3, once=False), 3), (ExpectedAttention(11, recent=2), 2),
        )
    ],
)  # fmt: skip
def test_tokens_that_a_policy_surely_keeps_may_be_cropped_and_others_not(word: Eviction, recent: int):
    cache, s = KVCache(evict=word), stream(40)
    feed(cache, s, [20])
    feed(cache, s, [2], 20)
    cache.crop(20 - recent)
    assert (cache.tokens, cache.tokens_seen) == (11 - recent, 20 - recent)
    with pytest.raises(ProblemError, match=rf"crop\({19 - recent}\)"):
        cache.crop(19 - recent)


def test_reading_evicts_nothing():
    cache, s = KVCache(evict=Knorm(11)), stream(40)
    feed(cache, s, [20, 0])
    assert cache.tokens == 20


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        pytest.param(kind, given, message, id=f"{kind.__name__} {given}")
        for kind, given, message in (
            (Knorm, {"budget": True}, "expected a number of tokens, or a share below 1"),
            (Knorm, {"budget": "all"}, "budget='all'"),
            (Knorm, {"budget": 1.5}, "a float is the share"),
            (Knorm, {"budget": 0.0}, "a float is the share"),
            (Knorm, {"budget": 0}, "at least 5"),
            (SinksAndRecent, {"budget": 4}, "at least 5"),
            (Knorm, {"budget": 9, "recent": 5}, "4 sinks and 5 recent tokens always stay, so it must be at least 10"),
            (H2O, {"budget": 9, "recent": 5}, "at least 10"),
            (SnapKV, {"budget": 36}, "4 sinks and 32 recent tokens"),
            (Knorm, {"budget": 9, "sinks": -1}, "sinks=-1"),
            (Knorm, {"budget": 9, "sinks": 1.0}, "sinks=1.0"),
            (Knorm, {"budget": 9, "sinks": True}, "sinks=True"),
            (H2O, {"budget": 9, "sinks": None}, "sinks=None"),
            (Knorm, {"budget": 9, "every": 0}, "every=0"),
            (Knorm, {"budget": 9, "recent": -1}, "recent=-1"),
            (H2O, {"budget": 9, "recent": 0.5}, "recent=0.5"),
            (SnapKV, {"budget": 64, "window": 0}, "window=0"),
            (SnapKV, {"budget": 64, "kernel": 4}, "kernel=4"),
            (SnapKV, {"budget": 64, "kernel": 5.0}, "kernel=5.0"),
            (SnapKV, {"budget": 64, "once": 1}, "once=1"),
            (ExpectedAttention, {"budget": 64, "future": 0}, "future=0"),
            (ExpectedAttention, {"budget": 64, "values": None}, "values=None"),
            (ExpectedAttention, {"budget": 64, "rope": 10000.0}, "rope=10000.0"),
            (ExpectedAttention, {"budget": 64, "recent": 60}, "at least 65"),
        )
    ],
)
def test_numbers_that_make_no_sense_are_refused(kind: type[Eviction], given: dict[str, object], message: str):
    with pytest.raises(ProblemError) as error:
        kind(**given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "layout", [pytest.param(Contiguous(capacity=97), id="capacity"), pytest.param(Paged(page=7), id="pages")]
)
@every_word
def test_the_same_tokens_stay_in_every_layout(kind: type[Eviction], options: dict[str, object], layout: Layout):
    s, word, start = stream(sum(SIZES)), kind(11, **options), 0
    plain, other = KVCache(evict=word), KVCache(layout, evict=word)
    for size in SIZES:
        step = s.tokens(start, start + size)
        for mine, theirs in zip(append(plain, *step[1:]), other.append(*step[1:]), strict=True):
            assert torch.equal(mine, theirs if isinstance(theirs, Tensor) else theirs.dense())
        plain.observe(step.q)
        other.observe(step.q)
        start += size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_scores_that_are_equal_but_for_rounding_the_later_tokens_stay(dtype: torch.dtype):
    scores = torch.tensor([0.0, 9.0, 5.0, 2.0, 5.0, 5.0, 7.0, 5.0, 0.0], dtype=dtype).expand(1, 64, -1).clone()
    noise = torch.randn(1, 64, 9, dtype=dtype) * torch.finfo(dtype).eps
    for kept, stays in (
        (4, [0, 1, 6, 8]),
        (5, [0, 1, 6, 7, 8]),
        (6, [0, 1, 5, 6, 7, 8]),
        (8, [0, 1, 2, 4, 5, 6, 7, 8]),
    ):
        assert (highest(scores * (1 + noise), kept, first=1, last=1) == torch.tensor(stays)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_in_no_type_are_scores_tied_that_differ(dtype: torch.dtype):
    scores = torch.tensor([[[50, 49, 48, 47, 46, 45]]]).to(dtype)
    assert highest(scores, 3, first=0, last=0).tolist() == [[[0, 1, 2]]]
    assert highest(scores > 48, 2, first=0, last=0).tolist() == [[[0, 1]]]


def test_large_integers_are_compared_exactly():
    assert highest(torch.tensor([[[2**40 + 2, 2**40 + 1, 2**40]]]), 1, first=0, last=0).tolist() == [[[0]]]


@pytest.mark.parametrize(
    ("scores", "kept", "stays"),
    [
        ([5.0, 4.0, -math.inf, 3.0], 3, [0, 1, 3]),
        ([5.0, -math.inf, -math.inf, 3.0], 3, [0, 2, 3]),
        ([math.inf, math.inf, math.inf, 3.0], 2, [1, 2]),
        ([math.inf, 5.0, 4.0, -math.inf], 1, [0]),
    ],
)
def test_infinite_scores_are_tied_to_no_others(scores: list[float], kept: int, stays: list[int]):
    assert highest(torch.tensor([[scores]]), kept, first=0, last=0).tolist() == [[stays]]


def test_by_default_a_quarter_of_what_small_keys_leave_is_recent():
    """Else a token of a large key would go with the step after its own."""
    s = stream(60)
    s.k[:, :, 30:] *= 100
    kept = kept_by(Knorm(24), s, [20, *[1] * 40])
    assert (kept[-1][:, :, -5:] == torch.arange(54, 59)).all()
    assert (kept_by(Knorm(24, recent=0), s, [20, *[1] * 40])[-1] < 30).all()
    assert [Knorm(0.5).last(number) for number in (4, 5, 100)] == [0, 0, 24]
