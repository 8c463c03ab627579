"""What policies that look at queries keep of them while a cache runs: those that wait to be looked at, and no more.

Weights are computed again from queries and keys where they are needed (`column_sums.py`). Who needs every query once
(`Folding`) lets small steps wait for one another, so that one product serves many; who needs the last ones alone
(`Recalling`) computes nothing before tokens go.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.cache.column_sums import Asked
from regard.cache.evict import Tally, W
from regard.cache.store import Store
from regard.describe.mask import Mask
from regard.errors import ProblemError

WAIT = 32
"""Queries that wait for one another, and are held beyond need; as many drafts may be cropped without a trace."""


class Hearing(Tally[W]):
    """A tally that looks at queries; abstract. Those that wait are in `asked`, in order."""

    def __init__(self, policy: W) -> None:
        super().__init__(policy)
        self.asked: list[Asked] = []
        self.heard = 0  # keys that there were when the last queries came

    def observe(self, q: Tensor, store: Store, mask: Mask | None, scale: float | None) -> None:
        new = store.tokens - self.heard
        if q.shape[2] > new:
            raise ProblemError(
                f"{q.shape[2]} queries were observed and only {new} tokens were appended since the last ones: observe "
                "the queries of each step once, after their keys were appended."
            )
        if q.shape[2]:
            self.take(Asked.of(q, store.tokens, mask, scale, seen=store.tokens_seen), store)
            self.heard = store.tokens

    def take(self, asked: Asked, store: Store) -> None:
        """Look at queries, or let them wait."""
        raise NotImplementedError(f"{type(self).__name__}.take")

    def check_heard(self, store: Store) -> None:
        """Raise unless the queries of the last tokens came."""
        if self.heard != store.tokens:
            raise ProblemError(
                f"{self.policy!r} chooses by queries, and those of the last {store.tokens - self.heard} tokens never "
                "came: call cache.observe(q) after each append, with the queries that went to attend. After a crop "
                "show those of the last tokens that are left again."
            )

    def keep(self, index: Tensor) -> None:
        super().keep(index)
        self.asked, self.heard = [], index.shape[2]

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self.asked = [asked.cropped(tokens) for asked in self.asked if asked.first < tokens]
        self.heard = min(self.heard, tokens)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.asked = [asked.selected(rows) for asked in self.asked]


class Folding(Hearing[W]):
    """A tally that needs every query once; abstract. Few wait until they are many, or until they are needed."""

    def take(self, asked: Asked, store: Store) -> None:
        if sum(waiting.queries for waiting in self.asked) + asked.queries > WAIT:
            self.settle(store)
        if asked.queries > WAIT:
            self.fold([asked], store)
        else:
            self.asked.append(asked.copied())

    def settle(self, store: Store) -> None:
        """Look at all that wait."""
        if self.asked:
            self.fold(_joined(self.asked), store)
            self.asked = []

    def fold(self, asked: list[Asked], store: Store) -> None:
        """Look at queries."""
        raise NotImplementedError(f"{type(self).__name__}.fold")


def _joined(asked: Iterable[Asked]) -> list[Asked]:
    """The same queries in fewer pieces."""
    runs: list[list[Asked]] = []
    for one in asked:
        if runs and one.follows(runs[-1][-1]):
            runs[-1].append(one)
        else:
            runs.append([one])
    return [
        run[0]._replace(q=torch.cat([one.q for one in run], dim=2), tokens=run[-1].tokens) if len(run) > 1 else run[0]
        for run in runs
    ]


class Recalling(Hearing[W]):
    """A tally that needs the last `need` queries alone; abstract. More are held, for drafts may be cropped.

    Of those before the last call `need` at least, so that a crop of all of that call leaves no trace, of whatever size
    it was. After a crop further back, queries of the last tokens that are left may be shown again.
    """

    need = 1

    def take(self, asked: Asked, store: Store) -> None:
        before = latest(self.asked, max(self.need, self.need + WAIT - asked.queries))
        self.asked = [*before, *latest([asked], self.need + WAIT)]
        self.asked[-1] = self.asked[-1].copied()

    def votes(self, store: Store) -> Tensor:
        """The column sums of the last `need` queries, [batch, kv_heads, tokens]."""
        self.check_heard(store)
        k, tokens = store.keys(), store.tokens
        sums = [one.column_sums(k) for one in _joined(latest(self.asked, self.need))]
        return torch.stack([pad(one, (0, tokens - one.shape[2])) for one in sums]).sum(0)

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self.heard = self.asked[-1].tokens if self.asked else 0  # so that queries may be shown again


def latest(asked: list[Asked], queries: int) -> list[Asked]:
    """The last so many queries."""
    found: list[Asked] = []
    for one in reversed(asked):
        if queries > 0:
            found.insert(0, one if one.queries <= queries else one.between(one.queries - queries, one.queries).copied())
        queries -= one.queries
    return found
