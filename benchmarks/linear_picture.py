"""The time of linear attention by length, drawn as an SVG by hand."""

import math
from html import escape

LEFT, TOP, WIDE, HIGH = 76, 46, 560, 380
"""Pixels: where the plot begins, and its size."""

COLOURS = {
    "a": ("#0a7d6c", "#2dc1a8"),
    "b": ("#8250df", "#b392f0"),
    "c": ("#0969da", "#58a6ff"),
    "d": ("#bf8700", "#e3b341"),
    "e": ("#bc4c00", "#f0883e"),
    "f": ("#656d76", "#8d96a0"),
}
"""Of each kind, on light and on dark."""

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.quiet { fill: #656d76; font-size: 10px; } .title { font-weight: 600; } .grid { stroke: #d0d7de; }
polyline { fill: none; stroke-width: 2; } .f { stroke-dasharray: 6 4; }
"""


def picture(seconds: dict[str, dict[int, float]]) -> str:
    """Time by tokens as an SVG, both axes logarithmic."""
    points = [(tokens, time) for column in seconds.values() for tokens, time in column.items()]
    first, last = (math.log2(f(tokens for tokens, _ in points)) for f in (min, max))
    low, high = (f(math.log10(time) for _, time in points) for f in (min, max))
    low, high = math.floor(low), math.ceil(high)

    def x(tokens: float) -> float:
        return LEFT + WIDE * (math.log2(tokens) - first) / max(1e-9, last - first)

    def y(time: float) -> float:
        return TOP + HIGH * (high - math.log10(time)) / (high - low)

    body = [f'<text class="title" x="{LEFT}" y="20">Time of one head by number of tokens, both logarithmic</text>']
    for power in range(low, high + 1):
        at = y(10.0**power)
        body.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{LEFT + WIDE}" y2="{at:.1f}"/>')
        body.append(f'<text class="quiet" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_power(power)}</text>')
    for n in range(math.ceil(first), math.floor(last) + 1, 2):
        body.append(f'<line class="grid" x1="{x(2**n):.1f}" y1="{TOP}" x2="{x(2**n):.1f}" y2="{TOP + HIGH}"/>')
        body.append(f'<text class="quiet" x="{x(2**n):.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">{2**n:,}</text>')
    ends = sorted(((y(column[max(column)]), name) for name, column in seconds.items()), key=lambda end: end[0])
    floor = -math.inf
    for kind, (name, column) in zip(COLOURS, seconds.items(), strict=True):
        line = " ".join(f"{x(tokens):.1f},{y(time):.1f}" for tokens, time in sorted(column.items()))
        body.append(f'<polyline class="{kind}" points="{line}"><title>{escape(name)}</title></polyline>')
    for at, name in ends:  # names at the ends of their lines, without overlap
        floor = max(at, floor + 15)
        kind = list(COLOURS)[list(seconds).index(name)]
        body.append(_name(x(max(seconds[name])) + 8, floor + 4, name, kind))
    width, height = LEFT + WIDE + 150, TOP + HIGH + 34
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img">\n<title>Time by number of tokens</title>\n<style>{_style()}</style>'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"


def _name(x: float, y: float, name: str, kind: str) -> str:
    return f'<text class="n{kind}" x="{x:.1f}" y="{y:.1f}">{escape(name)}</text>'


def _power(power: int) -> str:
    """10 to this power in seconds."""
    unit, least = next(
        (unit, least) for unit, least in (("s", 0), ("ms", -3), ("us", -6)) if power >= least or unit == "us"
    )
    return f"{10.0 ** (power - least):g} {unit}"


def _style() -> str:
    light = " ".join(f".{k} {{ stroke: {one}; }} text.n{k} {{ fill: {one}; }}" for k, (one, _) in COLOURS.items())
    dark = " ".join(f".{k} {{ stroke: {two}; }} text.n{k} {{ fill: {two}; }}" for k, (_, two) in COLOURS.items())
    dark = f"text {{ fill: #e6edf3; }} .quiet {{ fill: #8d96a0; }} .grid {{ stroke: #30363d; }} {dark}"
    return f"{STYLE}{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"
