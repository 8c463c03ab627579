"""Bytes with a unit, the same in all commands: powers of 1,024."""


def size(count: float) -> str:
    """Bytes in powers of 1,024.

    >>> size(10 * 2**30), size(70_272), size(12)
    ('10.00 GiB', '68.62 KiB', '12 bytes')
    """
    for unit, name in ((2**60, "EiB"), (2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            value = count / unit
            return f"{value:,.2f} {name}" if value < 100 else f"{value:,.0f} {name}"
    return f"{count:,.0f} bytes"
