"""Eviction by the attention that future queries are expected to give. See `evict.py` for what policies share.

The scores of queries that are normally distributed are so as well, so the mean of their exponentials has a closed form
(the moment generating function), and no future query need be known:

    E[exp(scale q . k)] = exp(scale mu . k + scale^2 / 2 k' Sigma k)        for q ~ N(mu, Sigma)
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.column_sums import TILE, Asked
from regard.cache.evict import Eviction, Tally, check_bool, check_whole, norms
from regard.cache.hearing import Folding
from regard.cache.store import Store
from regard.describe.mask import Mask
from regard.describe.position import Rope
from regard.errors import ProblemError

CHUNK = 1024
"""Queries whose moments are taken at once."""

AHEAD = 32
"""Positions whose turns are added at once: 512 KiB for 64 dimensions, where 512 would take 8 MiB at every step."""


class Moments(NamedTuple):
    """How queries lie: their number, their mean, and their covariance times their number, per query head.

    Attributes:
        number: [batch, heads, 1].
        mean: [batch, heads, qk_dim].
        spread: [batch, heads, qk_dim, qk_dim].
    """

    number: Tensor
    mean: Tensor
    spread: Tensor

    @classmethod
    def of(cls, q: Tensor, counts: Tensor) -> "Moments":
        """Of queries [batch, heads, queries, qk_dim], those that count: broadcasts to [batch, heads, queries]."""
        weights = counts.to(q.dtype).expand(q.shape[:3])[..., None]
        count = weights.sum(2)
        mean = (q * weights).sum(2) / count.clamp_min(1)
        apart = (q - mean[:, :, None]) * weights
        return cls(count, mean, apart.mT @ apart)

    def __or__(self, other: "Moments") -> "Moments":
        """Of both sets of queries. Chan et al. 1979, Updating formulae, STAN-CS-79-773."""
        count = self.number + other.number
        share = other.number / count.clamp_min(1)
        apart = other.mean - self.mean
        cross = (apart * (self.number * share))[..., None] * apart[..., None, :]
        return Moments(count, self.mean + apart * share, self.spread + other.spread + cross)

    @property
    def covariance(self) -> Tensor:
        """[batch, heads, qk_dim, qk_dim]."""
        return self.spread / self.number.clamp_min(1)[..., None]

    def turned(self, turn: Tensor) -> "Moments":
        """Of the queries times a matrix, `q @ turn`: [qk_dim, qk_dim]."""
        return Moments(self.number, self.mean @ turn, turn.mT @ self.spread @ turn)


def expected_scores(moments: Moments, k: Tensor, scale: float) -> Tensor:
    """The log of the mean of `exp(scale * q . k)` over queries q that are normally distributed.

    Args:
        moments: of the queries of each head.
        k: [batch, kv_heads, keys, qk_dim].

    Returns:
        [batch, kv_heads, heads / kv_heads, keys]

    >>> q = torch.tensor([[[[1.0, 2.0], [1.0, -2.0]]]])  # of mean [1, 0] and covariance [[0, 0], [0, 4]]
    >>> moments = Moments.of(q, torch.ones(1, 1, 2))
    >>> expected_scores(moments, torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]]), scale=1.0)
    tensor([[[[1., 2.]]]])
    """
    (batch, kv_heads, keys, dim), group = k.shape, moments.mean.shape[1] // k.shape[1]
    mean = (moments.mean * scale).view(batch, kv_heads, group, dim)
    half = (moments.covariance * (scale * scale / 2)).view(batch, kv_heads, group, dim, dim)
    tile = max(1, TILE // max(1, batch * kv_heads * group * dim))
    scores = k.new_empty((batch, kv_heads, group, keys), dtype=mean.dtype)
    for start in range(0, keys, tile):
        some = k[:, :, start : start + tile].to(mean.dtype)
        curved = ((some[:, :, None] @ half) * some[:, :, None]).sum(-1)
        scores[..., start : start + tile] = mean @ some.mT + curved
    return scores


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """The keys of the most expected attention, times the norm of values. Devoto et al. 2025, arXiv:2510.00636.

        z[j] = exp(mu . k[j] / sqrt(d) + k[j]' Sigma k[j] / 2d),   score[j] = z[j] / sum z * |v[j]|

    mu and Sigma are the mean and covariance of the queries that were observed, per query head, those of the sinks and
    of padding left out, and `score` is the mean over the heads that share a key head. Where we differ from the paper:
    the norm is that of the value itself and not of its projection by W_o, which a cache does not know.

    The paper takes the queries before their rotation and turns their moments by the mean rotation of the next `future`
    positions; give `rope` for that, and the queries are turned back first. With rope=None the queries count as they
    came, at the positions that they had: what turns fast averages out all the same, and what turns slowly is taken to
    stay where it was. `regard_cache` and the models of `regard.nn` give theirs.

    It costs 2 qk_dim^2 multiplications per key and query head whenever it evicts, so choose `every` of 32 or more.

    Args:
        recent: so many of the last tokens always stay; the paper keeps none.
        values: whether scores are multiplied by the norms of the values.
        rope: what queries and keys were rotated by, token i of the sequence at position i.
        future: positions that are looked ahead, with `rope`.

    >>> ExpectedAttention(1024, every=32)
    ExpectedAttention(budget=1024, sinks=4, every=32, recent=0, values=True, rope=None, future=512)
    """

    recent: int = field(default=0, kw_only=True)
    values: bool = field(default=True, kw_only=True)
    rope: Rope | None = field(default=None, kw_only=True)
    future: int = field(default=512, kw_only=True)

    def __post_init__(self) -> None:
        check_whole(self, "recent", 0)
        check_whole(self, "future", 1)
        check_bool(self, "values")
        if self.rope is not None and not isinstance(self.rope, Rope):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"ExpectedAttention(rope={self.rope!r}): expected the Rope of the model, or None.")
        scaling = None if self.rope is None else self.rope.scaling
        if scaling is not None and scaling.looks_at_length():
            raise ProblemError(
                f"ExpectedAttention(rope={self.rope!r}): {type(scaling).__name__} turns a query by the length that the "
                "sequence had then, so queries cannot be turned back: rope=None takes them as they came."
            )
        super().__post_init__()

    def last(self, kept: int) -> int:
        return self.recent

    def start(self) -> "Tally[ExpectedAttention]":
        return _Expected(self)


class _Expected(Folding[ExpectedAttention]):
    def __init__(self, policy: ExpectedAttention) -> None:
        super().__init__(policy)
        self._moments: Moments | None = None
        self._scale = 1.0

    def append(self, k: Tensor, v: Tensor | None) -> None:
        if self.policy.values and v is not None:
            self._parts.append(norms(v))

    def observe(self, q: Tensor, store: Store, mask: Mask | None, scale: float | None) -> None:
        rope = self.policy.rope
        if rope is not None and rope.dim != q.shape[3]:
            raise ProblemError(f"queries have {q.shape[3]} dimensions and {self.policy!r} turns {rope.dim}.")
        super().observe(q, store, mask, scale)

    def fold(self, asked: list[Asked], store: Store) -> None:
        for one in asked:
            self._scale = one.scale
            for start in range(0, one.queries, CHUNK):
                new = self._of(one.between(start, min(start + CHUNK, one.queries)))
                self._moments = new if self._moments is None else self._moments | new

    def _of(self, asked: Asked) -> Moments:
        q = asked.q.to(torch.float64 if asked.q.dtype == torch.float64 else torch.float32)
        places = torch.arange(asked.queries, device=q.device) + (asked.forgotten + asked.first)
        counts = asked.is_text() & (places >= self.policy.sinks)
        return Moments.of(q if self.policy.rope is None else _turned_back(q, places, self.policy.rope), counts)

    def scores(self, store: Store) -> Tensor:
        self.check_heard(store)
        self.settle(store)
        assert self._moments is not None
        moments, rope, sinks = self._moments, self.policy.rope, self.policy.sinks
        if rope is not None:
            moments = moments.turned(_mean_turn(rope, store.tokens_seen, self.policy.future, moments.mean))
        scores = expected_scores(moments, store.keys()[:, :, sinks:], self._scale).softmax(-1).mean(2)
        if self.policy.values:
            scores = scores * self.numbers[:, :, sinks:]
        return torch.nn.functional.pad(scores, (sinks, 0))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self._moments is not None:
            self._moments = Moments(*(t[rows] for t in self._moments))


def _turned_back(q: Tensor, places: Tensor, rope: Rope) -> Tensor:
    """Queries before their rotation. Turning by -p is the inverse, but for the factor, which is multiplied in twice."""
    back = rope.rotate(q, -places)
    factor = rope.attention_factor() ** 2
    return back if factor == 1 else torch.cat([back[..., : rope.rotated] / factor, back[..., rope.rotated :]], dim=-1)


def _mean_turn(rope: Rope, first: int, future: int, like: Tensor) -> Tensor:
    """The mean over the next positions of the matrix that turns queries, `q @ turn`: [qk_dim, qk_dim]."""
    eye = torch.eye(rope.dim, dtype=like.dtype, device=like.device)[None, :, None]
    total = torch.zeros(rope.dim, rope.dim, dtype=like.dtype, device=like.device)
    for start in range(0, future, AHEAD):  # rows of eye are heads, copies of a row are tokens
        count = min(AHEAD, future - start)
        total += rope.rotate(eye.expand(-1, -1, count, -1), first + start)[0].sum(1)
    return total / future
