"""A pool whose sequences are used in several threads, each sequence in one, and collected in any, before any line."""

import gc
import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, RLock, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import ProblemError
from regard.cache import KVCache
from regard.cache.batch_table import BatchTable
from regard.cache.page_storage import PageStorage
from regard.cache.pool import PagePool
from regard.cache.sequence import Sequence
from regard.storage.codec import Int8
from regard.storage.stored import Paged
from tests.cache.before_line import BeforeLine
from tests.stored import dense, used_pages


@pytest.fixture
def _hurried() -> Iterator[None]:
    """Threads take turns after each few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def tokens_of(count: int, seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=torch.Generator().manual_seed(seed))


def test_pages_that_one_thread_made_room_for_are_not_taken_by_another(monkeypatch: pytest.MonkeyPatch):
    """The other thread appends between the moment when memory is there and that when its pages are taken."""
    pool, has_appended = PagePool(page=64), Event()
    first, second = pool.sequence(), pool.sequence()
    k, reserve = tokens_of(5, 0), PageStorage.reserve

    def append_second() -> None:
        pool.append([second], 2 * k, k)
        has_appended.set()

    other = Thread(target=append_second)

    def slow(storage: PageStorage, plain: int, coded: int) -> None:
        reserve(storage, plain, coded)
        if not other.ident:  # once
            other.start()
            has_appended.wait(0.1)

    monkeypatch.setattr(PageStorage, "reserve", slow)
    stored = pool.append([first], k, k)[0]
    other.join()
    assert torch.equal(stored.dense(), k)
    assert torch.equal(pool.append([second], k[:, :, :0], k[:, :, :0])[0].dense(), 2 * k)


class _Handover:
    """A lock; when an error leaves it for the first time, another thread runs at once."""

    def __init__(self, other: Callable[[], object]) -> None:
        self.lock, self.depth, self.other = RLock(), 0, [other]

    def __enter__(self) -> None:
        self.lock.acquire()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        self.lock.release()
        if error[0] is not None and not self.depth and self.other:
            thread = Thread(target=self.other.pop())
            thread.start()
            thread.join()


def test_pages_of_an_append_that_failed_are_given_back_before_another_thread_takes_any(monkeypatch: pytest.MonkeyPatch):
    """Its plain pages were released, as their tokens became codes; the other thread takes all that are free."""
    pool = PagePool(page=16, codec=Int8(residual=16))
    row, others, k, none = pool.sequence(), list[Sequence](), tokens_of(40, 0), tokens_of(0, 0)
    pool.append([row], k, k)
    before = pool.append([row], none, none)[0].dense()

    def take_all() -> None:
        others.extend(pool.sequence() for _ in pool.storage.plain.free)
        new = tokens_of(16, 1, len(others))
        pool.append(others, new, new)

    monkeypatch.setattr(pool.storage, "_lock", _Handover(take_all))
    monkeypatch.setattr(BatchTable, "write", _fail_once(BatchTable.write))
    with pytest.raises(MemoryError):
        pool.append([row], k, k)
    assert others
    assert torch.equal(pool.append([row], none, none)[0].dense(), before)


def _fail_once(write: Callable[..., None]) -> Callable[..., None]:
    calls = iter([True])

    def failing(*given: Any) -> None:
        if next(calls, False):
            raise MemoryError
        write(*given)

    return failing


@pytest.mark.usefixtures("_hurried")
@pytest.mark.parametrize("codec", [None, Int8(residual=16)], ids=str)
def test_sequences_of_several_threads_have_their_own_tokens(codec: Int8 | None):
    """Prompts that begin alike, forks, crops and steps: each thread finds what it finds alone."""
    pool = PagePool(page=16, codec=codec)
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda seed: served(pool, seed), range(3)))
    for seed, found in enumerate(together):
        alone = served(PagePool(page=16, codec=codec), seed)
        assert all(map(torch.equal, found, alone))
    assert (used_pages(pool), pool.bytes) == (0, 0)


def served(pool: PagePool, seed: int) -> list[Tensor]:
    """What a pool returns while it serves some prompts, which all begin with the same token ids."""
    found: list[Tensor] = []
    for request in range(8):
        count = 20 + 13 * seed + request
        k = torch.cat([tokens_of(16, 99), tokens_of(count, seed)], 2)
        first = pool.sequence([*range(16), *(1000 * seed + i + request for i in range(count))])
        rest = k[:, :, first.tokens :]
        found += [t.dense() for t in pool.append([first], rest, rest + 1)]
        second = first.fork()
        steps = tokens_of(5, request, 2)
        found += step(pool, [first, second], steps)
        second.crop(18 + count)
        found += step(pool, [second], steps[:1])
        first.free()
        second.free()
    return found


def step(pool: PagePool, rows: list[Sequence], new: Tensor) -> list[Tensor]:
    """What is stored after each of some tokens."""
    handles = [pool.append(rows, k, k + 1) for k in new.split(1, 2)][-1]
    return [t.dense() for t in handles]


@pytest.mark.usefixtures("_hurried")
def test_caches_of_several_threads_share_a_pool():
    pool = PagePool(page=4)

    def serve(seed: int) -> bool:
        cache, k = KVCache(Paged(4, pool)), tokens_of(150, seed)
        stored = [cache.append(part, part)[0] for part in k.split([30, *[1] * 120], 2)]
        return torch.equal(dense(stored[-1]), k)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(serve, range(6)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_while_a_thread_changes_pages_can_use_the_pool():
    pool, is_inside = PagePool(page=4), Event()
    row, k = pool.sequence(), tokens_of(9, 0)
    pool.append([row], k, k)

    def change() -> None:
        with pool.storage.exclusive:
            is_inside.set()
            time.sleep(0.1)

    other = Thread(target=change)
    other.start()
    is_inside.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # ends the process where it waits for a lock that no thread of it has
        tokens = 1
        try:
            tokens = len(pool.sequence().fork())
        finally:
            os._exit(tokens)
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_sequences_of_one_pool_do_not_wait_for_those_of_another():
    busy, pool, k = PagePool(), PagePool(), tokens_of(5, 0)
    busy_row = busy.sequence()
    with ThreadPoolExecutor(1) as threads, busy.storage.exclusive:
        appended = threads.submit(lambda: pool.append([pool.sequence()], k, k))
        waits = threads.submit(busy_row.fork)
        assert torch.equal(appended.result(timeout=5)[0].dense(), k)
        assert not waits.done()
    assert len(waits.result()) == 0


@pytest.mark.parametrize("other", [tokens_of(5, 1).double(), tokens_of(5, 1)[:, :1], tokens_of(5, 1)[..., :4]])
def test_the_first_of_two_threads_says_what_tokens_are_like(other: Tensor, monkeypatch: pytest.MonkeyPatch):
    """Neither has found anything to compare its tokens to before both write."""
    pool, both, write = PagePool(page=4), Barrier(2), PagePool.write
    rows, given = [pool.sequence(), pool.sequence()], [tokens_of(5, 0), other]

    def write_together(self: PagePool, *arguments: Any) -> Any:
        both.wait()
        return write(self, *arguments)

    def append(row: int) -> Tensor | ProblemError:
        try:
            return pool.append([rows[row]], given[row], given[row])[0].dense()
        except ProblemError as problem:
            return problem

    monkeypatch.setattr(PagePool, "write", write_together)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(append, range(2)))
    refused = next(row for row in range(2) if isinstance(found[row], ProblemError))
    assert "a pool is for one layer" in str(found[refused])
    stored = found[1 - refused]
    assert isinstance(stored, Tensor)
    assert torch.equal(stored, given[1 - refused])
    assert stored.dtype is given[1 - refused].dtype
    assert (len(rows[refused]), len(rows[1 - refused])) == (0, 5)


def test_a_sequence_is_collected_while_another_thread_changes_pages():
    """It waits for nobody: a thread that collects it may have what the other waits for."""
    pool, k, is_inside, may_leave = PagePool(page=4), tokens_of(9, 0), Event(), Event()
    row = pool.sequence()
    pool.append([row], k, k)

    def change() -> None:
        with pool.storage.exclusive:
            is_inside.set()
            may_leave.wait(5)

    other = Thread(target=change)
    other.start()
    is_inside.wait()
    before = time.monotonic()
    del row
    waited = time.monotonic() - before
    may_leave.set()
    other.join()
    assert waited < 4
    assert used_pages(pool) == 0


@pytest.fixture
def _only_new_garbage() -> Iterator[None]:
    """The garbage collector runs only when a test calls it, and looks only at objects made since."""
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


WHILE: dict[str, Callable[[PagePool, Sequence], object]] = {
    "append": lambda pool, row: pool.append([row], tokens_of(70, 1), tokens_of(70, 1)),
    "fork": lambda pool, row: row.fork(),
    "crop": lambda pool, row: row.crop(21),
    "free": lambda pool, row: row.free(),
    "find": lambda pool, row: pool.sequence(range(90)),
    "select": lambda pool, row: pool.select([row], [0, 0]),
    "shrink": lambda pool, row: pool.storage.shrink(),
    "count": lambda pool, row: (repr(pool), pool.free_pages),
    "pickle": lambda pool, row: pickle.loads(pickle.dumps(pool)),
}


@pytest.mark.usefixtures("_only_new_garbage")
@pytest.mark.parametrize("codec", [None, Int8(residual=16)], ids=str)
@pytest.mark.parametrize("call", WHILE)
def test_a_sequence_is_collected_before_any_line_of_a_call(call: str, codec: Int8 | None):
    k, none, counted = tokens_of(90, 0), tokens_of(0, 0), 0
    for sample in range(12):
        pool = PagePool(page=16, codec=codec)
        row, left, other = pool.sequence(range(90)), pool.sequence(), pool.sequence()
        for s, count in ((row, 90), (left, 90), (other, 1000)):
            pool.append([s], *(tokens_of(count, 0) for _ in range(2)))
        other.free()
        gone: list[object] = [row.fork(), pool.append([left], none, none)[0]]
        before = pool.append([left], none, none)[0].dense()
        pool.append([gone[0]], k, k)  # pyright: ignore[reportArgumentType]
        gone.append(gone)
        del gone, s, other
        with BeforeLine(sample and 1 + (sample - 1) * counted // 11, gc.collect) as collected:
            result = WHILE[call](pool, row)
        counted = counted or collected.count
        del result
        gc.collect()
        held = Counter(page for s in (row, left) for page in (*s.plain, *s.coded))
        assert used_pages(pool) == len(held)
        for page in (*pool.storage.plain.pages, *pool.storage.coded.pages):
            assert (page.references, page in page.allocator.free) == (held[page], not held[page])
            assert page.allocator.pages[page.index] is page
        assert torch.equal(pool.append([left], none, none)[0].dense(), before)


def test_a_pool_can_be_pickled_and_used_in_threads_again():
    pool = PagePool(page=4)
    row, k = pool.sequence(), tokens_of(9, 0)
    pool.append([row], k, k)
    copied_pool, copied = pickle.loads(pickle.dumps((pool, row)))
    with ThreadPoolExecutor(1) as threads:
        stored = threads.submit(copied_pool.append, [copied], k, k).result()[0]
    assert torch.equal(stored.dense(), torch.cat([k, k], 2))
