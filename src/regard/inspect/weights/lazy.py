"""The weights of one attention call, computed when they are read and never stored all at once.

A call has q, k (after any rotation), mask, bias, scale, softcap, sink, and `lse`, the log of the softmax denominator of
each row. They determine all of A:

    A[i, j] = exp(s[i, j] - L[i])      L = lse, or logaddexp(lse, sink[head]) where the call has a sink

so one weight costs one dot product: `pairs` costs O(pairs); `rows`, `columns` and `tiles` cost O(weights returned).
With a sink the rows sum to less than 1: the rest, `sink_share`, is the share of the sink, which is no token. These are
the weights before dropout. Their relative error is that of a score and of lse, about 1e-7 x |s| in float32;
`in_float64` avoids it. Rows that a finite number such as -1e9 hides wholly have L in two numbers (`far_rows.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import shown
from regard.inspect.plot import heat_map, html_table
from regard.inspect.weights.far_rows import Totals, totals
from regard.inspect.weights.index import Indices, index_of, index_pairs
from regard.inspect.weights.scores import CallScores
from regard.inspect.weights.spans import count_visible, visible_runs
from regard.inspect.weights.tiles import Largest, Pooled, Tile, Top

TILE = 2**20
"""Weights in a tile: 4 MiB of float32, so that a tile stays in the L2 cache, or close to it, for all passes over it."""

ROWS = 128
"""Rows of a tile if whole rows are longer than a tile: the keys are then read once per this number of rows."""

CHUNK = 128
"""Keys per rectangle of the mask's bounds: a sweep skips rectangles that are hidden from all rows of a tile."""

DENSE_LIMIT = 2**26
"""The most weights that `dense` builds by default: 256 MiB of float32."""


@dataclass(frozen=True, eq=False)
class Weights(CallScores):
    """A lazy map of the weights of one call; every method computes its result and stores nothing.

    Args:
        q: [batch, heads, queries, qk_dim], k: [batch, kv_heads, keys, qk_dim]; heads in contiguous groups per key head.
        lse: [batch, heads, queries], natural log, without the sink; -inf for a row that sees no key.
        mask, bias, scale, softcap, sink, offset: those of a `Call`, which has bound mask and bias to its sizes.
        sequence: the batch row of the first row of q (masks and biases may differ by batch row).
        starts: the position of the first query of each batch row of the call, where it has an offset for each; None
            reads them from mask and bias.
        dropped: how many tokens of the text a cache dropped before this call. Positions are those among the keys that
            are left, so measures by position raise a `ProblemError` where it is not 0.
        has_gaps: whether it dropped others than the first ones, so that measures by distance raise it too.

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

    def __repr__(self) -> str:
        """Heads, tokens, type and mask: `Weights(9 heads on 3, 7 queries x 7 keys, float32, mask=Causal())`."""
        batch, heads, queries, keys = self.shape
        sequences = "" if batch == 1 else f"{batch:,} sequences, "
        return (
            f"Weights({sequences}{heads} heads on {self.k.shape[1]}, {queries:,} queries x {keys:,} keys, "
            f"{str(self.dtype).removeprefix('torch.')}, mask={shown(self.mask)})"
        )

    def _repr_html_(self) -> str:
        """A table for notebooks: sizes, type, mask and bias."""
        batch, heads, queries, keys = self.shape
        parts: dict[str, object] = {
            "sequences": f"{batch:,}",
            "heads": f"{heads} on {self.k.shape[1]} key heads",
            "queries x keys": f"{queries:,} x {keys:,}",
            "type": str(self.dtype).removeprefix("torch."),
            "mask": shown(self.mask),
            "bias": shown(self.bias),
        }
        return html_table("Weights", ["part", "value"], list(parts.items()))

    def plot(self, head: int = 0, sequence: int = 0, size: int = 256, ax: Any = None) -> Any:
        """Draw the weights of one head as a heat map: at most size x size cells, each the mean of its weights.

        Args:
            head: number of the head in the call.
            ax: the matplotlib `Axes` to draw on; None makes a new figure.

        Returns:
            The `Axes`; `ax.figure.savefig("weights.png")` writes it.

        Raises:
            ProblemError: there is no such head or sequence.
            RefusalError: matplotlib is not installed (`pip install 'regard[plot]'`).
        """
        cells = self.only(sequence).heads(head).pooled(size)[0, 0]
        tokens = max(1, -(-max(self.shape[2:]) // size))
        pooled = "" if tokens == 1 else f", cells of {tokens} x {tokens} tokens"
        return heat_map(cells, title=f"weights of head {head}{pooled}", x="key", y="query", low=0.0, ax=ax)

    def pairs(self, q_index: Indices, k_index: Indices) -> Tensor:
        """The weights at given pairs, in O(pairs): row `q_index[p]` (0 is the call's first query), key `k_index[p]`.

        Args:
            q_index, k_index: int64 [pairs], or lists of them.

        Returns:
            [batch, heads, pairs]; 0 where the mask hides the pair.

        Raises:
            ProblemError: indices of another shape or type, or rows or keys that the call does not have.
        """
        q_index, k_index = index_pairs(q_index, k_index, self.shape, self.q.device)
        at_once = max(1, TILE // max(1, self.q[:, :, 0].numel()))
        parts = zip(q_index.split(at_once), k_index.split(at_once), strict=True)
        return torch.cat(
            [self._weights(self.score_pairs(i, j), i, j, self.totals.at(lambda t, i=i: t[:, :, i])) for i, j in parts],
            dim=-1,
        )

    def rows(self, start: int, stop: int) -> Tensor:
        """The weights of queries start <= i < stop, whole rows: [batch, heads, rows, keys]."""
        return self._tile(self.span("rows", start, stop, 2), slice(0, self.shape[3])).weights

    def columns(self, start: int, stop: int) -> Tensor:
        """The weights on keys start <= j < stop, whole columns: [batch, heads, queries, columns]."""
        return self._tile(slice(0, self.shape[2]), self.span("columns", start, stop, 3)).weights

    def tiles(self) -> Iterator[Tile]:
        """All weights except those that the bounds of the mask exclude, in tiles of at most about `TILE` weights.

        Tiles are in the order of their rows, and for the same rows from left to right; keys in no tile have weight 0.
        """
        batch, heads, queries, keys = self.shape
        rows = TILE // max(1, batch * heads * keys)
        if rows < ROWS:  # fewer keys then, but whole chunks
            rows = max(1, min(ROWS, TILE // (batch * heads * CHUNK)))
        width = max(CHUNK, TILE // max(1, batch * heads * rows))
        for start in range(0, queries, rows):
            row = slice(start, min(start + rows, queries))
            for run in visible_runs(self, row, CHUNK):
                for key in range(run.start, run.stop, width):
                    yield self._tile(row, slice(key, min(key + width, run.stop)))

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row, in descending order, and their keys; one sweep over tiles.

        Equal weights are in the order of their keys. Where a row has fewer than k weights above 0, the remaining
        weights and keys are 0.

        Returns:
            weights [batch, heads, queries, k], keys int64 [batch, heads, queries, k].

        Raises:
            ProblemError: k is below 1.
        """
        if index_of(k) is None or k < 1:
            raise ProblemError(f"top(k={k}): expected the number of weights to return of each row, 1 or more.")
        top = Top(self, k)
        for tile in self.tiles():
            top.add(tile)
        return top.weights, top.keys

    def pooled(self, size: int, by: Literal["mean", "max"] = "mean") -> Tensor:
        """A picture of at most size x size cells: the mean weight of each cell, or the largest; one sweep over tiles.

        A cell is c x c pairs, c = ceil(max(queries, keys) / size); the cells of the last row and column average over
        the pairs that exist. With c = 1 the cells are the weights.

        Returns:
            [batch, heads, ceil(queries / c), ceil(keys / c)]

        Raises:
            ProblemError: size is below 1, or `by` is neither.
        """
        if index_of(size) is None or size < 1 or by not in ("mean", "max"):
            raise ProblemError(f"pooled(size={size}, by={by!r}): expected 1 cell a side or more, and 'mean' or 'max'.")
        cells = Pooled(self, size) if by == "mean" else Largest(self, size)
        for tile in self.tiles():
            cells.add(tile)
        return cells.picture()

    def dense(self, limit: int = DENSE_LIMIT) -> Tensor:
        """All weights, [batch, heads, queries, keys], up to a limit.

        Raises:
            ProblemError: there are more than `limit`.
        """
        batch, heads, queries, keys = self.shape
        if (total := batch * heads * queries * keys) > limit:
            raise ProblemError(
                f"the dense weights [{batch}, {heads}, {queries}, {keys}] are {total:,} elements "
                f"({total * self.dtype.itemsize / 2**30:.1f} GiB), more than the limit of {limit:,}: read `rows`, "
                "`tiles`, `pairs` or `pooled`, or pass a larger limit."
            )
        return self.rows(0, queries)

    def in_float64(self) -> Self:
        """The same weights computed in float64 from q and k, with lse computed again: one sweep over the scores."""
        batch, heads, queries, keys = self.shape
        wide = replace(self, q=self.q.double(), k=self.k.double())
        step = max(1, TILE // max(1, batch * heads * keys))
        rows = range(0, queries, step)
        lse = [wide.scores(row, min(row + step, queries)).logsumexp(-1) for row in rows]
        return replace(wide, lse=torch.cat(lse, dim=-1)) if lse else wide

    @cached_property
    def total(self) -> Tensor:
        """L: the log of the softmax denominator of each row, the sink included; [batch, heads, queries]."""
        lse = self.lse.to(self.dtype)
        return lse if self.sink is None else torch.logaddexp(lse, self.sink.to(self.dtype)[None, :, None])

    @property
    def sink_share(self) -> Tensor:
        """The share of the learned sink in each row, [batch, heads, queries]; 0 in a call without one.

        The weights of a row and this share sum to 1, except in a fully masked row without a sink, or with one of -inf.
        """
        if self.sink is None:
            return torch.zeros_like(self.total)
        sink = self.sink.to(self.dtype)[None, :, None]
        share = self.totals.logs(sink.expand(self.shape[:3]).clone()).exp_()
        return torch.where(sink.isinf(), (sink > 0).to(self.dtype), share)  # infinite numbers have no difference

    @cached_property
    def visible(self) -> Tensor:
        """The number of keys that the mask keeps for each row; int64, broadcasts to [batch, heads, queries]."""
        return count_visible(self, CHUNK)

    @cached_property
    def totals(self) -> Totals:
        """`total` in two numbers; 0 where a row has no weights, whose scores of -inf must not become NaN."""
        return totals(self, self.total)

    def _tile(self, row: slice, key: slice) -> Tile:
        scores, i, j = self.score_tile(row, key)
        of_rows = self.totals.at(lambda t: t[:, :, row, None])
        return Tile(row.start, key.start, self._weights(scores, i, j, of_rows))

    def _weights(self, scores: Tensor, i: Tensor, j: Tensor, of_rows: Totals) -> Tensor:
        return of_rows.logs(scores).exp_().masked_fill_(~self.keep(i, j), 0.0)
