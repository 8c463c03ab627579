"""How measures are spread over heads: one strip each, to point at and to walk through."""

import numpy as np
import pytest

from tests.inspect.page.tab import colours
from tests.inspect.reports import report


def strip(tab, label):
    return tab.locator(f'.strip:has(b:text-is("{label}"))')


def test_every_measure_has_a_strip_that_says_what_it_shows(opened):
    made = report()
    tab = opened(made)
    output = strip(tab, "sink").locator("canvas").get_attribute("aria-label")
    values = np.sort([head.value("sink") for head in made.heads])
    assert f"lowest {values[0]:.3f}" in output
    assert f"median {values[round(5.5)]:.3f}" in output
    assert f"highest {values[-1]:.3f} (head 0.0)" in output
    assert f"chance {made.heads[0].scores['sink'].chance:.3f}" in output
    assert colours(tab, ".strip canvas") > 3


def test_a_click_opens_the_nearest_head(opened):
    made = report()
    tab = opened(made)
    canvas = strip(tab, "sink").locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x = box["x"] + 6 + max(head.value("sink") for head in made.heads) * (box["width"] - 12)
    tab.mouse.move(x + 2, box["y"] + 6)
    assert strip(tab, "sink").locator("small").inner_text().startswith("0.0 0.900")
    tab.mouse.click(x + 2, box["y"] + 6)
    assert tab.inner_text("#focus-title") == "Layer 0 · head 0"


def test_keys_walk_from_head_to_head_by_value(opened):
    made = report()
    tab = opened(made)
    strip(tab, "sink").locator("canvas").focus()
    tab.keyboard.press("End")
    assert tab.inner_text("#announcement").startswith("0.0 0.900")
    tab.keyboard.press("ArrowLeft")
    assert tab.inner_text("#announcement").startswith("1.3 0.850")
    tab.keyboard.press("Enter")
    assert tab.inner_text("#focus-title") == "Layer 1 · head 3"


@pytest.mark.parametrize("state", ["where=sink&least=0.5", pytest.param("kind=sink", marks=pytest.mark.exhaustive)])
def test_heads_that_the_filter_holds_back_cannot_be_walked_to(opened, state):
    tab = opened(state=state)
    strip(tab, "sink").locator("canvas").focus()
    tab.keyboard.press("Home")
    assert tab.inner_text("#announcement").startswith("2.2 0.800")
