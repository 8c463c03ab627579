"""Text of the user in a message."""

LONGEST = 60
"""Characters of a text that is shown whole."""


def quoted(text: str) -> str:
    """The text in quotation marks, or its beginning if it is long.

    >>> quoted("window(4)"), len(quoted("a" * 100))
    ("'window(4)'", 62)
    """
    return repr(text) if len(text) <= LONGEST else f"{text[: LONGEST - 3]!r}..."
