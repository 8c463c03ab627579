"""Policies of your own: what they see, may keep, and return."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import ProblemError
from regard.cache.evict import Eviction, EvictionState
from regard.cache.kv_cache import KVCache
from regard.cache.pool import PagePool
from regard.cache.store import Store
from regard.storage.codec import Int8
from regard.storage.stored import Layout, Paged
from tests.cache.evicted import append, stream
from tests.stored import dense


@dataclass(frozen=True)
class Nameless(Eviction):
    """A policy of a user that lacks `recent` and `start`."""


@dataclass(frozen=True)
class Stateless(Eviction):
    recent = 0


@dataclass(frozen=True)
class LongestValues(Eviction):
    recent = 0

    def start(self) -> EvictionState["LongestValues"]:
        return ByValues(self)


class ByValues(EvictionState[LongestValues]):
    def append(self, k: Tensor, v: Tensor | None) -> None:
        assert v is not None
        self.record(v.norm(dim=3))

    def scores(self, store: Store) -> Tensor:
        return self.values


@dataclass(frozen=True)
class LongestValuesAndRecent(LongestValues):
    recent: int = 4


@dataclass(frozen=True)
class ByFunction(Eviction):
    """Scores are a function of the store, or anything else that a user may return."""

    function: Callable[[Store], Any] = field(kw_only=True)
    recent = 0

    def start(self) -> EvictionState["ByFunction"]:
        return FunctionState(self)


class FunctionState(EvictionState[ByFunction]):
    def scores(self, store: Store) -> Tensor:
        return self.policy.function(store)


@dataclass(frozen=True)
class Scoreless(Eviction):
    recent = 0

    def start(self) -> EvictionState["Scoreless"]:
        return EvictionState(self)


def test_a_policy_of_your_own_that_lacks_a_member_is_refused_with_its_name():
    k = torch.randn(1, 1, 20, 4)
    with pytest.raises(ProblemError, match=r"evict is Nameless\(.*\), without recent: expected .* 0 or None: none"):
        KVCache(evict=Nameless(8))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match=r"^Stateless does not define start\(\), .* docs/extending.md"):
        KVCache(evict=Stateless(8)).append(k, k)
    cache = KVCache(evict=Scoreless(8))
    cache.append(k, k)
    with pytest.raises(ProblemError, match=r"^EvictionState does not define scores\(store\) .* the Scoreless chooses"):
        cache.forget()


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(2, 3, 15), r"returned float32 \[2, 3, 15\] on cpu"),
        (torch.zeros(2, 3, 25), r"returned float32 \[2, 3, 25\] on cpu"),
        (torch.zeros(1, 3, 20), r"returned float32 \[1, 3, 20\] on cpu"),
        (torch.zeros(2, 6, 20), r"returned float32 \[2, 6, 20\] on cpu"),
        (torch.zeros(2, 20), r"returned float32 \[2, 20\] on cpu"),
        (torch.zeros(2, 3, 20, dtype=torch.complex64), r"returned complex64 \[2, 3, 20\] on cpu"),
        (None, "returned NoneType"),
    ],
    ids=str,
)
def test_scores_of_another_form_are_refused(scores: object, message: str):
    cache, k = KVCache(evict=ByFunction(8, function=lambda store: scores)), torch.randn(2, 3, 20, 4)
    cache.append(k, k)
    expected = r": expected a score of each token .* = \[2, 3 or 1, 20\]\.$"
    with pytest.raises(ProblemError, match=rf"^FunctionState.scores\(store\) {message}{expected}"):
        cache.forget()
    assert cache.tokens == 20


def test_recent_tokens_stay_where_a_policy_of_your_own_has_no_more_than_their_number():
    word, v = LongestValuesAndRecent(8, sinks=0), torch.arange(40.0, 0, -1)[None, None, :, None]
    assert [word.last(kept) for kept in (0, 8)] == [4, 4]
    with pytest.raises(ProblemError, match="0 sinks and 4 recent tokens always stay, so it must be at least 5"):
        LongestValuesAndRecent(4, sinks=0)
    cache = KVCache(evict=word)
    append(cache, v, v)
    cache.forget()
    cache.crop(38)
    assert append(cache, v[:, :, :0], v[:, :, :0])[1].flatten().tolist() == [40, 39, 38, 37, 4, 3]


@pytest.mark.parametrize("recent", ["x", 2.5, -1, True])
def test_recent_tokens_of_a_policy_of_your_own_are_a_whole_number(recent: object):
    @dataclass(frozen=True)
    class Word(LongestValues):
        @property
        def recent(self) -> object:  # pyright: ignore[reportIncompatibleVariableOverride]
            return recent

    with pytest.raises(ProblemError, match=rf"^Word\.recent is {recent!r}: expected .* tokens\.$"):
        Word(8)
    protocol = SimpleNamespace(budget=8, recent=recent, start=LongestValues(8).start)
    with pytest.raises(ProblemError, match=rf"^SimpleNamespace\.recent is {recent!r}: expected"):
        KVCache(evict=protocol)  # pyright: ignore[reportArgumentType]


def test_a_policy_of_your_own_sees_tokens_as_they_are_appended_where_a_codec_rotates_them():
    s, seen = stream(90, dim=8), list[tuple[Tensor, Tensor]]()
    k, v = s.k.float(), torch.randn(2, 3, 90, 16)

    class Seeing(ByValues):
        def append(self, k: Tensor, v: Tensor | None) -> None:
            assert v is not None
            seen.append((k, v))
            super().append(k, v)

    class Word(LongestValues):
        def start(self) -> EvictionState[LongestValues]:
            return Seeing(self)

    cache = KVCache(codec=Int8(rotate=True), evict=Word(8))
    cache.append(k, v)
    assert torch.equal(seen[0][0], k)
    assert torch.equal(seen[0][1], v)


@pytest.mark.parametrize("layout", [None, Paged(16)])
@pytest.mark.parametrize("codec", [None, Int8(group=16, residual=16)])
@pytest.mark.parametrize("before", [0, 30])
def test_an_append_at_which_a_policy_of_your_own_fails_appends_nothing(
    layout: Layout | None, codec: Int8 | None, before: int
):
    k, v = torch.randn(2, 3, 50, 16), torch.rand(2, 3, 50, 16)
    fails = [False]

    class Failing(ByValues):
        def append(self, k: Tensor, v: Tensor | None) -> None:
            super().append(k, v)
            if fails[0]:
                raise MemoryError

    class Word(LongestValues):
        def start(self) -> EvictionState[LongestValues]:
            return Failing(self)

    caches = [KVCache(layout, codec, Word(24)) for _ in range(2)]
    for cache in caches:
        if before:
            cache.append(k[:, :, :before], v[:, :, :before])
    fails[0] = True
    with pytest.raises(MemoryError):
        caches[0].append(k[:, :, before:40], v[:, :, before:40])
    fails[0] = False
    assert caches[0].tokens_seen == before
    for first, last in ((before, 40), (40, 41), (41, 50)):
        found, expected = (cache.append(k[:, :, first:last], v[:, :, first:last]) for cache in caches)
        assert all(torch.equal(dense(a), dense(b)) for a, b in zip(found, expected, strict=True))


def test_a_policy_of_your_own_sees_values():
    v = torch.randperm(40, generator=torch.Generator().manual_seed(0)).float()[None, None, :, None]
    cache = KVCache(evict=LongestValues(8, sinks=0))
    cache.append(torch.randn(1, 1, 40, 4), v)
    cache.forget()
    cache.append(torch.randn(1, 1, 1, 4), torch.full((1, 1, 1, 1), 32.5))  # takes the place of 32
    cache.forget()
    _, kept = cache.append(torch.randn(1, 1, 0, 4), v[:, :, :0])
    assert isinstance(kept, Tensor)
    assert sorted(kept.flatten().tolist()) == [32.5, 33, 34, 35, 36, 37, 38, 39]


@dataclass(frozen=True)
class Starting(LongestValues):
    """Starts with what a function returns."""

    begin: Callable[["Starting"], Any] = field(kw_only=True)

    def start(self) -> EvictionState["LongestValues"]:
        return self.begin(self)


@pytest.mark.parametrize(
    ("begin", "found"),
    [
        (lambda policy: None, "None"),
        (lambda policy: ByValues, "the class ByValues"),
        (lambda policy: 3, "3"),
        (lambda policy: policy, r"Starting\(.*"),
    ],
)
def test_a_start_of_your_own_that_returns_no_state_is_refused(begin: Callable[[Starting], Any], found: str):
    k, pool = torch.randn(1, 2, 20, 16), PagePool(16)
    for layout in (None, Paged(16, pool)):
        cache = KVCache(layout, evict=Starting(8, begin=begin))
        with pytest.raises(ProblemError, match=rf"^start of Starting returned {found}: expected the EvictionState of"):
            cache.append(k, k)
        assert cache.tokens_seen == 0
    assert pool.allocated_bytes == 0
    assert repr(pool) == repr(PagePool(16))


def test_a_state_of_a_class_of_your_own_is_taken():
    class Apart:
        """Not derived from `EvictionState`, with the same methods."""

        def __init__(self, state: EvictionState[Any]) -> None:
            self.state = state

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["state"], name)

        def __copy__(self) -> "Apart":
            return Apart(copy.copy(self.state))

    k, caches = torch.randn(1, 2, 20, 16), [KVCache(evict=LongestValues(8))]
    caches.append(KVCache(evict=Starting(8, begin=lambda policy: Apart(ByValues(policy)))))
    for cache in caches:
        cache.append(k, k)
        cache.forget()
    assert torch.equal(*(dense(cache.append(k[:, :, :0], k[:, :, :0])[0]) for cache in caches))


def recording(function: Callable[[Tensor], Any]) -> Starting:
    """Records what the function returns for new values."""

    class State(ByValues):
        def append(self, k: Tensor, v: Tensor | None) -> None:
            assert v is not None
            for values in function(v):
                self.record(values)

    return Starting(8, begin=State)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda v: [v[:, :1, :, 0]], r"float32 \[2, 1, 5\] on cpu"),
        (lambda v: [v[:1, :, :, 0]], r"float32 \[1, 3, 5\] on cpu"),
        (lambda v: [v], r"float32 \[2, 3, 5, 16\] on cpu"),
        (lambda v: [v[:, :, 1:, 0]], r"float32 \[2, 3, 4\] on cpu"),
        (lambda v: [v[..., 0], v[..., 0]], r"float32 \[2, 3, 5\] on cpu, float32 \[2, 3, 5\] on cpu"),
        (lambda v: [None], "NoneType"),
    ],
)
def test_values_that_are_not_one_per_token_are_refused_as_they_are_recorded(
    function: Callable[[Tensor], Any], found: str
):
    cache, k = KVCache(evict=recording(function)), torch.randn(2, 3, 5, 16)
    expected = r"a value of each new token, \[batch, kv_heads, tokens\] = \[2, 3, 5\]\.$"
    with pytest.raises(ProblemError, match=rf"^State\.append\(k, v\) recorded {found}: expected {expected}"):
        cache.append(k, k)
    assert cache.tokens_seen == 0


def test_values_may_be_recorded_in_parts_and_must_be_recorded_to_be_read():
    k = torch.randn(2, 3, 20, 16)
    cache = KVCache(evict=recording(lambda v: v.norm(dim=3).split(3, dim=2)))
    for first, last in ((0, 0), (0, 11), (11, 20)):
        cache.append(k[:, :, first:last], k[:, :, first:last])
    cache.forget()
    assert cache.tokens == 8
    cache = KVCache(evict=recording(lambda v: []))
    cache.append(k, k)
    with pytest.raises(ProblemError, match=r"^State\.values: nothing was recorded; call record\(values\) in append"):
        cache.forget()


def choosing(function: Callable[[Any], Any]) -> Starting:
    """Keeps what the function makes of the tokens that would stay."""

    class State(ByValues):
        def choose(self, store: Store, coming: int) -> Tensor | None:
            return function(super().choose(store, coming))

    return Starting(8, begin=State)


@pytest.mark.parametrize("layout", [None, Paged(16)])
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda kept: kept[0], r"int64 \[3, 8\] on cpu"),
        (lambda kept: kept[:, :1], r"int64 \[2, 1, 8\] on cpu"),
        (lambda kept: kept.double(), r"float64 \[2, 3, 8\] on cpu"),
        (lambda kept: torch.ones(2, 3, 20, dtype=torch.bool), r"bool \[2, 3, 20\] on cpu"),
        (lambda kept: kept.tolist(), "list"),
        (lambda kept: kept.to("meta"), r"int64 \[2, 3, 8\] on meta"),
        (lambda kept: kept + 20, r"int64 \[2, 3, 8\] on cpu, tokens from 2\d to 39"),
        (lambda kept: kept - 20, r"int64 \[2, 3, 8\] on cpu, tokens from -\d+ to -1"),
        (lambda kept: kept.flip(2), r"int64 \[2, 3, 8\] on cpu, tokens from \d+ to 19"),
        (lambda kept: kept * 0, r"int64 \[2, 3, 8\] on cpu, tokens from 0 to 0"),
    ],
    ids=[
        "rows alone",
        "one head",
        "floats",
        "bools",
        "a list",
        "device",
        "too high",
        "negative",
        "descending",
        "twice",
    ],
)
def test_tokens_that_cannot_be_kept_are_refused(layout: Paged | None, function: Callable[[Any], Any], found: str):
    cache, k = KVCache(layout, evict=choosing(function)), torch.randn(2, 3, 20, 16)
    k[:, :, -1] = 9  # the last token stays
    cache.append(k, k)
    expected = r"expected the tokens to keep of each key head, int64 \[batch, kv_heads, kept\] = \[2, 3, kept\] on cpu"
    with pytest.raises(ProblemError, match=rf"^State\.choose\(store, coming\) returned {found}: {expected}"):
        cache.forget()
    assert cache.tokens == 20


def test_a_policy_of_your_own_may_keep_all_or_any_number_of_tokens():
    k = torch.randn(2, 3, 20, 16)
    for function, tokens in ((lambda kept: None, 20), (lambda kept: kept[:, :, 3:], 5), (lambda kept: kept, 8)):
        cache = KVCache(evict=choosing(function))
        cache.append(k, k)
        cache.forget()
        assert cache.tokens == tokens
