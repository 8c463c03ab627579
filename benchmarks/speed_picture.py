"""docs/speed.svg: how many times as long torch, and the fastest other library, take as regard; a dot plot, log scale.

```
                              0.5   1     2     4     8    16 ...
  causal, 4,096, d 128   fp32       |  o  •
                         bf16       | o        •
```

The line at 1 is regard, the dot is torch's `scaled_dot_product_attention`, the ring is the fastest other library
with its name (`benchmarks/peers.py`). The times of regard and torch are read from docs/performance/zen5.md, which
`./bench --write` wrote. Run it with `python docs/refresh.py speed`.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers import BEST, WHERE
from benchmarks.performance_pages import CASES, all_times
from benchmarks.picture import STYLE, text_at

DRAWN = tuple(case for case in CASES if (case, "float32") in BEST)
"""Those of the cases in which other libraries were measured."""

TYPES = {"fp32": "float32", "bf16": "bfloat16"}

LEFT, WIDTH, ROW, TOP = 336, 470, 17, 78
"""Pixels: where the axis begins, its length, the height of a row, where the first row begins."""

FIRST, LAST = 0.5, 64.0
"""Ends of the axis."""


def speed_picture(page: str) -> str:
    """The picture of the cases in the tables of docs/performance/zen5.md."""
    times = all_times(page)
    body, y = list[str](), TOP
    for case in DRAWN:
        body.append(text_at(LEFT - 52, y + 12, case, anchor="end"))
        for kind, dtype in TYPES.items():
            ours, torch = times[case, kind]
            other, whose = BEST[case, dtype]
            body.append(text_at(LEFT - 12, y + 12, kind, "quiet small", "end"))
            body += _dots(y + 8, torch / ours, other / ours, whose)
            y += ROW
        y += 6
    height = y + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="960" height="{height}" viewBox="-8 0 960 {height}" '
        'role="img">\n'
        f"<title>Times of torch and of the fastest other library, as multiples of regard's</title>\n<style>{STYLE}"
        ".ring { fill: none; stroke: #b35900; stroke-width: 2; } .dot { fill: #656d76; }\n"
        "@media (prefers-color-scheme: dark) { .ring { stroke: #f0a04b; } .dot { fill: #8d96a0; } }\n</style>"
    )
    return "\n".join([head, *_legend(), *_axis(y), *body, "</svg>"]) + "\n"


def main() -> None:
    """Draw: the page, then the picture."""
    page, picture = map(Path, sys.argv[1:3])
    picture.write_text(speed_picture(page.read_text()))


def _x(ratio: float) -> float:
    share = math.log(ratio / FIRST) / math.log(LAST / FIRST)
    return LEFT + WIDTH * min(max(share, 0.0), 1.0)


def _legend() -> Iterator[str]:
    yield text_at(0, 18, "Time, as a multiple of regard's (further right: slower than regard)", "title")
    yield text_at(0, 36, f"{WHERE}, 2 threads. Of the others, the fastest in each case.", "quiet")
    yield f'<circle class="dot" cx="{LEFT + 260}" cy="32" r="4.5"/>' + text_at(LEFT + 272, 36, "torch SDPA")
    yield f'<circle class="ring" cx="{LEFT + 370}" cy="32" r="4"/>' + text_at(LEFT + 382, 36, "fastest other library")


def _axis(bottom: int) -> Iterator[str]:
    ratio = FIRST
    while ratio <= LAST:
        kind = "goal" if ratio == 1 else "grid"
        yield f'<line class="{kind}" x1="{_x(ratio):.1f}" y1="{TOP - 8}" x2="{_x(ratio):.1f}" y2="{bottom}"/>'
        yield text_at(_x(ratio), TOP - 14, "regard" if ratio == 1 else f"{ratio:g}x", "quiet small", "middle")
        ratio *= 2


def _dots(y: int, torch: float, other: float, whose: str) -> Iterator[str]:
    yield f'<circle class="dot" cx="{_x(torch):.1f}" cy="{y}" r="4.5"/>'
    yield f'<circle class="ring" cx="{_x(other):.1f}" cy="{y}" r="4"/>'
    right = max(_x(torch), _x(other)) + 10
    yield text_at(right, y + 4, f"torch {torch:.2g}x · {whose} {other:.2g}x", "small quiet")


if __name__ == "__main__":
    main()
