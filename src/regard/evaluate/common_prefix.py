"""The common prefix of two texts, or of two lists of tokens."""

from collections.abc import Sequence


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """The length of the common prefix.

    >>> common_prefix([3, 1, 4], [3, 1, 5, 9]), common_prefix("a", "ab")
    (2, 1)
    """
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
