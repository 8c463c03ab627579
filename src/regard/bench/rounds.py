"""Measuring in rounds: each round measures everything once, so that a busy machine slows all that is compared alike.

What is compared is compared within a round, and the median is taken of what came out of the rounds.
"""

import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Measure = Callable[[], float]
"""Measures something once: seconds, or so many a second."""

LONG_ENOUGH = 0.005
"""Seconds that one measurement lasts at least, so that the clock and the loop around the call do not count."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds go on for `seconds` in all, and are at least `least` and at most `most`."""

    seconds: float = 2.0
    least: int = 5
    most: int = 200


QUICK = Effort(seconds=0.2, least=2)


@dataclass
class Rounds:
    """What each round measured, by name.

    Attributes:
        cut: whether Ctrl-C ended them early.
    """

    found: list[dict[str, float]] = field(default_factory=list)
    cut: bool = False

    def median(self, of: Callable[..., float], *names: str) -> float | None:
        """The median of what is computed within each round from these; None where one of them was not measured.

        >>> rounds = Rounds([{"ours": 1.0, "theirs": 2.0}, {"ours": 3.0, "theirs": 9.0}])
        >>> rounds.median(lambda ours, theirs: theirs / ours, "ours", "theirs")
        2.5
        """
        if not all(name in one for one in self.found for name in names):
            return None
        return statistics.median(of(*(one[name] for name in names)) for one in self.found)


def interleaved(
    measures: Mapping[str, Measure], effort: Effort, progress: Callable[[int, int], None] = lambda done, total: None
) -> Rounds:
    """Rounds of these measurements, every other one in the opposite order.

    Ctrl-C ends them after one round or more, and is raised before.

    Args:
        progress: is told how many rounds are done, and how many there will be as far as one can tell.
    """
    rounds, start = Rounds(), time.perf_counter()
    try:
        while not _done(rounds, effort, time.perf_counter() - start):
            order = list(measures.items())[:: 1 if len(rounds.found) % 2 == 0 else -1]
            rounds.found.append({name: measure() for name, measure in order})
            progress(len(rounds.found), _expected(rounds, effort, time.perf_counter() - start))
    except KeyboardInterrupt:
        if not rounds.found:
            raise
        rounds.cut = True
    return rounds


def _done(rounds: Rounds, effort: Effort, seconds: float) -> bool:
    count = len(rounds.found)
    return count >= effort.most or (count >= effort.least and seconds >= effort.seconds)


def _expected(rounds: Rounds, effort: Effort, seconds: float) -> int:
    count = len(rounds.found)
    return min(effort.most, max(effort.least, count, math.ceil(count * effort.seconds / seconds)))


def timed(run: Callable[[], object]) -> Measure:
    """Measures the seconds of one call, by as many calls as last 5 ms. It is called here, to warm up."""
    first = _seconds(run, 1)
    again = first if first > 0.3 else _seconds(run, 1)
    calls = max(1, math.ceil(LONG_ENOUGH / min(first, again)))
    return lambda: _seconds(run, calls)


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


@contextmanager
def on_threads(count: int) -> Generator[None]:
    """torch, and regard with it, computes on so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
