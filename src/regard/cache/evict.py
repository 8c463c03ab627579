"""Eviction policies: which tokens of a cache are removed when there are more than its budget.

A policy is a frozen value, with its paper. What it observes while a cache runs is in an `EvictionState`, which
`start()` creates for each cache, so one policy serves all layers. All policies have this structure:

    sinks          the middle                                                        recent
    0 1 2 3 | 4 5 6 7 ...         the tokens with the highest scores stay       ... | n-2 n-1

`budget` tokens stay per key head. Each head keeps its own tokens; with `SinksAndRecent` and `TOVA` all heads keep the
same. The first `sinks` tokens always stay, because models put much of their attention there and fail without them (Xiao
et al. 2023, arXiv:2309.17453, §3); sinks=0 turns this off. Eviction happens at the start of an append, so a step always
sees all its own tokens, or earlier, by `KVCache.forget`; the store then frees memory. With grouped-query attention, the
score of a key is the mean over the query heads of its group.

Policies that read queries are in `evict_by_attention.py` and `expected_attention.py`.
"""

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from regard.cache.store import Store, check_has_data, describe_tensor
from regard.describe.whole_number import whole, whole_field
from regard.errors import ProblemError
from regard.integers import as_integer
from regard.wide import wide_of

E = TypeVar("E", bound="Eviction")


@dataclass(frozen=True)
class Eviction:
    """Which tokens are evicted; abstract: `SinksAndRecent`, `Knorm`, `H2O`, `TOVA`, `SnapKV`, `ExpectedAttention`.

    A subclass is a frozen dataclass. It has `recent`, how many of the last tokens always stay, an int or None (a field
    or a property), and defines `start`. It overrides `last` where that number depends on how many tokens stay.

    Args:
        budget: tokens that stay per key head, sinks and recent ones included; or a share of the tokens that were seen,
            0 < share < 1. Numbers of NumPy are taken as well, here and in all that follows.
        sinks: how many of the first tokens always stay.
        every: how many tokens over the budget are collected before it is enforced. The remaining tokens are copied each
            time, so 32 is about 32 times cheaper than 1, for 31 more tokens in memory.

    Raises:
        ProblemError: a number out of range.
    """

    budget: int | float
    sinks: int = field(default=4, kw_only=True)
    every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_whole(self, "sinks", 0)
        check_whole(self, "every", 1)
        check_budget(self)
        budget = self.budget
        if isinstance(budget, float) and not 0 < budget < 1:
            raise ProblemError(
                f"{self._name}(budget={budget!r}): a float is the share of the tokens that stays, between 0 and 1; "
                "give tokens as an int."
            )
        check_recent(self)
        least = self.sinks + self.last(0) + 1
        if isinstance(budget, int) and budget < least:
            raise ProblemError(
                f"{self._name}(budget={budget}): {self.sinks} sinks and {self.last(0)} recent tokens always stay, so "
                f"it must be at least {least} for anything to choose."
            )

    def start(self) -> "EvictionState[Any]":
        """The state for one new cache; every subclass defines it."""
        raise ProblemError(
            f"{self._name} does not define start(), which creates the EvictionState of a new cache: see "
            "docs/extending.md, An eviction policy."
        )

    def last(self, kept: int) -> int:
        """How many of the last tokens always stay if `kept` stay in all; kept=0: the minimum for any number."""
        return getattr(self, "recent", None) or 0

    def kept(self, seen: int) -> int:
        """How many tokens stay when `seen` were seen."""
        if isinstance(self.budget, int):
            return self.budget
        return max(_rounded_up(self.budget * seen), self.sinks + self.last(0) + 1)

    @property
    def _name(self) -> str:
        return type(self).__name__


def _rounded_up(tokens: float) -> int:
    """A number of tokens, rounded up, unless it is a whole one except for the rounding of a float.

    >>> 0.55 * 100, _rounded_up(0.55 * 100), _rounded_up(0.55 * 101)
    (55.00000000000001, 55, 56)
    """
    nearest = round(tokens)
    return nearest if math.isclose(tokens, nearest, rel_tol=1e-12) else math.ceil(tokens)


class EvictionState(Generic[E]):
    """What a policy has observed in one cache, one value per stored token; abstract.

    `KVCache` reports every change to it (`append`, `observe`, `keep`, `crop`, `select`) and calls `choose`. A subclass
    defines `scores`, which reads all keys by `store.keys()`. What it needs of values it computes in `append`, which
    receives them, and stores by `record`: one value per token. Only `append` may change an attribute in place: the
    other methods are called on a shallow copy (see `PolicyState`).
    """

    def __init__(self, policy: E) -> None:
        self.policy = policy
        self._parts: list[Tensor] = []  # concatenated only when read: at each step it would copy all values

    @property
    def values(self) -> Tensor:
        """One value per stored token, [batch, kv_heads, tokens].

        Raises:
            ProblemError: nothing was recorded.
        """
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, dim=2)]
        if not self._parts:
            raise ProblemError(f"{type(self).__name__}.values: nothing was recorded; call record(values) in append.")
        return self._parts[0]

    def record(self, values: Tensor) -> None:
        """Add a value of each new token, [batch, kv_heads, tokens], to `values`; evicted tokens lose theirs.

        `KVCache` checks the shape at its first append.
        """
        self._parts.append(values)

    def check_recorded(self, k: Tensor) -> None:
        """Raise `ProblemError` unless the first append, of the keys k, recorded one value per token, or nothing."""
        (batch, kv_heads, tokens), parts = k.shape[:3], cast("list[object]", self._parts)  # a user's may be anything
        right = [t for t in parts if isinstance(t, Tensor) and t.ndim == 3 and t.shape[:2] == (batch, kv_heads)]
        if not parts or (len(right) == len(parts) and sum(t.shape[2] for t in right) == tokens):
            return
        found = ", ".join(describe_tensor(t) if isinstance(t, Tensor) else type(t).__name__ for t in parts)
        raise ProblemError(
            f"{type(self).__name__}.append(k, v) recorded {found}: expected a value of each new token, "
            f"[batch, kv_heads, tokens] = [{batch}, {kv_heads}, {tokens}]."
        )

    def append(self, k: Tensor, v: Tensor | None) -> None:
        """`KVCache.append` received these tokens: [batch, kv_heads, tokens, dim]; v is None with `Latent`."""

    def observe(self, q: Tensor, store: Store, mask: Any, scale: float | None) -> None:
        """Receive the queries of this step; most policies need none."""

    def choose(self, store: Store, coming: int) -> Tensor | None:
        """The tokens to keep, int64 [batch, kv_heads, kept], ascending, before `coming` new ones; None: all stay."""
        kept = self.policy.kept(store.tokens_seen)
        if not coming or store.tokens < kept + self.policy.every:
            return None
        return self._choose(store, kept)

    def keep(self, index: Tensor) -> None:
        """The store evicts all tokens but these."""
        if self._parts:
            self._parts = [self.values.gather(2, index)]

    def crop(self, tokens: int) -> None:
        """The store removes all but its first `tokens` tokens."""
        if self._parts:
            self._parts = [self.values[:, :, :tokens]]

    def select(self, rows: Tensor) -> None:
        """The store selects batch rows."""
        self._parts = [part[rows] for part in self._parts]

    def _choose(self, store: Store, kept: int) -> Tensor:
        scores = self._checked(self.scores(store), store).expand(-1, store.form.kv_heads, -1)
        return highest(scores, kept, self.policy.sinks, self.policy.last(kept))

    def _checked(self, scores: object, store: Store) -> Tensor:
        """The scores of the tokens in the store.

        Raises:
            ProblemError: `scores` returned no real numbers of the expected shape.
        """
        batch, kv_heads, tokens = store.form.batch, store.form.kv_heads, store.tokens
        shapes = (batch, kv_heads, tokens), (batch, 1, tokens)
        if isinstance(scores, Tensor) and not scores.is_complex() and scores.shape in shapes:
            return scores
        what = describe_tensor(scores) if isinstance(scores, Tensor) else type(scores).__name__
        raise ProblemError(
            f"{type(self).__name__}.scores(store) returned {what}: expected a score of each token that is stored, "
            f"real numbers [batch, kv_heads or 1, tokens] = [{batch}, {kv_heads} or 1, {tokens}]."
        )

    def scores(self, store: Store) -> Tensor:
        """The tokens with the highest scores stay, [batch, kv_heads or 1, tokens]; every subclass defines it."""
        raise ProblemError(
            f"{type(self).__name__} does not define scores(store) -> [batch, kv_heads or 1, tokens], by which the "
            f"{type(self.policy).__name__} chooses: see docs/extending.md, An eviction policy."
        )


def check_chosen(state: object, index: object, store: Store) -> None:
    """Raise `ProblemError` unless the tokens that the `choose` of a user's state gave can be kept."""
    batch, kv_heads, tokens, device = store.form.batch, store.form.kv_heads, store.tokens, store.form.device
    found = describe_tensor(index) if isinstance(index, Tensor) else type(index).__name__
    form = torch.int64, device, (batch, kv_heads)
    if isinstance(index, Tensor) and (index.dtype, index.device, index.shape[:-1]) == form:
        before, after = index.new_full((batch, kv_heads, 1), -1), index.new_full((batch, kv_heads, 1), tokens)
        if bool((torch.cat((before, index, after), 2).diff(dim=2) > 0).all()):
            return
        found += f", tokens from {int(index.min())} to {int(index.max())}"
    raise ProblemError(
        f"{type(state).__name__}.choose(store, coming) returned {found}: expected the tokens to keep of each key head, "
        f"int64 [batch, kv_heads, kept] = [{batch}, {kv_heads}, kept] on {device}, ascending, from 0 to {tokens - 1}; "
        "or None to keep all."
    )


ROUNDING = 32
"""Units in the last place of float32, or of float64, by which scores of equal tokens may differ: other matrix sizes sum
in another order. In bfloat16 they would be a quarter of a score."""


def highest(scores: Tensor, kept: int, first: int, last: int) -> Tensor:
    """The indices of the `first` tokens, the `last` ones, and those with the highest scores between: `kept` in all.

    Of scores that are equal except for rounding, the later tokens stay, so that a row keeps the same tokens in a batch
    as alone. Only where scores differ by slightly more, some 1e-5 of their size, may the rounding of a batch decide.

    Args:
        scores: [batch, kv_heads, tokens].

    Returns:
        int64 [batch, kv_heads, kept], ascending.

    >>> highest(torch.tensor([[[0.0, 5.0, 1.0, 3.0, 2.0, 0.0]]]), 4, first=1, last=1)
    tensor([[[0, 1, 3, 5]]])
    """
    check_has_data(scores, "a policy that chooses tokens")
    tokens = scores.shape[2]
    wide = wide_of(scores.dtype) if scores.is_floating_point() else torch.float64
    middle, count = scores[:, :, first : tokens - last].to(wide), tokens - kept
    edge = middle.kthvalue(count, dim=2, keepdim=True).values
    # `<` and not `<=`: infinity is not tied to finite scores, and equal scores need no tie
    is_tied = (middle - edge).abs() < edge.abs() * (ROUNDING * torch.finfo(wide).eps)
    evicted = torch.where(is_tied, edge, middle).argsort(dim=2, stable=True)[:, :, :count] + first
    is_kept = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).scatter_(2, evicted, False)
    # a stable sort, and not nonzero, for whose size the host would wait for a GPU
    return is_kept.to(torch.uint8).argsort(dim=2, descending=True, stable=True)[:, :, :kept]


@dataclass(frozen=True)
class SinksAndRecent(Eviction):
    """The first tokens and the last ones. Xiao et al. 2023, StreamingLLM, arXiv:2309.17453, §3.2.

    Keys keep their original positions, while the paper counts positions inside the cache. `Rolling` does that, without
    copies; use it where sequences grow longer than the model was trained for.

    >>> SinksAndRecent(1024)
    SinksAndRecent(budget=1024, sinks=4, every=1)
    """

    @property
    def recent(self) -> int | None:
        """How many of the last tokens stay; None if the budget is a share."""
        return max(0, self.budget - self.sinks) if isinstance(self.budget, int) else None

    def last(self, kept: int) -> int:
        return max(0, kept - self.sinks)

    def start(self) -> "EvictionState[SinksAndRecent]":
        return _PositionState(self)


class _PositionState(EvictionState[SinksAndRecent]):
    def _choose(self, store: Store, kept: int) -> Tensor:
        index = torch.arange(kept, device=store.form.device)
        index[self.policy.sinks :] += store.tokens - kept
        return index.expand(store.form.batch, store.form.kv_heads, -1).contiguous()


@dataclass(frozen=True)
class RecentStay(Eviction):
    """A policy under which recent tokens stay: `recent`, or one in `recent_part` of those after the sinks."""

    recent_part: ClassVar[int]
    recent: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.recent is not None:
            check_whole(self, "recent", 0)
        check_whole(self, "sinks", 0)
        check_budget(self)
        if self.recent is None and isinstance(self.budget, int):
            object.__setattr__(self, "recent", max(0, self.budget - self.sinks) // self.recent_part)
        super().__post_init__()

    def last(self, kept: int) -> int:
        return max(0, kept - self.sinks) // self.recent_part if self.recent is None else self.recent


@dataclass(frozen=True)
class Knorm(RecentStay):
    """The keys with the smallest Euclidean norms. Devoto et al. 2024, arXiv:2406.11430.

        score[j] = -|k[j]|

    The paper finds that keys with small norms receive much attention, so no query is needed. The paper evicts nothing
    from the first two layers: `regard_cache(model, evict=[None, None, *[Knorm(1024)] * 28])` does so.

    Where a model normalises its keys (QK-norm) without trained weights, all keys have the same norm up to some 1e-5.
    Then rounding decides, and a row may keep other tokens in a padded batch than alone.

    Args:
        recent: how many of the last tokens always stay; None: a quarter of the tokens that are not sinks. The paper,
            which evicts once, after the prompt, keeps none. Eviction at each step needs some: otherwise a token with a
            large key is evicted as soon as it is stored, and perplexity more than doubles (docs/caches.md).

    >>> Knorm(1024)
    Knorm(budget=1024, sinks=4, every=1, recent=255)
    """

    recent_part: ClassVar[int] = 4

    def start(self) -> "EvictionState[Knorm]":
        return _NormState(self)


class _NormState(EvictionState[Knorm]):
    def append(self, k: Tensor, v: Tensor | None) -> None:
        self.record(norms(k))

    def scores(self, store: Store) -> Tensor:
        return -self.values


def norms(x: Tensor) -> Tensor:
    """The Euclidean norms of the tokens of x, [batch, kv_heads, tokens], float32; float64 for float64."""
    dtype = wide_of(x.dtype)
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype)


def check_budget(policy: Eviction) -> None:
    """Make the budget an int or a float; raise `ProblemError` unless it is a real number."""
    value = cast(object, policy.budget)  # NumPy's, or no number at all
    found = as_integer(value)
    if found is None and not isinstance(value, bool) and isinstance(value, Real):
        found = float(value)
    if found is None:
        raise ProblemError(
            f"{type(policy).__name__}(budget={value!r}): expected a number of tokens, or a share below 1."
        )
    object.__setattr__(policy, "budget", found)


def check_recent(policy: object) -> None:
    """Raise `ProblemError` unless `recent`, which may be a property, is None or a whole number of tokens."""
    recent = getattr(policy, "recent", None)
    if recent is not None:
        whole(recent, f"{type(policy).__name__}.recent", least=0)


def check_bool(policy: Eviction, name: str) -> None:
    """Raise `ProblemError` unless the field is True or False."""
    if not isinstance(getattr(policy, name), bool):
        raise ProblemError(f"{type(policy).__name__}({name}={getattr(policy, name)!r}): expected True or False.")


def check_whole(policy: Eviction, name: str, least: int) -> None:
    """Make the field an int; raise `ProblemError` unless it is a whole number of at least `least`."""
    whole_field(policy, name, least=least)
