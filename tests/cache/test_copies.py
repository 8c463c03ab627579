"""Caches that were pickled, saved by torch, or copied: they go on with the same bits, and each on its own."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, ProblemError, Rope, Window, attend
from regard.cache import H2O, TOVA, ExpectedAttention, Knorm, KVCache, PagePool, SinksAndRecent, SnapKV
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling
from tests.stored import dense, used_pages

HEADS, QK, V = 3, 8, 5


def by_torch(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": by_torch,
    "deepcopy": copy.deepcopy,
}
LAYOUTS: dict[str, Layout] = {
    "contiguous": Contiguous(),
    "with a capacity": Contiguous(capacity=1024),
    "rolling": Rolling(61, 3, Rope(QK)),
    "paged": Paged(16),
    "latent": Latent(5),
}
CODECS: dict[str, Codec | torch.dtype | None] = {
    "plain": None,
    "bfloat16": torch.bfloat16,
    "int8": Int8(16, 7),
    "int4": Int4(16, 16),
    "fp8": Fp8(32, 0, 0),
    "int8 rotated": Int8(16, 7, rotate=True),
}
POLICIES = {
    "none": None,
    "recent": SinksAndRecent(61),
    "Knorm": Knorm(61),
    "H2O": H2O(61),
    "TOVA": TOVA(61),
    "SnapKV": SnapKV(61, window=7),
    "expected": ExpectedAttention(61, values=False, rope=Rope(QK)),
}
WORDS = [
    pytest.param(layout, codec, policy, marks=[pytest.mark.exhaustive] if policy != "none" and (i + j + k) % 8 else [])
    for i, layout in enumerate(LAYOUTS)
    for j, codec in enumerate(CODECS)
    for k, policy in enumerate(POLICIES)
    if not (layout == "rolling" and policy != "none") and not (layout == "latent" and codec == "int8 rotated")
]
"""By default each layout and codec, and a policy of eviction with an eighth of them."""


class Step:
    """Queries, keys and values of some tokens."""

    def __init__(self, count: int, batch: int = 2) -> None:
        self.k, self.v = torch.randn(batch, HEADS, count, QK), torch.randn(batch, HEADS, count, V)
        self.q = torch.randn(batch, 2 * HEADS, count, QK)

    def into(self, cache: KVCache) -> list[Tensor]:
        """What the cache hands out, and attention to it, whose queries a policy sees."""
        keys, values = cache.append(self.k, None if isinstance(cache.layout, Latent) else self.v)
        if not self.k.shape[2]:
            return [dense(keys), dense(values)]
        out = attend(self.q, keys, values, mask=Causal())
        cache.observe(self.q, Causal() & Window(97))
        return [dense(keys), dense(values), out]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layout", "codec", "policy"), WORDS)
def test_a_copy_goes_on_with_the_same_bits_and_on_its_own(layout: str, codec: str, policy: str, way: str):
    cache = KVCache(LAYOUTS[layout], CODECS[codec], POLICIES[policy])
    for count in (0, 50, 1, 33, 1, 1):
        Step(count).into(cache)
    other = WAYS[way](cache)
    assert (other.layout, other.codec, other.evict) == (cache.layout, cache.codec, cache.evict)
    assert (other.tokens, other.tokens_seen, other.min_crop, other.bytes) == (
        cache.tokens,
        cache.tokens_seen,
        cache.min_crop,
        cache.bytes,
    )
    before = Step(0).into(cache)
    for count in (1, 5, 40, 1):
        Step(count).into(other)  # other tokens than come to the first
    other.reset()
    assert same(Step(0).into(cache), before)
    other = WAYS[way](cache)
    for count in (1, 1, 40, 1, 5, 1):
        step = Step(count)
        assert same(step.into(other), step.into(cache))
    for one in (cache, other):
        one.crop(one.tokens_seen - 1)
        one.select(torch.tensor([1, 0, 1]))
    step = Step(3, batch=3)
    assert same(step.into(other), step.into(cache))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", ["plain", "int8"])
def test_a_crop_into_codes_has_the_same_bits_in_a_copy(codec: str, way: str):
    """Pages of codes whose tokens are there as they came, too, are cropped to those."""
    for layout in (Contiguous(), Paged(16)):
        cache = KVCache(layout, CODECS[codec])
        for count in (50, 33, 1, 16):
            Step(count).into(cache)
        other = WAYS[way](cache)
        for one in (other, cache):
            one.crop(77)
        step = Step(3)
        assert same(step.into(other), step.into(cache))


def test_an_empty_cache_can_be_pickled():
    for layout in LAYOUTS.values():
        other = pickle.loads(pickle.dumps(KVCache(layout, Int8())))
        assert (other.layout, other.codec, other.tokens) == (layout, Int8(), 0)


def test_a_pickle_has_no_room_for_tokens_to_come():
    cache = KVCache()
    for count in (1000, 126):
        Step(count).into(cache)
    assert cache.allocated_bytes > 1.9 * cache.bytes
    assert len(pickle.dumps(cache)) < 1.1 * cache.bytes


@pytest.mark.parametrize("codec", [None, Int8()], ids=str)
@pytest.mark.parametrize("layout", [Contiguous(capacity=500), Rolling(128, 4), Paged(16)], ids=str)
def test_a_pickle_has_nothing_of_memory_that_the_process_freed(layout: Layout, codec: Codec | None):
    secret = b"SECRETSECRETSECR"
    freed = [
        torch.frombuffer(bytearray(secret * (n // 16)), dtype=torch.uint8).clone()
        for n in (2**14, 2**15, 2**16, 2**17, 98304, 133120, 163840) * 12
    ]
    del freed
    cache = KVCache(layout, codec)
    cache.append(torch.ones(1, 2, 5, 64), torch.ones(1, 2, 5, 64))
    assert secret not in pickle.dumps(cache)


def test_what_inference_mode_stored_is_copied_outside_of_it():
    for policy in POLICIES.values():
        cache = KVCache(evict=policy)
        with torch.inference_mode():
            Step(90).into(cache)
        for way in WAYS.values():
            other, step = way(cache), Step(1)
            assert same(step.into(other), step.into(copy.deepcopy(cache)))


@pytest.mark.parametrize("codec", ["plain", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_what_inference_mode_copied_goes_on_outside_of_it(way: str, layout: str, codec: str):
    cache = KVCache(LAYOUTS[layout], CODECS[codec])
    Step(90).into(cache)
    with torch.inference_mode():
        other = WAYS[way](cache)
    for count in (1, 40):
        step = Step(count)
        assert same(step.into(other), step.into(cache))


@pytest.mark.parametrize("way", WAYS)
def test_a_pool_that_inference_mode_copied_goes_on_outside_of_it(way: str):
    pool = PagePool(pages=64, page=16)
    sequence = pool.sequence()
    pool.append([sequence], torch.randn(1, HEADS, 50, QK), torch.randn(1, HEADS, 50, V))
    with torch.inference_mode():
        other, own = WAYS[way]((pool, sequence))
    k, v = torch.randn(1, HEADS, 3, QK), torch.randn(1, HEADS, 3, V)
    found, expected = other.append([own], k, v), pool.append([sequence], k, v)
    assert all(torch.equal(a.dense(), b.dense()) for a, b in zip(found, expected, strict=True))


def pool_with_sequences() -> tuple[PagePool, list[Any], list[int]]:
    ids = list(range(2000))  # a long chain of names
    pool = PagePool(page=16, codec=Int8(16, 7))
    first = pool.sequence(ids)
    pool.append([first], torch.randn(1, HEADS, 2000, QK), torch.randn(1, HEADS, 2000, V))
    second, third = pool.sequence([*ids[:1000], 7, 7]), first.fork()
    pool.append(
        [second], torch.randn(1, HEADS, 1002 - second.tokens, QK), torch.randn(1, HEADS, 1002 - second.tokens, V)
    )
    third.crop(777)
    pool.sequence(ids[:40]).free()
    return pool, [first, second, third], ids


@pytest.mark.parametrize("way", WAYS)
def test_a_pool_travels_whole_with_its_sequences(way: str):
    pool, sequences, ids = pool_with_sequences()
    other, copies = WAYS[way]((pool, sequences))
    assert repr(other) == repr(pool)
    assert [repr(s) for s in copies] == [repr(s) for s in sequences]
    assert other.sequence([*ids[:500], 3]).tokens == pool.sequence([*ids[:500], 3]).tokens > 0
    for count in (1, 30, 1):
        k, v = torch.randn(3, HEADS, count, QK), torch.randn(3, HEADS, count, V)
        found, expected = other.append(copies, k, v), pool.append(sequences, k, v)
        assert all(torch.equal(a.dense(), b.dense()) for a, b in zip(found, expected, strict=True))
    held = pool.free_pages
    del copies
    assert used_pages(other) == 0
    assert (pool.free_pages, used_pages(pool) > 0) == (held, True)


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_caches_that_share_a_pool_share_one_again(way: str):
    pool = PagePool(page=16)
    caches = [KVCache(Paged(16, pool)) for _ in range(2)]
    for cache in caches:
        Step(21).into(cache)
    first, second = WAYS[way](caches)
    assert first.layout.pool is second.layout.pool is not pool
    assert used_pages(first.layout.pool) == used_pages(pool)
    alone = WAYS[way](caches[0])  # its pool comes along; what only others held there is free
    assert used_pages(alone.layout.pool) == used_pages(pool) // 2
    step = Step(5)
    found = [step.into(cache) for cache in (caches[0], first, alone)]
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_a_deep_copy_shares_the_pool_and_parts_where_it_is_written_to():
    pool = PagePool(page=16)
    cache = KVCache(Paged(16, pool))
    Step(21).into(cache)
    used = used_pages(pool)
    other = copy.deepcopy(cache)
    assert (other.layout, used_pages(pool)) == (cache.layout, used)
    before = Step(0).into(cache)
    Step(1).into(other)
    assert used_pages(pool) == used + 2
    assert same(Step(0).into(cache), before)


@pytest.mark.parametrize("codec", ["plain", "int8"])
@pytest.mark.parametrize("layout", ["contiguous", "rolling", "paged"])
def test_copy_copy_shares_no_memory_that_is_written_to(layout: str, codec: str):
    cache = KVCache(LAYOUTS[layout], CODECS[codec])
    Step(90).into(cache)
    before = Step(0).into(cache)
    other = copy.copy(cache)
    Step(5).into(other)
    assert same(Step(0).into(cache), before)
    assert (cache.tokens_seen, other.tokens_seen) == (90, 95)
    steps = cache.steps(None if layout == "rolling" else 200)
    first, second = Step(1), Step(1)
    other = copy.copy(steps)
    found = [dense(t) for t in steps.append(first.k, first.v)]
    other.append(second.k, second.v)
    steps.position.sub_(1)
    assert same([dense(t) for t in steps.append(first.k, first.v)], found)


def test_a_copy_of_a_sequence_is_a_fork():
    pool = PagePool(page=16)
    sequence, step = pool.sequence(), Step(21, batch=1)
    pool.append([sequence], step.k, step.v)
    other = copy.copy(sequence)
    assert (len(other), other.plain, used_pages(pool)) == (21, sequence.plain, 2)
    new = Step(1, batch=1)
    pool.append([other], new.k, new.v)
    assert (len(sequence), len(other), used_pages(pool)) == (21, 22, 3)
    sequence.free()
    with pytest.raises(ProblemError, match="the sequence was freed"):
        copy.copy(sequence)


def test_a_freed_sequence_stays_freed():
    pool = PagePool(page=16)
    sequence = pool.sequence()
    sequence.free()
    assert repr(pickle.loads(pickle.dumps(sequence))) == "Sequence(freed)"
