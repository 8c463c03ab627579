"""H2O, TOVA and SnapKV against their definitions, token by token."""

import copy
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Causal, KeyLengths, MaskFunction, ProblemError, Window
from regard.cache import query_observer
from regard.cache.evict import Eviction, Knorm, SinksAndRecent
from regard.cache.evict_by_attention import H2O, TOVA, SnapKV
from regard.cache.expected_attention import ExpectedAttention
from regard.cache.kv_cache import KVCache
from regard.describe.mask_by_table import TensorMask
from tests.cache.evicted import (
    Score,
    Stream,
    append,
    by_definition,
    feed,
    inside,
    kept_by,
    stream,
    sums_of_weights,
    weights,
)

SIZES = [23, 1, 1, 5, 1, 1, 1, 7, 1, 1, 1]


def group_of(s: Stream, kv_head: int) -> range:
    group = s.q.shape[1] // s.k.shape[1]
    return range(kv_head * group, (kv_head + 1) * group)


def column_sums(s: Stream, b: int, h: int, alive: list[int], shown: list[int]) -> dict[int, float]:
    """Over these queries, the mean over the heads of a group."""
    sums = defaultdict[int, float](float)
    for head in group_of(s, h):
        for i in shown:
            for j, a in weights(s, b, head, i, alive).items():
                sums[j] += a / len(group_of(s, h))
    return sums


def h2o(s: Stream) -> Score:
    total = defaultdict[tuple[int, int, int], float](float)

    def score(b: int, h: int, alive: list[int], shown: list[int]) -> dict[int, float]:
        for j, a in column_sums(s, b, h, alive, shown).items():
            total[b, h, j] += a
        return {j: total[b, h, j] for j in alive}

    return score


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (3, 3), (4, 1)])
def test_heavy_hitters_stay(heads: int, kv_heads: int, every: int):
    s = stream(sum(SIZES), heads=heads, kv_heads=kv_heads)
    found = kept_by(H2O(11, recent=2, sinks=3, every=every), s, SIZES)
    expected = by_definition(s, SIZES, h2o(s), budget=11, sinks=3, recent=2, every=every)
    assert all(map(torch.equal, found, expected))
    assert len({tuple(row) for row in found[1].flatten(0, 1).tolist()}) > 1  # each head its own


def test_half_of_what_is_not_sinks_is_recent():
    assert H2O(11).recent == 3
    assert H2O(12, sinks=0).recent == 6
    s = stream(sum(SIZES))
    assert all(map(torch.equal, kept_by(H2O(11), s, SIZES), kept_by(H2O(11, recent=3), s, SIZES)))
    shares = kept_by(H2O(0.5), s, SIZES)[1]
    assert shares.shape[2] == 12
    assert (shares[:, :, -4:] == torch.arange(19, 23)).all()


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 41), min_size=1, max_size=7), wait=st.sampled_from([1, 5, 32]))
def test_a_prompt_in_chunks_gives_the_sums_of_one_shot(sizes: list[int], wait: int):
    s = stream(sum(sizes) + 1, batch=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_observer, "BUFFERED", wait)
        sums = []
        for steps in (sizes, [sum(sizes)]):
            cache = KVCache(evict=H2O(5))
            cache.evict.__dict__["budget"] = 10**6  # never full
            feed(cache, s, steps)
            watch, store = inside(cache)
            sums.append(watch.scores(store))
        torch.testing.assert_close(*sums)


def test_what_waits_counts_as_it_was_asked():
    """Steps of other masks or scales, and steps of which some queries are not shown, are not taken for one."""
    s, cache, expected = stream(40), KVCache(evict=H2O(60)), torch.zeros(2, 3, 40, dtype=torch.float64)
    start = 0
    for size, shown, mask, scale in (
        (9, 9, None, None), (1, 1, None, None), (3, 2, None, None), (4, 4, Window(3), None), (1, 1, Window(2), None),
        (2, 2, None, None), (2, 2, None, 0.7), (1, 1, None, 0.7), (5, 1, Window(7), 0.1), (3, 3, Causal(), None),
    ):  # fmt: skip
        start += size
        _, k, v = s.tokens(start - size, start)
        cache.append(k, v)
        q = s.q[:, :, start - shown : start]
        cache.observe(q, mask, scale)
        expected[:, :, :start] += sums_of_weights(q, s.k[:, :, :start], mask, scale)
    watch, store = inside(cache)
    assert sum(one.queries for one in watch.windows) == 26
    torch.testing.assert_close(watch.scores(store), expected[:, :, :start])


def test_small_steps_wait_for_one_another(monkeypatch: pytest.MonkeyPatch):
    """A step costs no product of its own before it is needed, and then one serves all that waited."""
    asked = list[int]()
    count = query_observer.QueryWindow.column_sums
    monkeypatch.setattr(
        query_observer.QueryWindow, "column_sums", lambda one, k: asked.append(one.queries) or count(one, k)
    )
    cache, s = KVCache(evict=H2O(101, every=40)), stream(300)
    feed(cache, s, [90] + [1] * 51)
    assert asked == [90, 32]
    feed(cache, s, [1], 141)
    assert asked == [90, 32, 19]
    for token in range(142, 181):
        q, k, v = s.tokens(token, token + 1)
        cache.append(k, v)
        cache.observe(q, mask=None if token % 2 else Causal())
    assert asked == [90, 32, 19, 32]


@pytest.mark.parametrize("every", [1, 3])
def test_what_the_last_query_attends_to_stays_in_all_heads(every: int):
    s = stream(sum(SIZES))

    def score(b: int, h: int, alive: list[int], shown: list[int]) -> dict[int, float]:
        of_heads = [column_sums(s, b, each, alive, shown[-1:]) for each in range(3)]
        return {j: sum(sums[j] for sums in of_heads) for j in alive}

    found = kept_by(TOVA(11, sinks=2, every=every), s, SIZES)
    expected = by_definition(s, SIZES, score, budget=11, sinks=2, recent=0, every=every)
    assert all(map(torch.equal, found, expected))
    assert all((kept == kept[:, :1]).all() for kept in found)


def snapkv(s: Stream, window: int, kernel: int) -> Score:
    def score(b: int, h: int, alive: list[int], shown: list[int]) -> dict[int, float]:
        votes = column_sums(s, b, h, alive, alive[-window:])
        before = [votes[j] for j in alive[:-window]]
        pooled = [
            sum(before[max(0, at - kernel // 2) : at + kernel // 2 + 1]) / kernel for at in range(len(before))
        ] + [0.0] * window
        return dict(zip(alive, pooled, strict=True))

    return score


@pytest.mark.parametrize(("window", "kernel"), [(5, 5), (5, 1), (3, 7), (1, 3)])
@pytest.mark.parametrize(
    ("chunks", "then"), [([41], [1]), ([17, 19, 5], [1]), ([36, 5], [2, 5]), ([36, 5], [4, 41, 1])], ids=str
)
def test_the_end_of_the_prompt_votes_once(chunks: list[int], then: list[int], window: int, kernel: int):
    """A prompt may come in chunks of `window` tokens or more; the first smaller one, or a single token, is a step."""
    if window < 5 and then[0] >= max(2, window):
        chunks, then = [*chunks, then[0]], [1]
    s, prompt, steps = stream(130), sum(chunks), [*then, 1, 1, 1]
    found = kept_by(SnapKV(17, window=window, kernel=kernel), s, chunks + steps)
    assert found[len(chunks) - 1].shape[2] == prompt - chunks[-1]  # nothing goes before
    expected = by_definition(s, [prompt, 1], snapkv(s, window, kernel), budget=17, sinks=4, recent=window)[1]
    assert torch.equal(found[len(chunks)], expected)
    generated = torch.arange(prompt, prompt + sum(steps[:-1])).expand(2, 3, -1)
    assert torch.equal(found[-1], torch.cat([expected, generated], dim=2))  # and what comes then all stays


def test_a_short_prompt_is_left_whole_for_good():
    s, cache = stream(90), KVCache(evict=SnapKV(17, window=5))
    feed(cache, s, [16] + [1] * 70)
    assert cache.tokens == 86


@pytest.mark.parametrize("every", [1, 3])
def test_it_votes_again_where_asked(every: int):
    s = stream(sum(SIZES))
    found = kept_by(SnapKV(13, window=5, kernel=3, once=False, every=every), s, SIZES)
    expected = by_definition(s, SIZES, snapkv(s, 5, 3), budget=13, sinks=4, recent=5, every=every)
    assert all(map(torch.equal, found, expected))


def test_after_the_prompt_no_query_is_kept():
    s, cache = stream(60), KVCache(evict=SnapKV(17, window=5))
    feed(cache, s, [41])
    assert inside(cache)[0].windows
    feed(cache, s, [1, 1], 41)
    assert not inside(cache)[0].windows


@pytest.mark.parametrize("mask", [None, TensorMask(torch.ones(41, 41, dtype=torch.bool))], ids=["causal", "of places"])
def test_queries_with_a_mask_of_their_own_vote_once(mask: TensorMask | None):
    """It says which places they saw, and those are not the same after tokens went."""
    s, cache = stream(60), KVCache(evict=SnapKV(17, window=5, once=False))
    q, k, v = s.tokens(0, 41)
    cache.append(k, v)
    cache.observe(q, mask)
    _, k, v = s.tokens(41, 42)
    cache.append(k, v)
    assert sum(one.queries for one in inside(cache)[0].windows) == (5 if mask is None else 0)


def test_fewer_queries_than_the_window_have_the_vote_alone():
    s = stream(30)
    cache = KVCache(evict=SnapKV(13, window=5, kernel=1, sinks=0))
    _, k, v = s.tokens(0, 29)
    cache.append(k, v)
    cache.observe(s.q[:, :, 27:29])
    found = feed(cache, s, [1], 29)[0]
    for b in range(2):
        for h in range(3):
            votes = column_sums(s, b, h, list(range(29)), [27, 28])
            best = sorted(range(24), key=lambda j: -votes[j])[:8]
            assert found[b, h].tolist() == [*sorted(best), *range(24, 29)]


NEEDLE = [
    pytest.param(H2O(32), True, id="H2O"),
    pytest.param(TOVA(32), True, id="TOVA"),
    pytest.param(SnapKV(48), True, id="SnapKV"),
    pytest.param(ExpectedAttention(32), True, id="ExpectedAttention"),
    pytest.param(SinksAndRecent(32), False, id="SinksAndRecent"),
    pytest.param(Knorm(32), False, id="Knorm"),
]


@pytest.mark.parametrize(("word", "stays"), NEEDLE)
def test_a_key_that_gets_much_attention_stays_where_attention_is_looked_at(word: Eviction, stays: bool):
    s = stream(160)
    q = s.q + 2  # queries have a common direction, and one key in the middle lies in it
    k = s.k.clone()
    k[:, :, 71] = 2
    cache = KVCache(evict=word)
    for start in range(0, 160, 40):
        step = Stream(q, k, s.v).tokens(start, start + 40)
        cache.append(*step[1:])
        cache.observe(step.q)
    _, v = append(cache, s.k[:, :, :1], s.v[:, :, :1])
    assert (v[..., 0] == 71).any(-1).all() == stays
    assert (v[..., 0] == 71).any(-1).any() == stays


def test_a_small_key_stays_where_norms_are_looked_at():
    s = stream(60)
    s.k[:, :, 31] *= 0.01
    assert (kept_by(Knorm(11), s, [59, 1])[1] == 31).any(-1).all()


def test_a_mask_goes_along():
    """Tokens that a mask hides get no attention, so they go first."""
    s, keep = stream(41), torch.ones(40, 40, dtype=torch.bool)
    keep[:, 7:23] = False
    for word, keeps_hidden in ((H2O(20, recent=2), False), (TOVA(20), False), (SnapKV(20, window=5, kernel=1), False)):
        for mask in (Causal() & TensorMask(keep), None):
            cache = KVCache(evict=word)
            _, k, v = s.tokens(0, 40)
            cache.append(k, v)
            cache.observe(s.q[:, :, :40], mask=mask)
            kept = feed(cache, s, [1], 40)[0]
            assert ((kept >= 7) & (kept < 23)).any() == (keeps_hidden if mask is not None else True)


@pytest.mark.parametrize("tokens", [29, 40])
@pytest.mark.parametrize(
    "word", [H2O(15, recent=0), TOVA(15), SnapKV(15, window=3), ExpectedAttention(15, future=3)], ids=str
)
def test_a_mask_counts_as_it_was_when_its_queries_were_observed(word: Eviction, tokens: int):
    """Its tensors may be written to before the eviction: lengths that grow with each token, or a closure's."""
    s, kept = stream(41), []
    for added in (0, 14):
        lengths, cache = torch.tensor([tokens, 5]), KVCache(evict=word)
        masks = KeyLengths(lengths), MaskFunction(lambda b, h, q, k, lengths=lengths: k < lengths[b])
        _, k, v = s.tokens(0, tokens)
        cache.append(k, v)
        cache.observe(s.q[:, :, :tokens], mask=Causal() & masks[0] & masks[1])
        lengths += added
        kept.append(feed(cache, s, [1], tokens)[0])
    assert torch.equal(*kept)


def test_a_mask_of_the_whole_prompt_serves_its_last_queries():
    """The window of SnapKV is a part of the call, and its mask is the call's."""
    s, keep = stream(41), torch.rand(40, 40, generator=torch.Generator().manual_seed(3)) > 0.5
    cache = KVCache(evict=SnapKV(15, window=4, kernel=1, sinks=0))
    _, k, v = s.tokens(0, 40)
    cache.append(k, v)
    cache.observe(s.q[:, :, :40], mask=TensorMask(keep))
    kept = feed(cache, s, [1], 40)[0]
    group = s.k[:, :, :40].repeat_interleave(2, 1)
    a = (s.q[:, :, 36:40] @ group.mT / 8**0.5).masked_fill(~keep[36:], -torch.inf).softmax(-1)
    votes = a.sum(2).unflatten(1, (3, 2)).mean(2)[:, :, :36]
    best = votes.topk(11).indices.sort().values
    assert torch.equal(kept[:, :, :11], best)


def test_padding_at_the_end_of_a_row_goes_first():
    s = stream(41)
    cache = KVCache(evict=H2O(15, recent=0, sinks=0))
    _, k, v = s.tokens(0, 40)
    cache.append(k, v)
    cache.observe(s.q[:, :, :40], mask=Causal() & KeyLengths(torch.tensor([40, 15])))
    kept = feed(cache, s, [1], 40)[0]
    assert (kept[1] == torch.arange(15)).all()
    assert (kept[0] > 15).any()


def test_the_scale_goes_along():
    """With scale 0 every weight is 1/n, and early keys, seen by more, win."""
    s = stream(41)
    cache = KVCache(evict=H2O(15, recent=3))
    _, k, v = s.tokens(0, 40)
    cache.append(k, v)
    cache.observe(s.q[:, :, :40], scale=0.0)
    assert (feed(cache, s, [1], 40)[0] == torch.tensor([*range(12), 37, 38, 39])).all()


@pytest.mark.parametrize(
    "word", [TOVA(11), TOVA(70), SnapKV(17, window=5), SnapKV(17, window=5, once=False), SnapKV(48, window=40)], ids=str
)
def test_a_long_call_that_failed_is_cropped_without_a_trace(word: TOVA | SnapKV):
    s, failed = stream(90), stream(200, seed=1)
    expected = feed(KVCache(evict=word), s, [60, 1, 1, 1])
    cache = KVCache(evict=word)
    feed(cache, s, [60])
    feed(cache, failed, [90], 60)
    cache.crop(60)
    assert all(map(torch.equal, feed(cache, s, [1, 1, 1], 60)[1:], expected[2:]))


@pytest.mark.parametrize("steps", [[], [1, 2]], ids=str)
@pytest.mark.parametrize("word", [H2O(109), ExpectedAttention(109)], ids=str)
def test_a_long_call_that_failed_is_not_counted(word: H2O | ExpectedAttention, steps: list[int]):
    s, failed = stream(130), stream(130, seed=1)
    expected = feed(KVCache(evict=word), s, [60, 43, 11, 1, 1])
    cache = KVCache(evict=word)
    feed(cache, s, [60])
    feed(cache, failed, [41, *steps], 60)
    cache.select(torch.tensor([1, 0]))
    copy.deepcopy(cache).crop(60)
    cache.crop(60)
    cache.select(torch.tensor([1, 0]))
    assert all(map(torch.equal, feed(cache, s, [43, 11, 1, 1], 60), expected[1:]))
    assert expected[-1].shape[2] == 109


@pytest.mark.parametrize("word", [TOVA(70), SnapKV(17, window=5), SnapKV(70, window=5, once=False)], ids=str)
def test_far_back_the_queries_that_are_missing_are_shown_again_and_nothing_else(word: TOVA | SnapKV):
    s, cache = stream(150), KVCache(evict=word)
    feed(cache, s, [60, 90])
    cache.crop(80)
    _, k, v = s.tokens(80, 81)
    with pytest.raises(ProblemError, match=r"the last 20 tokens were not observed.* observe the queries .* again"):
        cache.append(k, v)
    assert (cache.tokens, cache.tokens_seen) == (80, 80)
    cache.observe(s.q[:, :, 60:80])
    expected = feed(KVCache(evict=word), s, [80, 1, 1, 1])
    assert expected[1].shape[2] < 80
    assert all(map(torch.equal, feed(cache, s, [1, 1, 1], 80), expected[1:]))


@pytest.mark.parametrize("steps", [[3], [1, 2, 1]], ids=str)
def test_a_prompt_goes_on_after_steps_that_were_cropped(steps: list[int]):
    s, other, word = stream(72), stream(80, seed=1), SnapKV(17, window=5)
    expected = feed(KVCache(evict=word), s, [10, 60, 1])
    for left in (10, 8):
        cache = KVCache(evict=word)
        feed(cache, s, [10])
        feed(cache, other, steps, 10)
        cache.crop(left)
        assert torch.equal(feed(cache, s, [70 - left, 1], left)[-1], expected[-1])


def test_a_crop_among_the_steps_does_not_begin_the_prompt_again():
    s, cache = stream(130), KVCache(evict=SnapKV(17, window=5))
    feed(cache, s, [41, 1, 1])
    cache.crop(42)
    feed(cache, s, [60, 1], 42)
    assert cache.tokens == 17 + 1 + 60 + 1
    cache = KVCache(evict=SnapKV(60, window=5))
    feed(cache, s, [10, 3])
    cache.crop(10)
    feed(cache, s, [1, 1, 1], 10)
    cache.crop(12)
    feed(cache, s, [60, 1], 12)
    assert cache.tokens == 12 + 60 + 1


def test_after_a_crop_of_many_tokens_the_queries_that_are_left_have_the_vote():
    s, word = stream(101), SnapKV(48, window=40)
    cropped, few = KVCache(evict=word), KVCache(evict=word)
    feed(cropped, s, [100])
    cropped.crop(50)
    _, k, v = s.tokens(0, 50)
    few.append(k, v)
    few.observe(s.q[:, :, 28:50])
    assert torch.equal(feed(cropped, s, [1], 50)[0], feed(few, s, [1], 50)[0])


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(w, id=type(w).__name__)
        for w in (H2O(11), TOVA(11), SnapKV(11, window=3, once=False), ExpectedAttention(11))
    ],
)
class TestQueriesMustCome:
    def test_without_them_it_says_what_to_call(self, word: Eviction):
        cache, s = KVCache(evict=word), stream(60)
        _, k, v = s
        cache.append(k[:, :, :23], v[:, :, :23])
        with pytest.raises(ProblemError, match=r"the last 23 tokens were not observed: call cache.observe\(q\)"):
            cache.append(k[:, :, 23:24], v[:, :, 23:24])
        assert (cache.tokens, cache.tokens_seen) == (23, 23)
        cache.observe(s.q[:, :, :23])
        cache.append(k[:, :, 23:24], v[:, :, 23:24])
        assert cache.tokens == 12

    def test_those_of_the_latest_tokens_are_missed(self, word: Eviction):
        cache, s = KVCache(evict=word), stream(60)
        feed(cache, s, [5])
        _, k, v = s.tokens(5, 23)
        cache.append(k, v)
        with pytest.raises(ProblemError, match="the last 18 tokens were not observed"):
            cache.append(k[:, :, :1], v[:, :, :1])

    def test_queries_of_no_new_token_are_refused(self, word: Eviction):
        cache, s = KVCache(evict=word), stream(60)
        feed(cache, s, [7])
        with pytest.raises(ProblemError, match="7 queries were observed and only 0 tokens were appended"):
            cache.observe(s.q[:, :, :7])
        _, k, v = s.tokens(7, 9)
        cache.append(k, v)
        with pytest.raises(ProblemError, match="3 queries were observed and only 2 tokens"):
            cache.observe(s.q[:, :, :3])

    def test_a_batch_may_have_no_rows(self, word: Eviction):
        caches = KVCache(evict=word), KVCache(evict=word)
        for cache, batch in zip(caches, (0, 2), strict=True):
            feed(cache, stream(60, batch=batch), [31, 1, 1])
        assert caches[0].tokens == caches[1].tokens < 31

    def test_a_step_without_queries_is_none(self, word: Eviction):
        cache, s = KVCache(evict=word), stream(60)
        feed(cache, s, [7])
        cache.observe(s.q[:, :, :0])
        feed(cache, s, [16], 7)
        _, k, v = s.tokens(23, 24)
        cache.append(k, v)
        assert cache.tokens == 12
        cache.observe(s.q[:, :, :0])
        with pytest.raises(ProblemError, match="the last 1 tokens were not observed"):
            cache.append(k, v)

    def test_after_a_crop_beyond_what_is_kept_they_may_come_again(self, word: Eviction):
        cache, s = KVCache(evict=word), stream(200)
        feed(cache, s, [150])
        cache.crop(80)
        if isinstance(word, TOVA | SnapKV):
            _, k, v = s.tokens(80, 81)
            with pytest.raises(ProblemError, match=r"call cache.observe\(q\)"):
                cache.append(k, v)
            cache.observe(s.q[:, :, 70:80])
        feed(cache, s, [1], 80)
        assert cache.tokens == 12
