"""Measuring in rounds: each round measures everything once, so that other load slows everything alike.

Ratios and differences are taken within a round; their median over the rounds is the result.
"""

import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Measure = Callable[[], float]
"""Measures something once: seconds, or a rate per second."""

LONG_ENOUGH = 0.005
"""Shortest measurement in seconds, so that the clock and the loop around the call do not count."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds for `seconds` in all, at least `least` and at most `most` of them."""

    seconds: float = 2.0
    least: int = 5
    most: int = 200


QUICK = Effort(seconds=0.2, least=2)


@dataclass
class Rounds:
    """The measurements of each round, by name.

    Attributes:
        interrupted: whether Ctrl-C ended the rounds early.
    """

    rounds: list[dict[str, float]] = field(default_factory=list)
    interrupted: bool = False

    def median(self, of: Callable[..., float], *names: str) -> float | None:
        """The median of a value computed within each round from these measurements; None where one is missing.

        >>> rounds = Rounds([{"ours": 1.0, "theirs": 2.0}, {"ours": 3.0, "theirs": 9.0}])
        >>> rounds.median(lambda ours, theirs: theirs / ours, "ours", "theirs")
        2.5
        """
        if not all(name in one for one in self.rounds for name in names):
            return None
        return statistics.median(of(*(one[name] for name in names)) for one in self.rounds)


def interleaved(
    measures: Mapping[str, Measure], effort: Effort, progress: Callable[[int, int], None] = lambda done, total: None
) -> Rounds:
    """Rounds of these measurements, every second round in the opposite order.

    Ctrl-C ends them after at least one round, and is raised before that.

    Args:
        progress: called with the number of rounds done, and the expected number.
    """
    rounds, start = Rounds(), time.perf_counter()
    try:
        while not _done(rounds, effort, time.perf_counter() - start):
            order = list(measures.items())[:: 1 if len(rounds.rounds) % 2 == 0 else -1]
            rounds.rounds.append({name: measure() for name, measure in order})
            progress(len(rounds.rounds), _expected(rounds, effort, time.perf_counter() - start))
    except KeyboardInterrupt:
        if not rounds.rounds:
            raise
        rounds.interrupted = True
    return rounds


def _done(rounds: Rounds, effort: Effort, seconds: float) -> bool:
    count = len(rounds.rounds)
    return count >= effort.most or (count >= effort.least and seconds >= effort.seconds)


def _expected(rounds: Rounds, effort: Effort, seconds: float) -> int:
    count = len(rounds.rounds)
    return min(effort.most, max(effort.least, count, math.ceil(count * effort.seconds / seconds)))


def timed(run: Callable[[], object]) -> Measure:
    """A measurement of the seconds of one call, over calls that last 5 ms together. It is called here to warm up."""
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
    """Let torch, and with it regard, compute on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
