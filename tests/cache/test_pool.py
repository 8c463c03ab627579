"""The pool of pages: no page is lost, none is shared wrongly, whatever is done to sequences in whatever order."""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from regard import Causal, ProblemError, attend
from regard.cache import pool as pool_module
from regard.cache.paged import keep_tokens
from regard.cache.pool import PagePool
from regard.cache.sequence import Sequence
from regard.storage.codec import Codec, Fp8, Int4, Int8, decode_rows, decode_tiled, encode_rows, encode_tiled
from regard.storage.stored import StoredTensor

HEADS, QK, V = 2, 3, 5


@cache
def _numbers(ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, tokens, dim] that tell a token and all before it."""
    marks = itertools.accumulate(ids, lambda mark, token: (31 * mark + token + 1) % 10007, initial=0)
    mark = torch.tensor([*marks][1:], dtype=torch.float64)[:, None, None]
    wide = torch.sin(mark * torch.arange(1.0, 1 + HEADS * (QK + V)).view(HEADS, QK + V)).float().transpose(0, 1)
    return wide[..., :QK], wide[..., QK:]


def numbers(ids: list[int]) -> tuple[Tensor, Tensor]:
    return _numbers(tuple(ids))


def quantised(codec: Codec, page: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A page of keys and values, [kv_heads, page, dim], written and read."""
    per_token, group = codec.keys == "token", page
    keys, values = encode_tiled(k, codec, per_token=per_token, group=group), encode_rows(v, codec)
    return (
        decode_tiled(keys, codec.kind, dim=QK, per_token=per_token, group=group),
        decode_rows(values, codec.kind, dim=V, group=codec.channels(V)),
    )


@dataclass(eq=False)
class Plain:
    """A sequence as it should be: its ids and numbers, and how many of its pages are codes."""

    real: Sequence
    ids: list[int]
    k: Tensor
    v: Tensor
    coded: int = 0

    def __repr__(self) -> str:
        return f"{self.real}"


class Pool(RuleBasedStateMachine):
    """Things done to a pool that is too small, beside plain copies of every sequence."""

    page, pages, codec = 3, 29, None

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.pages, self.page, self.codec)
        self.all: list[Plain] = []
        self.codes = self.pool.storage.codec
        self.first = self.pool.storage.sink_pages

    def one(self, data: st.DataObject) -> Plain:
        return data.draw(st.sampled_from(self.all), "which")

    @initialize()
    def begin(self) -> None:
        self.start([1] * (3 * self.page), 0)

    @rule(kind=st.integers(1, 2), branch=st.integers(0, 7), count=st.integers(0, 7), more=st.integers(0, 9))
    def prompt(self, kind: int, branch: int, count: int, more: int) -> None:
        """Few prompts, so that they often begin alike; some are not computed to their end, others go on."""
        self.start([kind] * (branch * self.page // 2) + [7] * (count * self.page // 2), more - 2)

    @rule(count=st.integers(0, 5))
    def nameless(self, count: int) -> None:
        real = self.pool.sequence()
        assert not real.tokens
        self.all.append(Plain(real, [], *numbers([])))
        self.lengthen(self.all[-1:], [[3] * (count * self.page // 2)], known=False)

    def start(self, ids: list[int], more: int) -> None:
        real = self.pool.sequence(ids)
        assert real.tokens < max(1, len(ids))
        k, v = (t[:, : real.tokens].clone() for t in numbers(ids))
        self.all.append(Plain(real, ids[: real.tokens], k, v, len(real.coded)))
        self.lengthen(self.all[-1:], [(ids + [5] * max(0, more))[real.tokens : len(ids) + more]], known=more > 4)

    @precondition(lambda self: self.all)
    @rule(data=st.data(), new=st.integers(0, 41), known=st.booleans(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, new: int, known: bool, token: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.all), min_size=1, max_size=3, unique_by=id), "rows")
        known = known and all(len(s.real.ids) >= s.real.tokens for s in chosen)
        coming = [(s.real.ids[len(s.ids) :] + [token] * new)[:new] for s in chosen]
        self.lengthen(chosen, coming, known)

    @precondition(lambda self: self.all)
    @rule(count=st.integers(1, 5), times=st.integers(1, 7), token=st.integers(0, 1))
    def steps(self, count: int, times: int, token: int) -> None:
        """Token after token, as sequences are generated."""
        for _ in range(times):
            chosen = self.all[-count:]
            self.lengthen(chosen, [[*s.real.ids[len(s.ids) :], token][:1] for s in chosen], known=False)

    def lengthen(self, chosen: list[Plain], coming: list[list[int]], known: bool) -> None:
        k, v = (
            [numbers(s.ids + ids)[i][:, len(s.ids) :] for s, ids in zip(chosen, coming, strict=True)] for i in (0, 1)
        )
        before = self.look()
        ids = torch.tensor(coming, dtype=torch.int64).view(len(chosen), len(coming[0])) if known else None
        try:
            found = self.pool.append([s.real for s in chosen], torch.stack(k), torch.stack(v), ids)
        except ProblemError as problem:
            self.refused(problem, before)
            return
        for s, ids, mine_k, mine_v in zip(chosen, coming, k, v, strict=True):
            s.ids, s.k, s.v = s.ids + ids, torch.cat([s.k, mine_k], 1), torch.cat([s.v, mine_v], 1)
            if self.codes is not None:
                s.coded = max(s.coded, (len(s.ids) - self.codes.residual) // self.page - self.first)
        self.compare(chosen, found)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        s = self.one(data)
        self.all.append(Plain(s.real.fork(), s.ids, s.k, s.v, s.coded))

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        s = self.one(data)
        self.all.remove(s)
        s.real.free()
        s.real.free()  # no error

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        s = self.one(data)
        tokens = data.draw(st.integers(0, len(s.ids)), "tokens")
        before = self.look()
        try:
            s.real.crop(tokens)
        except ProblemError as problem:
            self.refused(problem, before)
            return
        whole = tokens // self.page
        if self.codes is not None and tokens % self.page and self.first <= whole < self.first + s.coded:
            self.read_back(s, whole)
        s.ids, s.k, s.v = s.ids[:tokens], s.k[:, :tokens], s.v[:, :tokens]
        s.coded = max(0, min(s.coded, whole - self.first))

    def read_back(self, s: Plain, number: int) -> None:
        """Of a page of codes a part stays: as it came, or as it was written."""
        assert self.codes is not None
        place = slice(number * self.page, len(s.real))
        found = self.pool.append([s.real], torch.zeros(1, HEADS, 0, QK), torch.zeros(1, HEADS, 0, V))
        whole = slice(number * self.page, (number + 1) * self.page)
        written = quantised(self.codes, self.page, s.k[:, whole], s.v[:, whole])
        mine = [t.dense()[0, :, place] for t in found]
        if not all(map(torch.equal, mine, (s.k[:, place], s.v[:, place]))):
            assert all(torch.equal(x, y[:, : x.shape[1]]) for x, y in zip(mine, written, strict=True))
            s.k, s.v = s.k.clone(), s.v.clone()
            s.k[:, place], s.v[:, place] = mine

    @precondition(lambda self: self.all and self.codes is None and self.pool.storage.form is not None)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        s = self.one(data)
        count = data.draw(st.integers(0, len(s.ids)), "kept")
        index = torch.stack([torch.randperm(len(s.ids))[:count].sort().values for _ in range(HEADS)])
        before = self.look()
        try:
            keep_tokens(self.pool.storage, [s.real], index[None])
        except ProblemError as problem:
            self.refused(problem, before)
            return
        s.k, s.v = (t.gather(1, index[..., None].expand(-1, -1, t.shape[2])) for t in (s.k, s.v))
        s.ids = [0] * count  # of no meaning from now on

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def beams(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(sorted({len(s.ids) for s in self.all})), "length")
        alike = [s for s in self.all if len(s.ids) == tokens]
        rows = data.draw(st.lists(st.integers(0, len(alike) - 1), min_size=1, max_size=4), "beams")
        self.all = [s for s in self.all if s not in alike]
        chosen = self.pool.select([s.real for s in alike], rows)
        self.all += [
            Plain(real, alike[row].ids, alike[row].k, alike[row].v, alike[row].coded)
            for real, row in zip(chosen, rows, strict=True)
        ]

    def refused(self, problem: ProblemError, before: list[object]) -> None:
        """The pool was full, and nothing changed."""
        assert "are wanted, and" in str(problem)
        assert self.look() == before

    def look(self) -> list[object]:
        """All that may not change when something is refused."""
        pages = [
            (p.index, p.references)
            for p in (*self.pool.storage.plain.pages, *self.pool.storage.coded.pages)
            if p.references
        ]
        rows = [(len(s.real), [*s.real.plain], [*s.real.coded], [*s.real.ids], s.real.indexed) for s in self.all]
        return [pages, rows, self.pool.free_pages, self.pool.bytes]

    def wanted(self, s: Plain) -> tuple[Tensor, Tensor]:
        k, v = s.k.clone(), s.v.clone()
        for number in range(self.first, self.first + s.coded):
            place = slice(number * self.page, (number + 1) * self.page)
            assert self.codes is not None
            k[:, place], v[:, place] = quantised(self.codes, self.page, k[:, place], v[:, place])
        return k, v

    def compare(self, chosen: list[Plain], found: tuple[StoredTensor, StoredTensor]) -> None:
        for t, i in zip(found, (0, 1), strict=True):
            dense = t.dense()
            assert dense.shape[2] == max(len(s.ids) for s in chosen)
            for row, s in enumerate(chosen):
                assert torch.equal(dense[row, :, : len(s.ids)], self.wanted(s)[i])
                assert not dense[row, :, len(s.ids) :].any()

    @invariant()
    def every_sequence_holds_its_own(self) -> None:
        for s in self.all:
            assert len(s.real) == len(s.ids)
            if self.pool.storage.form is not None:
                empty = torch.zeros(1, HEADS, 0, QK), torch.zeros(1, HEADS, 0, V)
                self.compare([s], self.pool.append([s.real], *empty))

    @invariant()
    def no_page_is_lost(self) -> None:
        storage = self.pool.storage
        held = Counter(page for s in self.all for page in (*s.real.plain, *s.real.coded))
        for allocator in (storage.plain, storage.coded):
            assert [page.index for page in allocator.pages] == [*range(len(allocator.pages))]
            for page in allocator.pages:
                assert page.references == held[page]
                assert (page in allocator.free) == (not page.references)
                assert page.node is None or page.node.pages[allocator] is page
                assert page.twin is None or page.twin.twin is page
        assert storage.used == len(held) <= self.pages
        assert self.pool.free_pages == self.pages - len(held)
        assert len(storage.tables) == len(self.all)


class PoolOfCodes(Pool):
    """The same where pages become codes."""

    page, pages, codec = 16, 23, Int8(residual=5, sinks=4)


class PoolOfSmallCodes(Pool):
    """The same with no sinks and no residual, codes of 4 bits, and scales of keys by token."""

    page, pages, codec = 16, 13, Int4(group=16, residual=0, sinks=0, keys="token")


for machine, examples in ((Pool, 15), (PoolOfCodes, 6), (PoolOfSmallCodes, 6)):
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=30, deadline=None)

TestPool = Pool.TestCase
TestPoolOfCodes = PoolOfCodes.TestCase
TestPoolOfSmallCodes = PoolOfSmallCodes.TestCase


def tokens_of(count: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, HEADS, count, QK), torch.randn(rows, HEADS, count, V)


def alone(t: Tensor, row: int) -> Tensor:
    return t[row : row + 1]


@pytest.mark.parametrize("codec", [None, torch.bfloat16, Int8(residual=16), Fp8(group=16, rotate=True)], ids=str)
def test_each_row_of_a_ragged_batch_gets_the_bits_that_it_gets_alone(codec: Codec | torch.dtype | None):
    """Sequences come and go, prompts in chunks between single tokens, as in continuous batching."""
    pool, lone = PagePool(page=16, codec=codec), [PagePool(page=16, codec=codec) for _ in range(5)]
    rows, singles = [pool.sequence() for _ in range(5)], [one.sequence() for one in lone]
    for chosen, new in (
        ([0], 53),
        ([1, 0], 1),
        ([3, 2], 40),
        ([2, 0, 3], 7),
        ([4], 90),
        ([4, 1, 0, 2], 1),
        ([0, 4, 3], 5),
    ):
        k, v = tokens_of(new, len(chosen))
        q = torch.randn(len(chosen), 2 * HEADS, new, QK)
        together = attend(q, *pool.append([rows[row] for row in chosen], k, v), mask=Causal(), backend="native")
        for place, row in enumerate(chosen):
            stored = lone[row].append([singles[row]], alone(k, place), alone(v, place))
            ours = alone(together, place)
            assert torch.equal(ours, attend(alone(q, place), *stored, mask=Causal(), backend="native"))
            flat = [t.dense() for t in stored]
            assert torch.equal(ours, attend(alone(q, place), *flat, mask=Causal(), backend="native"))


def filled(pool: PagePool, ids: list[int]) -> Sequence:
    """A sequence with this prompt."""
    sequence = pool.sequence(ids)
    k, v = numbers(ids)
    pool.append([sequence], k[None, :, sequence.tokens :], v[None, :, sequence.tokens :])
    return sequence


def test_equal_prompts_share_all_their_pages_but_the_last():
    pool, ids = PagePool(page=4), [*range(16)]
    first = filled(pool, ids)
    assert [pool.sequence(ids[:count]).tokens for count in (0, 1, 4, 5, 15, 16)] == [0, 0, 0, 4, 12, 12]
    assert pool.sequence([*ids, 99]).tokens == 16
    assert pool.sequence(torch.tensor(ids[:9])).tokens == 8
    assert pool.sequence([7, *ids]).tokens == 0
    second = filled(pool, [*ids[:8], 1, 2, 3, 4, 5])
    assert second.plain[:2] == first.plain[:2]
    assert pool.storage.used == 4 + 2


def test_equal_tokens_behind_different_ones_are_not_taken_for_equal():
    pool = PagePool(page=4)
    filled(pool, [1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert pool.sequence([2, 2, 2, 2, 5, 5, 5, 5, 9]).tokens == 0


def test_freed_pages_are_found_until_they_are_needed_and_the_oldest_go_first():
    pool = PagePool(pages=6, page=4)
    filled(pool, [1] * 8).free()
    filled(pool, [2] * 8).free()
    again = pool.sequence([1] * 9)
    assert again.tokens == 8
    again.free()  # used last: [2] is the oldest now
    third = filled(pool, [3] * 12)
    assert (pool.sequence([2] * 9).tokens, pool.sequence([1] * 9).tokens) == (4, 8)  # its end went first
    third.free()


def test_a_page_that_was_cropped_and_written_anew_is_not_found_under_its_old_name():
    pool = PagePool(page=4)
    first = filled(pool, [*range(8)])
    first.crop(6)
    pool.append([first], *tokens_of(3))
    assert pool.sequence([*range(9)]).tokens == 4


def test_generated_tokens_can_be_found_if_their_ids_are_told():
    pool = PagePool(page=4)
    first = filled(pool, [1, 2, 3])
    for token in (4, 5, 6, 7, 8):
        pool.append([first], *tokens_of(1), tokens=torch.tensor([[token]]))
    assert pool.sequence([*range(1, 10)]).tokens == 8
    pool.append([first], *tokens_of(1))
    with pytest.raises(ProblemError, match="after 9 tokens of row 0, of which only 8 have ids"):
        pool.append([first], *tokens_of(1), tokens=torch.tensor([[1]]))
    second = pool.sequence([7, 8, 9])
    with pytest.raises(ProblemError, match=r"tokens of row 0 are \[7, 9\], and its prompt goes on with \[7, 8\]"):
        pool.append([second], *tokens_of(2), tokens=torch.tensor([[7, 9]]))


def test_pages_without_names_go_before_those_that_may_be_found():
    pool = PagePool(pages=3, page=4)
    named, nameless = filled(pool, [1] * 8), pool.sequence()
    pool.append([nameless], *tokens_of(4))
    named.free()
    nameless.free()
    filled(pool, [2] * 4)
    assert pool.sequence([1] * 9).tokens == 8


def test_what_is_no_longer_anywhere_is_forgotten():
    pool = PagePool(pages=4, page=4)
    filled(pool, [*range(16)]).free()
    row = pool.sequence()
    pool.append([row], *tokens_of(16))
    assert not pool.storage.root.children


def test_the_pages_of_one_are_found_when_those_of_another_that_were_named_first_are_gone():
    pool, ids = PagePool(pages=4, page=4), [*range(9)]
    first, second = pool.sequence(ids), pool.sequence(ids)
    k, v = (t[None].expand(2, -1, -1, -1) for t in numbers(ids))
    pool.append([first, second], k[:, :, :4], v[:, :, :4])
    first.free()
    other = pool.sequence()
    pool.append([other], *tokens_of(12))
    other.free()
    pool.append([second], k[:1, :, 4:8], v[:1, :, 4:8])
    assert pool.sequence(ids).tokens == 8


def test_spare_pages_of_codes_are_not_found_where_plain_ones_have_reached_the_limit():
    pool, ids = PagePool(pages=4, page=16, codec=Int8(residual=0, sinks=0)), [*range(49)]
    filled(pool, ids).free()
    rows = [pool.sequence() for _ in range(4)]
    pool.append(rows, *tokens_of(1, rows=4))
    assert pool.sequence(ids).tokens == 0
    rows[0].free()
    assert pool.sequence(ids).tokens == 16


def test_a_full_pool_lets_a_page_become_codes():
    pool = PagePool(pages=2, page=16, codec=Int8(residual=0, sinks=0))
    row = pool.sequence()
    pool.append([row], *tokens_of(31))
    pool.append([row], *tokens_of(1))
    assert (len(row.coded), len(row.plain), pool.free_pages) == (2, 0, 0)


def test_codes_of_a_page_are_not_taken_for_its_own_once_they_are_written_over():
    pool = PagePool(page=16, codec=Int8(residual=16, sinks=0))
    first, (k, v) = pool.sequence(), tokens_of(32)
    pool.append([first], k[:, :, :16], v[:, :, :16])
    second = first.fork()
    pool.append([first], k[:, :, 16:], v[:, :, 16:])
    first.free()
    others = [pool.sequence() for _ in range(len(pool.storage.coded.pages))]
    pool.append(others, *tokens_of(32, rows=len(others)))
    found = pool.append([second], k[:, :, 16:], v[:, :, 16:])
    assert (found[0].dense() - k).abs().max() < 0.1


def test_pages_are_found_in_the_order_of_their_forms():
    """Plain pages may not stand before codes: where the codes of the first page are gone, plain ones follow it."""
    pool, ids = PagePool(page=16, codec=Int8(residual=16, sinks=0)), [*range(65)]
    first, (k, v) = pool.sequence(ids), (t[None] for t in numbers(ids))
    for start in range(0, 64, 16):
        pool.append([first], k[:, :, start : start + 16], v[:, :, start : start + 16])
    first.coded[0].invalidate()
    second = pool.sequence(ids)
    found = pool.append([second], k[:, :, second.tokens :], v[:, :, second.tokens :])
    assert second.indexed >= 1
    assert (found[0].dense() - k).abs().max() < 0.1


def test_codes_that_are_taken_up_again_count_as_pages_in_use():
    pool = PagePool(pages=3, page=16, codec=Int8(residual=16, sinks=0))
    first = pool.sequence()
    pool.append([first], *tokens_of(16))
    second = first.fork()
    pool.append([first], *tokens_of(16))
    first.free()
    others = [pool.sequence(), pool.sequence()]
    pool.append(others, *tokens_of(1, rows=2))
    with pytest.raises(ProblemError, match="0 of 3 are free"):
        pool.append([second], *tokens_of(16))
    others[0].free()
    pool.append([second], *tokens_of(16))
    assert pool.free_pages == 0


def test_a_page_that_becomes_codes_for_one_is_left_to_the_other_to_write_in():
    pool = PagePool(pages=2, page=16, codec=Int8(residual=0, sinks=0))
    first = pool.sequence()
    pool.append([first], *tokens_of(15))
    second = first.fork()
    second.crop(14)
    pool.append([first, second], *tokens_of(1, rows=2))
    assert (len(first.coded), len(second.plain), pool.free_pages) == (1, 1, 0)


def test_rotated_numbers_are_turned_back():
    pool = PagePool(page=16, codec=Int8(residual=5, rotate=True))
    k, v = torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 24)  # odd numbers of channels are not turned
    for t, expected in zip(pool.append([pool.sequence()], k, v), (k, v), strict=True):
        assert t.rotated
        torch.testing.assert_close(t.dense(), expected, atol=0.1, rtol=0)


def test_a_page_that_two_share_becomes_codes_once():
    pool = PagePool(page=16, codec=Int8(residual=16, sinks=0))
    first = pool.sequence()
    pool.append([first], *tokens_of(31))
    second = first.fork()
    pool.append([first], *tokens_of(1))
    pool.append([second], *tokens_of(1))
    assert first.coded == second.coded
    assert first.coded[0].references == 2
    third = first.fork()
    pool.append([first, third], *tokens_of(16, rows=2))
    assert first.coded[1:] == third.coded[1:] != []
    assert pool.storage.used == 1 + 1 + 1 + 2  # the first; another; the second's tail; the others' tails


def test_one_row_too_many_changes_none():
    pool = PagePool(pages=4, page=4)
    rows = [pool.sequence() for _ in range(3)]
    pool.append(rows, *tokens_of(3, rows=3))
    with pytest.raises(ProblemError, match="3 pages of 4 tokens are wanted, and 1 of 4 are free; 3 sequences hold the"):
        pool.append(rows, *tokens_of(2, rows=3))
    assert [len(row) for row in rows] == [3, 3, 3]
    rows[0].free()
    assert pool.append(rows[1:], *tokens_of(2, rows=2))[0].shape == (2, HEADS, 5, QK)


def test_numbers_that_codes_cannot_hold_change_nothing():
    pool = PagePool(page=16, codec=Int8(residual=0, sinks=0))
    row = pool.sequence()
    pool.append([row], *tokens_of(20))
    k, v = tokens_of(20)
    k[0, 0, 7] = torch.nan
    with pytest.raises(ProblemError, match="NaN"):
        pool.append([row], k, v)
    assert (len(row), pool.storage.used) == (20, 2)


def test_a_sequence_that_nobody_refers_to_gives_its_pages_back():
    pool = PagePool(pages=8, page=4)
    row = pool.sequence()
    pool.append([row], *tokens_of(9))
    fork = row.fork()
    assert pool.free_pages == 5
    del row
    assert (pool.free_pages, len(pool.storage.tables)) == (5, 1)
    del fork
    assert (pool.free_pages, len(pool.storage.tables)) == (8, 0)


def test_steps_of_one_token_change_pages_only_when_a_page_is_full(monkeypatch: pytest.MonkeyPatch):
    pool, times = PagePool(page=16), []
    rows = [pool.sequence() for _ in range(8)]
    pool.append(rows, *tokens_of(64, rows=8))
    append_tokens = pool_module.append_tokens
    monkeypatch.setattr(pool_module, "append_tokens", lambda *given: (times.append(1), append_tokens(*given)))
    for _ in range(64):
        pool.append(rows, *tokens_of(1, rows=8))
    assert len(times) == 4


def test_memory_is_made_at_once_where_there_is_a_limit_and_doubles_where_there_is_none():
    page = 4 * HEADS * (QK + V) * 4
    pool = PagePool(pages=40, page=4)
    assert (pool.allocated_bytes, pool.bytes, pool.free_pages) == (0, 0, 40)
    row = pool.sequence()
    pool.append([row], *tokens_of(9))
    assert (pool.allocated_bytes, pool.bytes, pool.free_pages) == (40 * page, 9 * HEADS * (QK + V) * 4, 37)
    pool, held = PagePool(page=4), set[int]()
    row = pool.sequence()
    for _ in range(200):
        pool.append([row], *tokens_of(1))
        held.add(pool.allocated_bytes // page)
    assert held == {16, 32, 64}
    assert repr(row) == "Sequence(200 tokens in 50 pages, 0 shared)"
    assert repr(pool) == (
        "PagePool(14 allocated pages of 4 tokens free, 1 sequences: k [tokens, 2, 3], v [tokens, 2, 5] float32: 12,800 "
        "bytes, 16,384 allocated)"
    )


def test_codes_take_the_bytes_that_they_should():
    pool = PagePool(page=16, codec=Int8(residual=0, sinks=0))
    row = pool.sequence()
    pool.append([row], *tokens_of(160))
    scales = 10 * HEADS * QK * 2 + 160 * HEADS * 2
    assert (len(row), pool.bytes) == (160, 160 * HEADS * (QK + V) + scales)
    assert not pool.storage.plain.used


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda pool, row: PagePool(pages=0), r"PagePool\(pages\) is 0"),
        (lambda pool, row: PagePool(page=True), r"PagePool\(page\) is True"),
        (lambda pool, row: PagePool(codec="int8"), "expected Int8"),
        (lambda pool, row: PagePool(page=24, codec=Int8()), "multiple of 16 tokens: 32 would do"),
        (lambda pool, row: pool.append([], *tokens_of(1)), "one sequence or more"),
        (lambda pool, row: pool.append(row, *tokens_of(1)), "sequences are Sequence"),
        (lambda pool, row: pool.append(None, *tokens_of(1)), "sequences are None"),
        (
            lambda pool, row: PagePool(codec=Int8()).write([row], tokens_of(1)[0], tokens_of(1)[1][..., :0]),
            "keys have 3 dimensions and values 0",
        ),
        (lambda pool, row: pool.append([row, row], *tokens_of(1, rows=2)), "is in two rows"),
        (lambda pool, row: pool.append([PagePool().sequence()], *tokens_of(1)), "a sequence of another pool"),
        (lambda pool, row: pool.append([3], *tokens_of(1)), "row 0 is 3"),
        (lambda pool, row: pool.append([row], *tokens_of(1, rows=2)), "for 1 sequences"),
        (lambda pool, row: pool.append([row], tokens_of(1)[0], None), "v None"),
        (lambda pool, row: pool.append([row], *(t.double() for t in tokens_of(1))), "a pool is for one layer"),
        (lambda pool, row: pool.append([row], *(t.requires_grad_() for t in tokens_of(1))), "gradients"),
        (lambda pool, row: pool.append([row], *tokens_of(2), tokens=torch.tensor([[1]])), r"\[1, 2\]"),
        (lambda pool, row: pool.sequence(torch.ones(3)), "the ids of one sequence"),
        (lambda pool, row: pool.sequence("abc"), "whole numbers"),
        (lambda pool, row: row.crop(6), "expected 0 to 5, the tokens that are stored"),
        (lambda pool, row: (row.free(), row.fork()), "was freed"),
        (lambda pool, row: (row.free(), row.crop(0)), "sequence was freed"),
        (lambda pool, row: (row.free(), pool.append([row], *tokens_of(1))), "was freed: its tokens are gone"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: object, said: str):
    pool = PagePool(page=4)
    row = pool.sequence()
    pool.append([row], *tokens_of(5))
    with pytest.raises(ProblemError, match=said):
        wrong(pool, row)
