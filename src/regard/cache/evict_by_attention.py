"""Eviction by the attention that keys received: H2O, TOVA and SnapKV. See `evict.py` for what policies share.

They need the queries of each step, after they went to `attend`:

    k, v = cache.append(k, v)
    out = attend(q, k, v, mask=Causal())
    cache.observe(q)

A mask that is not causal is passed as well, as it went to `attend`: `cache.observe(q, mask)`.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from regard.cache.evict import Eviction, EvictionState, RecentStay, check_bool, check_whole
from regard.cache.query_observer import QueryAccumulator, QueryWindow, RecentQueries, last_queries
from regard.cache.store import Store
from regard.errors import ProblemError
from regard.integers import as_integer


@dataclass(frozen=True)
class H2O(RecentStay):
    """Heavy hitters: the keys that received the most attention, and recent ones. Zhang et al. 2023, arXiv:2306.14048.

        score[j] = sum over queries i that were observed of A[i, j]            (Algorithm 1)

    The sum of a token starts when it is stored and is dropped when it is evicted.

    Args:
        recent: how many of the last tokens always stay; None: half of the tokens that are not sinks, as in the paper.

    >>> H2O(1024)
    H2O(budget=1024, sinks=4, every=1, recent=510)
    """

    recent_part: ClassVar[int] = 2

    def start(self) -> "EvictionState[H2O]":
        return _SumState(self)


class _SumState(QueryAccumulator[H2O]):
    def accumulate(self, windows: list[QueryWindow], store: Store) -> None:
        k = store.keys()
        for window in windows:
            new = window.column_sums(k)
            self._parts = [pad(old, (0, window.tokens - old.shape[2])) + new for old in self._parts] or [new]

    def scores(self, store: Store) -> Tensor:
        self.check_observed(store)
        self.flush(store)
        return self.values


@dataclass(frozen=True)
class TOVA(Eviction):
    """The keys that the last query attends to, averaged over all heads. Oren et al. 2024, arXiv:2401.06104, §4.

        score[j] = mean over heads of A[last query, j]

    So all heads keep the same tokens. The paper may drop any token; here sinks stay unless sinks=0.

    >>> TOVA(1024, every=16)
    TOVA(budget=1024, sinks=4, every=16)
    """

    @property
    def recent(self) -> int:
        """0: recent tokens have no special place."""
        return 0

    def start(self) -> "EvictionState[TOVA]":
        return _LastQueryState(self)


class _LastQueryState(RecentQueries[TOVA]):
    def scores(self, store: Store) -> Tensor:
        return self.votes(store).mean(1, keepdim=True)


@dataclass(frozen=True)
class SnapKV(Eviction):
    """The keys that the end of the prompt attends to, and their neighbours. Li et al. 2024, arXiv:2404.14469, §4.

        votes[j] = sum over the last `window` queries i of A[i, j]
        score[j] = mean of the votes for the `kernel` keys around j

    The tokens of the window always stay. As in the authors' code they get no votes, and a mean always has `kernel`
    terms: the window's tokens, and what would be before the first token, count as 0.

    Eviction happens once, after the prefill: before the first append of one token, or of fewer than `window` tokens (so
    a prompt may be prefilled in chunks). Generated tokens then add to the budget, as in the paper. `KVCache.forget`,
    which the layers of a transformers model call when their attention has read a prompt, takes the stored tokens for
    the whole prompt: with chunked prefill it evicts after each chunk. After a crop of all generated tokens the prompt
    may go on. The paper speaks of pooling; its authors' code takes the mean.

    Args:
        window: queries that vote; fewer if fewer were observed, or if a crop of many tokens leaves fewer.
        kernel: keys that a vote is spread over, an odd number.
        once: False: evict whenever the cache is over its budget, as the other policies do. Queries that were observed
            with a mask vote once, as the mask counts tokens that are gone.

    >>> SnapKV(1024, kernel=7)
    SnapKV(budget=1024, sinks=4, every=1, window=32, kernel=7, once=True)
    """

    window: int = field(default=32, kw_only=True)
    kernel: int = field(default=5, kw_only=True)
    once: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_whole(self, "window", 1)
        check_bool(self, "once")
        kernel = as_integer(self.kernel)
        if kernel is None or kernel < 1 or not kernel % 2:
            raise ProblemError(f"SnapKV(kernel={self.kernel!r}): expected an odd number of keys, 1 or more.")
        object.__setattr__(self, "kernel", kernel)
        super().__post_init__()

    @property
    def recent(self) -> int:
        """The window."""
        return self.window

    def last(self, kept: int) -> int:
        return self.window

    def start(self) -> "EvictionState[SnapKV]":
        return _VoteState(self)


class _VoteState(RecentQueries[SnapKV]):
    def __init__(self, policy: SnapKV) -> None:
        super().__init__(policy)
        self.need = policy.window
        self._tokens = 0
        self._prompt: int | None = None
        """Tokens of the prompt; None: it may go on."""

    def append(self, k: Tensor, v: Tensor | None) -> None:
        if self._prompt is None and self._tokens and self._is_step(k.shape[2]):
            self._prompt = self._tokens
        self._tokens += k.shape[2]

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self._tokens = tokens
        if self._prompt is not None and tokens <= self._prompt:
            self._prompt = None

    def choose(self, store: Store, coming: int) -> Tensor | None:
        if self.policy.once and (self._prompt is not None or not self._is_step(coming)):
            return None
        return super().choose(store, coming)

    def _is_step(self, tokens: int) -> bool:
        """Whether an append of this many tokens is a decode step, and not a chunk of a prompt."""
        return 0 < tokens < max(2, self.need)

    def add(self, window: QueryWindow, store: Store) -> None:
        if not self.policy.once or self._prompt is None:
            super().add(window, store)

    def scores(self, store: Store) -> Tensor:
        before = self.votes(store)[:, :, : -self.need]
        pooled = avg_pool1d(before, self.policy.kernel, stride=1, padding=self.policy.kernel // 2)
        return pad(pooled, (0, self.need))

    def keep(self, index: Tensor) -> None:
        windows, evicted = self.windows, self.observed - index.shape[2]
        super().keep(index)
        self._tokens = index.shape[2]
        if not self.policy.once:  # the window's tokens stay, so its queries vote again; a mask has the old indices
            self.windows = [w.shifted(evicted) for w in last_queries(windows, self.need) if w.mask is None]
