"""Two kinds of plots as SVG: dots with intervals on a logarithmic scale, and bars.

```
window 512, no sinks   |       ├──●──┤          bfloat16   ████████████▌      992 us · 50 %
window 512, 4 sinks    ├●┤                       Int8       ██████▌            512 us · 1.9x
                       ¦ all tokens
```
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

LABELS, WIDE, VALUES = 250, 420, 220
"""Widths in pixels: the names on the left, the plot, and the values on the right."""

ROW, TITLE = 24, 60

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.quiet { fill: #656d76; } .title { font-weight: 600; } .small { font-size: 10px; }
.ours { fill: #0a7d6c; stroke: #0a7d6c; } .theirs { fill: #a3abb3; stroke: none; } .bar { stroke: none; }
.goal { stroke: #d1242f; stroke-width: 1.5; } .grid { stroke: #d0d7de; }
.beside { stroke: #656d76; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .quiet { fill: #8d96a0; } .theirs { fill: #6b747d; } .grid { stroke: #30363d; }
  .ours { fill: #2dc1a8; stroke: #2dc1a8; } .goal { stroke: #ff7b72; }
  .beside { stroke: #8d96a0; } .bar { stroke: none; }
}
"""


class Dot(NamedTuple):
    """A name, and a value with its interval: (value, low, high)."""

    name: str
    at: tuple[float, float, float]


class Bar(NamedTuple):
    """A name, a value, its label, whether it is regard's, and its goal, if any."""

    name: str
    value: float
    label: str
    is_ours: bool = True
    goal: float | None = None


def dots(panels: Sequence[tuple[str, Sequence[Dot], float | None, str]]) -> str:
    """Panels below one another: (title, dots, a value to compare with or None, the name of that value)."""
    body, top = list[str](), 0
    for title, rows, beside, named in panels:
        body += _dots(top, title, rows, beside, named)
        top += TITLE + ROW * len(rows) + 20
    return _framed(body, top, panels[0][0])


def bars(panels: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Panels below one another: a title and its bars, from 0."""
    body, top = list[str](), 0
    for title, rows in panels:
        body.append(_text(0, top + 20, title, "title"))
        most = max((max(row.value, row.goal or 0) for row in rows), default=1.0)
        for number, row in enumerate(rows):
            body += _bar(top + TITLE - 22 + ROW * number, row, WIDE / most)
        top += TITLE - 10 + ROW * len(rows)
    return _framed(body, top, panels[0][0])


def _dots(top: int, title: str, rows: Sequence[Dot], beside: float | None, named: str) -> Iterator[str]:
    ends = [end for row in rows for end in row.at if end > 0] + [beside] * bool(beside)
    least, most = (math.log10(f(end for end in ends if end is not None)) for f in (min, max))
    margin = 0.05 * max(most - least, 0.1)
    least, most = least - margin, most + margin

    def x(number: float) -> float:
        return LABELS + WIDE * (math.log10(max(number, 10**least)) - least) / (most - least)

    bottom = top + TITLE + ROW * len(rows)
    yield _text(0, top + 20, title, "title")
    for tick in _ticks(10**least, 10**most):
        yield _line("grid", x(tick), top + TITLE - 8, x(tick), bottom)
        yield _text(x(tick), top + TITLE - 14, f"{tick:g}", "quiet small", "middle")
    if beside is not None:
        yield _line("beside", x(beside), top + TITLE - 8, x(beside), bottom + 4)
        yield _text(x(beside), bottom + 16, f"{named}: {beside:.3g}", "quiet small", "middle")
    for number, (name, (value, low, high)) in enumerate(rows):
        y = top + TITLE + ROW * number + 6
        yield _text(LABELS - 12, y + 4, name, anchor="end")
        yield _line("ours", x(low), y, x(high), y)
        yield f'<circle class="ours" cx="{x(value):.1f}" cy="{y}" r="4"/>'
        yield _text(LABELS + WIDE + 12, y + 4, f"{value:.3g} ({low:.3g} to {high:.3g})", "small")


def _bar(y: float, row: Bar, scale: float) -> Iterator[str]:
    yield _text(LABELS - 12, y + 12, row.name, anchor="end")
    kind = "ours bar" if row.is_ours else "theirs"
    width = max(1.0, row.value * scale)
    yield f'<rect class="{kind}" x="{LABELS}" y="{y + 2}" width="{width:.1f}" height="13" rx="1"/>'
    if row.goal is not None:
        yield _line("goal", LABELS + row.goal * scale, y - 2, LABELS + row.goal * scale, y + 19)
    yield _text(LABELS + max(row.value, row.goal or 0) * scale + 8, y + 12, row.label, "small")


def _ticks(least: float, most: float) -> Iterable[float]:
    """Round values between the two, three or more for a decade or less."""
    for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1):
        wide = most / least > 30
        yield from (
            n * 10.0**power for n in ((1,) if wide else (1, 2, 3, 4, 5, 6, 8)) if least <= n * 10.0**power <= most
        )


def _framed(body: Sequence[str], height: int, title: str) -> str:
    width = LABELS + WIDE + VALUES
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="-8 0 {width} {height}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
