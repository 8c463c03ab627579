"""Intervals of keys: the closed form of masks such as `Causal() & (Window(1024) | Prefix(4))`.

Where the keys that a query may see are a union of few intervals, and no edge of an interval moves to the left from a
query to the next, a schedule is a few lines of arithmetic (`plan/closed_form.py`). `Mask.intervals` gives that union.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

Edge: TypeAlias = "int | NDArray[np.int64] | None"
"""None: no edge; else an int, or an array [batch or 1, queries or 1]."""

MOST = 4
"""Intervals of a union; masks with more are split recursively."""

FAR = 1 << 60
"""Edges are cut to this distance, so that sums with positions fit 64 bits."""


class Interval(NamedTuple):
    """The keys k of query position q with max(q + left, start) <= k < min(q + right, stop); None is no limit.

    Arrays are [batch or 1, queries or 1]. Neither q + left, q + right, start nor stop decreases from a query to the
    next.
    """

    left: Edge = None
    right: Edge = None
    start: Edge = None
    stop: Edge = None


Union: TypeAlias = "list[Interval] | None"
"""The keys in any of the intervals, which may overlap; None where the intervals are unknown."""


def for_queries_moved(x: Interval, by: "int | NDArray[np.int64]") -> Interval:
    """The interval where the query at q has the keys that x gives to the one at q + by.

    Args:
        by: an int, or an array [batch or 1, queries or 1].

    >>> for_queries_moved(Interval(left=-3, right=1, start=2), 10)
    Interval(left=7, right=11, start=2, stop=None)
    """
    left, right = (None if edge is None else edge + by for edge in (x.left, x.right))
    return x._replace(left=left, right=right)


def fault_of(found: object, batch: int, queries: int) -> str | None:
    """What keeps this from being a list of intervals whose edges fit a call of these sizes; None: nothing."""
    if not isinstance(found, list | tuple) or isinstance(found, Interval):  # which is a tuple, too
        return repr(found)
    for x in cast("Sequence[object]", found):
        if not isinstance(x, Interval):
            return f"a list with {x!r}"
        for name, edge in zip(x._fields, cast("Sequence[object]", x), strict=True):
            if not _is_edge(edge, batch, queries):
                what = f"{edge.dtype} {list(edge.shape)}" if isinstance(edge, np.ndarray) else repr(edge)
                return f"an Interval whose {name} is {what}"
    return None


def as_int64(x: Interval) -> Interval:
    """The interval with edges whose sums and differences fit int64: Python's ints or int64 arrays, cut to `FAR`.

    >>> as_int64(Interval(start=np.uint8(3), stop=np.array([[2**64 - 1]], np.uint64)))
    Interval(left=None, right=None, start=3, stop=array([[1152921504606846976]]))
    """
    return Interval(*map(_cut, x))


def _cut(edge: Edge) -> Edge:
    if edge is None:
        return None
    if not isinstance(edge, np.ndarray):
        return max(-FAR, min(int(edge), FAR))
    if edge.dtype.kind == "u":  # beyond int64, it would wrap around
        edge = np.minimum(edge.astype(np.uint64), FAR)
    return edge.astype(np.int64).clip(-FAR, FAR)


def _is_edge(edge: object, batch: int, queries: int) -> bool:
    if not isinstance(edge, np.ndarray):
        return edge is None or isinstance(edge, int | np.integer)
    fits = edge.ndim == 2 and (edge.shape[0] == 1 or edge.shape[0] >= batch) and edge.shape[1] in (1, queries)
    return fits and edge.dtype.kind in "iu"


def step_left(x: Interval) -> tuple[str, int, int] | None:
    """The first edge that moves to the left from a query to the next: (name, batch row, query of the call) before it.

    >>> step_left(Interval(right=1, stop=np.array([[5, 5, 4]])))
    ('stop', 0, 1)
    """
    for name, edge, least in zip(x._fields, x, (-1, -1, 0, 0), strict=True):  # left and right count from the query
        if isinstance(edge, np.ndarray) and edge.shape[1] > 1:
            steps = np.argwhere(edge[:, 1:] - edge[:, :-1] < least)
            if len(steps):
                return name, int(steps[0, 0]), int(steps[0, 1])
    return None


def intersection(a: Union, b: Union) -> Union:
    """The keys in both unions."""
    if a is None or b is None:
        return None
    return limited([
        Interval(_most(x.left, y.left), _least(x.right, y.right), _most(x.start, y.start), _least(x.stop, y.stop))
        for x in a
        for y in b
    ])  # fmt: skip


def union(a: Union, b: Union) -> Union:
    """The keys in either union."""
    return None if a is None or b is None else limited(a + b)


def complement(a: Union) -> Union:
    """The keys outside of a union."""
    if a is None:
        return None
    found: Union = [Interval()]
    for x in a:
        sides = [
            Interval(right=x.left) if x.left is not None else None,
            Interval(left=x.right) if x.right is not None else None,
            Interval(stop=x.start) if x.start is not None else None,
            Interval(start=x.stop) if x.stop is not None else None,
        ]
        found = intersection(found, [side for side in sides if side is not None])
    return found


def limited(intervals: list[Interval]) -> Union:
    """The intervals that are not empty; None if these are more than `MOST`."""
    found = [x for x in intervals if not _is_empty(x)]
    return found if len(found) <= MOST else None


def _is_empty(x: Interval) -> bool:
    """Whether the int edges make the interval empty for every query."""
    return any(isinstance(a, int) and isinstance(b, int) and a >= b for a, b in ((x.left, x.right), (x.start, x.stop)))


def _most(a: Edge, b: Edge) -> Edge:
    if a is None or b is None:
        return b if a is None else a
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def _least(a: Edge, b: Edge) -> Edge:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)
