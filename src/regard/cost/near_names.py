"""Errors for unknown names, with the names that are near."""

from collections.abc import Sequence

from regard.errors import ProblemError


def unknown_name(kind: str, name: str, known: Sequence[str], otherwise: str = "") -> ProblemError:
    """The error for a name that is not known.

    >>> print(unknown_name("machine", "h1000", ["a100", "h100", "h200"]))
    unknown machine 'h1000'. Near: h100, h200, a100.
    """
    near = near_names(name, known)
    names = f"Near: {', '.join(near)}" if near else f"Known: {', '.join(known)}"
    return ProblemError(f"unknown {kind} {name!r}. {names}{f'; {otherwise}' if otherwise else ''}.")


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """The known names, 8 at most, that are spelt alike or contain the name.

    >>> near_names("h1000", ["a100", "h100", "h200"]), near_names("path/to/folder", ["a100", "h100"])
    (['h100', 'h200', 'a100'], [])
    """
    import difflib  # noqa: PLC0415 - only errors need it

    plain = name.lower()
    near = difflib.get_close_matches(plain, known, n=5)
    near += [each for each in known if len(plain) > 2 and plain in each and each not in near]
    return near[:8]
