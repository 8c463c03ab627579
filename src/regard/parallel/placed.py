"""Masks and biases of a whole sequence, for a call that has only some of its queries and some of its keys.

In a call, queries and keys have indices; in the sequence, positions. A `PlacedMask` is the mask of the call whose
query i is at position `queries[i]` and whose key j is at position `keys[j]`. Positions ascend, so a union of intervals
of positions is a union of intervals of indices, and a rectangle of indices is within a rectangle of positions.
"""

from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.bias import Bias, Sum, TensorBias
from regard.describe.interval import Edge, Interval, Union
from regard.describe.mask import (
    Bools,
    CallSizes,
    Ints,
    Mask,
    Positions,
    Rectangles,
    broadcast_shape_of,
    intervals_of,
    signature_of,
)
from regard.describe.score_function import ScoreFunction
from regard.describe.spec import spec
from regard.lru_cache import LRUCache

Piece: TypeAlias = tuple[int, int, int, int]
"""(first, count, block, stride): token i of the piece is at position `first + i // block * stride + i % block`."""

Pieces: TypeAlias = tuple[Piece, ...]
"""Where the tokens of a call are in the sequence: pieces in ascending order."""


def pieces_of(runs: Sequence[range]) -> Pieces:
    """The pieces of ascending ranges, such as those of `Layout.positions`."""
    return tuple((r.start, len(r), 1, r.step) if r.step > 1 else (r.start, len(r), len(r), len(r)) for r in runs if r)


_kept: LRUCache[Pieces, Ints] = LRUCache(entries=1024, nbytes=64 << 20, size=lambda at: at.nbytes)


def positions_of(pieces: Pieces) -> Ints:
    """The position of each token, [tokens].

    >>> positions_of(((0, 2, 2, 2), (8, 4, 2, 4))).tolist()
    [0, 1, 8, 9, 12, 13]
    """
    found = _kept.get(pieces)
    if found is None:
        each = [_positions(piece, np.arange(piece[1])) for piece in pieces]
        found = np.concatenate([np.zeros(0, np.int64), *each])
        found.flags.writeable = False
        _kept.put(pieces, found)
    return found


def is_even(pieces: Pieces) -> bool:
    """Whether the distance from each token to the next is the same, so that positions are a straight line."""
    return len(pieces) == 1 and (pieces[0][1] <= pieces[0][2] or pieces[0][2] == 1)


def step_of(pieces: Pieces) -> int:
    """The distance from a token to the next, of pieces that are even."""
    _, count, block, stride = pieces[0]
    return 1 if count <= block else stride


def have_one_step(queries: Pieces, keys: Pieces) -> bool:
    """Whether the distance of positions follows from that of indices."""
    return is_even(queries) and is_even(keys) and step_of(queries) == step_of(keys)


def split_even(pieces: Pieces) -> list[tuple[slice, Pieces]]:
    """The tokens cut into even pieces: their indices, and where they are."""
    found: list[tuple[slice, Pieces]] = []
    at = 0
    for first, count, block, stride in pieces:
        size = count if block == 1 else block
        for start in range(0, count, size):
            n = min(size, count - start)
            place = (first, n, 1, stride) if block == 1 else (first + start // block * stride, n, n, n)
            found.append((slice(at, at + n), (place,)))
            at += n
    return found


@spec
class PlacedMask(Mask):
    """The mask of a call that has some of the queries and keys of a sequence.

    Args:
        inner: the mask of the sequence, bound to it.
        queries: where the queries of the call are.
        keys: where the keys of the call are.

    >>> from regard import Causal, draw
    >>> print(draw(PlacedMask(Causal(), ((1, 2, 1, 2),), ((0, 3, 3, 3),)), 2, 3, offset=0))
    █ █ ·
    █ █ █
    """

    inner: Mask
    queries: Pieces
    keys: Pieces

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self.inner.keep(b, h, _placed(self.queries, q), _placed(self.keys, k))

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return self.inner.bounds(self._hull(r))

    def signature(self, r: Rectangles) -> Ints:
        inner = signature_of(self.inner, self._hull(r))
        sides = (_texture(self.queries, r.q0, r.q1), _texture(self.keys, r.k0, r.k1))
        return np.concatenate([inner, *sides], axis=1)

    def intervals(self, sizes: CallSizes) -> Union:
        queries = positions_of(self.queries)
        if not len(queries):
            return None
        first, stop = int(queries[0]), int(queries[-1]) + 1
        inner = intervals_of(self.inner, sizes._replace(queries=stop - first, offset=first))
        if inner is None:
            return None
        inner = [Interval(*(_chosen(edge, queries - first, stop - first) for edge in x)) for x in inner]
        if all(is_even(p) and step_of(p) == 1 for p in (self.queries, self.keys)):
            return [_moved(x, self.queries[0][0], self.keys[0][0]) for x in inner]
        return [_indexed(x, queries, positions_of(self.keys)) for x in inner]

    def broadcast_shape(self) -> tuple[int, int]:
        return broadcast_shape_of(self.inner)

    def bind(self, sizes: CallSizes) -> Mask:
        return self

    def _hull(self, r: Rectangles) -> Rectangles:
        q, k = positions_of(self.queries), positions_of(self.keys)
        return Rectangles(r.b, r.h, q[r.q0], q[r.q1 - 1] + 1, k[r.k0], k[r.k1 - 1] + 1)


@spec
class PlacedBias(Bias):
    """The bias of a call that has some of the queries and keys of a sequence.

    Args:
        inner: the bias of the sequence, bound to it.
        queries: where the queries of the call are.
        keys: where the keys of the call are.
    """

    inner: Bias
    queries: Pieces
    keys: Pieces

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return self.inner.value(b, h, _placed(self.queries, q), _placed(self.keys, k))

    def per_distance(self) -> bool:
        return have_one_step(self.queries, self.keys) and self.inner.per_distance()


def place_mask(mask: Mask | None, queries: Pieces, keys: Pieces) -> Mask | None:
    """The mask of the call that has these queries and keys."""
    return None if mask is None else PlacedMask(mask, queries, keys)


def place_bias(bias: Bias | None, queries: Pieces, keys: Pieces) -> Bias | None:
    """The bias of the call that has these queries and keys."""
    if bias is None:
        return None
    if type(bias) is Sum:
        a, b = (place_bias(each, queries, keys) for each in (bias.a, bias.b))
        return Sum(cast(Bias, a), cast(Bias, b))
    if type(bias) is TensorBias:
        return _chosen_rows(bias, queries, keys)
    return _placed_function(bias, queries, keys) if isinstance(bias, ScoreFunction) else PlacedBias(bias, queries, keys)


def _chosen_rows(bias: TensorBias, queries: Pieces, keys: Pieces) -> TensorBias:
    """The rows and columns of these queries and keys; gradients flow to the whole tensor."""
    rows = bias.tensor[(None,) * (4 - bias.tensor.ndim)]
    if rows.shape[2] > 1:
        rows = rows.index_select(2, torch.tensor(positions_of(queries) - (bias.offset or 0), device=rows.device))
    if rows.shape[3] > 1:
        rows = rows.index_select(3, torch.tensor(positions_of(keys), device=rows.device))
    return TensorBias(rows, None)


def _placed_function(bias: ScoreFunction, queries: Pieces, keys: Pieces) -> ScoreFunction:
    def function(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bias.changed(scores, b, h, _placed(queries, q), _placed(keys, k))

    return ScoreFunction(function, tuple(bias.tensors()))


def _positions(piece: Piece, i: Ints) -> Ints:
    first, _, block, stride = piece
    return first + i // block * stride + i % block


def _placed(pieces: Pieces, i: Positions) -> Positions:
    """The positions of tokens of the call, by their indices."""
    if is_even(pieces):
        return pieces[0][0] + i * step_of(pieces)
    table = positions_of(pieces)
    if isinstance(i, int):
        return int(table[i])
    return torch.tensor(table, device=i.device)[i.clamp(0, max(len(table) - 1, 0))]


def _texture(pieces: Pieces, start: Ints, stop: Ints) -> Ints:
    """Ints [rectangles, 2] that determine the distances between the tokens of each range of indices."""
    at, first = positions_of(pieces), np.cumsum([0, *(piece[1] for piece in pieces)])
    piece = np.searchsorted(first, start, side="right") - 1
    one = piece == np.searchsorted(first, stop - 1, side="right") - 1
    length, steps = stop - start, np.array([step_of((p,)) if is_even((p,)) else 0 for p in pieces])[piece]
    packed = at[stop - 1] - at[start] == length - 1
    step = np.where(packed, 1, np.where(one, steps, 0))
    return np.stack([step, np.where(step == 0, start, 0)], axis=1)


def _chosen(edge: Edge, at: Ints, queries: int) -> Edge:
    """The edge of the queries of the call, from that of all positions between the first and the last of them."""
    return edge[:, at] if isinstance(edge, np.ndarray) and edge.shape[1] == queries > 1 else edge


def _moved(x: Interval, query: int, key: int) -> Interval:
    """The interval where indices are positions less those of the first query and the first key."""
    slope, level = query - key, -key
    left, right = (None if edge is None else edge + slope for edge in (x.left, x.right))
    start, stop = (None if edge is None else edge + level for edge in (x.start, x.stop))
    return Interval(left, right, start, stop)


def _indexed(x: Interval, queries: Ints, keys: Ints) -> Interval:
    """The interval of indices of keys, from the interval of positions."""
    low = _joined(np.maximum, x.left, x.start, queries)
    high = _joined(np.minimum, x.right, x.stop, queries)
    return Interval(start=_index(low, keys), stop=_index(high, keys))


def _joined(join: np.ufunc, slope: Edge, level: Edge, queries: Ints) -> Edge:
    sloped = None if slope is None else queries + slope if isinstance(slope, np.ndarray) else (queries + slope)[None]
    if sloped is None or level is None:
        return level if sloped is None else sloped
    return cast(Ints, join(sloped, level))


def _index(edge: Edge, keys: Ints) -> Edge:
    return edge if edge is None else int(at) if (at := np.searchsorted(keys, edge)).ndim == 0 else at
