"""Which pictures and close-ups a page includes, so that it stays below a number of bytes.

Scores and mean pictures are always included. Then, while they fit: the pictures of greatest weights, the close-ups of
this report's heads, most remarkable first, and those of the report that it is compared with. The page says how many
were left out.
"""

from collections.abc import Iterable
from typing import NamedTuple

from regard.inspect.page.packing import Block, PackedCloseUp, blocks, is_causal, pack_close_ups
from regard.inspect.surveying.report import Report


class Fit(NamedTuple):
    """The pictures and close-ups of one report that a page includes, and the number of those left out."""

    causal: bool
    pictures: list[Block]
    close_ups: list[PackedCloseUp]
    largest_left_out: bool
    close_ups_left_out: int


def fit_into(report: Report, room: float, prefix: str = "") -> Fit:
    """The parts of a report that fit into `room` bytes; mean pictures are included in any case."""
    causal = is_causal(report.pictures)
    means = list(blocks(report.pictures, causal, "mean", prefix))
    largest = list(blocks(report.pictures, causal, "max", prefix))
    room -= size(means)
    too_large = size(largest) > room
    included = [] if too_large else largest
    close_ups = _close_ups(report, room - size(included), prefix)
    return Fit(causal, means + included, close_ups, too_large, len(report.close_ups) - len(close_ups))


def size(parts: Iterable[Block]) -> int:
    """The bytes of packed pictures."""
    return sum(len(part.data) for part in parts)


def fit_size(fit: Fit) -> int:
    """The bytes of all included parts."""
    return size(fit.pictures) + sum(map(len, close_up_blocks(fit).values()))


def close_up_blocks(fit: Fit) -> dict[str, str]:
    """The base64 of all close-ups by its id, each once."""
    return {name: data for close in fit.close_ups for name, data in close.blocks.items()}


def _close_ups(report: Report, room: float, prefix: str) -> list[PackedCloseUp]:
    """Close-ups, most remarkable first, up to the first that does not fit."""
    included: list[PackedCloseUp] = []
    stored: set[str] = set()
    for close in pack_close_ups(report.close_ups, prefix):
        room -= sum(len(data) for name, data in close.blocks.items() if name not in stored)
        if room < 0:
            break
        stored |= close.blocks.keys()
        included.append(close)
    return included
