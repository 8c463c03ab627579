"""What fits into a page of so many bytes.

Scores and the mean pictures always go in. Then, as long as there is room: the pictures of greatest weights, the
close-ups of this report's heads from the most remarkable on, and those of the report that it is compared with. What is
left out is counted, and the page says so.
"""

from collections.abc import Iterable
from typing import NamedTuple

from regard.inspect.page.closes import Packed, packed
from regard.inspect.page.pictures import Block, blocks, is_causal
from regard.inspect.surveying.report import Report


class Fitted(NamedTuple):
    """The pictures and close-ups of one report that a page holds, and how many it had to leave out."""

    causal: bool
    pictures: list[Block]
    closes: list[Packed]
    largest_left_out: bool
    closes_left_out: int


def fitted(report: Report, room: float, prefix: str = "") -> Fitted:
    """What of a report fits into `room` bytes; mean pictures go in whether they fit or not."""
    causal = is_causal(report.pictures)
    means = list(blocks(report.pictures, causal, "mean", prefix))
    largest = list(blocks(report.pictures, causal, "max", prefix))
    room -= weight(means)
    too_large = weight(largest) > room
    kept = [] if too_large else largest
    closes = _closest(report, room - weight(kept), prefix)
    return Fitted(causal, means + kept, closes, too_large, len(report.close_ups) - len(closes))


def weight(parts: Iterable[Block]) -> int:
    """The bytes of packed pictures."""
    return sum(len(part.data) for part in parts)


def spent(fit: Fitted) -> int:
    """The bytes of all that was fitted in."""
    return weight(fit.pictures) + sum(map(len, close_blocks(fit).values()))


def close_blocks(fit: Fitted) -> dict[str, str]:
    """The base64 of all close-ups by its id, each once."""
    return {name: data for close in fit.closes for name, data in close.blocks.items()}


def _closest(report: Report, room: float, prefix: str) -> list[Packed]:
    """CloseUp-ups from the most remarkable on, up to the first that does not fit."""
    kept: list[Packed] = []
    held: set[str] = set()
    for close in packed(report.close_ups, prefix):
        room -= sum(len(data) for name, data in close.blocks.items() if name not in held)
        if room < 0:
            break
        held |= close.blocks.keys()
        kept.append(close)
    return kept
