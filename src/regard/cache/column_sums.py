"""How much attention each key got: the column sums of the weights, a tile of queries at a time.

    sums[j] = sum over queries i of A[i, j],     A[i, :] = softmax over the keys that i may see

A tile is so many rows of A that they stay in the caches, whole rows, so each knows what it is divided by; then it is
summed over its rows and forgotten. No n x n is held: memory is one tile, whatever the number of queries.

Where earlier tokens have been evicted, keys are places in the cache and not positions: every key that was kept is
visible to every new query, and among the new tokens the mask decides. Queries at the last keys say just that.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.describe.mask import CallSizes, Mask
from regard.describe.mask_by_rule import Causal
from regard.errors import ProblemError

TILE = 2**20
"""Weights in a tile: 4 MiB of float32."""

ROWS = 16
"""Queries of a tile below which its heads are done one by one, in more rows each: a product of few rows is slow."""


class Asked(NamedTuple):
    """Queries, and where they stood among the keys of a cache.

    Attributes:
        q: [batch, heads, queries, qk_dim].
        mask: standing in its call; None: `Causal()`.
        scale: of the scores.
        first: place of the first query among the keys.
        tokens: how many keys there were.
        forgotten: tokens that had been evicted before, so query i is of token `forgotten + first + i` of the sequence.
        rows: int64 [batch], the batch rows that q has in the mask.
    """

    q: Tensor
    mask: Mask | None
    scale: float
    first: int
    tokens: int
    forgotten: int
    rows: Tensor

    @classmethod
    def of(cls, q: Tensor, tokens: int, mask: Mask | None = None, scale: float | None = None, seen: int = 0) -> "Asked":
        """Queries of the last ones of `tokens` keys.

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
            mask = None if isinstance(mask, Causal) else mask.bind(CallSizes(batch, heads, queries, tokens, first))
        rows = torch.arange(batch, device=q.device)
        return cls(q, mask, dim**-0.5 if scale is None else scale, first, tokens, max(seen - tokens, 0), rows)

    @property
    def queries(self) -> int:
        """How many."""
        return self.q.shape[2]

    def between(self, start: int, stop: int) -> "Asked":
        """Its queries start <= i < stop."""
        return self._replace(q=self.q[:, :, start:stop], first=self.first + start)

    def cropped(self, tokens: int) -> "Asked":
        """Its queries that are of the first `tokens` keys, among those; there is one at least."""
        asked = self.between(0, tokens - self.first) if tokens < self.first + self.queries else self
        return asked._replace(tokens=min(self.tokens, tokens))

    def selected(self, rows: Tensor) -> "Asked":
        """Of these batch rows."""
        return self._replace(q=self.q[rows], rows=self.rows[rows])

    def moved(self, gone: int) -> "Asked":
        """After so many tokens before its first query were evicted. It must have no mask: that knows the old places."""
        return self._replace(first=self.first - gone, tokens=self.tokens - gone, forgotten=self.forgotten + gone)

    def copied(self) -> "Asked":
        """With memory of its own, so that a few queries keep no whole prompt alive."""
        return self._replace(q=self.q.clone())

    def follows(self, other: "Asked") -> bool:
        """Whether the two are one: the queries of the next tokens, in a causal row."""
        is_next = (self.scale, self.first, self.forgotten) == (other.scale, other.tokens, other.forgotten)
        return self.mask is other.mask is None and is_next

    def is_text(self) -> Tensor:
        """Whether a query sees its own token, as all do but padding: bool, broadcasts to [batch, heads, queries]."""
        own = torch.arange(self.first, self.first + self.queries, device=self.q.device)
        if self.mask is None:
            return torch.ones_like(own, dtype=torch.bool)[None, None]
        heads = torch.arange(self.q.shape[1], device=own.device)
        kept = self.mask.keep(self.rows[:, None, None], heads[:, None], own, own)
        return kept[(None,) * (3 - kept.ndim)]

    def column_sums(self, k: Tensor) -> Tensor:
        """As the function `column_sums`; of the keys, the first `tokens` are looked at."""
        k = k[:, :, : self.tokens]
        (batch, kv_heads, keys, _), group = k.shape, self.q.shape[1] // k.shape[1]
        dtype = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        sums = torch.zeros(batch, kv_heads, keys, dtype=dtype, device=k.device)
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
        """The column sums of queries start <= i < stop of some heads, summed over those that share a key head."""
        q = self.q[batch, heads, start:stop].to(k.dtype) * self.scale
        s = q.reshape(*k.shape[:2], -1, k.shape[3]) @ k.mT  # the rows of all heads of a group, one after the other
        self._hide(s.view(*q.shape[:3], -1), batch, heads, start)
        peak = s.amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).min)  # a row that sees nothing: exp gives 0
        weights = s.sub_(peak).exp_()
        total = weights.sum(-1).clamp_min(1.0)  # the largest is exp(0) = 1, so this changes empty rows alone
        return (total.reciprocal()[:, :, None] @ weights)[:, :, 0]

    def _hide(self, s: Tensor, batch: slice, heads: slice, start: int) -> None:
        """Put -inf where the mask hides a pair: [batch, heads, rows, keys], rows from query `start` on."""
        rows, keys = s.shape[2:]
        if self.mask is None and rows > 1:
            later = torch.ones(rows, rows, dtype=torch.bool, device=s.device).triu(1)
            s[..., self.first + start :].masked_fill_(later, -torch.inf)
        elif self.mask is not None:
            b = self.rows[batch, None, None, None]
            h = torch.arange(heads.start, heads.stop, device=s.device)[:, None, None]
            q = torch.arange(self.first + start, self.first + start + rows, device=s.device)[:, None]
            s.masked_fill_(~self.mask.keep(b, h, q, torch.arange(keys, device=s.device)), -torch.inf)


def column_sums(q: Tensor, k: Tensor, mask: Mask | None = None, scale: float | None = None) -> Tensor:
    """How much weight each key got: sums over the queries, means over the query heads that share a key head.

    Args:
        q: [batch, heads, queries, qk_dim], of the last tokens.
        k: [batch, kv_heads, keys, qk_dim].
        mask: as `attend` has it; None: `Causal()`.
        scale: of the scores; None: `qk_dim ** -0.5`.

    Returns:
        [batch, kv_heads, keys], float32; float64 for float64.

    Raises:
        ProblemError: the mask does not fit.

    >>> q = k = torch.eye(3)[None, None]
    >>> column_sums(q, k, scale=1.0)[0, 0]  # of [[1, 0, 0], [0.2689, 0.7311, 0], [0.2119, 0.2119, 0.5761]]
    tensor([1.4809, 0.9430, 0.5761])
    """
    return Asked.of(q, k.shape[2], mask, scale).column_sums(k)
