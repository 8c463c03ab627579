"""Numbers of tokens as reports show them."""


def tokens_of(count: int, which: str = "") -> str:
    """The number of tokens, in words.

    >>> tokens_of(1), tokens_of(1234, "generated ")
    ('1 token', '1,234 generated tokens')
    """
    return f"{count:,} {which}token{'s' * (count != 1)}"
