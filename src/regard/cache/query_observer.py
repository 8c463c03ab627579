"""States of policies that read queries: which queries they store, and for how long.

Attention weights are computed again from queries and keys when they are needed (`column_sums.py`). A policy that needs
every query once (`QueryAccumulator`) collects the queries of small steps, so that one product serves many of them. A
policy that needs only the last queries (`RecentQueries`) computes nothing before tokens are evicted.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.cache.column_sums import QueryWindow
from regard.cache.evict import E, EvictionState
from regard.cache.store import Store
from regard.describe.mask import Mask
from regard.errors import ProblemError

BUFFERED = 32
"""Queries that are collected, or stored beyond need; this many drafts can be cropped without a trace."""


class QueryObserver(EvictionState[E]):
    """A state that reads queries; abstract. `windows` are the queries that it stores, in order."""

    def __init__(self, policy: E) -> None:
        super().__init__(policy)
        self.windows: list[QueryWindow] = []
        self.observed = 0  # keys in the cache when the last queries were observed

    def observe(self, q: Tensor, store: Store, mask: Mask | None, scale: float | None) -> None:
        new = store.tokens - self.observed
        if q.shape[2] > new:
            raise ProblemError(
                f"{q.shape[2]} queries were observed and only {new} tokens were appended since the last ones: observe "
                "the queries of each step once, after their keys were appended."
            )
        if q.shape[2]:
            self.add(QueryWindow.last(q, store.tokens, mask, scale, seen=store.tokens_seen), store)
            self.observed = store.tokens

    def add(self, window: QueryWindow, store: Store) -> None:
        """Read queries, or store them."""
        raise NotImplementedError(f"{type(self).__name__}.add")

    def check_observed(self, store: Store) -> None:
        """Raise `ProblemError` unless the queries of the last tokens were observed."""
        if self.observed != store.tokens:
            raise ProblemError(
                f"{self.policy!r} chooses by queries, and those of the last {store.tokens - self.observed} tokens were "
                "not observed: call cache.observe(q) after each append, with the queries that went to attend. After a "
                "crop observe the queries of the last remaining tokens again."
            )

    def keep(self, index: Tensor) -> None:
        super().keep(index)
        self.windows, self.observed = [], index.shape[2]

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self.windows = [window.cropped(tokens) for window in self.windows if window.first < tokens]
        self.observed = min(self.observed, tokens)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.windows = [window.selected(rows) for window in self.windows]


class QueryAccumulator(QueryObserver[E]):
    """A state that needs every query once; abstract. It stores a few until there are more, or until they are needed."""

    def add(self, window: QueryWindow, store: Store) -> None:
        if sum(earlier.queries for earlier in self.windows) + window.queries > BUFFERED:
            self.flush(store)
        if window.queries > BUFFERED:
            self.accumulate([window], store)
        else:
            self.windows.append(window.copied())

    def flush(self, store: Store) -> None:
        """Read all stored queries."""
        if self.windows:
            self.accumulate(_join(self.windows), store)
            self.windows = []

    def accumulate(self, windows: list[QueryWindow], store: Store) -> None:
        """Read queries."""
        raise NotImplementedError(f"{type(self).__name__}.accumulate")


def _join(windows: Iterable[QueryWindow]) -> list[QueryWindow]:
    """The same queries in fewer windows."""
    runs: list[list[QueryWindow]] = []
    for window in windows:
        if runs and window.follows(runs[-1][-1]):
            runs[-1].append(window)
        else:
            runs.append([window])
    return [
        run[0]._replace(q=torch.cat([window.q for window in run], dim=2), tokens=run[-1].tokens)
        if len(run) > 1
        else run[0]
        for run in runs
    ]


class RecentQueries(QueryObserver[E]):
    """A state that needs only the last `need` queries; abstract. It stores more, because drafts may be cropped.

    It stores at least `need` queries from before the last call, so that a crop of all tokens of that call leaves no
    trace, whatever their number. After a larger crop the queries of the last remaining tokens may be observed again.
    """

    need = 1

    def add(self, window: QueryWindow, store: Store) -> None:
        before = last_queries(self.windows, max(self.need, self.need + BUFFERED - window.queries))
        self.windows = [*before, *last_queries([window], self.need + BUFFERED)]
        self.windows[-1] = self.windows[-1].copied()

    def votes(self, store: Store) -> Tensor:
        """The column sums of the last `need` queries, [batch, kv_heads, tokens]."""
        self.check_observed(store)
        k, tokens = store.keys(), store.tokens
        sums = [window.column_sums(k) for window in _join(last_queries(self.windows, self.need))]
        return torch.stack([pad(one, (0, tokens - one.shape[2])) for one in sums]).sum(0)

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self.observed = self.windows[-1].tokens if self.windows else 0  # so that queries may be observed again


def last_queries(windows: list[QueryWindow], queries: int) -> list[QueryWindow]:
    """The windows of the last `queries` queries."""
    last: list[QueryWindow] = []
    for window in reversed(windows):
        if queries > 0:
            is_whole = window.queries <= queries
            last.insert(0, window if is_whole else window.between(window.queries - queries, window.queries).copied())
        queries -= window.queries
    return last
