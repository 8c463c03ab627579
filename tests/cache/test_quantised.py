"""The coded cache: against a list of tokens, each of which is written once."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import ProblemError, attend
from regard.cache import KVCache, SinksAndRecent, coded_slots
from regard.storage.codec import Codec, Fp8, Int4, Int8, decode_rows, decode_tiled, encode_rows, encode_tiled
from regard.storage.hadamard import hadamard
from regard.storage.stored import Contiguous, Paged, StoredTensor
from tests.selection import examples

BATCH, HEADS, QK, V = 2, 3, 5, 37


def tokens_of(count: int, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, count, QK, dtype=dtype), torch.randn(batch, HEADS, count, V, dtype=dtype)


def append(cache: KVCache, k: Tensor, v: Tensor | None = None) -> tuple[StoredTensor, StoredTensor]:
    """What a cache of codes hands out: handles."""
    keys, values = cache.append(k, v)
    assert isinstance(keys, StoredTensor)
    assert isinstance(values, StoredTensor)
    return keys, values


def once(x: Tensor, codec: Codec, *, tiled: bool) -> Tensor:
    """One group, written and read."""
    dim, per_token = x.shape[-1], codec.keys == "token"
    if tiled:
        codes = encode_tiled(x, codec, per_token=per_token)
        return decode_tiled(codes, codec.kind, dim=dim, per_token=per_token, group=codec.group).to(x.dtype)
    return decode_rows(encode_rows(x, codec), codec.kind, dim=dim, group=codec.channels(dim)).to(x.dtype)


class Model:
    """One side of the cache, as a list of tokens [batch, kv_heads, dim]: (sinks, coded ones, tail)."""

    def __init__(self, codec: Codec, *, tiled: bool) -> None:
        self.codec, self.tiled = codec, tiled
        self.room = -(-codec.sinks // codec.group) * codec.group
        self.sinks: list[Tensor] = []
        self.coded: list[Tensor] = []
        self.tail: list[Tensor] = []
        self.before: tuple[list[Tensor], list[Tensor], list[Tensor]] | None = None
        self.new: list[Tensor] = []
        self.is_whole = False

    def append(self, x: Tensor) -> None:
        if not x.shape[2]:
            return
        self.before, self.new = (list(self.sinks), list(self.coded), list(self.tail)), list(x.unbind(2))
        left = len(self.tail)
        self.is_whole = self.put(self.new) <= left

    def put(self, new: list[Tensor]) -> int:
        """Append; how many became codes."""
        coded = len(self.coded)
        for token in new:
            open_ = len(self.sinks) < self.room and not self.coded and not self.tail
            (self.sinks if open_ else self.tail).append(token)
        group = self.codec.group
        while len(self.tail) >= self.codec.residual + group:
            written = once(torch.stack(self.tail[:group], 2), self.codec, tiled=self.tiled)
            self.coded, self.tail = self.coded + list(written.unbind(2)), self.tail[group:]
        return len(self.coded) - coded

    def __len__(self) -> int:
        return len(self.sinks) + len(self.coded) + len(self.tail)

    def crop(self, tokens: int) -> None:
        """As if of the last append only the first ones had come, if the others became no codes at once."""
        before, new = self.before, self.new
        if before and tokens < len(self):
            known = sum(map(len, before))
            if tokens <= known or self.is_whole:
                self.sinks, self.coded, self.tail = (list(part) for part in before)
                self.before = before if tokens >= known else None
                self.put(new[: max(tokens - known, 0)])
        if len(self) - tokens > len(self.tail):
            self.before = None
        for part in (self.tail, self.coded, self.sinks):
            while part and len(self) > tokens:
                part.pop()

    def dense(self) -> Tensor:
        return torch.stack(self.sinks + self.coded + self.tail, 2)

    def select(self, rows: Tensor) -> None:
        self.sinks, self.coded, self.tail = ([t[rows] for t in part] for part in (self.sinks, self.coded, self.tail))
        self.new = [t[rows] for t in self.new]
        if self.before:
            sinks, coded, tail = ([t[rows] for t in part] for part in self.before)
            self.before = sinks, coded, tail


STEPS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([0, 1, 1, 1, 2, 7, 16, 33, 97])),
    st.tuples(st.just("crop"), st.one_of(st.integers(0, 20), st.integers(0, 120))),
    st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
)

CODECS = {
    "int8": Int8(16, residual=16, sinks=0),
    "int8 with sinks": Int8(16, residual=5, sinks=1),
    "int8, no residual": Int8(32, residual=0, sinks=3),
    "int8 per token": Int8(16, residual=7, sinks=4, keys="token"),
    "int4": Int4(32, residual=32, sinks=4),
    "fp8": Fp8(16, residual=3, sinks=17),
}


@pytest.mark.parametrize("name", CODECS)
@given(steps=st.lists(STEPS, min_size=1, max_size=14))
@examples(40, everything=150)
def test_it_is_a_list_of_tokens_of_which_each_is_written_once(name: str, steps: list[tuple[str, Any]]):
    codec = CODECS[name]
    cache, batch = KVCache(codec=codec), BATCH
    codec = codec if codec.keys else replace(codec, keys="channel")
    models = Model(codec, tiled=True), Model(codec, tiled=False)
    for step, what in steps:
        if step == "append":
            new = tokens_of(what, batch)
            append(cache, *new)
            for model, x in zip(models, new, strict=True):
                model.append(x)
        elif step == "crop":
            left = max(len(models[0]) - what, 0)
            cache.crop(left)
            for model in models:
                model.crop(left)
            batch = BATCH if not left else batch
        elif len(models[0]):
            rows = torch.tensor(what) % batch
            cache.select(rows)
            for model in models:
                model.select(rows)
            batch = len(rows)
        assert cache.tokens == cache.tokens_seen == len(models[0])
        if len(models[0]):
            for found, model in zip(append(cache, *tokens_of(0, batch)), models, strict=True):
                assert isinstance(found, StoredTensor)
                assert torch.equal(found.dense(), model.dense())


@pytest.mark.parametrize("kind", [Int8, Int4, Fp8])
@pytest.mark.parametrize("keys", ["channel", "token"])
def test_bytes_are_those_of_the_formula(kind: type[Codec], keys: str):
    """2 * kv_heads * dim * tokens * bits / 8, and scales; and what is held is not much more."""
    dim, tokens, group, residual = 64, 4096 + 32 + 32, 32, 32
    codec = kind(group=group, residual=residual, sinks=4, keys=keys)
    cache = KVCache(codec=codec)
    for new in (1, 2111, 1, 1, tokens - 2114):
        append(cache, *(torch.randn(BATCH, HEADS, new, dim) for _ in "kv"))
    plain, coded = 32 + residual, 4096
    rows = BATCH * HEADS
    per_scale = 4 if codec.kind == "int4" else 2
    key_scales = coded // group * dim if keys == "channel" else coded
    value_scales = coded * dim // (group if codec.kind == "int4" else dim)
    numbers = 2 * rows * dim * (coded * codec.bits // 8 + plain * 4)
    assert cache.bytes == numbers + rows * (key_scales + value_scales) * per_scale
    assert cache.allocated_bytes <= 2 * cache.bytes  # codes double; the tail has room for 96 tokens more


def test_room_for_so_many_is_made_at_once():
    cache, (k, v) = KVCache(Contiguous(capacity=300), Int8(16, 8)), tokens_of(300)
    append(cache, k[:, :, :1], v[:, :, :1])
    held = cache.allocated_bytes
    for i in range(1, 300):
        append(cache, k[:, :, i : i + 1], v[:, :, i : i + 1])
    assert cache.allocated_bytes == held
    with pytest.raises(ProblemError, match=r"1 tokens more than the 300 .*capacity=300"):
        append(cache, *tokens_of(1))
    assert cache.tokens == 300


def test_a_step_writes_a_row_and_copies_nothing():
    cache, places = KVCache(codec=Int8(16, 16)), list[tuple[int, ...]]()
    append(cache, *tokens_of(1000))
    keys, _ = append(cache, *tokens_of(16))  # codes double
    for _ in range(31):
        keys, _ = append(cache, *tokens_of(1))
        places.append(tuple(part.data.data_ptr() for part in keys.parts))
    assert len(set(places)) == 1
    assert [part.kind for part in keys.parts] == ["plain", "int8", "plain"]


def test_drafts_that_were_not_accepted_leave_no_trace():
    """Up to `residual` tokens: what the drafts made old enough to be written is plain again."""
    codec, (k, v) = Int8(32, residual=32), tokens_of(400)
    plain, drafted, at = KVCache(codec=codec), KVCache(codec=codec), 0
    for accepted in (100, 1, 7, 31, 12, 1, 3, 30):
        end = at + accepted
        found = [t.dense() for t in append(plain, k[:, :, at:end], v[:, :, at:end])]
        for drafts in (1, 5, 32 - accepted % 32):
            wrong = tokens_of(drafts)
            append(drafted, *(torch.cat((t[:, :, at:end], w), 2) for t, w in zip((k, v), wrong, strict=True)))
            drafted.crop(end)
            assert drafted.tokens == end
            if accepted < 100:
                assert all(
                    torch.equal(t.dense(), old) for t, old in zip(append(drafted, *tokens_of(0)), found, strict=True)
                )
            drafted.crop(at)
        append(drafted, k[:, :, at:end], v[:, :, at:end])
        at = end


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("new", [1, 5, 17, 32, 40, 71])
@pytest.mark.parametrize(
    "codec", [Int8(16, residual=32, sinks=0), Int4(16, residual=16), Fp8(16, residual=5, sinks=17)], ids=repr
)
@pytest.mark.parametrize("layout", [None, Paged(16), Paged(32)], ids=repr)
def test_a_crop_of_one_append_restores_what_was_stored_before(layout: Paged | None, codec: Codec, new: int):
    """Whatever became codes since then; and of an append of up to `residual` tokens any part leaves no trace."""
    k, v = tokens_of(200)

    def stored(*ends: int) -> tuple[KVCache, list[Tensor]]:
        cache = KVCache(layout, codec)
        for start, end in zip((0, *ends), ends, strict=False):
            append(cache, k[:, :, start:end], v[:, :, start:end])
        return cache, [t.dense() for t in append(cache, *tokens_of(0))]

    for before in range(3, 81, 4):
        for accepted in {0, 1, new // 2} if new <= codec.residual else {0}:
            cache, _ = stored(before, before + new)
            cache.crop(before + accepted)
            _, expected = stored(before, before + accepted)
            assert all(map(torch.equal, (t.dense() for t in append(cache, *tokens_of(0))), expected))


def test_drafts_that_came_one_by_one_can_be_cropped():
    """Codes may be written a few tokens earlier than without them, and no token changes otherwise."""
    cache, new = KVCache(codec=Int8(16, residual=32)), tokens_of(100)
    append(cache, *new)
    for _ in range(10):
        for _ in range(32):
            append(cache, *tokens_of(1))
        cache.crop(100)
    assert cache.tokens == 100
    for found, x in zip(append(cache, *tokens_of(0)), new, strict=True):
        torch.testing.assert_close(found.dense(), x, rtol=0, atol=0.05)


def test_a_crop_into_codes_leaves_those_before_as_they_are():
    codec = Int8(16, residual=0, sinks=0)
    cache, x = KVCache(codec=codec), tokens_of(96)
    before = [t.dense() for t in append(cache, *x)]
    cache.crop(53)  # five tokens of the fourth group
    assert cache.tokens == 53
    more = tokens_of(32)
    keys, values = append(cache, *more)
    assert [part.tokens for part in keys.parts] == [53, 32]
    for found, old, new in zip((keys, values), before, more, strict=True):
        assert torch.equal(found.dense()[:, :, :53], old[:, :, :53])
        torch.testing.assert_close(found.dense()[:, :, 53:], new, rtol=0, atol=0.05)


@pytest.mark.parametrize("codec", [Int8(16, 8, keys="token"), Int4(16, 8, keys="token"), Fp8(32, 0, 0, keys="token")])
def test_tokens_are_forgotten_head_by_head(codec: Codec):
    """Codes move as they are; plain tokens become codes only where heads keep different numbers of them."""
    cache, new = KVCache(codec=codec), tokens_of(151)
    before = [t.dense() for t in append(cache, *new)]
    held = cache.allocated_bytes
    index = torch.stack([torch.randperm(151)[:61].sort().values for _ in range(BATCH * HEADS)]).view(BATCH, HEADS, 61)
    cache._store.keep(index)
    assert (cache.tokens, cache.tokens_seen) == (61, 151)
    assert cache.allocated_bytes < held
    more = tokens_of(5)
    for found, old, plain in zip(append(cache, *more), before, more, strict=True):
        whole = found.dense()
        kept = old.gather(2, index[..., None].expand(-1, -1, -1, old.shape[3]))
        assert codec.residual < 5 or torch.equal(whole[:, :, 61:], plain)
        room, tail = -(-codec.sinks // codec.group) * codec.group, codec.residual
        were_codes = ((index >= room) & (index < 151 - tail - codec.group))[..., None].expand_as(kept)
        assert torch.equal(whole[:, :, :61][were_codes], kept[were_codes])
        torch.testing.assert_close(whole[:, :, :61], kept, rtol=0, atol=0.4 if codec.kind == "int4" else 0.15)
    torch.testing.assert_close(cache._store.keys(), append(cache, *tokens_of(0))[0].dense(), rtol=0, atol=0)


def test_recent_tokens_and_sinks_that_all_heads_keep_stay_plain():
    codec = Int8(16, 8, keys="token")
    cache, (k, v) = KVCache(codec=codec), tokens_of(151)
    append(cache, k, v)
    middle = torch.stack([torch.randperm(100)[:20].sort().values + 20 for _ in range(BATCH * HEADS)])
    ends = torch.tensor([0, 1, 2, 3]), torch.tensor([149, 150])
    index = torch.cat([ends[0].expand(BATCH * HEADS, 4), middle, ends[1].expand(BATCH * HEADS, 2)], 1)
    cache._store.keep(index.view(BATCH, HEADS, 26))
    keys, _ = append(cache, *tokens_of(0))
    assert [(part.kind, part.tokens) for part in keys.parts] == [("plain", 4), ("int8", 20), ("plain", 2)]
    assert torch.equal(keys.dense()[:, :, :4], k[:, :, :4])
    assert torch.equal(keys.dense()[:, :, -2:], k[:, :, -2:])


def test_tokens_that_share_scales_cannot_go_one_by_one():
    cache = KVCache(codec=Int8())
    append(cache, *tokens_of(100))
    with pytest.raises(ProblemError, match='keys="token"'):
        cache._store.keep(torch.arange(3).expand(BATCH, HEADS, 3))
    assert cache.tokens == 100


@pytest.mark.parametrize("codec", [Int8(16, 5, rotate=True), Int4(16, 5, rotate=True)], ids=repr)
def test_rotated_numbers_are_turned_back(codec: Codec):
    cache, new = KVCache(codec=codec), tokens_of(101)
    for found, x in zip(append(cache, *new), new, strict=True):
        assert found.rotated
        plain = hadamard(x)[:, :, :16]
        assert torch.equal(found.parts[0].data[:, :, :16], plain)
        torch.testing.assert_close(found.dense(), x, rtol=0, atol=0.4)
    assert torch.equal(cache._store.keys(), append(cache, *tokens_of(0))[0].dense())


@pytest.mark.parametrize("codec", [Int8(16, 8), Int8(16, 8, keys="token")], ids=repr)
def test_numbers_that_cannot_be_written_change_nothing(codec: Codec):
    cache, new = KVCache(codec=codec), tokens_of(51)
    before = [t.dense() for t in append(cache, *new)]
    bad = tokens_of(64)
    bad[1][0, 1, 20, 2] = torch.nan
    message = repr(cache)
    with pytest.raises(ProblemError, match="NaN"):
        append(cache, *bad)
    assert repr(cache) == message
    assert all(torch.equal(t.dense(), old) for t, old in zip(append(cache, *tokens_of(0)), before, strict=True))
    with pytest.raises(ProblemError, match="NaN"):
        append(KVCache(codec=codec), *bad)


@pytest.mark.parametrize(("place", "name"), [(coded_slots, "allocate"), (Tensor, "clone")], ids=["codes", "tail"])
def test_a_step_that_lacks_memory_can_be_made_again(place: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    """Also where there was memory for the keys, and none for the values."""
    real, step, failed = getattr(place, name), tokens_of(16), 0
    for call in range(8):
        cache, other, calls = KVCache(codec=Int8(16, 8)), KVCache(codec=Int8(16, 8)), itertools.count()

        def lacking(*given: Any, calls: Iterator[int] = calls, call: int = call) -> Tensor:
            if next(calls) == call:
                raise torch.OutOfMemoryError
            return real(*given)

        first = tokens_of(55)  # so that the tail is as long as it may be, and moves to a place that it overlaps
        append(cache, *first)
        append(other, *first)
        for _ in range(9):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, lacking)
                try:
                    found = append(cache, *step)
                except torch.OutOfMemoryError:
                    failed += 1
                    found = append(cache, *step)
            for ours, theirs in zip(found, append(other, *step), strict=True):
                assert torch.equal(ours.dense(), theirs.dense())
    assert failed > 1


def test_half_precision_keeps_its_type_in_plain_parts():
    cache, new = KVCache(codec=Int8(16, 5)), tokens_of(101, dtype=torch.bfloat16)
    for found, x in zip(append(cache, *new), new, strict=True):
        assert found.dtype == found.dense().dtype == torch.bfloat16
        assert torch.equal(found.dense()[:, :, :16], x[:, :, :16])
        assert torch.equal(found.dense()[:, :, -5:], x[:, :, -5:])


def test_what_inference_mode_stored_can_be_added_to_outside_of_it():
    cache, (k, v) = KVCache(codec=Int8(16, 5)), tokens_of(101)
    with torch.inference_mode():
        append(cache, k[:, :, :50], v[:, :, :50])
    append(cache, k[:, :, 50:], v[:, :, 50:])
    with torch.inference_mode():
        cache.select(torch.tensor([1, 0]))
        found = append(cache, *tokens_of(40))[0]
    append(cache, *tokens_of(40))
    torch.testing.assert_close(found.dense()[:, :, :101], k[[1, 0]], rtol=0, atol=0.05)


@pytest.mark.parametrize("codec", [None, Int8(), Int4(rotate=True), Fp8(residual=1, sinks=0)], ids=str)
def test_a_batch_without_rows_is_stored_decoded_and_shortened(codec):
    cache = KVCache(codec=codec, evict=SinksAndRecent(20))
    keys, _ = cache.append(torch.randn(0, 2, 100, 8), torch.randn(0, 2, 100, 8))
    assert (keys.dense() if isinstance(keys, StoredTensor) else keys).shape == (0, 2, 100, 8)
    cache.forget()
    assert attend(torch.randn(0, 4, 1, 8), *cache.append(*torch.randn(2, 0, 2, 1, 8))).shape == (0, 4, 1, 8)
    assert cache.tokens == 21
