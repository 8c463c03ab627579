"""States of policies that read queries: which queries they store, and how much attention each key received.

Attention weights are computed again from queries and keys when they are needed. A policy that needs every query once
(`QueryAccumulator`) collects the queries of small steps, so that one product serves many of them. A policy that needs
only the last queries (`RecentQueries`) computes nothing before tokens are evicted.

    sums[j] = sum over queries i of A[i, j],     A[i, :] = softmax over the keys that i may see

A tile is a few whole rows of A, which fit into the CPU caches. Whole rows, so that the softmax of each is known; the
tile is summed over its rows and dropped. No n x n matrix is stored: memory is one tile for any number of queries.

Where earlier tokens were evicted, keys have indices in the cache and not positions: every stored key is visible to
every new query, and among the new tokens the mask decides. This is a causal mask with the queries at the last keys.

A softcap or a bias does not count, as in the papers. Modules of `regard.nn` that have one refuse these policies; in a
model of transformers with a softcap, such as Gemma 2, the policy computes weights without it.
"""

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.cache.evict import E, EvictionState
from regard.cache.store import Store
from regard.describe.mask import CallSizes, Mask, broadcast_shape_of, kept_pairs
from regard.describe.mask_by_rule import Causal
from regard.describe.mask_by_table import TensorMask
from regard.describe.spec import bound_to
from regard.errors import ProblemError
from regard.wide import wide_of

TILE = 2**20
"""Weights in a tile: 4 MiB of float32."""

ROWS = 16
"""Queries per tile below which heads are computed one by one, with more rows each: a product of few rows is slow."""


class QueryWindow(NamedTuple):
    """Consecutive queries, and their place among the keys of a cache.

    Attributes:
        q: [batch, heads, queries, qk_dim].
        mask: bound to its call; None: `Causal()`.
        scale: of the scores.
        first: the index of the first query among the keys.
        tokens: keys in the cache when the queries were observed.
        evicted: tokens that were evicted before, so query i is token `evicted + first + i` of the sequence.
        rows: int64 [batch], the batch rows of the mask that the rows of q have.
    """

    q: Tensor
    mask: Mask | None
    scale: float
    first: int
    tokens: int
    evicted: int
    rows: Tensor

    @classmethod
    def last(
        cls, q: Tensor, tokens: int, mask: Mask | None = None, scale: float | None = None, seen: int = 0
    ) -> "QueryWindow":
        """Queries at the last of `tokens` keys.

        Args:
            seen: tokens of the sequence so far, evicted ones included; 0: `tokens`.

        Raises:
            ProblemError: the mask does not fit.
        """
        batch, heads, queries, dim = q.shape
        first = tokens - queries
        if mask is not None and not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"mask is {type(mask).__name__}: expected a regard mask as it went to attend, or None.")
        if mask is not None:
            mask = None if type(mask) is Causal else bound_to(mask, CallSizes(batch, heads, queries, tokens, first))
        rows = torch.arange(batch, device=q.device)
        return cls(q, mask, dim**-0.5 if scale is None else scale, first, tokens, max(seen - tokens, 0), rows)

    @property
    def queries(self) -> int:
        """How many queries."""
        return self.q.shape[2]

    def between(self, start: int, stop: int) -> "QueryWindow":
        """Its queries start <= i < stop."""
        return self._replace(q=self.q[:, :, start:stop], first=self.first + start)

    def cropped(self, tokens: int) -> "QueryWindow":
        """Its queries among the first `tokens` keys; there is at least one."""
        window = self.between(0, tokens - self.first) if tokens < self.first + self.queries else self
        return window._replace(tokens=min(self.tokens, tokens))

    def selected(self, rows: Tensor) -> "QueryWindow":
        """The queries of these batch rows."""
        return self._replace(q=self.q[rows], rows=self.rows[rows])

    def shifted(self, evicted: int) -> "QueryWindow":
        """The window after an eviction of tokens before it. It must have no mask, which would have the old indices."""
        return self._replace(first=self.first - evicted, tokens=self.tokens - evicted, evicted=self.evicted + evicted)

    def copied(self) -> "QueryWindow":
        """The window with memory of its own, so that a few queries do not keep a whole prompt in memory."""
        return self._replace(q=self.q.clone())

    def kept(self) -> "QueryWindow":
        """The window to be read later: a copy, whose mask is what it is now, even if its tensors are written to."""
        window = self.copied()
        if self.mask is None or self.mask.constant() is not None:
            return window
        batch, heads = (torch.arange(size, device=self.q.device) for size in broadcast_shape_of(self.mask))
        q = torch.arange(self.first, self.first + self.queries, device=self.q.device)[:, None]
        k = torch.arange(self.tokens, device=self.q.device)
        pairs = kept_pairs(self.mask, batch[:, None, None, None], heads[:, None, None], q, k)
        return window._replace(mask=TensorMask(pairs.clone(), self.first))

    def follows(self, other: "QueryWindow") -> bool:
        """Whether its queries come right after those of the other, both with a causal mask."""
        is_next = (self.scale, self.first, self.evicted) == (other.scale, other.tokens, other.evicted)
        return self.mask is other.mask is None and is_next

    def is_not_padding(self) -> Tensor:
        """Whether a query sees its own token, as all do except padding: bool, broadcasts to [batch, heads, queries]."""
        own = torch.arange(self.first, self.first + self.queries, device=self.q.device)
        if self.mask is None:
            return torch.ones_like(own, dtype=torch.bool)[None, None]
        heads = torch.arange(self.q.shape[1], device=own.device)
        kept = self.mask.keep(self.rows[:, None, None], heads[:, None], own, own)
        return kept[(None,) * (3 - kept.ndim)]

    def column_sums(self, k: Tensor) -> Tensor:
        """How much attention each key received: sums over queries, means over the query heads that share a key head.

        Args:
            k: [batch, kv_heads, keys, qk_dim]; only the first `tokens` keys are read.

        Returns:
            [batch, kv_heads, tokens], float32; float64 for float64.

        >>> q = k = torch.eye(3)[None, None]
        >>> QueryWindow.last(q, 3, scale=1.0).column_sums(k)[0, 0]  # of [[1, 0, 0], [.27, .73, 0], [.21, .21, .58]]
        tensor([1.4809, 0.9430, 0.5761])
        """
        k = k[:, :, : self.tokens]
        (batch, kv_heads, keys, _), group = k.shape, self.q.shape[1] // k.shape[1]
        dtype = wide_of(self.q.dtype)
        sums = torch.zeros(batch, kv_heads, keys, dtype=dtype, device=k.device)
        if not batch:
            return sums
        rows = TILE // max(1, batch * kv_heads * group * keys)
        blocks = [(slice(0, batch), slice(0, kv_heads))]
        if rows < min(self.queries, ROWS) or (k.dtype != dtype and k.numel() > TILE):
            blocks = [(slice(b, b + 1), slice(h, h + 1)) for b in range(batch) for h in range(kv_heads)]
            rows = max(1, TILE // (group * keys))
        for b, h in blocks:
            of_heads = k[b, h].to(dtype)
            for start in range(0, self.queries, rows):
                stop = min(start + rows, self.queries)
                visible = keys if self.mask is not None else self.first + stop
                heads = slice(h.start * group, h.stop * group)
                sums[b, h, :visible] += self._tile(of_heads[:, :, :visible], b, heads, start, stop)
        return sums / group

    def _tile(self, k: Tensor, batch: slice, heads: slice, start: int, stop: int) -> Tensor:
        """The column sums of queries start <= i < stop of some heads, summed over the query heads of each key head."""
        q = self.q[batch, heads, start:stop].to(k.dtype) * self.scale
        s = q.reshape(*k.shape[:2], -1, k.shape[3]) @ k.mT  # rows of all query heads of a group
        self._hide(s.view(*q.shape[:3], -1), batch, heads, start)
        peak = s.amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).min)  # a row without visible keys: exp gives 0
        weights = s.sub_(peak).exp_()
        total = weights.sum(-1).clamp_min(1.0)  # the largest is exp(0) = 1, so this changes empty rows alone
        return (total.reciprocal()[:, :, None] @ weights)[:, :, 0]

    def _hide(self, s: Tensor, batch: slice, heads: slice, start: int) -> None:
        """Write -inf where the mask hides a pair: [batch, heads, rows, keys], rows from query `start` on."""
        rows, keys = s.shape[2:]
        if self.mask is None and rows > 1:
            later = torch.ones(rows, rows, dtype=torch.bool, device=s.device).triu(1)
            s[..., self.first + start :].masked_fill_(later, -torch.inf)
        elif self.mask is not None:
            b = self.rows[batch, None, None, None]
            h = torch.arange(heads.start, heads.stop, device=s.device)[:, None, None]
            q = torch.arange(self.first + start, self.first + start + rows, device=s.device)[:, None]
            s.masked_fill_(~self.mask.keep(b, h, q, torch.arange(keys, device=s.device)), -torch.inf)


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
    """A state that needs every query once; abstract. It stores a few until there are more, or until they are needed.

    What it knew before the last queries that it did not store remains, so that a crop of all tokens of a long call
    leaves no trace. After a crop of some of them, the queries of the others still count.
    """

    def __init__(self, policy: E) -> None:
        super().__init__(policy)
        self._before: tuple[int, QueryAccumulator[E]] | None = None
        """The first key of the last long call, and a copy from before its queries were read."""

    def add(self, window: QueryWindow, store: Store) -> None:
        if sum(earlier.queries for earlier in self.windows) + window.queries > BUFFERED:
            self.flush(store)
        if window.queries > BUFFERED:
            self._before = None
            before = copy.copy(self)
            before.windows, before._parts = [], [*self._parts]  # lists that this state will append to
            self._before = window.first, before
            self.accumulate([window], store)
        else:
            self.windows = [*self.windows, window.kept()]

    def keep(self, index: Tensor) -> None:
        self._before = None
        super().keep(index)

    def crop(self, tokens: int) -> None:
        if self._before is not None and tokens <= self._before[0]:
            self.__dict__.update(self._before[1].__dict__)
        super().crop(tokens)

    def select(self, rows: Tensor) -> None:
        if self._before is not None:
            before = copy.copy(self._before[1])
            before.select(rows)
            self._before = self._before[0], before
        super().select(rows)

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
        self.windows[-1] = self.windows[-1].kept()

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
