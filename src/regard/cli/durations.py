"""Times with a unit: of calls, in tables of measured times, and of any length, in sentences and tables of costs."""


def call_duration(seconds: float | None) -> str:
    """The time of a call in milliseconds, or below one in microseconds, with three digits.

    >>> call_duration(0.0234), call_duration(0.0000234), call_duration(2.5), call_duration(None)
    ('23.4 ms', '23.4 us', '2,500 ms', '-')
    """
    if seconds is None:
        return "-"
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:,.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def duration(seconds: float | None) -> str:
    """A time in seconds, milliseconds or microseconds, with at most three digits.

    >>> duration(0.0234), duration(2.5), duration(0.0000234), duration(None), duration(0.9997)
    ('23.4 ms', '2.5 s', '23.4 us', '-', '1,000 ms')
    """
    if seconds is None:
        return "-"
    value, unit = (
        (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms") if seconds >= 1e-3 else (1e6 * seconds, "us")
    )
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:,.3g} {unit}"
