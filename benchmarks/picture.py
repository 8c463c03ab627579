"""The share of the machine's limit that regard and torch reach, case by case, drawn as an SVG by hand.

```
                          fp32                       bf16
  causal, 4,096, d 64     ██████████████▌|  83 %     ███████████▏|  76 %
                          ▔▔▔▔▔ 30 %                 ▔▔ 15 %
```

Thick is regard, thin is torch, the stroke is the goal.
"""

from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.cases import BESIDE_LIMIT
from benchmarks.report import TYPES, Line, by_section

LABELS, PANEL, GAP, WIDTH = 292, 290, 24, 920
"""Pixels: where the first panel begins, how wide 100 % is drawn with the room for numbers, between panels, in all."""

FULL = PANEL - 62
"""Pixels of 100 %."""

ROW, TITLE = 27, 34

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.quiet { fill: #656d76; } .title { font-weight: 600; } .small { font-size: 10px; }
.ours { fill: #0a7d6c; } .theirs { fill: #a3abb3; } .goal { stroke: #d1242f; stroke-width: 1.5; }
.grid { stroke: #d0d7de; stroke-width: 1; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .quiet { fill: #8d96a0; }
  .ours { fill: #2dc1a8; } .theirs { fill: #6b747d; } .goal { stroke: #ff7b72; } .grid { stroke: #30363d; }
}
"""


def draw(lines: Sequence[Line]) -> str:
    """The picture of those lines whose limit is known."""
    known = [line for line in lines if line.result is not None and line.result.share is not None]
    sections = [(section, own) for section, own in by_section(known) if section.columns == BESIDE_LIMIT]
    body, height = list[str](), 64
    for section, own in sections:
        body.append(text_at(0, height + 22, section.title, "title"))
        height += TITLE
        for name in dict.fromkeys(line.name for line in own):
            body += _row(height, name, {line.dtype: line for line in own if line.name == name})
            height += ROW
    frame = [*_legend(), *_grid(height)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height + 12}" '
        f'viewBox="-8 0 {WIDTH} {height + 12}" role="img">\n'
        f"<title>Share of the machine's limit that regard and torch reach</title>\n<style>{STYLE}</style>"
    )
    return "\n".join([head, *frame, *body, "</svg>"]) + "\n"


def _left(panel: int) -> int:
    return LABELS + panel * (PANEL + GAP)


def _legend() -> Iterator[str]:
    yield text_at(0, 18, "Share of the machine's limit", "title")
    x = LABELS
    for kind, name, height in (("ours", "regard", 9), ("theirs", "torch", 5)):
        yield f'<rect class="{kind}" x="{x}" y="{14 - height / 2}" width="22" height="{height}" rx="1"/>'
        yield text_at(x + 28, 18, name)
        x += 90
    yield f'<line class="goal" x1="{x + 2}" y1="8" x2="{x + 2}" y2="20"/>' + text_at(x + 10, 18, "goal")
    yield text_at(_left(1), 18, "numbers: share of the limit · times torch", "quiet")


def _grid(height: int) -> Iterator[str]:
    for panel, name in enumerate(TYPES.values()):
        yield text_at(_left(panel), 44, name, "title")
        for percent in (0, 50, 100):
            x = _left(panel) + FULL * percent / 100
            yield f'<line class="grid" x1="{x}" y1="62" x2="{x}" y2="{height}"/>'
            yield f'<text class="quiet small" x="{x}" y="57" text-anchor="middle">{percent} %</text>'


def _row(top: int, name: str, by_type: dict[str, Line]) -> Iterator[str]:
    yield text_at(LABELS - 12, top + 14, name, anchor="end")
    for panel, dtype in enumerate(TYPES):
        if dtype in by_type:
            yield from _bars(_left(panel), top, by_type[dtype])


def _bars(x: int, top: int, line: Line) -> Iterator[str]:
    assert line.result is not None
    bars = (("ours", line.result.share, top + 3, 9), ("theirs", line.result.torch_share, top + 14, 5))
    for kind, share, y, height in bars:
        if share is None:
            continue
        width = FULL * min(share, 1.1)
        yield f'<rect class="{kind}" x="{x}" y="{y}" width="{max(1.0, width):.1f}" height="{height}" rx="1"/>'
    shown = max(line.result.share or 0, line.goal.share or 0)
    yield text_at(x + FULL * min(shown, 1.1) + 6, top + 14, _said(line), "small")
    if line.goal.share is not None:
        at = x + FULL * line.goal.share
        yield f'<line class="goal" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{top + 15}"/>'


def _said(line: Line) -> str:
    """`83 % · 2.6x`: the share, and how many times torch."""
    r = line.result
    assert r is not None and r.share is not None  # noqa: PT018
    times = "" if r.ratio is None else f" · {r.ratio:.1f}x" if r.ratio < 10 else f" · {r.ratio:.0f}x"
    return f"{100 * r.share:.0f} %{times}"


def text_at(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """An element of SVG with this text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
