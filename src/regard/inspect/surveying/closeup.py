"""One head to the last weight: kept in O(n) bytes instead of n x n, and read again.

q and k say every score, `total` says what each row is divided by, and the mask is said by two numbers a row
where a row sees one run of keys and perhaps the first few of all (causal, windows, windows with sinks, padding, none).
Before a close-up is handed out it is read at some rows, in float64, and must show the softmax of the call's scores.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.describe.mask import Ints
from regard.inspect.surveying.report import CloseUp
from regard.inspect.weights.lazy import CHUNK, ROWS, TILE, Weights
from regard.inspect.weights.scores import cap_and_bias
from regard.inspect.weights.spans import kept_columns

WRONG_BY = 0.001
"""How far a weight of a close-up may be from the exact one: q, k and totals in float32 say scores of 1,000 to that."""

CHECKED = 16
"""Rows at which a close-up is compared with the exact weights."""


class Runs(NamedTuple):
    """The keys that each row sees: first <= j < last, and the first `prefix` keys as far as they stand before last."""

    first: NDArray[np.int32]
    last: NDArray[np.int32]
    prefix: int


def close_up(weights: Weights, layer: int, head: int, known: dict[object, Runs | None] | None = None) -> CloseUp | None:
    """The close-up of one head of a call, or None where it cannot be told so: another mask, a bias by pair.

    Args:
        weights: of one sequence over itself, [1, heads, tokens, tokens].
        known: what was found of masks, to be used again: a mask whose bounds decide nothing takes O(n^2).
    """
    group = weights.shape[1] // weights.k.shape[1]
    bias = _distance_bias(weights, head)
    runs = _known_runs(weights, head, {} if known is None else known)
    if runs is None or (bias is None) != (weights.bias is None):
        return None
    q, k = (each.float().cpu().numpy() for each in (weights.q[0, head], weights.k[0, head // group]))
    total = weights.total.expand(weights.shape[:3])[0, head].float().cpu().numpy()
    close = CloseUp(layer, head, q, k, total, weights.scale, weights.softcap, runs.first, runs.last, runs.prefix, bias)
    return close if _is_right(close, weights.heads(head)) else None


def close_up_rows(close: CloseUp, start: int, stop: int) -> NDArray[np.float32]:
    """The weights of rows start <= i < stop, [rows, tokens]: what the page computes, for tests and for the terminal."""
    i, j = np.arange(start, stop)[:, None], np.arange(len(close.k))[None]
    scores = close.scale * (close.q[start:stop] @ close.k.T)
    bias = None if close.distance_bias is None else torch.from_numpy(close.distance_bias[len(close.k) - 1 + i - j])
    scores = cap_and_bias(torch.from_numpy(scores), close.softcap, bias).numpy()
    first, last = close.first[start:stop, None], close.last[start:stop, None]
    seen = (j < last) & ((j >= first) | (j < close.prefix))
    return np.where(seen, np.exp(np.where(seen, scores - close.total[start:stop, None], 0)), 0)


class Pair(NamedTuple):
    """A weight: how much the token at `query` looks at the one at `key`."""

    query: int
    key: int
    weight: float


def strongest(close: CloseUp, count: int, *, from_key: int = 1) -> list[Pair]:
    """The pairs of different tokens with the greatest weights, a key from `from_key` on; in O(n) memory.

    The first token is left out by default: the mass on it is what the sink score says, and would fill the list.
    """
    best: list[Pair] = []
    rows = max(1, TILE // len(close.k))
    for start in range(0, len(close.q), rows):
        weights = close_up_rows(close, start, min(start + rows, len(close.q)))
        weights[np.arange(len(weights)), np.arange(start, start + len(weights))] = 0
        weights[:, :from_key] = 0
        found = np.argsort(weights, axis=None)[-count:] if count else []
        best += [Pair(start + int(at) // len(close.k), int(at) % len(close.k), float(weights.flat[at])) for at in found]
        best = sorted(best, key=lambda pair: -pair.weight)[:count]
    return [pair for pair in best if pair.weight > 0]


def visible_runs(weights: Weights, head: int) -> Runs | None:
    """The keys that each row of a head sees, or None where they are no such runs."""
    own = weights.heads(head)
    parts = [_runs(kept, edges) for _, kept, edges in _kept(own)]
    prefix = max((int(part[2].max(initial=0)) for part in parts), default=0)
    first, last = (np.concatenate([part[side] for part in parts]).astype(np.int32) for side in (0, 1))
    runs = Runs(first, last, prefix)
    for row, kept, edges in _kept(own):
        if any((kept != _seen(runs, row, keys)).any() for keys in (edges[:-1], edges[1:] - 1)):  # both ends of a column
            return None
    return runs


def _is_right(close: CloseUp, weights: Weights) -> bool:
    """Whether some rows of a close-up show the weights of its head, all in float64.

    Two products in float32 may round alike, and differ from the page's, which are in float64: nothing of the comparison
    is left to the rounding of a machine.
    """
    exact = replace(weights, q=weights.q.double(), k=weights.k.double())
    ours = replace(close, q=close.q.astype(np.float64), k=close.k.astype(np.float64))
    for row in np.unique(np.linspace(0, len(close.q) - 1, CHECKED).round().astype(int)).tolist():
        with np.errstate(over="ignore", invalid="ignore"):  # what is no number is wrong as well
            off = np.abs(close_up_rows(ours, row, row + 1)[0] - _exact_row(exact, row)).max()
        if not off <= WRONG_BY:
            return False
    return True


def _exact_row(weights: Weights, row: int) -> NDArray[np.float64]:
    """A row of weights from its scores alone, without the call's lse: [keys]; zeros where the row sees no key."""
    scores = weights.scores(row, row + 1)[0, 0, 0]
    columns = scores if weights.sink is None else torch.cat([scores, weights.sink.to(scores)])
    return columns.softmax(-1).nan_to_num(0.0)[: len(scores)].cpu().numpy()


def _known_runs(weights: Weights, head: int, known: dict[object, Runs | None]) -> Runs | None:
    mask = weights.mask
    key = mask, head if mask is not None and mask.broadcast_shape()[1] > 1 else 0, weights.shape[2:], weights.sequence
    if key not in known:
        known[key] = visible_runs(weights, head)
    return known[key]


def _seen(runs: Runs, row: slice, keys: Ints) -> NDArray[np.bool_]:
    j = keys[None]
    return (j < runs.last[row, None]) & ((j >= runs.first[row, None]) | (j < runs.prefix))


def _runs(kept: NDArray[np.bool_], edges: Ints) -> tuple[Ints, Ints, Ints]:
    """Of each row: where its last run of keys begins and ends, and how many keys a run from 0 on before it has."""
    columns = kept.shape[1]
    last = np.where(kept.any(1), columns - kept[:, ::-1].argmax(1), 0)
    gaps = ~kept & (np.arange(columns) < last[:, None])
    first = np.where(gaps.any(1), columns - gaps[:, ::-1].argmax(1), 0)
    return edges[first], edges[last], edges[np.where(first > 0, gaps.argmax(1), 0)]


def _kept(weights: Weights) -> Iterator[tuple[slice, NDArray[np.bool_], Ints]]:
    """Some rows after the other, which columns of keys they see [rows, columns], and the edges of the columns."""
    for start in range(0, weights.shape[2], ROWS):
        row = slice(start, min(start + ROWS, weights.shape[2]))
        kept, edges = kept_columns(weights, row, CHUNK)
        yield row, kept[0, 0], edges


def _distance_bias(weights: Weights, head: int) -> NDArray[np.float32] | None:
    """What is added to a score by i - j, from -(tokens - 1) on; None without a bias, or where it depends on more."""
    if weights.bias is None or not weights.bias.per_distance():
        return None
    tokens = weights.shape[2]
    distance = torch.arange(1 - tokens, tokens, device=weights.q.device)
    here, zero = torch.tensor([head], device=distance.device), torch.zeros_like(distance)
    value: Tensor = weights.bias.value(zero[:1], here, distance.clamp(min=0), (-distance).clamp(min=0))
    return value.detach().float().expand(len(distance)).cpu().numpy()
