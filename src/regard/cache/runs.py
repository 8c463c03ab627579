"""`Run`: codes of consecutive tokens in consecutive slots; a side of a cache is a few of them, mostly one."""

from typing import NamedTuple


class Run(NamedTuple):
    """The slots from `slot` on hold so many tokens."""

    slot: int
    tokens: int


def span(run: Run) -> tuple[int, int]:
    """Its first slot, and the one behind it."""
    return run.slot, run.slot + run.tokens


def tokens_of(runs: tuple[Run, ...]) -> int:
    """How many tokens they hold."""
    return sum(run.tokens for run in runs)


def first_of(runs: tuple[Run, ...], tokens: int) -> tuple[Run, ...]:
    """The first so many tokens.

    >>> first_of((Run(0, 5), Run(16, 32)), 7)
    (Run(slot=0, tokens=5), Run(slot=16, tokens=2))
    """
    found: list[Run] = []
    for slot, count in runs:
        if tokens > 0:
            found.append(Run(slot, min(count, tokens)))
        tokens -= count
    return tuple(found)


def without(runs: tuple[Run, ...], tokens: int) -> tuple[Run, ...]:
    """All but the first so many tokens.

    >>> without((Run(0, 5), Run(16, 32)), 7)
    (Run(slot=18, tokens=30),)
    """
    found: list[Run] = []
    for slot, count in runs:
        gone = min(count, max(tokens, 0))
        if gone < count:
            found.append(Run(slot + gone, count - gone))
        tokens -= count
    return tuple(found)
