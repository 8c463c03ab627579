"""The versions of torch that regard was tested with, what is known of each, and a warning where torch is newer.

`scripts/versions.sh` runs the tests with versions other than the one that `./test` uses; what it finds is written here.
"""

import re
from functools import cache

import torch

from regard import native
from regard.errors import VersionWarning
from regard.torch_internals import MISSING

TESTED: dict[tuple[int, int], str] = {
    (2, 11): "2.11.0",
    (2, 12): "2.12.1",
    (2, 13): "2.13.0",
    (2, 14): "2.14.1",
    (2, 15): "2.15.0",
}
"""The release of each minor version that `scripts/versions.sh` was run with; `KNOWN` has what differed."""

KNOWN: dict[tuple[int, int], tuple[str, ...]] = {
    (2, 11): (
        "torch.compile evaluates a mask of a class of your own for all pairs of queries and keys, which takes memory",
    ),
    (2, 14): ("torch warns of its own torch.jit.script (FutureWarning) at the first forward-mode derivative",),
    (2, 15): ("torch warns of its own torch.jit.script (FutureWarning) at the first forward-mode derivative",),
}
"""What differs with a minor version, one sentence each."""


def minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version of torch.

    >>> minor("2.15.0+cu132")
    (2, 15)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def untested(version: str) -> str | None:
    """Why a version of torch may not fit, in one sentence; None for those that regard was tested with.

    >>> untested("2.13.1+cpu")
    >>> untested("3.0.0")
    'torch 3.0.0 is newer than the versions that this regard was tested with, 2.11 to 2.15.'
    """
    first, last = (".".join(map(str, end(TESTED))) for end in (min, max))
    if minor(version) in TESTED:
        return None
    age = "newer" if minor(version) > max(TESTED) else "older"
    return f"torch {version} is {age} than the versions that this regard was tested with, {first} to {last}."


@cache
def warn_of_untested() -> None:
    """Give a `VersionWarning` if this torch is not one of those tested: once, and not if `REGARD_QUIET` is set."""
    if (why := untested(torch.__version__)) is not None:
        lost = "".join(f" {name} is missing: {consequence}." for name, consequence in MISSING.items())
        native.warn_once(f"{why}{lost} If something fails, install one of these, or a newer regard.", VersionWarning)
