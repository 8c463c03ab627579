"""One head, large, as its reader has it: the cross, pins, the text, and what is shown beside it."""

import re

import numpy as np
import pytest

from tests.inspect.page.tab import address, colours, shown_pair, shown_weight, swatch, under, values_shown
from tests.inspect.reports import report, weights

# ---- one head -------------------------------------------------------------------------------------------------------


def test_a_click_opens_a_head_and_back_closes_it(opened):
    tab = opened()
    tab.click('.cell[aria-label^="Layer 2 head 3"]')
    assert tab.inner_text("#focus-title") == "Layer 2 · head 3"
    assert address(tab).endswith("#head=2.3")
    assert colours(tab, "#matrix canvas") > 30
    tab.go_back()
    tab.wait_for_selector("#focus", state="hidden")
    tab.click('#table a:text-is("1.1")')
    assert tab.inner_text("#focus-title") == "Layer 1 · head 1"
    tab.click("#close")
    assert tab.is_hidden("#focus")


def test_the_cross_tells_the_pair_and_its_weight(opened):
    tab = opened(state="head=0.0")
    tab.focus("#matrix")
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "ArrowRight"):  # it starts in the last row and first column
        tab.keyboard.press(key)
    assert shown_pair(tab) == [27, 3]
    assert shown_weight(tab) == pytest.approx(weights(0, 0, 29)[27, 3], abs=0.004)
    assert "·t27" in tab.inner_text("#spoken")


@pytest.mark.parametrize(
    ("across", "down"),
    [(0.5, 0.9), *(pytest.param(*at, marks=pytest.mark.exhaustive) for at in ((0.83, 0.95), (0.3, 0.7)))],
)
def test_the_mouse_finds_the_cell_under_it(opened, across, down):
    tab = opened(state="head=0.1")
    box = tab.locator("#matrix canvas").bounding_box()
    x, y = round(box["width"] * across), round(box["height"] * down)
    tab.mouse.move(box["x"] + x, box["y"] + y)
    query, key = shown_pair(tab)
    assert shown_weight(tab) == pytest.approx(weights(0, 1, 29)[query, key], abs=0.004)
    assert swatch(tab) == under(tab, x, y)
    tab.mouse.click(box["x"] + x, box["y"] + y)
    assert f"pin={query}-{key}" in address(tab)
    assert tab.inner_text(".word.pinned") == f"t{query}"
    assert tab.inner_text(".word.target") == f"t{key}"


def test_a_pinned_pair_can_be_followed_through_all_heads(opened):
    made = report()
    tab = opened(made, state="head=0.1&pin=20-19")
    tab.click('button:text-is("in every head")')
    assert tab.input_value("#colour") == "pair"
    expected = {f"{h.layer}.{h.head}": weights(h.layer, h.head, 29)[20, 19] for h in made.heads}
    top = max(expected.values())
    assert values_shown(tab) == {name: pytest.approx(weight / top, abs=0.01) for name, weight in expected.items()}


def test_a_pinned_token_colours_whom_it_looks_at_and_who_looks_at_it(opened):
    tab = opened(state="head=0.1&pin=15")
    row, column = weights(0, 1, 29)[15], weights(0, 1, 29)[:, 15]
    assert tab.locator(".word.outgoing").count() == 16
    assert tab.locator(".word.incoming").count() == 13
    given, got = (tab.locator(f"#strongest .{name} li").first.inner_text() for name in ("outgoing", "incoming"))
    assert given.split()[0].startswith(f"·t{row.argmax()}")
    assert got.split()[0].startswith(f"·t{16 + column[16:].argmax()}")
    heaviest = tab.locator(".word").nth(int(row.argmax())).evaluate("word => word.style.getPropertyValue('--weight')")
    assert int(heaviest[:-1]) == pytest.approx(100 * np.sqrt(row.max()), abs=1)


def test_without_a_head_a_pinned_token_shows_the_mean_of_the_heads_in_view(opened):
    tab = opened(state="pin=15&kind=sink")
    mean = np.mean([weights(layer, 4 - layer if layer else 0, 29)[15] for layer in range(3)], axis=0)
    assert tab.inner_text("#reading-of") == "mean of 3 heads"
    heaviest = float(tab.locator("#strongest .outgoing li b").first.inner_text())
    assert heaviest == pytest.approx(mean[0], abs=0.004)


def test_the_first_token_can_be_hidden(opened):
    tab = opened(state="head=0.0&pin=20-19")
    row = weights(0, 0, 29)[20]
    before = shown_weight(tab)
    tab.check("#first")
    after = shown_weight(tab)
    assert (before, after) == pytest.approx((row[19], row[19] / (1 - row[0])), abs=0.02)
    assert "first=hidden" in address(tab)


def test_the_continuation_is_distinguished_from_the_prompt(opened):
    tab = opened()
    assert tab.locator(".word.generated").count() == 5
    assert tab.inner_text(".turn") == "continuation"


def test_attention_by_distance_adds_up(opened):
    output = opened(state="head=0.1").get_attribute("#distance", "aria-label")
    percents = [int(n) for n in re.findall(r"(\d+) percent", output)]
    assert sum(percents) == pytest.approx(100, abs=3)
    previous = np.mean([weights(0, 1, 29)[i, i - 1] if i else 0 for i in range(29)])
    assert int(re.search(r"; 1 tokens back: (\d+)", output)[1]) == pytest.approx(100 * previous, abs=1)


def test_a_long_text_is_pooled_and_says_so(opened):
    made = report(layers=1, tokens=[f" t{n}" for n in range(1003)], pooled=10)
    tab = opened(made, state="head=0.0")
    assert "10 × 10 tokens" in tab.inner_text("#pair")
    tab.focus("#matrix")
    tab.keyboard.press("ArrowUp")
    output = tab.inner_text("#spoken")
    assert "990–999" in output
    assert "0–9" in output
    cell = weights(0, 0, 1003)[990:1000, :10].sum(1).mean()
    assert shown_weight(tab) == pytest.approx(cell, abs=0.03)
    tab.click("#text .word:nth-of-type(996)")
    assert tab.locator("#strongest .outgoing li sub").first.inner_text() == "0–9"
    assert tab.locator("#strongest .outgoing li").count() == 6


def test_attention_in_both_directions_is_shown_whole(opened):
    tab = opened(report(causal=False), state="head=0.1")
    tab.focus("#matrix")
    tab.keyboard.press("Home")
    for _ in range(27):
        tab.keyboard.press("ArrowUp")
    for _ in range(9):
        tab.keyboard.press("ArrowRight")
    query, key = shown_pair(tab)
    assert query < key
    assert shown_weight(tab) == pytest.approx(weights(0, 1, 29, causal=False)[query, key], abs=0.004)


@pytest.mark.parametrize(("causal", "pair"), [(True, [7, 3]), (False, [3, 7])])
def test_a_later_token_is_the_key_of_a_pinned_one_where_attention_goes_both_ways(opened, causal, pair):
    tab = opened(report(causal=causal), state="head=0.1&pin=3")
    word = tab.locator("#text .word").nth(7)
    word.hover()
    assert shown_pair(tab) == pair
    assert shown_weight(tab) == pytest.approx(weights(0, 1, 29, causal=causal)[tuple(pair)], abs=0.004)
    word.click(modifiers=["Shift"])
    assert address(tab).endswith(f"pin={pair[0]}-{pair[1]}")


def test_zooming_keeps_every_label_readable(opened):
    tab = opened(report(layers=1, tokens=[f" t{n}" for n in range(150)]), state="head=0.0")
    assert tab.evaluate("matrix.scrollHeight <= matrix.clientHeight + 1")
    tab.click("#zoom-fit")
    assert tab.evaluate("matrix.scrollHeight") > 150 * 12
    tab.click("#zoom-fit")
    assert tab.evaluate("matrix.scrollHeight <= matrix.clientHeight + 1")
