"""The pool of pages: which pages sequences share, find again, give back and turn into codes."""

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import Causal, ProblemError, attend
from regard.cache import batch_table
from regard.cache import pool as pool_module
from regard.cache.batch_table import BatchTable
from regard.cache.page_memory import CodedPageMemory, PlainPageMemory
from regard.cache.pages import PageAllocator
from regard.cache.pool import PagePool
from regard.cache.sequence import Sequence
from regard.storage.codec import Codec, Fp8, Int8
from tests.cache.marked_tokens import HEADS, QK, V, numbers


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


@pytest.mark.parametrize("stored", [0, 16, 17])
def test_a_crop_forgets_the_rest_of_a_prompt(stored: int):
    """What is appended then may be another text, which no sequence of the prompt may find."""
    pool, prompt, kept = PagePool(page=16), list(range(64)), min(stored, 16)
    s = pool.sequence(prompt)
    pool.append([s], *tokens_of(stored))
    s.crop(kept)
    pool.append([s], *tokens_of(64 - kept))
    assert pool.sequence(prompt).tokens == kept


def test_generated_tokens_can_be_found_by_their_ids():
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


def test_a_crop_makes_pages_plain_again_that_are_codes_only_because_of_what_it_removes():
    """In a pool that has no page to spare, and where others share the page that was not full."""
    pool = PagePool(pages=7, page=16, codec=Int8(residual=16, sinks=0))
    first = pool.sequence()
    before = [t.dense() for t in pool.append([first], *tokens_of(37))]
    second, pages, nothing = first.fork(), [*first.plain], tokens_of(0)
    pool.append([first], *tokens_of(33))
    assert (len(first.coded), pool.free_pages) == (3, 0)
    first.crop(37)
    assert ([*first.plain], len(first.coded)) == (pages, 1)
    for one in (first, second):
        assert all(torch.equal(t.dense(), old) for t, old in zip(pool.append([one], *nothing), before, strict=True))
    more = tokens_of(48)
    second.free()
    pool.append([first], *more)
    for t, x in zip(pool.append([first], *nothing), more, strict=True):
        torch.testing.assert_close(t.dense()[:, :, 37:], x, atol=0.1, rtol=0)


@pytest.mark.parametrize("tokens", [80, 64, 48])
def test_a_crop_that_cuts_no_page_needs_none(tokens: int):
    """In a full pool whose pages another sequence still has: whole pages stay codes."""
    pool = PagePool(pages=6, page=16, codec=Int8(residual=16, sinks=0))
    first = pool.sequence()
    appended = [pool.append([first], *tokens_of(16))[0] for _ in range(6)]
    second, before = first.fork(), appended[-1].dense()
    assert pool.free_pages == 0
    second.crop(tokens)
    kept = pool.append([second], *tokens_of(0))[0].dense()
    assert torch.equal(kept[:, :, : tokens - 16], before[:, :, : tokens - 16])
    torch.testing.assert_close(kept, before[:, :, :tokens], atol=0.1, rtol=0)


def test_pages_of_codes_are_taken_only_by_those_with_the_same_tokens():
    """A page that was cut, and became codes with other tokens, is no twin for those who have all of it."""
    pool = PagePool(page=16, codec=Int8(residual=16, sinks=0))
    first = pool.sequence()
    pool.append([first], *tokens_of(16))
    second = first.fork()
    first.crop(10)
    pool.append([first], *tokens_of(40))
    found = pool.append([second], *tokens_of(0))[0].dense()
    after = pool.append([second], *tokens_of(16))[0]
    assert (len(first.coded), len(second.coded)) == (2, 1)
    torch.testing.assert_close(after.dense()[:, :, :16], found, atol=0.1, rtol=0)


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


def fails_once(function: Callable[..., Any], error: BaseException, call: int = 0) -> Callable[..., Any]:
    """The function, which raises an error after one of its calls."""
    calls = itertools.count()

    def failing(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        if next(calls) == call:
            raise error
        return result

    return failing


def test_a_step_that_lacks_memory_is_made_again_and_leaves_other_sequences_alone(monkeypatch: pytest.MonkeyPatch):
    pool = PagePool(page=16)
    first, second = pool.sequence(), pool.sequence()
    theirs, ours = tokens_of(16), tokens_of(129)
    pool.append([first], *theirs)
    pool.append([second], *(t[:, :, :128] for t in ours))
    last = [t[:, :, 128:] for t in ours]
    with monkeypatch.context() as patch:
        patch.setattr(batch_table, "allocate", fails_once(batch_table.allocate, torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            pool.append([second], *last)  # its block table becomes wider
    assert (len(second), pool.storage.used) == (128, 9)
    for row, expected in ((second, ours), (first, theirs)):
        stored = pool.append([row], *(last if row is second else tokens_of(0)))
        assert all(torch.equal(t.dense(), x) for t, x in zip(stored, expected, strict=True))


def forks(codec: Codec | None) -> tuple[PagePool, list[Sequence]]:
    pool = PagePool(page=16, codec=codec)
    first = filled(pool, [*range(70)])
    first.ids.extend(range(70, 200))
    return pool, [first, first.fork()]


INTERRUPTED: dict[tuple[type, str], tuple[str, ...]] = {
    (PageAllocator, "allocate"): ("plain", "codes"),
    (PageAllocator, "release"): ("plain", "codes"),
    (PlainPageMemory, "copy"): ("plain",),
    (CodedPageMemory, "write"): ("codes",),
    (BatchTable, "change"): ("plain", "codes"),
    (BatchTable, "write"): ("plain", "codes"),
    (Sequence, "index_pages"): ("plain", "codes"),
    (BatchTable, "refresh"): ("plain", "codes"),
    (BatchTable, "stored"): ("plain", "codes"),
}
"""What an append calls, and which changes do."""


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [(*called, change) for called, changes in INTERRUPTED.items() for change in changes],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_an_append_that_is_interrupted_changes_nothing(
    owner: type, name: str, change: str, monkeypatch: pytest.MonkeyPatch
):
    codec = Int8(residual=16) if change == "codes" else None
    (pool, rows), (other, others) = forks(codec), forks(codec)
    k, v = tokens_of(40, rows=2)
    gc.collect()  # a pool of another test would release its pages later, and fail in place of this one
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_once(getattr(owner, name), KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            pool.append(rows, k, v)
    assert ([len(row) for row in rows], pool.storage.used) == ([len(row) for row in others], other.storage.used)
    for row, same in zip(rows, others, strict=True):
        both = zip(pool.append([row], *tokens_of(0)), other.append([same], *tokens_of(0)), strict=True)
        assert all(torch.equal(ours.dense(), theirs.dense()) for ours, theirs in both)
    both = zip(pool.append(rows, k, v), other.append(others, k, v), strict=True)
    assert all(torch.equal(ours.dense(), theirs.dense()) for ours, theirs in both)
    assert pool.storage.used == other.storage.used
    for row in rows:
        row.free()
    storage = pool.storage
    assert (storage.used, len(storage.plain.free)) == (0, len(storage.plain.pages))


@pytest.mark.parametrize("name", ["extend", "stored"])
def test_a_step_within_a_page_that_is_interrupted_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch):
    pool = PagePool(page=16)
    row, (k, v) = pool.sequence(), tokens_of(20)
    pool.append([row], k[:, :, :18], v[:, :, :18])
    with monkeypatch.context() as patch:
        patch.setattr(BatchTable, name, fails_once(getattr(BatchTable, name), KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            pool.append([row], *tokens_of(1))
    assert len(row) == 18
    assert torch.equal(pool.append([row], k[:, :, 18:], v[:, :, 18:])[0].dense(), k)


def test_memory_that_grew_in_a_call_that_was_interrupted_is_used(monkeypatch: pytest.MonkeyPatch):
    pool = PagePool(pages=8, page=4)
    row, (k, v) = pool.sequence(), tokens_of(32)
    with monkeypatch.context() as patch:
        patch.setattr(PlainPageMemory, "grow", fails_once(PlainPageMemory.grow, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            pool.append([row], k, v)
    assert torch.equal(pool.append([row], k, v)[0].dense(), k)
    assert pool.free_pages == 0


def test_a_small_tensor_that_lacks_memory_leaves_the_step_to_be_made_again(monkeypatch: pytest.MonkeyPatch):
    """Each call of `torch.arange` in an append fails once, including calls after the memory was enlarged."""
    call = 0
    for call in itertools.count():
        pool = PagePool(page=16)
        row, (k, v) = pool.sequence(), tokens_of(100)
        pool.append([row], k[:, :, :50], v[:, :, :50])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "arange", fails_once(torch.arange, torch.OutOfMemoryError(), call))
            try:
                pool.append([row], k[:, :, 50:], v[:, :, 50:])
            except torch.OutOfMemoryError:
                pass
            else:
                break
        for stored, x in zip(pool.append([row], k[:, :, 50:], v[:, :, 50:]), (k, v), strict=True):
            assert torch.equal(stored.dense(), x)
    assert call > 1


def test_a_sequence_that_nobody_refers_to_gives_its_pages_back():
    pool = PagePool(pages=8, page=4)
    row = pool.sequence()
    pool.append([row], *tokens_of(9))
    fork = row.fork()
    assert pool.free_pages == 5
    del row
    assert (pool.free_pages, len(pool.storage.held.tables)) == (5, 1)
    del fork
    assert (pool.free_pages, len(pool.storage.held.tables)) == (8, 0)


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
    ("wrong", "message"),
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
        (lambda pool, row: pool.sequence(b"abc"), "tokens are b'abc': .* whole numbers"),
        (lambda pool, row: pool.sequence({1: 2}), "tokens are {1: 2}: .* whole numbers"),
        (lambda pool, row: pool.sequence(torch.arange(3, device="meta")), r"sequence\(tokens\) reads elements"),
        (
            lambda pool, row: pool.append([row], *tokens_of(1), tokens=torch.zeros(1, 1, device="meta").long()),
            r"append\(tokens=\.\.\.\) reads elements",
        ),
        (lambda pool, row: row.crop(6), "expected 0 to 5, the tokens that are stored"),
        (lambda pool, row: (row.free(), row.fork()), "was freed"),
        (lambda pool, row: (row.free(), row.crop(0)), "sequence was freed"),
        (lambda pool, row: (row.free(), pool.append([row], *tokens_of(1))), "was freed: its tokens are gone"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: object, message: str):
    pool = PagePool(page=4)
    row = pool.sequence()
    pool.append([row], *tokens_of(5))
    with pytest.raises(ProblemError, match=message):
        wrong(pool, row)


def test_ids_of_a_prompt_may_be_integers_of_numpy_and_no_bools():
    pool, ids = PagePool(page=4), np.arange(9)
    pool.append([pool.sequence(ids)], *torch.randn(2, 1, 2, 9, 8))
    assert [pool.sequence(again).tokens for again in (ids, [*ids], ids.tolist(), ids.astype(np.int32))] == [8] * 4
    for wrong in ([True] * 9, np.ones(9, dtype=bool), np.arange(9.0), np.arange(18).reshape(9, 2), ["7"], 7):
        with pytest.raises(ProblemError, match="expected the ids of a prompt, whole numbers"):
            pool.sequence(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rows", [[2], [-1], [1, 0, 2], [0.0]], ids=str)
def test_rows_that_are_no_indices_of_sequences_are_refused_and_nothing_is_changed(rows: list[Any]):
    pool = PagePool(page=4)
    sequences = [pool.sequence(), pool.sequence()]
    pool.append(sequences, *tokens_of(5, rows=2))
    with pytest.raises(ProblemError, match="select"):
        pool.select(sequences, rows)
    assert [len(one) for one in sequences] == [5, 5]
    pool.append(sequences, *tokens_of(1, rows=2))


def test_compiled_steps_are_compiled_once_for_all_lengths():
    """Pages change between two graphs: what is before an append, and what is after it."""
    (pool, compiled), (other, plain) = ((pool, pool.sequence()) for pool in (PagePool(page=4), PagePool(page=4)))

    def step(pool: PagePool, row: Sequence, q: Tensor, k: Tensor) -> Tensor:
        return attend(q + 1, *pool.append([row], k * 2, k)) - 1

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast = torch.compile(step, backend="eager")
    for count in (9, *[1] * 20):
        q, k = torch.randn(1, 4, count, 8), torch.randn(1, 2, count, 8)
        assert torch.equal(fast(pool, compiled, q, k), step(other, plain, q, k))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("codec", "long", "short", "new"), [(None, 11, 6, 1), (Int8(16, 8, 0), 20, 10, 10)], ids=["plain", "becomes codes"]
)
def test_a_shorter_row_does_not_write_over_the_tokens_of_a_page_that_an_undo_gives_back(
    codec: Codec | None, long: int, short: int, new: int, order: int, monkeypatch: pytest.MonkeyPatch
):
    """Both rows have one page: the longer leaves it, and the shorter writes to it before the append fails."""
    pool, k, none = PagePool(page=16, codec=codec), torch.randn(1, 2, long, 16), torch.randn(1, 2, 0, 16)
    first = pool.sequence()
    pool.append([first], k, k)
    second = first.fork()
    second.crop(short)
    given = torch.randn(2, 2, new, 16)

    def failing(self: BatchTable, tables: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):  # noqa: PT012
        patch.setattr(BatchTable, "refresh", failing)
        pool.append([first, second][::order], given, given)
    assert torch.equal(pool.append([first], none, none)[0].dense(), k)
    assert torch.equal(pool.append([second], none, none)[0].dense(), k[:, :, :short])


def test_an_append_that_finds_no_page_does_not_say_what_tokens_are_like():
    pool, k = PagePool(pages=2, page=4), torch.randn(1, 2, 9, 8)
    row = pool.sequence()
    with pytest.raises(ProblemError, match="3 pages of 4 tokens are wanted, and 2 of 2 are free"):
        pool.append([row], k, k)
    fitting = torch.randn(1, 1, 8, 4, dtype=torch.float64)
    assert torch.equal(pool.append([row], fitting, fitting)[0].dense(), fitting)
