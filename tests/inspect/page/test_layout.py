"""On every screen, from a phone's to a wide one, nothing overlaps and nothing is cut."""

from dataclasses import replace

import pytest

from tests.inspect.page.boxes import faults
from tests.inspect.page.long import long_report
from tests.inspect.reports import report

TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"

SIZES = (
    (360, 740), (390, 844), (561, 900), (600, 800), (768, 1024), (844, 390), (1000, 700), (1001, 700), (1024, 768),
    (1100, 800), (1240, 800), (1241, 800), (1280, 800), (1440, 900), (1920, 1080), (2560, 1440),
)  # fmt: skip

LONG = pytest.mark.exhaustive

STATES = {
    "all heads": "",
    "all heads of a kind, filtered and ordered": "order=previous&colour=induction&where=sink&least=0.1&most=0.9",
    "a head": "head=1.1",
    "a head, filtered": "head=1.1&where=sink&least=0.1",
    "a pinned pair": "head=1.1&pin=199-103",
    "two heads and a pinned pair": "head=1.1&vs=0.2&pin=199-103&by=max",
    "two heads, one less the other": "head=1.1&vs=0.2&how=difference&pin=199-3&where=sink&first=hidden",
    "a head, zoomed": "head=1.1&at=100-50-40",
}

LIKE_OTHERS = ("all heads of a kind, filtered and ordered", "a head, filtered", "a pinned pair", "a head, zoomed")
"""What these show, another one shows as well."""


@pytest.fixture(scope="module")
def made():
    """A report whose head that is open has the longest name, in a long text, with a close-up."""
    made = report(heads=6, tokens=[f" token{n}" for n in range(211)], pooled=2, close_ups=[(1, 1)])
    return replace(made, heads=tuple(replace(head, kind="shifted induction") for head in made.heads))


@pytest.mark.parametrize("tokens", [601, pytest.param(4001, marks=LONG)])
def test_nothing_overlaps_in_a_long_text(opened, tokens):
    tab = opened(long_report(tokens, 8), state="head=0.0&pin=500-300", size=(390, 844))
    assert faults(tab) == []


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("sizes", [SIZES[n::4] for n in range(4)], ids=lambda sizes: f"from {sizes[0][0]} pixels on")
@pytest.mark.parametrize(
    "state",
    [pytest.param(state, marks=LONG if name in LIKE_OTHERS else (), id=name) for name, state in STATES.items()],
)
def test_nothing_overlaps_and_nothing_is_cut(opened, made, state, sizes):
    tab = opened(made, state=state)
    found = {}
    for width, height in sizes:
        tab.set_viewport_size({"width": width, "height": height})
        tab.evaluate(TWO_FRAMES)  # the picture is drawn at the next frame
        found[f"{width} x {height}"] = faults(tab)
    assert not any(found.values()), found
