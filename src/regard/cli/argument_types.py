"""Values of options as they are typed, for argparse: counts, tokens, layers, heads, shares."""

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

FACTORS = {"": 1, "k": 1 << 10, "ki": 1 << 10, "m": 1 << 20, "mi": 1 << 20}
"""Tokens in a `k` or an `m`: 32k is 32,768, as context lengths are named."""

RATES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "Mb": 10**6 / 8, "Gb": 10**9 / 8, "Tb": 10**12 / 8, "Mbit": 10**6 / 8, "Gbit": 10**9 / 8, "Tbit": 10**12 / 8,
}  # fmt: skip
"""Bytes/s of a unit a second: B are bytes, b and bit are bits."""


def count(least: int, *, more: str = "") -> Callable[[str], int]:
    """A reader of whole numbers from `least` on; `k` multiplies by 1,024, `m` by 1,048,576.

    Args:
        more: what an error says is expected beside small numbers.

    >>> count(1)("500"), count(1)("1k"), count(1)("1M")
    (500, 1024, 1048576)
    """

    def read(text: str) -> int:
        number = _whole(text)
        if number is None and text.isdecimal():
            raise argparse.ArgumentTypeError(f"{text} is too large: expected at most 99999999999")
        if number is None or number < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no count: expected {least}, {least + 1}, {least + 2} ...{more}"
            )
        return number

    return read


THREADS = 64
"""The most threads per processor that `--threads` takes: a system may not start thousands, which ends the process."""


def threads(text: str) -> int:
    """A number of threads.

    >>> threads("4")
    4
    """
    number, processors = count(1)(text), os.cpu_count() or 1
    if number > (most := THREADS * processors):
        machine = f"{processors} processor" + "s" * (processors > 1)
        raise argparse.ArgumentTypeError(f"{text} is too many for {machine}: expected {most:,} or fewer")
    return number


def _whole(text: str) -> int | None:
    match = re.fullmatch(r"(\d{1,11})((?:[km]i?)?)", text, re.ASCII | re.IGNORECASE)
    return int(match[1]) * FACTORS[match[2].lower()] if match else None


def rate(text: str) -> float:
    """Bytes a second, with their unit.

    >>> rate("100GB/s"), rate("400 Gbit/s"), rate("1GiB/s")
    (100000000000.0, 50000000000.0, 1073741824.0)
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+)/s", text, re.ASCII)
    if match is None or match[2] not in RATES or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no rate: expected a number with its unit, such as 100GB/s, 50GiB/s or 400Gbit/s"
        )
    return float(match[1]) * RATES[match[2]]


def number(expected: str, least: float, most: float) -> Callable[[str], float]:
    """A reader of finite numbers between `least` and `most`; `expected` describes them in the error."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number {expected}")
        return value

    return read


def tokens(text: str) -> int:
    """A number of tokens, 2 or more.

    >>> tokens("500"), tokens("32k")
    (500, 32768)
    """
    value = _whole(text)
    if value is None or value < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: expected 2, 3 ... or thousands such as 32k")
    return value


def layers(text: str) -> list[int]:
    """Layers by number, from 0.

    >>> layers("3"), layers("0,5-7")
    ([3], [0, 5, 6, 7])
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip(), re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no layer: expected a number from 0 on, or a range such as 4-7"
            )
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return numbers


def heads(text: str) -> list[tuple[int, int]]:
    """Heads as layer.head, both from 0.

    >>> heads("18.6,17.3")
    [(18, 6), (17, 3)]
    """
    return [_head(part.strip()) for part in text.split(",")]


def _head(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no head: expected layer.head, both from 0, such as 18.6")
    return int(match[1]), int(match[2])


def budget(text: str) -> int | float:
    """A number of tokens, or a share of them, below 1.

    >>> budget("1024"), budget("1k"), budget("0.25")
    (1024, 1024, 0.25)
    """
    if _whole(text) is not None:
        return count(1)(text)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no budget: expected tokens, such as 1024, or a share as 0.25")
    return share


def counts(text: str) -> tuple[int, ...]:
    """Numbers from 1 on.

    >>> counts("512,1k")
    (512, 1024)
    """
    return tuple(count(1)(part.strip()) for part in text.split(","))


def shares(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1.

    >>> shares("0,0.5,1")
    (0.0, 0.5, 1.0)
    """
    return tuple(number("from 0 to 1", 0.0, 1.0)(part.strip()) for part in text.split(","))


def chosen_options(args: argparse.Namespace, defaults: Mapping[str, Any]) -> list[str]:
    """The options whose values are not their defaults.

    Args:
        args: the values of the options.
        defaults: the values without any option.

    >>> chosen_options(argparse.Namespace(batch=1, page_size=16), {"batch": 1, "page_size": None})
    ['--page-size']
    """
    return [f"--{name.replace('_', '-')}" for name, value in defaults.items() if getattr(args, name) != value]
