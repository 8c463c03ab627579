"""The paged cache: bit for bit what a contiguous one gives, whatever was done before, and pages handed around."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, ProblemError, attend
from regard.cache import KVCache, PagePool, SinksAndRecent
from regard.cache.batch_table import BatchTable
from regard.cache.paged import PagedStore
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Paged, StoredTensor
from tests.stored import dense

QK, V = 13, 7


def tokens_of(count: int, batch: int = 2, kv_heads: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, kv_heads, count, QK), torch.randn(batch, kv_heads, count, V)


def store_of(cache: KVCache) -> PagedStore:
    assert isinstance(cache._store, PagedStore)
    return cache._store


@given(
    steps=st.lists(st.one_of(st.integers(0, 37), st.tuples(st.just("crop"), st.integers(0, 40))), max_size=9),
    page=st.sampled_from([1, 5, 16]),
    codec=st.sampled_from([None, torch.bfloat16]),
)
def test_it_gives_what_a_contiguous_cache_gives(steps: list[object], page: int, codec: torch.dtype | None):
    ours, theirs = KVCache(Paged(page), codec), KVCache(codec=codec)
    for step in steps:
        if isinstance(step, tuple):
            tokens = max(0, theirs.tokens - step[1])
            ours.crop(tokens)
            theirs.crop(tokens)
        else:
            k, v = tokens_of(step)
            for mine, other in zip(ours.append(k, v), theirs.append(k, v), strict=True):
                assert torch.equal(dense(mine), dense(other))
        assert (ours.tokens, ours.tokens_seen, ours.bytes) == (theirs.tokens, theirs.tokens_seen, theirs.bytes)


@pytest.mark.parametrize("new", [1, 40])
def test_an_append_that_is_interrupted_counts_no_tokens(new: int, monkeypatch: pytest.MonkeyPatch):
    cache, (k, v) = KVCache(Paged(16)), tokens_of(70 + new)
    cache.append(k[:, :, :70], v[:, :, :70])
    stored = BatchTable.stored

    def interrupted(batch: BatchTable) -> None:
        stored(batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(BatchTable, "stored", interrupted)
        cache.append(*tokens_of(new))
    assert cache.tokens == cache.tokens_seen == 70
    assert torch.equal(dense(cache.append(k[:, :, 70:], v[:, :, 70:])[0]), k)


@pytest.mark.parametrize("page", [3, 16])
def test_attention_over_pages_is_that_over_tensors_to_the_bit(page: int):
    q, (k, v) = torch.randn(2, 6, 101, QK), tokens_of(101)
    cache, out = KVCache(Paged(page)), []
    for start, end in ((0, 53), (53, 54), (54, 71), (71, 101)):
        stored = cache.append(k[:, :, start:end], v[:, :, start:end])
        out.append(attend(q[:, :, start:end], *stored, mask=Causal(), backend="native"))
    assert torch.equal(torch.cat(out, dim=2), attend(q, k, v, mask=Causal(), backend="native"))


@pytest.mark.parametrize(
    "codec", [Int8(), Int4(group=48, residual=7), Fp8(keys="token", residual=0), Int8(rotate=True)]
)
def test_codes_are_near_and_stand_where_they_should(codec: Codec):
    cache, (k, v) = KVCache(Paged(48), codec), tokens_of(331)
    for start, end in ((0, 211), (211, 212), (212, 213), (213, 331)):
        stored = cache.append(k[:, :, start:end], v[:, :, start:end])
    assert isinstance(stored[0], StoredTensor)
    plain, coded, tail = stored[0].parts
    assert (plain.tokens, coded.kind, tail.kind) == (48, codec.kind, "plain")
    assert codec.residual <= tail.tokens < codec.residual + 48
    assert coded.group == 48 if codec.group == 48 else 16
    for t, expected in zip(stored, (k, v), strict=True):
        error = (dense(t) - expected).abs()
        assert error.max() < (0.5 if codec.bits == 4 else 0.2)
        if not codec.rotate:
            assert not error[:, :, :48].any()
            assert not error[:, :, -tail.tokens :].any()
            assert error[:, :, 48 : -tail.tokens].any(-1).float().mean() > 0.9


def test_beams_in_a_new_order_copy_no_numbers_until_they_write():
    cache, (k, v) = KVCache(Paged(16)), tokens_of(40)
    cache.append(k, v)
    held = cache.allocated_bytes
    cache.select(torch.tensor([1, 1, 1, 0]))
    assert cache.bytes == 2 * 40 * 3 * (QK + V) * 4  # what is shared counts once
    assert cache.allocated_bytes == held
    new = tokens_of(1, batch=4)
    found = cache.append(*new)
    for t, old, one in zip(found, (k, v), new, strict=True):
        assert torch.equal(dense(t), torch.cat([old[[1, 1, 1, 0]], one], 2))
    assert cache.bytes == (2 * 32 + 4 * 9) * 3 * (QK + V) * 4


def test_beam_search_gives_what_recomputation_gives():
    cache, (k, v) = KVCache(Paged(5)), tokens_of(7)
    cache.append(k, v)
    for step in range(40):
        rows = torch.randint(0, len(k), (4,))
        new = tokens_of(1, batch=4)
        k, v = torch.cat([k[rows], new[0]], 2), torch.cat([v[rows], new[1]], 2)
        cache.select(rows)
        stored = cache.append(*new)
        if step % 7 == 0:
            q = torch.randn(4, 6, 1, QK)
            ours = attend(q, *stored, mask=Causal(), backend="native")
            assert torch.equal(ours, attend(q, k, v, mask=Causal(), backend="native"))


def test_beams_take_no_more_pages_than_they_need():
    """40 tokens of 2 rows, then 4 beams that part: the common pages once, and of each beam what is its own."""
    pool = PagePool(pages=2 * 2 + 4 * 3, page=16)
    cache = KVCache(Paged(16, pool))
    cache.append(*tokens_of(40))
    for _ in range(24):
        cache.select(
            torch.randint(0, cache.append(*tokens_of(0, batch=len(store_of(cache).sequences)))[0].shape[0], (4,))
        )
        cache.append(*tokens_of(1, batch=4))
    assert cache.tokens == 64


def test_a_copy_goes_its_own_way():
    cache = KVCache(Paged(16))
    old = tokens_of(21)
    cache.append(*old)
    branch = copy.deepcopy(cache)
    ours, theirs = tokens_of(1), tokens_of(1)
    cache.append(*ours)
    branch.append(*theirs)
    assert torch.equal(dense(cache.append(*tokens_of(0))[0]), torch.cat([old[0], ours[0]], 2))
    assert torch.equal(dense(branch.append(*tokens_of(0))[0]), torch.cat([old[0], theirs[0]], 2))


def test_caches_share_a_pool_and_give_it_back():
    pool = PagePool(pages=20)
    first, second = KVCache(Paged(pool=pool)), KVCache(Paged(pool=pool))
    first.append(*tokens_of(40))
    second.append(*tokens_of(99))
    assert (pool.free_pages, first.allocated_bytes) == (20 - 2 * 3 - 2 * 7, 2 * 3 * 16 * 3 * (QK + V) * 4)
    with pytest.raises(ProblemError, match="2 pages of 16 tokens are wanted, and 0 of 20 are free; 4 sequences hold"):
        first.append(*tokens_of(9))
    assert first.tokens == 40
    second.reset()
    assert pool.free_pages == 14
    first.append(*tokens_of(9))
    del first
    assert pool.free_pages == 20


def test_a_first_append_that_fails_leaves_nothing_behind():
    pool = PagePool(pages=3)
    cache = KVCache(Paged(pool=pool))
    with pytest.raises(ProblemError, match="4 pages of 16 tokens are wanted"):
        cache.append(*tokens_of(17))
    assert (cache.tokens, pool.free_pages, len(pool.storage.held.tables)) == (0, 3, 0)


def test_eviction_gives_whole_pages_back():
    cache, (k, v) = KVCache(Paged(16)), tokens_of(100)
    cache.append(k, v)
    store = store_of(cache)
    index = torch.stack([torch.stack([torch.randperm(100)[:20].sort().values for _ in range(3)]) for _ in range(2)])
    store.keep(index)
    assert (store.tokens, store.tokens_seen, store.pool.storage.used) == (20, 100, 2 * 2)
    assert store.bytes == 2 * 20 * 3 * (QK + V) * 4
    for t, old in zip(cache.append(*tokens_of(0)), (k, v), strict=True):
        assert torch.equal(dense(t), old.gather(2, index[..., None].expand(-1, -1, -1, old.shape[3])))


@pytest.mark.parametrize("codec", [None, Int8(residual=0, sinks=0), Int4(residual=0)], ids=repr)
def test_eviction_gives_the_memory_of_pages_of_its_own_back(codec: Codec | None):
    """A copy, which shares them, keeps what it has; what stays is what stays side by side."""
    cache, other = (KVCache(layout, codec, SinksAndRecent(61, every=8)) for layout in (Paged(16), None))
    k, v = tokens_of(2011)
    for one in (cache, other):
        one.append(k, v)
    whole, nothing = cache.allocated_bytes, tokens_of(0)
    branch = copy.deepcopy(cache)
    before = [dense(t) for t in branch.append(*nothing)]
    cache.append(k[:, :, :1], v[:, :, :1])
    assert cache.allocated_bytes >= whole  # the copy needs all pages
    assert all(torch.equal(dense(t), old) for t, old in zip(branch.append(*nothing), before, strict=True))
    branch.append(k[:, :, :1], v[:, :, :1])  # from here on nobody does
    other.append(k[:, :, :1], v[:, :, :1])
    for i in range(1, 41):
        ours, theirs = (one.append(k[:, :, i : i + 1], v[:, :, i : i + 1]) for one in (cache, other))
        if codec is None:
            assert all(torch.equal(dense(a), dense(b)) for a, b in zip(ours, theirs, strict=True))
    assert cache.allocated_bytes < whole / 6


def test_it_works_in_and_out_of_inference_mode():
    cache = KVCache(Paged(16))
    parts = []
    for inside, count in ((True, 5), (False, 1), (True, 1), (False, 30), (True, 30)):
        with torch.inference_mode(inside):
            parts.append(tokens_of(count))
            found = cache.append(*parts[-1])
    assert torch.equal(dense(found[0]), torch.cat([k for k, _ in parts], 2))


def test_what_does_not_fit_a_pool_is_refused():
    pool = PagePool(pages=9, page=32, codec=Int8())
    with pytest.raises(ProblemError, match=r"pages of its pool have 32 tokens: expected Paged\(page=32"):
        KVCache(Paged(pool=pool), Int8()).append(*tokens_of(1))
    with pytest.raises(ProblemError, match="Give both the same codec"):
        KVCache(Paged(32, pool)).append(*tokens_of(1))
    with pytest.raises(ProblemError, match=r"expected a regard\.cache\.PagePool"):
        KVCache(Paged(pool=3)).append(*tokens_of(1))
    KVCache(Paged(32, pool), Int8()).append(*tokens_of(1))
    with pytest.raises(ProblemError, match="a pool is for one layer"):
        KVCache(Paged(32, pool), Int8()).append(*tokens_of(1, kv_heads=2))
    with pytest.raises(ProblemError, match=r"a page must be a multiple of 16 tokens: 32 would do"):
        KVCache(Paged(20), Int8()).append(*tokens_of(1))
    with pytest.raises(ProblemError, match="a batch of 0 rows"):
        KVCache(Paged()).append(*tokens_of(1, batch=0))


@pytest.mark.parametrize("codec", [Int8(keys="token", residual=20), Int4(keys="token", residual=0, sinks=0)], ids=repr)
def test_eviction_moves_codes_as_they_are(codec: Codec):
    """What was codes stays the same numbers, what was plain stays or becomes codes; no token becomes codes twice."""
    cache, (k, v) = KVCache(Paged(16), codec), tokens_of(150)
    found = [dense(t) for t in cache.append(k, v)]
    store = store_of(cache)
    for round_ in range(4):
        tokens = store.tokens
        index = torch.stack(
            [torch.stack([torch.randperm(tokens)[: tokens - 30].sort().values for _ in range(3)]) for _ in range(2)]
        )
        store.keep(index)
        given = [t.gather(2, index[..., None].expand(-1, -1, -1, t.shape[3])) for t in (k, v)]
        before = [t.gather(2, index[..., None].expand(-1, -1, -1, t.shape[3])) for t in found]
        after = cache.append(*tokens_of(0))
        for t, old, exact in zip(after, before, given, strict=True):
            now = dense(t)
            was_plain = (old == exact).all(-1)
            assert ((now == old).all(-1) | was_plain).all()
            assert (now - exact).abs().max() < (0.5 if codec.bits == 4 else 0.2)
            assert (now == old).all(-1).float().mean() > 0.5
        assert store.bytes <= sum(t.numel() for t in given) * 4
        room = store.pool.storage
        assert room.used * 16 <= 2 * (tokens - 30 + 3 * 15)
        new = tokens_of(11 + 7 * round_)
        found = [torch.cat([dense(t), one], 2) for t, one in zip(after, new, strict=True)]
        k, v = (torch.cat([t, one], 2) for t, one in zip(given, new, strict=True))
        stored = cache.append(*new)
        assert all(torch.equal(dense(t), mine) for t, mine in zip(stored, found, strict=True))
        q = torch.randn(2, 6, 1, QK)
        assert torch.equal(attend(q, *stored, mask=Causal()), attend(q, *(dense(t) for t in stored), mask=Causal()))
        cache.crop(store.tokens_seen - 5)
        store = store_of(cache)
        k, v, *found = (t[:, :, :-5] for t in (k, v, *found))
        assert all(torch.equal(dense(t), mine) for t, mine in zip(cache.append(*tokens_of(0)), found, strict=True))
    cache.crop(store.tokens_seen - store.tokens + 3)
    cache.select(torch.tensor([1, 0, 1]))
    one = tokens_of(1, batch=3)
    for t, mine, last in zip(cache.append(*one), found, one, strict=True):
        assert torch.equal(dense(t), torch.cat([mine[[1, 0, 1], :, :3], last], 2))


def test_channels_that_share_scales_over_tokens_cannot_lose_some():
    cache = KVCache(Paged(16), Int8())
    cache.append(*tokens_of(100))
    with pytest.raises(ProblemError, match="share the scales of keys"):
        store_of(cache).keep(torch.arange(50).expand(2, 3, 50))
    assert cache.tokens == 100
