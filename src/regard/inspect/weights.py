"""The weights of one call of attention, computed where they are looked at and never held all at once.

A call knows its q, k (after any rotation), mask, bias, scale, softcap and sink, and its `lse`, the log of what each row
was divided by. That is all of A:

    A[i, j] = exp(s[i, j] - L[i])      L = lse, or logaddexp(lse, sink[head]) where the call has a sink

so one weight costs one dot product, wherever it stands: `pairs` costs O(pairs), `rows` and `tiles` O(what they show).
With a sink the rows sum to less than 1: what is missing went to the sink, which is no token. Dropout is no part of the
weights: these are the ones before it. Their relative error is that of a score, about 1e-7 x |s| in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attend import Call
from regard.describe.bias import Bias
from regard.describe.mask import Ints, Mask, Rectangles
from regard.describe.score import Dot
from regard.errors import ProblemError

TILE = 2**20
"""Weights in a tile: 4 MiB of float32, so that the few passes over a tile find it in the second level cache or near."""

CHUNK = 128
"""Keys for which a mask is asked at once whether any is visible: a sweep skips what no row of the tile may see."""

DENSE_LIMIT = 2**26
"""Weights that `dense` agrees to build: 256 MiB of float32."""


class Tile(NamedTuple):
    """The weights of queries `row` and on, keys `key` and on: [batch, heads, rows, keys]."""

    row: int
    key: int
    weights: Tensor

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.weights.shape[2])


@dataclass(frozen=True, eq=False)
class Weights:
    """A lazy map of the weights of one call; every method computes what it returns and keeps nothing.

    Args:
        q: [batch, heads, queries, qk_dim], k: [batch, kv_heads, keys, qk_dim]; heads in contiguous groups per key head.
        lse: [batch, heads, queries], natural log, without the sink; -inf for a row that sees no key.
        mask, bias, scale, softcap, sink, offset: as a `Call` has them: mask and bias stand in the call, numbers are
            resolved.
        sequence: batch row that the first row of q is (masks and biases may differ by batch row).

    ```
    >>> import torch
    >>> from regard import Causal, attend_state
    >>> q = k = v = torch.eye(3)[None, None]
    >>> lse = attend_state(q, k, v, mask=Causal(), scale=1.0).lse
    >>> Weights(q, k, lse, Causal(), scale=1.0).dense()[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.2689, 0.7311, 0.0000],
            [0.2119, 0.2119, 0.5761]])

    ```
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    mask: Mask | None = None
    bias: Bias | None = None
    scale: float = 1.0
    softcap: float | None = None
    sink: Tensor | None = None
    offset: int = 0
    sequence: int = 0

    @classmethod
    def of(cls, call: Call) -> "Weights":
        """The weights of a `regard.attend.Call`, such as `watching` and `observe` hand out.

        Raises:
            ProblemError: the call scores pairs by another word than the scaled dot product.
        """
        if not isinstance(call.score, Dot | None):
            raise ProblemError(
                f"the call scores pairs by {call.score!r}: weights can be read of scaled dot products only. "
                "Observe with a function of your own that takes what it needs from the call."
            )
        sink = None if call.sink is None else call.sink.detach()
        q, k, lse = call.q.detach(), call.k.detach(), call.lse.detach()
        return cls(q, k, lse, call.mask, call.bias, call.scale, call.softcap, sink, call.offset)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, heads, queries, keys]."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights: float32, or float64 for a call in float64."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def positions(self) -> Tensor:
        """Where the queries stand among the keys; int64 [queries]."""
        return torch.arange(self.offset, self.offset + self.shape[2], device=self.q.device)

    def only(self, batch: int) -> "Weights":
        """The weights of one sequence of the batch, as a batch of one."""
        own = slice(batch, batch + 1)
        return replace(self, q=self.q[own], k=self.k[own], lse=self.lse[own], sequence=self.sequence + batch)

    def pairs(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        """The weights at given pairs, in O(pairs): row `q_index[p]` (0 is the call's first query), key `k_index[p]`.

        Args:
            q_index, k_index: int64 [pairs].

        Returns:
            [batch, heads, pairs]; 0 where the mask hides the pair.
        """
        at_once = max(1, TILE // max(1, self.q[:, :, 0].numel()))
        parts = zip(q_index.split(at_once), k_index.split(at_once), strict=True)
        return torch.cat([self._pairs(q, k) for q, k in parts], dim=-1)

    def rows(self, start: int, stop: int) -> Tensor:
        """The weights of queries start <= i < stop, whole rows: [batch, heads, rows, keys]."""
        return self._tile(slice(start, stop), slice(0, self.shape[3])).weights

    def tiles(self) -> Iterator[Tile]:
        """All weights that the mask does not surely hide, a tile of at most about `TILE` weights at a time.

        Tiles come row by row from the first query on; the keys that no tile shows have weight 0.
        """
        batch, heads, queries, keys = self.shape
        rows = max(1, TILE // max(1, batch * heads * keys))
        for start in range(0, queries, rows):
            row = slice(start, min(start + rows, queries))
            for key in self._visible_runs(row):
                yield self._tile(row, key)

    def pooled(self, size: int) -> Tensor:
        """A picture of at most size x size cells: the mean weight of each cell.

        A cell is c x c pairs, c = ceil(max(queries, keys) / size); the last row and column of cells average over the
        pairs that exist. Where c is 1 these are the weights.

        Returns:
            [batch, heads, ceil(queries / c), ceil(keys / c)]
        """
        picture = Pooled(self, size)
        for tile in self.tiles():
            picture.add(tile)
        return picture.mean()

    def dense(self, limit: int = DENSE_LIMIT) -> Tensor:
        """All weights: [batch, heads, queries, keys].

        Raises:
            ProblemError: they are more than `limit`.
        """
        batch, heads, queries, keys = self.shape
        if (total := batch * heads * queries * keys) > limit:
            raise ProblemError(
                f"the dense weights [{batch}, {heads}, {queries}, {keys}] are {total:,} numbers "
                f"({total * self.dtype.itemsize / 2**30:.1f} GiB), more than the limit of {limit:,}: read `rows`, "
                "`tiles`, `pairs` or `pooled`, or pass a larger limit."
            )
        return self.rows(0, queries)

    @cached_property
    def total(self) -> Tensor:
        """L: the log of what each row is divided by, the sink included; [batch, heads, queries]."""
        lse = self.lse.to(self.dtype)
        return lse if self.sink is None else torch.logaddexp(lse, self.sink.to(self.dtype)[None, :, None])

    @cached_property
    def visible(self) -> Tensor:
        """How many keys each row may see; int64, broadcasts to [batch, heads, queries]."""
        if self.mask is None:
            return torch.full((1, 1, self.shape[2]), self.shape[3], device=self.q.device)
        queries, keys = self.shape[2:]
        rows = max(1, TILE // max(1, keys))
        spans = (slice(start, min(start + rows, queries)) for start in range(0, queries, rows))
        return torch.cat([self._count(span) for span in spans], dim=-1)

    def keep(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        """Whether the mask keeps pairs: bool, broadcasts to [batch, heads, *shape]; the indices have the same axes."""
        if self.mask is None:
            return torch.ones((1,) * (2 + q_index.ndim), dtype=torch.bool, device=q_index.device)
        b, h, q, k = self._coordinates(q_index, k_index)
        kept = self.mask.keep(b, h, q, k)
        return kept[(None,) * (q.ndim - kept.ndim)]

    def _coordinates(self, q_index: Tensor, k_index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, heads, axes = *self.shape[:2], q_index.ndim
        b = torch.arange(self.sequence, self.sequence + batch, device=self.q.device).view(-1, 1, *[1] * axes)
        h = torch.arange(heads, device=self.q.device).view(1, -1, *[1] * axes)
        return b, h, (q_index + self.offset)[None, None], k_index[None, None]

    def _tile(self, row: slice, key: slice) -> Tile:
        kv_heads, dim = self.k.shape[1], self.k.shape[3]
        batch, heads = self.shape[:2]
        # the queries of all heads that share a key head are the rows of one product
        q = self.q[:, :, row].to(self.dtype).reshape(batch, kv_heads, -1, dim)
        dots = (q @ self.k[:, :, key].to(self.dtype).mT).view(batch, heads, row.stop - row.start, -1)
        i = torch.arange(row.start, row.stop, device=q.device)[:, None]
        j = torch.arange(key.start, key.stop, device=q.device)[None, :]
        return Tile(row.start, key.start, self._weights(dots, i, j, self.total[:, :, row, None]))

    def _pairs(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q[:, :, q_index].to(self.dtype)  # [batch, heads, pairs, qk_dim]
        k = self.k[:, :, k_index].to(self.dtype).repeat_interleave(group, dim=1)
        return self._weights((q * k).sum(-1), q_index, k_index, self.total[:, :, q_index])

    def _weights(self, dots: Tensor, i: Tensor, j: Tensor, total: Tensor) -> Tensor:
        s = dots.mul_(self.scale)
        if self.softcap is not None:
            s = s.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is not None:
            s = s + self.bias.value(*self._coordinates(i, j)).to(self.dtype)
        return s.sub_(total).exp_().masked_fill_(~self.keep(i, j), 0.0)

    def _visible_runs(self, row: slice) -> Iterator[slice]:
        """Runs of keys of which some may be visible to some of the rows."""
        keys = self.shape[3]
        if self.mask is None:
            yield slice(0, keys)
            return
        starts = np.arange(0, keys, CHUNK)
        some = self.mask.bounds(self._strips(self.mask, row, starts))[0].reshape(-1, len(starts)).any(axis=0)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], some, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2):
            yield slice(int(first) * CHUNK, min(int(last) * CHUNK, keys))

    def _strips(self, mask: Mask, row: slice, starts: Ints) -> Rectangles:
        """The rows times each chunk of keys, for every batch row and head that the mask tells apart."""
        batch, heads = (min(told_apart, here) for told_apart, here in zip(mask.spread(), self.shape[:2], strict=True))
        b, h, k0 = (axis.ravel() for axis in np.meshgrid(np.arange(batch), np.arange(heads), starts, indexing="ij"))
        q0, q1 = (np.full_like(k0, end + self.offset) for end in (row.start, row.stop))
        return Rectangles(b + self.sequence, h, q0, q1, k0, np.minimum(k0 + CHUNK, self.shape[3]))

    def _count(self, row: slice) -> Tensor:
        i = torch.arange(row.start, row.stop, device=self.q.device)[:, None]
        counts = torch.zeros((1, 1, row.stop - row.start), dtype=torch.int64, device=self.q.device)
        for key in self._visible_runs(row):
            j = torch.arange(key.start, key.stop, device=self.q.device)[None, :]
            counts = counts + self.keep(i, j).expand(-1, -1, len(i), j.shape[1]).sum(-1)
        return counts


class Pooled:
    """Tiles of weights gathered into cells; see `Weights.pooled`."""

    def __init__(self, weights: Weights, size: int) -> None:
        batch, heads, queries, keys = weights.shape
        self.cell = max(1, -(-max(queries, keys) // size))
        self._size = queries, keys
        shape = batch, heads, -(-queries // self.cell), -(-keys // self.cell)
        self._sums = torch.zeros(shape, dtype=weights.dtype, device=weights.q.device)

    def add(self, tile: Tile) -> None:
        """Add a tile's weights to their cells."""
        cell, first = self.cell, tile.key // self.cell
        before = tile.key - first * cell
        after = -(before + tile.weights.shape[3]) % cell
        runs = torch.nn.functional.pad(tile.weights, (before, after)).unflatten(3, (-1, cell)).sum(-1)
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=runs.device) // cell
        self._sums[..., first : first + runs.shape[3]].index_add_(2, rows, runs)

    def mean(self) -> Tensor:
        """The mean weight of each cell, over the pairs that exist."""
        rows, columns = (self._existing(n) for n in self._size)
        return self._sums / (rows[:, None] * columns[None, :])

    def _existing(self, tokens: int) -> Tensor:
        starts = torch.arange(0, tokens, self.cell, device=self._sums.device)
        return (tokens - starts).clamp(max=self.cell)
