"""The pool of pages: no page is lost, none is shared wrongly, whatever is done to sequences in whatever order."""

from collections import Counter
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from regard import ProblemError
from regard.cache.paged import keep_tokens
from regard.cache.pool import PagePool
from regard.cache.sequence import Sequence
from regard.storage.codec import Codec, Int4, Int8, decode_rows, decode_tiled, encode_rows, encode_tiled
from regard.storage.stored import StoredTensor
from tests.cache.marked_tokens import HEADS, QK, V, numbers
from tests.selection import examples


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
        most = max(0, min(s.coded, whole - self.first))
        least = max(0, self.pool.storage.coded_page_end(tokens) - self.first)
        s.coded = len(s.real.coded)  # the others are plain again, as they came
        assert min(least, most) <= s.coded <= most

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
        assert len(storage.held.tables) == len(self.all)


class PoolOfCodes(Pool):
    """The same where pages become codes."""

    page, pages, codec = 16, 23, Int8(residual=5, sinks=4)


class PoolOfSmallCodes(Pool):
    """The same with no sinks and no residual, codes of 4 bits, and scales of keys by token."""

    page, pages, codec = 16, 13, Int4(group=16, residual=0, sinks=0, keys="token")


for machine, default, everything in ((Pool, 6, 15), (PoolOfCodes, 3, 6), (PoolOfSmallCodes, 3, 6)):
    machine.TestCase.settings = examples(default, everything=everything, stateful_step_count=30, deadline=None)

TestPool = Pool.TestCase
TestPoolOfCodes = PoolOfCodes.TestCase
TestPoolOfSmallCodes = PoolOfSmallCodes.TestCase
