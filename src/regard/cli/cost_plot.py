"""Memory and times of a model over its context, as an SVG of two panels: logarithmic axes, a line for each change."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape

from regard.cli.byte_size import size
from regard.cli.durations import duration
from regard.cost.model_cost import ModelCost

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 300, 76, 44, 12, 40
COLOURS = ("#1b1b1b", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
POINTS = 4
"""Points for each doubling of the context."""

Line = tuple[str, list[tuple[float, float]]]


def draw(changes: Sequence[tuple[str, ModelCost]]) -> str:
    """The picture: bytes of weights and cache, and the time of one more token (of a prompt, for an encoder)."""
    current = changes[0][1]
    contexts = _contexts(current)

    def lines(value: Callable[[ModelCost], float | None]) -> list[Line]:
        points = [(name, [(n, value(replace(c, context=n))) for n in contexts]) for name, c in changes]
        return [(name, [(float(n), y) for n, y in each if y]) for name, each in points]

    is_step = current.model.is_causal
    panels: list[tuple[str, list[Line], Callable[..., str]]] = [
        ("memory: weights and KV cache", lines(lambda c: c.weight_bytes + c.cache_bytes), size)
    ]
    if current.machine is not None:
        title = "least time of one more token" if is_step else "least time of a prompt"
        panels.append((title, lines(lambda c: c.seconds(c.step or c.prompt)), duration))
    limit = None if current.machine is None else current.machine.memory
    body = [
        _panel(i * (LEFT + WIDTH + RIGHT), title, each, unit, limit if unit is size else None)
        for i, (title, each, unit) in enumerate(panels)
    ]
    width = len(panels) * (LEFT + WIDTH + RIGHT)
    legend_at = TOP + HEIGHT + BOTTOM
    where = f" on {current.machine.title}" if current.machine else ""
    title = f"{current.model.name}, {current.batch:,} x {current.dtype}{where}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {legend_at + 34}" font-family="sans-serif" '
        f'font-size="11"><desc>regard cost</desc><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{escape(title)}</text>'
        f"{''.join(body)}{_legend([name for name, _ in changes], legend_at, width)}</svg>\n"
    )


def _contexts(c: ModelCost) -> list[int]:
    """Contexts from 1,024 tokens, or an eighth of this one, to four times this one, or to the last learned position."""
    most = 4 * c.context if not c.model.positions else c.model.context or c.context
    least = max(1, min(1024, c.context // 8))
    steps = max(1, round(POINTS * math.log2(most / least)))
    return sorted({round(least * (most / least) ** (i / steps)) for i in range(steps + 1)})


def _panel(x0: float, title: str, lines: Sequence[Line], unit: Callable[..., str], limit: float | None) -> str:
    points = [point for _, each in lines for point in each]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    values = [y for _, y in points] + ([limit] if limit else [])
    low_y, high_y = min(values) / 1.1, max(values) * 1.1  # no value is on the frame

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            x0 + LEFT + WIDTH * math.log(x / low_x) / math.log(high_x / low_x or 2),
            TOP + HEIGHT * (1 - math.log(y / low_y) / math.log(high_y / low_y)),
        )

    parts = [
        f'<rect x="{x0 + LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{x0 + LEFT}" y="{TOP - 8}">{escape(title)}</text>',
        f'<text x="{x0 + LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 32}" text-anchor="middle">context, tokens</text>',
    ]
    for n in _ticks(low_x, high_x, (1,), 2):
        x, _ = at(n, low_y)
        name = f"{round(n / 1024):,}k" if n >= 1024 else f"{n:.0f}"
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{name}</text>')
    for y_value in _ticks(low_y, high_y, *(((1,), 2) if unit is size else ((1, 2, 5), 10))):
        _, y = at(low_x, y_value)
        parts.append(f'<path d="M{x0 + LEFT} {y:.1f}h{WIDTH}" stroke="#eee"/>')
        parts.append(f'<text x="{x0 + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{unit(y_value)}</text>')
    if limit:
        _, y = at(low_x, limit)
        parts.append(f'<path d="M{x0 + LEFT} {y:.1f}h{WIDTH}" stroke="#c00" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x0 + LEFT + 6}" y="{y - 4:.1f}" fill="#c00">memory of the machine</text>')
    for i, (_, each) in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in each))
        width = 2.4 if not i else 1.4
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="{width}"/>'
        )
    return "".join(parts)


def _ticks(low: float, high: float, steps: Sequence[float], base: float) -> list[float]:
    """Multiples of powers of the base between two values, some 9 at most; the middle alone, where there is none."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    found = [step * float(base) ** e for e in range(first, last + 1) for step in steps]
    inside = [each for each in found if low <= each <= high]
    return inside[:: 1 + len(inside) // 10] or [math.sqrt(low * high)]


def _legend(names: Sequence[str], y: float, width: float) -> str:
    room = (width - LEFT - 60) / max(1, len(names))
    return "".join(
        f'<path d="M{LEFT + i * room:.0f} {y + 12}h16" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="2.4"/>'
        f'<text x="{LEFT + 20 + i * room:.0f}" y="{y + 16}" font-size="10">{escape(name)}</text>'
        for i, name in enumerate(names)
    )
