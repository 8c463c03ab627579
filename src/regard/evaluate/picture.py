"""Pictures of results as SVG: a heat map of a grid, accuracy by position, losses over positions."""

import math
from collections.abc import Callable, Sequence
from html import escape

from regard.evaluate.intervals import Interval
from regard.evaluate.loss_results import curve, longest
from regard.evaluate.results import Results, shown

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
LEFT, TOP, WIDTH, HEIGHT = 70, 46, 420, 260
CELL_WIDTH, CELL_HEIGHT = 84, 36

Line = tuple[str, list[tuple[float, Interval]]]


def picture(runs: Sequence[tuple[str, Results]]) -> str:
    """The pictures of one or more runs of a task under each other; their lines share one picture.

    Args:
        runs: (name, results); the name is shown where there are several.
    """
    first = runs[0][1]
    if first.is_loss:
        lines = [(name, curve(longest(results.records))) for name, results in runs]
        parts = [plot("loss by position, nats", "position in the text, tokens", lines, None)]
    else:
        parts = [heat_map(name, results) for name, results in runs if len(results.axes) > 1]
        axis = first.axes[0]
        lines = [(name, _points(results, axis)) for name, results in runs]
        parts.append(plot(f"right answers by {axis}", axis, lines, (0.0, 1.0)))
    return stacked(f"{first.task}, {first.settings['model']}", parts)


def _points(results: Results, axis: str) -> list[tuple[float, Interval]]:
    found = results.along(axis)
    return sorted(
        (float(each.cell[axis]) if not isinstance(each.cell[axis], str) else float(i), each.score)
        for i, each in enumerate(found)
    )


Part = tuple[float, float, str]
"""Width, height and content."""


def stacked(title: str, parts: Sequence[Part]) -> str:
    """Parts under each other, with a title, as one SVG."""
    y, body = 24.0, list[str]()
    for _, height, content in parts:
        body.append(f'<g transform="translate(0 {y:g})">{content}</g>')
        y += height
    width = max(part[0] for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" font-family="sans-serif" '
        f'font-size="11"><desc>regard evaluate</desc><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="18" font-size="13" font-weight="bold">{escape(title)}</text>{"".join(body)}</svg>\n'
    )


def heat_map(name: str, results: Results) -> Part:
    """The score of each cell of a grid: white is 0, green is 1; each with its interval."""
    row_axis, column_axis = results.axes[:2]
    rows, columns = (sorted(results.values(axis), key=_number) for axis in (row_axis, column_axis))
    parts = [f'<text x="{LEFT}" y="16">{escape(name)}</text>' if name else ""]
    for i, column in enumerate(columns):
        x = LEFT + (i + 0.5) * CELL_WIDTH
        parts.append(f'<text x="{x:g}" y="{TOP - 6}" text-anchor="middle">{escape(shown(column_axis, column))}</text>')
    for j, row in enumerate(rows):
        y = TOP + (j + 0.5) * CELL_HEIGHT + 4
        parts.append(f'<text x="{LEFT - 6}" y="{y:g}" text-anchor="end">{escape(shown(row_axis, row))}</text>')
    for each in results.cells():
        x = LEFT + columns.index(each.cell[column_axis]) * CELL_WIDTH
        y = TOP + rows.index(each.cell[row_axis]) * CELL_HEIGHT
        parts.append(_cell(x, y, each.score))
    label = f"{column_axis} across, {row_axis} down; 95 % intervals"
    bottom = TOP + len(rows) * CELL_HEIGHT
    parts.append(f'<text x="{LEFT}" y="{bottom + 18}">{escape(label)}</text>')
    return LEFT + len(columns) * CELL_WIDTH + 20, bottom + 36, "".join(parts)


def _cell(x: float, y: float, score: Interval) -> str:
    share = 0.0 if math.isnan(score.value) else score.value
    red, green, blue = (round(255 + share * (to - 255)) for to in (49, 163, 84))
    middle = x + CELL_WIDTH / 2
    ink = "#fff" if share > 0.6 else "#222"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="rgb({red},{green},{blue})" '
        f'stroke="#fff"/><text x="{middle:g}" y="{y + 16:g}" text-anchor="middle" fill="{ink}">{100 * share:.0f} %'
        "</text>"
        f'<text x="{middle:g}" y="{y + 29:g}" text-anchor="middle" font-size="9" fill="{ink}">{100 * score.low:.0f} to '
        f"{100 * score.high:.0f}</text>"
    )


def _number(value: float | str) -> tuple[int, float, str]:
    return (1, 0.0, value) if isinstance(value, str) else (0, float(value), "")


Place = Callable[[float, float], tuple[float, float]]
"""A function from the values of both axes to the place in a picture."""


def plot(title: str, label: str, lines: Sequence[Line], limits: tuple[float, float] | None) -> Part:
    """Lines with the bands of their intervals over a linear axis."""
    points = [point for _, line in lines for point in line]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    values = [value for _, each in points for value in each if math.isfinite(value)]
    if not values:
        return _note(title, "infinite at every position")
    low, high = limits or (min(values), max(values))
    high = high if high > low else low + 1

    def at(x: float, y: float) -> tuple[float, float]:
        right = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        y = min(max(y, low), high)
        return LEFT + WIDTH * right, TOP + HEIGHT * (high - y) / (high - low)

    parts = [
        f'<text x="{LEFT}" y="{TOP - 10}">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 32}" text-anchor="middle">{escape(label)}</text>',
    ]
    for i in range(5):
        x, y = low_x + i * (high_x - low_x) / 4, low + i * (high - low) / 4
        place, height = at(x, y)
        y_name = f"{100 * y:.0f} %" if limits else f"{y:.3g}"
        x_name = shown(label, x) if label == "depth" else f"{x:,.0f}"
        parts.append(f'<path d="M{LEFT} {height:.1f}h{WIDTH}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{y_name}</text>')
        parts.append(f'<text x="{place:.1f}" y="{TOP + HEIGHT + 15}" text-anchor="middle">{x_name}</text>')
    for i, (_, line) in enumerate(lines):
        parts += _drawn(line, COLOURS[i % len(COLOURS)], at)
    names = [(i, name) for i, (name, _) in enumerate(lines) if name]
    for i, name in names:
        y = TOP + HEIGHT + 50 + 15 * i
        parts.append(f'<path d="M{LEFT} {y - 4}h16" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="2.4"/>')
        parts.append(f'<text x="{LEFT + 22}" y="{y}">{escape(name)}</text>')
    return LEFT + WIDTH + 20, TOP + HEIGHT + 46 + 15 * len(names), "".join(parts)


def _drawn(line: Sequence[tuple[float, Interval]], colour: str, at: Place) -> list[str]:
    """A line with its points, over the band of its intervals where these are finite; `at` keeps it in the picture."""
    middle, parts = [at(x, each.value) for x, each in line], list[str]()
    if all(math.isfinite(each.high) for _, each in line):
        upper, lower = [at(x, each.high) for x, each in line], [at(x, each.low) for x, each in reversed(line)]
        parts.append(f'<polygon points="{_path([*upper, *lower])}" fill="{colour}" opacity="0.15"/>')
    parts.append(f'<polyline points="{_path(middle)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return [*parts, *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in middle)]


def _note(title: str, text: str) -> Part:
    """A title with a text in place of lines."""
    return LEFT + WIDTH + 20, TOP + 10, f'<text x="{LEFT}" y="{TOP - 10}">{escape(f"{title}: {text}")}</text>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
