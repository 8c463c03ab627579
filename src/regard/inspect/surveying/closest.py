"""Which heads are kept to the last weight: those asked for, and of a long text the strongest of every kind."""

from collections.abc import Sequence

from regard.inspect.surveying.closeup import Runs, close_up
from regard.inspect.surveying.kinds import NAMERS, strength
from regard.inspect.surveying.report import CloseUp, Head
from regard.inspect.weights.lazy import Weights

BUDGET = 4 * 2**20
"""Bytes of close-ups that nobody asked for: 15 heads of 1,024 tokens; of longer texts one head in any case."""

Place = tuple[int, int]


class Closest:
    """Gathers close-ups while the layers pass, since their queries and keys are gone afterwards.

    Which heads are the most remarkable is known only at the end, so of each kind a few candidates are held.

    Args:
        asked: heads (layer, head) that are kept in any case.
        others: whether there are to be any others: where a picture shows every weight there is no need of them.
    """

    def __init__(self, asked: Sequence[Place], others: bool) -> None:
        self._asked, self._others = asked, others
        self._kept: dict[Place, CloseUp] = {}
        self._masks: dict[object, Runs | None] = {}
        self._candidates: dict[str, list[tuple[float, CloseUp]]] = {}

    def offer(self, weights: Weights, heads: Sequence[Head]) -> None:
        """The heads of a layer, as it passes."""
        for head in heads:
            if (head.layer, head.head) in self._asked:
                close = close_up(weights, head.layer, head.head, self._masks)
                self._kept |= {} if close is None else {(head.layer, head.head): close}
            elif self._others:
                self._consider(weights, head)

    def of(self, heads: Sequence[Head]) -> tuple[CloseUp, ...]:
        """The close-ups of these heads: those asked for in the order of asking, then others as far as the budget goes.

        Args:
            heads: of the report, most remarkable first.
        """
        asked = [self._kept[place] for place in self._asked if place in self._kept]
        held = {(c.layer, c.head): c for candidates in self._candidates.values() for _, c in candidates}
        ordered = [held[head.layer, head.head] for head in heads if (head.layer, head.head) in held]
        room, others = BUDGET, list[CloseUp]()
        for close in ordered:
            room -= close.bytes
            if room < 0 and (asked or others):
                break
            others.append(close)
        return (*asked, *others)

    def _consider(self, weights: Weights, head: Head) -> None:
        """Hold the head if it is among the strongest of its kind."""
        held, strong = self._candidates.setdefault(head.kind, []), strength(head)
        size = weights.shape[2] * (4 * weights.q.shape[3] + 12)
        most = max(1, BUDGET // (size * (len(NAMERS) + 1)))
        if len(held) >= most and strong <= held[-1][0]:
            return
        close = close_up(weights, head.layer, head.head, self._masks)
        if close is not None:
            held.append((strong, close))
            held.sort(key=lambda candidate: -candidate[0])
            del held[most:]
