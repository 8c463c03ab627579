"""Eviction by the attention expected from future queries. See `evict.py` for what policies share.

If queries are normally distributed, so are their scores, and the mean of the exponentials of scores has a closed form
(the moment generating function). So no future query is needed:

    E[exp(scale q . k)] = exp(scale mu . k + scale^2 / 2 k' Sigma k)        for q ~ N(mu, Sigma)
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.evict import Eviction, EvictionState, check_bool, check_whole, norms
from regard.cache.query_observer import TILE, QueryAccumulator, QueryWindow
from regard.cache.store import Store
from regard.describe.mask import Mask
from regard.describe.position import Rope, has_own_rotate
from regard.errors import ProblemError
from regard.wide import wide_of

CHUNK = 1024
"""Queries whose moments are computed at once."""

AHEAD = 32
"""Positions whose rotations are summed at once: 512 KiB for 64 dimensions; 512 would take 8 MiB at every step."""


class Moments(NamedTuple):
    """The distribution of queries per query head: count, mean, and covariance times count.

    Attributes:
        total: the count, [batch, heads, 1].
        mean: [batch, heads, qk_dim].
        scatter: [batch, heads, qk_dim, qk_dim].
    """

    total: Tensor
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, q: Tensor, chosen: Tensor) -> "Moments":
        """The moments of chosen queries, q [batch, heads, queries, qk_dim]; `chosen` broadcasts to all but the last."""
        weights = chosen.to(q.dtype).expand(q.shape[:3])[..., None]
        count = weights.sum(2)
        mean = (q * weights).sum(2) / count.clamp_min(1)
        centred = (q - mean[:, :, None]) * weights
        return cls(count, mean, centred.mT @ centred)

    def __or__(self, other: "Moments") -> "Moments":
        """The moments of both sets of queries together. Chan et al. 1979, Updating formulae, STAN-CS-79-773."""
        count = self.total + other.total
        share = other.total / count.clamp_min(1)
        difference = other.mean - self.mean
        cross = (difference * (self.total * share))[..., None] * difference[..., None, :]
        return Moments(count, self.mean + difference * share, self.scatter + other.scatter + cross)

    @property
    def covariance(self) -> Tensor:
        """[batch, heads, qk_dim, qk_dim]."""
        return self.scatter / self.total.clamp_min(1)[..., None]

    def multiplied(self, matrix: Tensor) -> "Moments":
        """The moments of the queries times a matrix [qk_dim, qk_dim], `q @ matrix`."""
        return Moments(self.total, self.mean @ matrix, matrix.mT @ self.scatter @ matrix)


def expected_scores(moments: Moments, k: Tensor, scale: float) -> Tensor:
    """The log of the mean of `exp(scale * q . k)` over normally distributed queries q.

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
    """The keys with the highest expected attention times norm of the value. Devoto et al. 2025, arXiv:2510.00636.

        z[j] = exp(mu . k[j] / sqrt(d) + k[j]' Sigma k[j] / 2d),   score[j] = z[j] / sum z * |v[j]|

    mu and Sigma are the mean and covariance of the observed queries, per query head, without those of sinks and of
    padding. `score` is the mean over the query heads that share a key head. A difference from the paper: the norm is
    that of the value itself and not of its projection by W_o, which a cache does not know.

    The paper takes the queries before their rotary embedding, and multiplies their moments by the mean rotation of the
    next `future` positions. With `rope` this is done, after the rotation of the queries is undone. With rope=None the
    queries count at the positions that they had: channels that rotate fast average out all the same, and channels that
    rotate slowly are assumed not to move. `regard_cache` and the models of `regard.nn` pass their rope.

    It costs 2 qk_dim^2 multiplications per key and query head at each eviction, so choose `every` of 32 or more.

    Args:
        recent: how many of the last tokens always stay; the paper keeps none.
        values: whether scores are multiplied by the norms of the values.
        rope: the rotary embedding of queries and keys, token i of the sequence at position i.
        future: how many future positions are averaged over, with `rope`.

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
                f"ExpectedAttention(rope={self.rope!r}): {type(scaling).__name__} depends on the length that "
                "the sequence had, so the rotation of queries cannot be undone: take rope=None."
            )
        if self.rope is not None and has_own_rotate(self.rope):
            raise ProblemError(
                f"ExpectedAttention(rope={self.rope!r}): {type(self.rope).__name__} has a rotate of its own, which "
                "cannot be undone: take rope=None."
            )
        super().__post_init__()

    def last(self, kept: int) -> int:
        return self.recent

    def start(self) -> "EvictionState[ExpectedAttention]":
        return _ExpectedState(self)


class _ExpectedState(QueryAccumulator[ExpectedAttention]):
    def __init__(self, policy: ExpectedAttention) -> None:
        super().__init__(policy)
        self._moments: Moments | None = None
        self._scale = 1.0

    def append(self, k: Tensor, v: Tensor | None) -> None:
        if self.policy.values and v is not None:
            self.record(norms(v))

    def observe(self, q: Tensor, store: Store, mask: Mask | None, scale: float | None) -> None:
        rope = self.policy.rope
        if rope is not None and rope.dim != q.shape[3]:
            raise ProblemError(f"queries have {q.shape[3]} dimensions, and {self.policy!r} rotates {rope.dim}.")
        super().observe(q, store, mask, scale)

    def accumulate(self, windows: list[QueryWindow], store: Store) -> None:
        for window in windows:
            self._scale = window.scale
            for start in range(0, window.queries, CHUNK):
                new = self._moments_of(window.between(start, min(start + CHUNK, window.queries)))
                self._moments = new if self._moments is None else self._moments | new

    def _moments_of(self, window: QueryWindow) -> Moments:
        q = window.q.to(wide_of(window.q.dtype))
        positions = torch.arange(window.queries, device=q.device) + (window.evicted + window.first)
        chosen = window.is_not_padding() & (positions >= self.policy.sinks)
        return Moments.of(q if self.policy.rope is None else _unrotate(q, positions, self.policy.rope), chosen)

    def scores(self, store: Store) -> Tensor:
        self.check_observed(store)
        self.flush(store)
        assert self._moments is not None
        moments, rope, sinks = self._moments, self.policy.rope, self.policy.sinks
        if rope is not None:
            moments = moments.multiplied(_mean_rotation(rope, store.tokens_seen, self.policy.future, moments.mean))
        scores = expected_scores(moments, store.keys()[:, :, sinks:], self._scale).softmax(-1).mean(2)
        if self.policy.values:
            scores = scores * self.values[:, :, sinks:]
        return torch.nn.functional.pad(scores, (sinks, 0))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self._moments is not None:
            self._moments = Moments(*(t[rows] for t in self._moments))


def _unrotate(q: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Queries before their rotation, by a rotation to -position. It applies the attention factor a second time."""
    back = rope.rotate(q, -positions)
    factor = rope.attention_factor() ** 2
    return back if factor == 1 else torch.cat([back[..., : rope.rotated] / factor, back[..., rope.rotated :]], dim=-1)


def _mean_rotation(rope: Rope, first: int, future: int, like: Tensor) -> Tensor:
    """The mean over the next positions of the matrix that rotates queries, `q @ matrix`: [qk_dim, qk_dim]."""
    eye = torch.eye(rope.dim, dtype=like.dtype, device=like.device)[None, :, None]
    total = torch.zeros(rope.dim, rope.dim, dtype=like.dtype, device=like.device)
    for start in range(0, future, AHEAD):  # rows of eye are heads, copies of a row are tokens
        count = min(AHEAD, future - start)
        total += rope.rotate(eye.expand(-1, -1, count, -1), first + start)[0].sum(1)
    return total / future
