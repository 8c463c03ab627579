"""Close-ups: all weights of one head, stored in O(n) bytes instead of n x n, and read again.

q and k determine every score, `total` is the log of what each row is divided by, and the mask is two integers per row
where a row sees one range of keys and perhaps the first few of all (causal, windows, windows with sinks, padding,
none). Before a close-up is returned some of its rows are compared, in float64, with the softmax of the call's scores.

A report has close-ups of the heads that were selected, and of a long text of the strongest of every kind.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from regard.describe.mask import Ints
from regard.inspect.surveying.kinds import NAMERS, Head, strength
from regard.inspect.surveying.report import CloseUp
from regard.inspect.weights.lazy import CHUNK, ROWS, TILE, Weights
from regard.inspect.weights.scores import cap_and_bias, summed_bias
from regard.inspect.weights.spans import kept_columns

WRONG_BY = 0.001
"""The tolerance of a weight of a close-up: the rounding error of scores of 1,000 from q, k and totals in float32."""

BLOCK = 256
"""The most rows of a block of `strongest`: with a window of 1,024 keys, a fifth of the computed weights is unused."""

CHECKED = 16
"""Rows at which a close-up is compared with the exact weights."""


class KeyRanges(NamedTuple):
    """The keys that each row sees: first <= j < last, and those of the first `prefix` keys that are before last."""

    first: NDArray[np.int32]
    last: NDArray[np.int32]
    prefix: int


OTHER_FORM = (
    "a page computes weights from queries, keys, runs of visible keys and a bias by distance, and its mask or its bias "
    "is another"
)
OTHER_WEIGHTS = "its weights are not finite, or its scores are too large for the page's float32 totals"
"""Why a head has no close-up."""


def close_up(
    weights: Weights, layer: int, head: int, known: dict[object, KeyRanges | None] | None = None
) -> CloseUp | None:
    """The close-up of one head of a call; None if its form has no such mask or bias, or shows other weights.

    Args:
        weights: of one sequence over itself, [1, heads, tokens, tokens].
        known: the key ranges of masks read before: a mask whose bounds decide nothing takes O(n^2).
    """
    found = _close_up_or_reason(weights, layer, head, {} if known is None else known)
    return found if isinstance(found, CloseUp) else None


def _close_up_or_reason(
    weights: Weights, layer: int, head: int, known: dict[object, KeyRanges | None]
) -> CloseUp | str:
    """The close-up of one head, or why it has none."""
    group = weights.shape[1] // weights.k.shape[1]
    bias = _distance_bias(weights, head)
    runs = _known_runs(weights, head, known)
    if runs is None or (bias is None) != (weights.bias is None):
        return OTHER_FORM
    q, k = (each.float().cpu().numpy() for each in (weights.q[0, head], weights.k[0, head // group]))
    total = weights.total.expand(weights.shape[:3])[0, head].float().cpu().numpy()
    close = CloseUp(layer, head, q, k, total, weights.scale, weights.softcap, runs.first, runs.last, runs.prefix, bias)
    return close if _is_right(close, weights.heads(head)) else OTHER_WEIGHTS


def close_up_rows(close: CloseUp, start: int, stop: int) -> NDArray[np.float32]:
    """The weights of rows start <= i < stop, [rows, tokens]: what the page computes, for tests and for the terminal."""
    return np.exp(_log_weights(close, slice(start, stop), slice(0, len(close.k))))


class Pair(NamedTuple):
    """A weight: how much the token at `query` looks at the one at `key`."""

    query: int
    key: int
    weight: float


def strongest(close: CloseUp, count: int, *, from_key: int = 1) -> list[Pair]:
    """The pairs of different tokens with the greatest weights, a key from `from_key` on, the greatest first.

    The first token is excluded by default: its mass is the sink score, and it would fill the list. O(visible pairs) in
    time, in blocks of `TILE` weights: columns that no row of a block sees are skipped.
    """
    best, least = list[Pair](), -np.inf
    for rows, keys in _blocks(close, from_key) if count else ():
        logs = _log_weights(close, rows, keys)
        i, j = (logs > least).nonzero()
        different = i + rows.start != j + keys.start
        i, j = i[different], j[different]
        if len(i) > count:
            order = np.argsort(-logs[i, j], kind="stable")[:count]
            i, j = i[order], j[order]
        weights = np.exp(logs[i, j])
        best += [
            Pair(int(r) + rows.start, int(c) + keys.start, float(w)) for r, c, w in zip(i, j, weights, strict=True)
        ]
        best = sorted(best, key=lambda pair: -pair.weight)[:count]
        least = float(np.log(best[-1].weight)) if len(best) == count and best[-1].weight > 0 else -np.inf
    return [pair for pair in best if pair.weight > 0]


def _blocks(close: CloseUp, from_key: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of at most about `TILE` weights that have every visible pair with a key from `from_key` on, each once."""
    start, tokens = 0, len(close.q)
    while start < tokens:
        visible = max(1, int((close.last - close.first)[start : start + BLOCK].max()))
        rows = slice(start, min(start + max(1, min(BLOCK, TILE // visible)), tokens))
        first = max(from_key, int(close.first[rows].min()))
        last = int(close.last[rows].max())
        for keys in (slice(from_key, min(close.prefix, first, last)), slice(first, last)):
            if keys.start < keys.stop:
                yield rows, keys
        start = rows.stop


def _log_weights(close: CloseUp, rows: slice, keys: slice) -> NDArray[np.float32]:
    """The logarithms of the weights of some rows on some keys, -inf where the mask hides a key."""
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)[None]
    scores = close.scale * (close.q[rows] @ close.k[keys].T)
    bias = None if close.distance_bias is None else torch.from_numpy(close.distance_bias[len(close.k) - 1 + i - j])
    scores = cap_and_bias(torch.from_numpy(scores), close.softcap, bias).numpy() - close.total[rows, None]
    first, last = close.first[rows, None], close.last[rows, None]
    scores[(j >= last) | ((j < first) & (j >= close.prefix))] = -np.inf
    return scores


def visible_runs(weights: Weights, head: int) -> KeyRanges | None:
    """The keys that each row of a head sees, or None if `KeyRanges` cannot represent them."""
    own = weights.heads(head)
    parts = [_runs(kept, edges) for _, kept, edges in _kept(own)]
    prefix = max((int(part[2].max(initial=0)) for part in parts), default=0)
    first, last = (np.concatenate([part[side] for part in parts]).astype(np.int32) for side in (0, 1))
    runs = KeyRanges(first, last, prefix)
    for row, kept, edges in _kept(own):
        if any(
            (kept != _visible(runs, row, keys)).any() for keys in (edges[:-1], edges[1:] - 1)
        ):  # both ends of a column
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
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and inf are wrong as well
            off = np.abs(close_up_rows(ours, row, row + 1)[0] - _exact_row(exact, row)).max()
        if not off <= WRONG_BY:
            return False
    return True


def _exact_row(weights: Weights, row: int) -> NDArray[np.float64]:
    """A row of weights from its scores alone, without the call's lse: [keys]; zeros where the row sees no key."""
    scores = weights.scores(row, row + 1)[0, 0, 0]
    columns = scores if weights.sink is None else torch.cat([scores, weights.sink.to(scores)])
    return columns.softmax(-1).nan_to_num(0.0)[: len(scores)].cpu().numpy()


def _known_runs(weights: Weights, head: int, known: dict[object, KeyRanges | None]) -> KeyRanges | None:
    mask = weights.mask
    key = mask, head if mask is not None and mask.broadcast_shape()[1] > 1 else 0, weights.shape[2:], weights.sequence
    if key not in known:
        known[key] = visible_runs(weights, head)
    return known[key]


def _visible(runs: KeyRanges, row: slice, keys: Ints) -> NDArray[np.bool_]:
    j = keys[None]
    return (j < runs.last[row, None]) & ((j >= runs.first[row, None]) | (j < runs.prefix))


def _runs(kept: NDArray[np.bool_], edges: Ints) -> tuple[Ints, Ints, Ints]:
    """For each row: start and end of its last run of keys, and the length of a run from key 0 before it."""
    columns = kept.shape[1]
    last = np.where(kept.any(1), columns - kept[:, ::-1].argmax(1), 0)
    gaps = ~kept & (np.arange(columns) < last[:, None])
    first = np.where(gaps.any(1), columns - gaps[:, ::-1].argmax(1), 0)
    return edges[first], edges[last], edges[np.where(first > 0, gaps.argmax(1), 0)]


def _kept(weights: Weights) -> Iterator[tuple[slice, NDArray[np.bool_], Ints]]:
    """For groups of rows: which columns of keys they see [rows, columns], and the edges of the columns."""
    for start in range(0, weights.shape[2], ROWS):
        row = slice(start, min(start + ROWS, weights.shape[2]))
        kept, edges = kept_columns(weights, row, CHUNK)
        yield row, kept[0, 0], edges


def _distance_bias(weights: Weights, head: int) -> NDArray[np.float32] | None:
    """The bias by i - j, from -(tokens - 1) on; None without a bias, or if it depends on more than i - j."""
    if weights.bias is None or not weights.bias.per_distance():
        return None
    tokens = weights.shape[2]
    distance = torch.arange(1 - tokens, tokens, device=weights.q.device)
    here, zero = torch.tensor([head], device=distance.device), torch.zeros_like(distance)
    at = zero[:1], here, distance.clamp(min=0), (-distance).clamp(min=0)
    value = summed_bias(weights.bias, at, weights.dtype)
    return value.detach().float().expand(len(distance)).cpu().numpy()


BUDGET = 4 * 2**20
"""Bytes for close-ups of heads that were not selected: 15 heads of 1,024 tokens; at least one for longer texts."""

Place = tuple[int, int]


class CloseUpCollector:
    """Collects close-ups during the forward pass, since queries and keys of a layer are not stored.

    The most remarkable heads are known only at the end, so a few candidates of each kind are stored.

    Args:
        selected: heads (layer, head) that get a close-up, or a note where there is none.
        others: whether other heads get one; not needed if a picture shows every weight.

    Attributes:
        missing: by (layer, head), why a selected head has no close-up.
    """

    def __init__(self, selected: Sequence[Place], others: bool) -> None:
        self._selected, self._others = selected, others
        self._kept: dict[Place, CloseUp] = {}
        self.missing: dict[Place, str] = {}
        self._masks: dict[object, KeyRanges | None] = {}
        self._candidates: dict[str, list[tuple[float, CloseUp]]] = {}

    def offer(self, weights: Weights, heads: Sequence[Head]) -> None:
        """Consider the heads of a layer, during its call."""
        for head in heads:
            if (head.layer, head.head) in self._selected:
                self._keep(weights, head)
            elif self._others:
                self._consider(weights, head)

    def of(self, heads: Sequence[Head]) -> tuple[CloseUp, ...]:
        """The close-ups of these heads: the selected ones in their order, then others within the budget.

        Args:
            heads: the heads of the report, most remarkable first.
        """
        selected = [self._kept[place] for place in self._selected if place in self._kept]
        candidates = {(c.layer, c.head): c for group in self._candidates.values() for _, c in group}
        ordered = [candidates[head.layer, head.head] for head in heads if (head.layer, head.head) in candidates]
        budget, others = BUDGET, list[CloseUp]()
        for close in ordered:
            budget -= close.bytes
            if budget < 0 and (selected or others):
                break
            others.append(close)
        return (*selected, *others)

    @property
    def notes(self) -> list[str]:
        """A note for each selected head that has no close-up."""
        return [
            f"Head {layer}.{head} has no close-up: {self.missing[layer, head]}. `regard.inspect.observe` reads its "
            "weights."
            for layer, head in self._selected
            if (layer, head) in self.missing
        ]

    def _keep(self, weights: Weights, head: Head) -> None:
        """Store the close-up of a selected head, or why it has none."""
        place = head.layer, head.head
        found = _close_up_or_reason(weights, *place, self._masks)
        if isinstance(found, CloseUp):
            self._kept[place] = found
        else:
            self.missing[place] = found

    def _consider(self, weights: Weights, head: Head) -> None:
        """Store the head's close-up if it is among the strongest of its kind."""
        candidates, strong = self._candidates.setdefault(head.kind, []), strength(head)
        size = weights.shape[2] * (4 * weights.q.shape[3] + 12)
        most = max(1, BUDGET // (size * (len(NAMERS) + 1)))
        if len(candidates) >= most and strong <= candidates[-1][0]:
            return
        close = close_up(weights, head.layer, head.head, self._masks)
        if close is not None:
            candidates.append((strong, close))
            candidates.sort(key=lambda candidate: -candidate[0])
            del candidates[most:]
