"""The page of `regard inspect`: its size, and the time until a browser shows pictures."""

import statistics
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from regard.inspect import survey, write_page

CHROMIUM = Path("/usr/bin/chromium")
SIZE_GOAL, FIRST_GOAL = 15.0, 1.0
"""MB; seconds until the first picture."""

TEXT = Path(__file__).parents[1] / "README.md"


def page(model: Any, tokenizer: Any, tokens: int, times: int = 5) -> str:
    """A survey of `tokens` tokens as a page: MB, and the median seconds to the first picture and to all."""
    report = survey(model, tokenizer, TEXT.read_text(encoding="utf-8"), tokens=tokens, new_tokens=0)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        megabytes = write_page(report, path) / 1e6
        what = f"{len(report.heads)} heads, {len(report.tokens):,} tokens: {megabytes:.1f} MB"
        size = f"{what} (goal: less than {SIZE_GOAL:g}; reached: {_reached(megabytes, SIZE_GOAL)})"
        if not CHROMIUM.exists() or find_spec("playwright") is None:
            return f"{size}. There is no {CHROMIUM} or no playwright: the time to show pictures was not measured."
        opened = [_opened(path) for _ in range(times)]
    first, every = (statistics.median(one[i] for one in opened) for i in range(2))
    goal = f"(goal: less than {FIRST_GOAL:g} s; reached: {_reached(first, FIRST_GOAL)})"
    return f"{size}. Opened from disk in a headless Chromium: first picture {first:.2f} s {goal}, all {every:.2f} s."


def _reached(found: float, most: float) -> str:
    return "yes" if found < most else "**no**"


def _opened(path: Path) -> tuple[float, float]:
    """Seconds to the first picture and to all, in a browser that has just started."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # no dependency of regard

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]")
        marks: dict[str, float] = tab.evaluate(
            "Object.fromEntries(performance.getEntriesByType('mark').map(({ name, startTime }) => [name, startTime]))"
        )
        browser.close()
    return marks["first-picture"] / 1000, marks["all-pictures"] / 1000
