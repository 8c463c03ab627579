"""Which heads get a close-up: those selected, and of a long text the strongest of every kind."""

from collections.abc import Sequence

from regard.inspect.surveying.closeup import KeyRanges, close_up
from regard.inspect.surveying.kinds import NAMERS, strength
from regard.inspect.surveying.report import CloseUp, Head
from regard.inspect.weights.lazy import Weights

BUDGET = 4 * 2**20
"""Bytes for close-ups of heads that were not selected: 15 heads of 1,024 tokens; at least one for longer texts."""

Place = tuple[int, int]


class CloseUpCollector:
    """Collects close-ups during the forward pass, since queries and keys of a layer are not stored.

    The most remarkable heads are known only at the end, so a few candidates of each kind are stored.

    Args:
        selected: heads (layer, head) that always get a close-up.
        others: whether other heads get one; not needed if a picture shows every weight.
    """

    def __init__(self, selected: Sequence[Place], others: bool) -> None:
        self._selected, self._others = selected, others
        self._kept: dict[Place, CloseUp] = {}
        self._masks: dict[object, KeyRanges | None] = {}
        self._candidates: dict[str, list[tuple[float, CloseUp]]] = {}

    def offer(self, weights: Weights, heads: Sequence[Head]) -> None:
        """Consider the heads of a layer, during its call."""
        for head in heads:
            if (head.layer, head.head) in self._selected:
                close = close_up(weights, head.layer, head.head, self._masks)
                self._kept |= {} if close is None else {(head.layer, head.head): close}
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
