"""Eviction: which tokens of a cache are forgotten when there are more than its budget.

A policy is a word, a frozen value, with its paper. What it looks at while a cache runs stands in a `Tally`, which
`start()` makes for each cache, so one word serves all layers. All policies share one frame:

    sinks          the middle                                                        recent
    0 1 2 3 | 4 5 6 7 ...         the tokens of the highest scores stay         ... | n-2 n-1

`budget` tokens stay per key head, each head its own ones (`SinksAndRecent` and `TOVA`: all the same), and the first
`sinks` are never dropped unless told to, by sinks=0: models put much of their attention there, and without them
they fail (Xiao et al. 2023, arXiv:2309.17453, §3). It happens at the start of an append, so a step always sees all its
own tokens, or before, by `KVCache.forget`; the store frees what was dropped. With grouped-query attention, a key's
score is the mean over the query heads of its group.

The policies that look at queries are in `evict_by_attention.py` and `expected_attention.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from regard.cache.store import Store, check_has_data
from regard.describe.whole_number import whole_field
from regard.errors import ProblemError

W = TypeVar("W", bound="Eviction")


@dataclass(frozen=True)
class Eviction:
    """Which tokens are forgotten; abstract: `SinksAndRecent`, `Knorm`, `H2O`, `TOVA`, `SnapKV`, `ExpectedAttention`.

    Args:
        budget: tokens that stay per key head, sinks and recent ones included; or a share of the tokens that were seen,
            0 < share < 1.
        sinks: so many of the first tokens always stay.
        every: how many tokens over the budget gather before it is enforced. What stays is copied each time, so 32 is
            about 32 times cheaper than 1, for 31 more tokens held.

    Raises:
        ProblemError: numbers that make no sense.
    """

    budget: int | float
    sinks: int = field(default=4, kw_only=True)
    every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_whole(self, "sinks", 0)
        check_whole(self, "every", 1)
        budget, least = self.budget, self.sinks + self.last(0) + 1
        if isinstance(budget, bool) or not isinstance(budget, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"{self._name}(budget={budget!r}): expected a number of tokens, or a share below 1.")
        if isinstance(budget, float) and not 0 < budget < 1:
            raise ProblemError(
                f"{self._name}(budget={budget!r}): a float is the share of the tokens that stays, between 0 and 1; "
                "give tokens as an int."
            )
        if isinstance(budget, int) and budget < least:
            raise ProblemError(
                f"{self._name}(budget={budget}): {self.sinks} sinks and {self.last(0)} recent tokens always stay, so "
                f"it must be at least {least} for anything to choose."
            )

    def start(self) -> "Tally[Any]":
        """What one cache keeps for this policy, empty."""
        raise NotImplementedError(f"{type(self).__name__}.start")

    def last(self, kept: int) -> int:
        """How many of the last tokens always stay where `kept` stay in all; of kept=0, what holds for any number."""
        return 0

    def kept(self, seen: int) -> int:
        """How many tokens stay of so many that were seen."""
        if isinstance(self.budget, int):
            return self.budget
        return max(math.ceil(self.budget * seen), self.sinks + self.last(0) + 1)

    @property
    def _name(self) -> str:
        return type(self).__name__


class Tally(Generic[W]):
    """What a policy has seen in one cache: numbers per token that is kept, which follow the cache; abstract.

    `KVCache` tells it what happens (`append`, `observe`, `keep`, `crop`, `select`) and asks what to keep (`choose`).
    """

    def __init__(self, policy: W) -> None:
        self.policy = policy
        self._parts: list[Tensor] = []  # joined when they are asked for: joining each step would copy all each step

    @property
    def numbers(self) -> Tensor:
        """A number per token that is kept, [batch, kv_heads, tokens]."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, dim=2)]
        return self._parts[0]

    def append(self, k: Tensor, v: Tensor | None) -> None:
        """These were stored: [batch, kv_heads, tokens, dim]."""

    def observe(self, q: Tensor, store: Store, mask: Any, scale: float | None) -> None:
        """Look at the queries of this step; most need none."""

    def choose(self, store: Store, coming: int) -> Tensor | None:
        """The tokens to keep, int64 [batch, kv_heads, kept], ascending, before `coming` new ones; None: all stay."""
        kept = self.policy.kept(store.tokens_seen)
        if not coming or store.tokens < kept + self.policy.every:
            return None
        return self._choose(store, kept)

    def keep(self, index: Tensor) -> None:
        """The store keeps only these."""
        if self._parts:
            self._parts = [self.numbers.gather(2, index)]

    def crop(self, tokens: int) -> None:
        """The store keeps only its first `tokens` tokens."""
        if self._parts:
            self._parts = [self.numbers[:, :, :tokens]]

    def select(self, rows: Tensor) -> None:
        """Batch row i is what row `rows[i]` was."""
        self._parts = [part[rows] for part in self._parts]

    def _choose(self, store: Store, kept: int) -> Tensor:
        scores = self.scores(store).expand(-1, store.form.kv_heads, -1)
        return highest(scores, kept, self.policy.sinks, self.policy.last(kept))

    def scores(self, store: Store) -> Tensor:
        """How much each token should stay, [batch, kv_heads or 1, tokens]."""
        raise NotImplementedError(f"{type(self).__name__}.scores")


ROUNDING = 32
"""Units in the last place by which scores of equal tokens may differ: products of other sizes add in another order."""


def highest(scores: Tensor, kept: int, first: int, last: int) -> Tensor:
    """The places of the `first` tokens, the `last` ones, and between them those of the highest scores: `kept` in all.

    Of scores that are equal but for rounding, the later tokens stay: a row of a batch keeps what it keeps alone. Only
    where scores differ by a little more, some 1e-5 of their size, may the rounding of a batch still decide.

    Args:
        scores: [batch, kv_heads, tokens].

    Returns:
        int64 [batch, kv_heads, kept], ascending.

    >>> highest(torch.tensor([[[0.0, 5.0, 1.0, 3.0, 2.0, 0.0]]]), 4, first=1, last=1)
    tensor([[[0, 1, 3, 5]]])
    """
    check_has_data(scores, "a policy that chooses tokens")
    tokens = scores.shape[2]
    middle, count = scores[:, :, first : tokens - last], tokens - kept
    edge = middle.kthvalue(count, dim=2, keepdim=True).values
    is_tied = (middle - edge).abs() <= edge.abs() * (ROUNDING * torch.finfo(scores.dtype).eps)
    gone = torch.where(is_tied, edge, middle).argsort(dim=2, stable=True)[:, :, :count] + first
    stays = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).scatter_(2, gone, False)
    return stays.nonzero()[:, 2].view(*scores.shape[:2], kept)


@dataclass(frozen=True)
class SinksAndRecent(Eviction):
    """The first tokens and the last ones. Xiao et al. 2023, StreamingLLM, arXiv:2309.17453, §3.2.

    Keys keep the positions that they came with, where the paper counts positions inside the cache: `Rolling` does
    that, and copies nothing; take it where sequences grow longer than the model was trained for.

    >>> SinksAndRecent(1024)
    SinksAndRecent(budget=1024, sinks=4, every=1)
    """

    @property
    def recent(self) -> int | None:
        """How many of the last tokens stay; None where it is a share."""
        return self.budget - self.sinks if isinstance(self.budget, int) else None

    def start(self) -> "Tally[SinksAndRecent]":
        return _Places(self)


class _Places(Tally[SinksAndRecent]):
    def _choose(self, store: Store, kept: int) -> Tensor:
        places = torch.arange(kept, device=store.form.device)
        places[self.policy.sinks :] += store.tokens - kept
        return places.expand(store.form.batch, store.form.kv_heads, -1).contiguous()


@dataclass(frozen=True)
class Knorm(Eviction):
    """The keys of the smallest Euclidean norm. Devoto et al. 2024, arXiv:2406.11430.

        score[j] = -|k[j]|

    Models give small keys much attention, the paper finds, so no query need be seen. The paper leaves the first two
    layers whole: `regard_cache(model, evict=[None, None, *[Knorm(1024)] * 28])` does so.

    Where a model normalises its keys (QK-norm) without trained weights, all keys have the same norm up to some 1e-5, so
    this rule has nothing to choose by: rounding decides, and a row may keep other tokens in a padded batch than alone.

    Args:
        recent: how many of the last tokens always stay; None: a quarter of what is not sinks. The paper, which forgets
            once, after the prompt, keeps none. Forgetting at each step needs some: a token of a large key would go as
            soon as it came, and perplexity more than doubles (docs/caches.md).

    >>> Knorm(1024)
    Knorm(budget=1024, sinks=4, every=1, recent=255)
    """

    recent: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.recent is not None:
            check_whole(self, "recent", 0)
        elif isinstance(self.budget, int) and isinstance(self.sinks, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "recent", max(0, self.budget - self.sinks) // 4)
        super().__post_init__()

    def last(self, kept: int) -> int:
        return max(0, kept - self.sinks) // 4 if self.recent is None else self.recent

    def start(self) -> "Tally[Knorm]":
        return _Norms(self)


class _Norms(Tally[Knorm]):
    def append(self, k: Tensor, v: Tensor | None) -> None:
        self._parts.append(norms(k))

    def scores(self, store: Store) -> Tensor:
        return -self.numbers


def norms(x: Tensor) -> Tensor:
    """The Euclidean norms of tokens, [batch, kv_heads, tokens], float32; float64 for float64."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype)


def check_bool(policy: Eviction, name: str) -> None:
    """Raise `ProblemError` unless the field is True or False."""
    if not isinstance(getattr(policy, name), bool):
        raise ProblemError(f"{type(policy).__name__}({name}={getattr(policy, name)!r}): expected True or False.")


def check_whole(policy: Eviction, name: str, least: int) -> None:
    """Make the field an int; raise `ProblemError` unless it is a whole number of at least `least`."""
    whole_field(policy, name, least=least)
