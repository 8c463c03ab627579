"""Calls that fail change nothing: made again, they give what a cache that never failed gives.

Memory is refused at each allocation of a call in turn, wherever torch makes one. Ctrl-C comes before a line.
"""

import copy
import gc
import itertools
import pickle
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard import Causal, ProblemError, Rope
from regard.cache import H2O, TOVA, ExpectedAttention, Knorm, KVCache, PagePool, SinksAndRecent, SnapKV
from regard.cache.evict import Eviction
from regard.cache.page_memory import PlainPageMemory
from regard.cache.pages import Page, PageAllocator
from regard.cache.pool_lock import pool_locks
from regard.cache.quantised import QuantisedStore
from regard.cache.sequence import Sequence
from regard.cache.steps import StepCache
from regard.storage.codec import Codec, Int4, Int8
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling
from tests.cache.before_line import interrupt
from tests.stored import dense, used_pages

HEADS, DIM = 2, 16
VIEWS = {"slice", "alias", "view", "expand", "transpose", "unsqueeze", "squeeze", "select", "detach", "unfold", "split"}
OPTIONS: dict[str, tuple[Layout, Codec | torch.dtype | None, Eviction | None]] = {
    "dense": (Contiguous(), None, None),
    "int8": (Contiguous(), Int8(16, 16, 16), None),
    "int4 rotated": (Contiguous(), Int4(16, 16, rotate=True), None),
    "rolling": (Rolling(24, 4), None, None),
    "rolling, rotated": (Rolling(24, 4, Rope(DIM)), torch.bfloat16, None),
    "rolling int8": (Rolling(40, 4, Rope(DIM)), Int8(16, 16), None),
    "rolling int8, short": (Rolling(24, 4, Rope(DIM)), Int8(16, 32), None),  # less than the residual and a group
    "paged": (Paged(16), None, None),
    "paged int8": (Paged(16), Int8(16, 16, 16), None),
    "latent int8": (Latent(8), Int8(16, 16), None),
    "recent": (Contiguous(), None, SinksAndRecent(20)),
    "H2O": (Contiguous(), Int8(16, 16), H2O(40)),
    "TOVA": (Contiguous(), None, TOVA(40)),
    "SnapKV": (Paged(16), None, SnapKV(40, window=8, once=False)),
    "Knorm": (Paged(16), Int8(16, 16), Knorm(40)),
    "expected": (Contiguous(), None, ExpectedAttention(60)),
    "H2O, pages": (Paged(16), Int8(16, 16), H2O(40)),
}
CALLS: dict[str, Callable[["Text"], None]] = {
    "append one": lambda text: text.append(1),
    "append many": lambda text: text.append(70),
    "select": lambda text: text.cache.select(torch.tensor([1, 1])),
    "crop": lambda text: text.cache.crop(text.cache.tokens_seen - 1),
    "crop many": lambda text: text.cache.crop(max(text.cache.min_crop, 20)),
    "forget": lambda text: text.cache.forget(),
}


class Refusing(TorchDispatchMode):
    """Refuses memory to the n-th operation that allocates some, and counts them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in VIEWS and not name.endswith("_") and func._overloadname != "out":
            self.count += 1
            if self.count == self.at:
                raise MemoryError(name)
        return func(*args, **(kwargs or {}))


class Text:
    """A cache, and how many calls of it were made: the next tokens are the same for each text at this point."""

    def __init__(self, name: str) -> None:
        self.cache, self.calls = KVCache(*OPTIONS[name]), 0

    def append(self, count: int) -> None:
        made = torch.Generator().manual_seed(self.calls)
        k, v = (torch.randn(2, HEADS, count, DIM, generator=made) for _ in range(2))
        self.cache.append(k, None if isinstance(self.cache.layout, Latent) else v)

    def observe(self, count: int) -> None:
        self.cache.observe(torch.randn(2, 2 * HEADS, count, DIM, generator=torch.Generator().manual_seed(9)), Causal())
        self.calls += 1

    def stored(self) -> list[Tensor]:
        """What the cache hands out, and its counts."""
        none = torch.zeros(2, HEADS, 0, DIM)
        found = self.cache.append(none, None if isinstance(self.cache.layout, Latent) else none)
        counts = [self.cache.tokens, self.cache.tokens_seen, self.cache.min_crop, self.cache.bytes]
        return [*(dense(t).clone() for t in found), torch.tensor(counts)]


def prepared(name: str) -> Text:
    """A text of which tokens were evicted, or became codes."""
    text = Text(name)
    for count in (50, 1, 17, 1):
        text.append(count)
        text.observe(count)
    return text


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def stored_after_three_more(text: Text, call: str) -> list[Tensor]:
    """What is stored after 3 more tokens; a policy first observes the queries of the call, if it was an append."""
    if call.startswith("append"):
        text.observe(70 if call == "append many" else 1)
    text.append(3)
    return text.stored()


def failures(total: int) -> list[int]:
    """At which of its allocations a call is refused memory: at the last ones, and at some before."""
    return sorted({*range(1, total + 1, 1 + total // 8), *range(max(1, total - 6), total + 1)})


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_refused_memory_changes_nothing_and_can_be_made_again(name: str, call: str):
    saved, is_append = pickle.dumps(prepared(name)), call.startswith("append")  # copies would share their pages
    before, never_failed = pickle.loads(saved), pickle.loads(saved)
    with Refusing(0) as counted:
        CALLS[call](never_failed)
    evicts = before.cache.evict is not None and is_append  # which it does first, and which may stay done
    expected = never_failed.stored()
    later = stored_after_three_more(never_failed, call)
    allowed = [before.stored(), expected] if call == "forget" else [before.stored()]  # it trims memory after all
    for at in failures(counted.count):
        text = pickle.loads(saved)
        with pytest.raises(MemoryError), Refusing(at):
            CALLS[call](text)
        assert evicts or any(same(text.stored(), state) for state in allowed), at
        CALLS[call](text)
        assert same(text.stored(), expected), at
        assert same(stored_after_three_more(text, call), later), at


@pytest.fixture(autouse=True)
def _no_thread_waits() -> Generator[None]:
    """Nobody holds the lock of a pool after a call that failed: other threads would wait forever."""
    yield
    with ThreadPoolExecutor(1) as other:
        for lock in pool_locks():
            assert other.submit(lock.acquire, timeout=1).result()
            other.submit(lock.release).result()


@pytest.mark.parametrize(
    ("name", "stored"),
    [("rolling int8, short", [19] * 8), ("rolling int8, short", [100, 100]), ("int8", [19] * 4)],
    ids=["evicts plain tokens", "evicts codes", "evicts nothing"],
)
@pytest.mark.parametrize("new", [1, 19, 70, 100])
def test_an_append_that_is_interrupted_after_it_wrote_leaves_all_to_be_cropped(
    name: str, stored: list[int], new: int, monkeypatch: pytest.MonkeyPatch
):
    text, never_failed = Text(name), Text(name)
    for count in stored:
        for each in (text, never_failed):
            each.append(count)
            each.calls += 1

    def interrupted(self: QuantisedStore) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(QuantisedStore, "cached", interrupted)
        text.append(new)
    assert same(text.stored(), never_failed.stored())
    for each in (text, never_failed):
        each.cache.crop(each.cache.min_crop or sum(stored[:-1]))
    assert same(text.stored(), never_failed.stored())
    for each in (text, never_failed):
        each.append(1)
    assert same(text.stored(), never_failed.stored())


IN_PAGES = [name for name, (layout, _, _) in OPTIONS.items() if isinstance(layout, Paged)]


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in IN_PAGES])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_ctrl_c_interrupts_changes_nothing_and_can_be_made_again(name: str, call: str):
    interrupt_everywhere(name, call)


@pytest.mark.parametrize("name", [name for name in IN_PAGES if OPTIONS[name][2] is None])
@pytest.mark.parametrize("call", ["append one", "append many", "select"])
def test_a_call_on_pages_that_ctrl_c_interrupts_changes_nothing(name: str, call: str):
    interrupt_everywhere(name, call)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", IN_PAGES)
@pytest.mark.parametrize("call", CALLS)
def test_tokens_in_pages_that_ctrl_c_changes_halfway_are_lost_and_not_wrong(name: str, call: str):
    interrupt_everywhere(name, call, may_lose=True)


@pytest.mark.parametrize("name", ["paged", "paged int8"])
def test_a_crop_that_ctrl_c_interrupts_while_it_releases_pages_frees_them(name: str, monkeypatch: pytest.MonkeyPatch):
    text, release, calls = prepared(name), PageAllocator.release, itertools.count()

    def interrupted(self: PageAllocator, page: Page) -> None:
        release(self, page)
        if not next(calls):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PageAllocator, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text.cache.crop(20)
    with pytest.raises(ProblemError, match="the tokens are lost"):
        text.stored()
    text.cache.reset()
    text.append(3)
    assert text.cache.tokens == 3


@pytest.mark.parametrize("name", ["find", "fork", "free", "select"])
def test_pages_of_other_sequences_stay_where_ctrl_c_comes(name: str):
    calls: dict[str, Callable[[PagePool, Sequence, Sequence], object]] = {
        "find": lambda pool, one, other: pool.sequence(range(41)),
        "fork": lambda pool, one, other: other.fork(),
        "free": lambda pool, one, other: one.free(),
        "select": lambda pool, one, other: pool.select([one, other], [1, 1, 1]),
    }
    k, v = torch.randn(2, 1, HEADS, 40, DIM)
    for at in range(1, 300):
        pool = PagePool(page=8)
        one = pool.sequence(range(40))
        pool.append([one], k, v)
        other, left = one.fork(), one.fork()
        try:
            with interrupt(at) as interrupted:
                calls[name](pool, one, other)
        except KeyboardInterrupt:
            pass
        else:
            assert at > interrupted.count > 0
            break
        del one, other
        gc.collect()
        assert used_pages(pool) == 5, at
        assert [page.references for page in left.plain] == [1] * 5, at
        assert torch.equal(pool.append([left], k[:, :, :0], v[:, :, :0])[0].dense(), k), at


def interrupt_everywhere(name: str, call: str, *, may_lose: bool = False) -> None:
    """Interrupt a call before some of its lines, and make it again.

    Args:
        may_lose: whether the tokens may be lost instead, if later calls say so.
    """
    saved, is_append = pickle.dumps(prepared(name)), call.startswith("append")
    CALLS[call](pickle.loads(saved))  # angles of sinks are computed once for all
    before, never_failed = pickle.loads(saved), pickle.loads(saved)
    with interrupt(0) as counted:
        CALLS[call](never_failed)
    evicts = is_append and (before.cache.evict is not None or isinstance(before.cache.layout, Rolling))
    expected = never_failed.stored()
    later = stored_after_three_more(never_failed, call)
    for at in range(1, counted.count + 1, 1 + counted.count // 60):
        text = pickle.loads(saved)
        with pytest.raises(KeyboardInterrupt), interrupt(at):
            CALLS[call](text)
        assert text.cache.tokens_seen in (before.cache.tokens_seen, never_failed.cache.tokens_seen - 3), at
        if may_lose and is_lost(text):
            continue
        is_done = not is_append and same(text.stored(), expected)  # before it returned
        assert evicts or is_done or same(text.stored(), before.stored()), at
        if not is_done:
            assert text.cache.tokens_seen == before.cache.tokens_seen, at
            CALLS[call](text)
        assert same(text.stored(), expected), at
        assert same(stored_after_three_more(text, call), later), at


def is_lost(text: Text) -> bool:
    """Whether the tokens are lost, so that the cache can only start anew."""
    try:
        text.stored()
    except ProblemError as error:
        if "the tokens are lost" not in str(error):
            raise
    else:
        return False
    text.cache.reset()
    text.append(3)
    return text.cache.tokens == 3


def test_pages_that_ctrl_c_left_half_written_are_freed_and_not_read(monkeypatch: pytest.MonkeyPatch):
    cache, (k, v) = KVCache(Paged(16), None, Knorm(40)), torch.randn(2, 1, HEADS, 60, DIM)
    cache.append(k, v)
    write = PlainPageMemory.write

    def interrupted(self: PlainPageMemory, *given: Any) -> None:
        write(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PlainPageMemory, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.forget()
    uses: list[Callable[[], object]] = [
        lambda: cache.append(k, v), lambda: cache.observe(k), cache.forget, lambda: cache.crop(60),
        lambda: cache.crop(59), lambda: cache.select(torch.tensor([0])), lambda: cache.steps(64),
        lambda: copy.deepcopy(cache),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ProblemError, match="the tokens are lost"):
            use()
    cache.reset()
    found, _ = cache.append(k, v)
    assert torch.equal(dense(found), k)


STEPS: dict[str, tuple[Layout, Codec | torch.dtype | None, int | None]] = {
    "dense": (Contiguous(), None, 80),
    "rolling, rotated": (Rolling(24, 4, Rope(DIM)), None, None),
    "rolling int8": (Rolling(40, 4, Rope(DIM)), Int8(16, 16), None),
    "int4": (Contiguous(), Int4(16, 16, rotate=True), 80),
    "paged": (Paged(16), None, 80),
    "paged int8": (Paged(16), Int8(16, 16, 16), 80),
    "latent": (Latent(8), None, 80),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_ctrl_c_interrupts_is_made_again(name: str):
    """Before any line; the token that was given up is another one than that of the step that is made."""
    layout, codec, capacity = STEPS[name]
    values = 0 if isinstance(layout, Latent) else 1
    given_up, *tokens = torch.randn(8, 2, 2, HEADS, 1, DIM).unbind()
    saved = KVCache(layout, codec)
    saved.append(*torch.randn(2, 2, HEADS, 45, DIM)[: 1 + values])

    def append(steps: StepCache, token: Tensor) -> list[Tensor]:
        return [dense(t).clone() for t in steps.append(*token[: 1 + values])]

    never_failed = saved.steps(capacity)
    expected = [append(never_failed, token) for token in tokens]
    counting = saved.steps(capacity)
    append(counting, tokens[0])
    with interrupt(0) as counted:
        append(counting, given_up)
    for at in range(1, counted.count + 1, 1 + counted.count // 40):
        steps = saved.steps(capacity)
        append(steps, tokens[0])
        with pytest.raises(KeyboardInterrupt), interrupt(at):
            append(steps, given_up)
        assert steps.position.tolist() == [46, 46], at
        assert [same(append(steps, token), e) for token, e in zip(tokens[1:], expected[1:], strict=True)] == [True] * 6
