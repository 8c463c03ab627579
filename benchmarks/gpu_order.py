"""From measurements to the order of backends on CUDA (`src/regard/dispatch/cuda_order.toml`)."""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu_page import OURS, Chip, Record
from regard.atomic_write import write_whole
from regard.dispatch.cuda_order import TABLE, Order, orders


def measured_orders(records: Sequence[Record], chip: Chip) -> list[Order]:
    """The rows of the kinds of calls in which two backends or more were measured, in the measured order.

    A backend counts with the geometric mean of its time by that of the fastest, over the cases in which all of the
    kind's measured backends ran. Backends that were not measured keep their places.
    """
    return [row for order in orders().values() if (row := _measured(order, records, chip)) is not None]


def _measured(order: Order, records: Sequence[Record], chip: Chip) -> Order | None:
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if record.kind == order.kind and record.library.startswith(OURS) and record.seconds is not None:
            cases.setdefault((record.section, record.case), {})[record.backend] = record.seconds
    common = set[str]().union(*cases.values())
    whole = [times for times in cases.values() if times.keys() == common]
    if len(common) < 2 or not whole:
        return None
    by_fastest = {
        name: math.exp(sum(math.log(times[name] / min(times.values())) for times in whole) / len(whole))
        for name in common
    }
    ranked = iter(sorted(by_fastest, key=lambda name: by_fastest[name]))
    backends = tuple(next(ranked) if name in by_fastest else name for name in order.backends)
    figures = ", ".join(f"{name} {by_fastest[name]:.2f}" for name in backends if name in by_fastest)
    where = f"{chip.title}, {len(whole)} case{'s' * (len(whole) > 1)}, {datetime.now(UTC).date()}"
    return Order(order.kind, backends, order.reason, f"times of the fastest: {figures}; {where}")


def write_order(records: Sequence[Record], chip: Chip, path: Path = TABLE) -> list[str]:
    """Write the measured rows into the table; returns a line for each."""
    text, lines = path.read_text(), list[str]()
    for row in measured_orders(records, chip):
        listed = ", ".join(f'"{name}"' for name in row.backends)
        text = _with(_with(text, row.kind, "backends", f"[{listed}]"), row.kind, "measured", f'"{row.measured}"')
        lines.append(str(row))
    write_whole(path, text.encode())
    return lines or ["no kind of call was measured by two backends: the order stays as it is"]


def _with(text: str, kind: str, key: str, value: str) -> str:
    """The table with another value in the row of a kind."""
    pattern = re.compile(rf"(^\[{kind}\]\n(?:[^\[\n].*\n)*?{key} = ).*$", re.MULTILINE)
    found, count = pattern.subn(lambda match: match[1] + value, text)
    assert count == 1, f"{kind} has {count} lines of {key}"
    return found
