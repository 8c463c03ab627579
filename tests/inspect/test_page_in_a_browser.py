"""The page as its reader has it: opened from the disk in Chromium, with mouse and keys."""

import re
from pathlib import Path

import numpy as np
import pytest

from regard.inspect.page import write_page
from tests.inspect.reports import report, weights

CHROMIUM = Path("/usr/bin/chromium")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium at /usr/bin/chromium"),
    pytest.mark.xdist_group("browser"),  # it is started once
]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of a report; when the test is over, say whether it complained or asked for anything."""
    tabs, said, asked = [], [], []

    def open_(of=None, state="", *, size=(1280, 800), dark=False):
        path = tmp_path / "page.html"
        write_page(of or report(), path)
        tab = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light")
        tabs.append(tab)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(f"{path.as_uri()}#{state}")
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield open_
    for tab in tabs:
        tab.close()
    assert said == []
    assert all(url.startswith("file://") and "/page.html" in url for url in asked)
    assert len(asked) == len(tabs)


def colours(tab, selector):
    """How many colours a canvas has."""
    return tab.eval_on_selector(
        selector,
        """canvas => new Set(new Uint32Array(canvas.getContext("2d")
            .getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size""",
    )


def shown_weight(tab):
    return float(tab.inner_text("#pair b").lstrip("<"))


# ---- opening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True])
def test_it_shows_a_picture_of_every_head(opened, dark):
    tab = opened(dark=dark)
    assert tab.locator(".cell canvas").count() == 12
    assert colours(tab, ".cell:nth-of-type(1) canvas") > 10
    assert tab.get_attribute("html", "data-theme") == ("dark" if dark else "light")
    assert len(set(tab.screenshot()[1000:])) == 256  # a PNG of something


def test_markup_in_the_prompt_is_shown_and_not_run(opened):
    tokens = ["<script>window.ran=1</script>", "</script><img src=x onerror=window.ran=1>", " &lt;b&gt;"]
    tab = opened(report(tokens=tokens, prompt=2))
    assert tab.evaluate("window.ran") is None
    for token in tokens:
        assert token.strip() in tab.inner_text("#text")


def test_what_ran_is_told(opened):
    told = opened().inner_text("header")
    for words in (
        "a model",
        "29 tokens",
        "24 of the prompt",
        "5 that the model wrote",
        "12.35 million",
        "321 tokens/s",
        "12.3 tokens/s",
        "0.50 GFLOP",
        "sdpa",
        "2.0e-5",
    ):
        assert words in told


@pytest.mark.parametrize("state", ["", "head=1.1"])
def test_a_phone_needs_no_sideways_scrolling(opened, state):
    tab = opened(state=state, size=(390, 844))
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.is_visible("#close" if state else "#grid")


# ---- all heads ------------------------------------------------------------------------------------------------------


def test_pointing_at_a_head_tells_its_scores(opened):
    made = report()
    tab = opened(made)
    tab.hover('.cell[aria-label^="Layer 1 head 0"]')
    told = tab.inner_text("#readout")
    assert told.startswith("1.0")
    assert "previous token 0.850" in told.replace("\n", " ")


def test_one_kind_can_be_shown_alone(opened):
    made = report()
    tab = opened(made)
    count = sum(head.kind == "sink" for head in made.heads)
    tab.click('.chip:has-text("sink")')
    assert tab.locator(".cell:not(.faded)").count() == count == 3
    assert tab.locator("#table tbody tr:visible").count() == count
    tab.click('.chip:has-text("sink")')
    assert tab.locator(".cell:not(.faded)").count() == 12


def test_heads_can_be_ordered_and_coloured_by_a_measure(opened):
    made = report()
    tab = opened(made)
    tab.select_option("#order", "induction")
    tab.select_option("#colour", "induction")
    shown = [text.strip() for text in tab.locator(".cell span").all_inner_texts()]
    value = {f"{head.layer}.{head.head}": head.induction for head in made.heads}
    assert [value[name] for name in shown] == sorted(value.values(), reverse=True)
    shares = [
        float(share)
        for share in tab.eval_on_selector_all(
            ".cell i", "bars => bars.map(bar => bar.style.getPropertyValue('--share'))"
        )
    ]
    assert shares == pytest.approx([value[name] / max(value.values()) for name in shown], abs=1e-5)


def test_the_table_sorts_both_ways(opened):
    made = report()
    tab = opened(made)
    first = "#table tbody tr:first-child th"
    assert tab.inner_text(first) == f"{made.heads[0].layer}.{made.heads[0].head}"
    tab.click('#table thead button:text-is("sink")')
    highest, lowest = (pick(made.heads, key=lambda head: head.sink).sink for pick in (max, min))
    assert f"{highest:.3f}" in tab.inner_text("#table tbody tr:first-child")
    assert tab.get_attribute('#table th[data-key="sink"]', "aria-sort") == "descending"
    tab.click('#table thead button:text-is("sink")')
    assert f"{lowest:.3f}" in tab.inner_text("#table tbody tr:first-child td:nth-child(5)")


def test_every_number_is_defined_and_weights_are_not_called_importance(opened):
    notes = opened().inner_text("#notes")
    assert "not importance" in notes
    assert all(
        name in notes
        for name in (
            "entropy",
            "effective tokens",
            "sink",
            "previous token",
            "induction",
            "remarkable",
            "Chance:",
            "arXiv:",
        )
    )


# ---- one head -------------------------------------------------------------------------------------------------------


def test_a_click_opens_a_head_and_back_closes_it(opened):
    tab = opened()
    tab.click('.cell[aria-label^="Layer 2 head 3"]')
    assert tab.inner_text("#focus-title") == "Layer 2 · head 3"
    assert tab.url.endswith("#head=2.3")
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
    assert tab.locator("#pair sub").all_inner_texts() == ["27", "3"]
    assert shown_weight(tab) == pytest.approx(weights(0, 0, 29)[27, 3], abs=0.004)
    assert "·t27" in tab.inner_text("#spoken")


@pytest.mark.parametrize(("across", "down"), [(0.5, 0.9), (0.83, 0.95), (0.3, 0.7)])
def test_the_mouse_finds_the_cell_under_it(opened, across, down):
    tab = opened(state="head=0.1")
    box = tab.locator("#matrix canvas").bounding_box()
    x, y = round(box["width"] * across), round(box["height"] * down)
    tab.mouse.move(box["x"] + x, box["y"] + y)
    query, key = (int(n) for n in tab.locator("#pair sub").all_inner_texts())
    assert shown_weight(tab) == pytest.approx(weights(0, 1, 29)[query, key], abs=0.004)
    under = tab.evaluate(
        f"[...document.querySelector('#matrix canvas').getContext('2d').getImageData({x}, {y}, 1, 1).data]"
    )
    swatch = tab.eval_on_selector("#pair .swatch", "swatch => getComputedStyle(swatch).backgroundColor")
    assert [int(n) for n in re.findall(r"\d+", swatch)] == under[:3]
    tab.mouse.click(box["x"] + x, box["y"] + y)
    assert f"pin={query}-{key}" in tab.url
    assert tab.inner_text(".word.pinned") == f"t{query}"
    assert tab.inner_text(".word.target") == f"t{key}"


def test_a_pinned_pair_can_be_followed_through_all_heads(opened):
    made = report()
    tab = opened(made, state="head=0.1&pin=20-19")
    tab.click('button:text-is("in every head")')
    assert tab.input_value("#colour") == "pair"
    share = {}
    for cell in tab.locator(".cell").all():
        name = cell.locator("span").text_content()
        share[name] = float(cell.locator("i").evaluate("bar => bar.style.getPropertyValue('--share')"))
    expected = {f"{h.layer}.{h.head}": weights(h.layer, h.head, 29)[20, 19] for h in made.heads}
    top = max(expected.values())
    assert share == {name: pytest.approx(weight / top, abs=0.01) for name, weight in expected.items()}


def test_a_pinned_token_colours_whom_it_looks_at_and_who_looks_at_it(opened):
    tab = opened(state="head=0.1&pin=15")
    row, column = weights(0, 1, 29)[15], weights(0, 1, 29)[:, 15]
    assert tab.locator(".word.given").count() == 16
    assert tab.locator(".word.got").count() == 13
    given, got = (tab.locator(f"#strongest .{name} li").first.inner_text() for name in ("given", "got"))
    assert given.split()[0].startswith(f"·t{row.argmax()}")
    assert got.split()[0].startswith(f"·t{16 + column[16:].argmax()}")
    heaviest = tab.locator(".word").nth(int(row.argmax())).evaluate("word => word.style.getPropertyValue('--weight')")
    assert int(heaviest[:-1]) == pytest.approx(100 * np.sqrt(row.max()), abs=1)


def test_without_a_head_a_pinned_token_shows_the_mean_of_the_heads_in_view(opened):
    tab = opened(state="pin=15&kind=sink")
    mean = np.mean([weights(layer, 4 - layer if layer else 0, 29)[15] for layer in range(3)], axis=0)
    assert tab.inner_text("#reading-of") == "mean of 3 heads"
    heaviest = float(tab.locator("#strongest .given li b").first.inner_text())
    assert heaviest == pytest.approx(mean[0], abs=0.004)


def test_the_first_token_can_be_hidden(opened):
    tab = opened(state="head=0.0&pin=20-19")
    row = weights(0, 0, 29)[20]
    before = shown_weight(tab)
    tab.check("#first")
    after = shown_weight(tab)
    assert (before, after) == pytest.approx((row[19], row[19] / (1 - row[0])), abs=0.02)
    assert "first=hidden" in tab.url


def test_the_continuation_is_told_from_the_prompt(opened):
    tab = opened()
    assert tab.locator(".word.written").count() == 5
    assert tab.inner_text(".turn") == "continuation"


def test_attention_by_distance_adds_up(opened):
    told = opened(state="head=0.1").get_attribute("#distance", "aria-label")
    percents = [int(n) for n in re.findall(r"(\d+) percent", told)]
    assert sum(percents) == pytest.approx(100, abs=3)
    previous = np.mean([weights(0, 1, 29)[i, i - 1] if i else 0 for i in range(29)])
    assert int(re.search(r"; 1 tokens back: (\d+)", told)[1]) == pytest.approx(100 * previous, abs=1)


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_keys_alone_lead_through_the_page(opened):
    tab = opened()
    tab.focus("#order")
    while not tab.evaluate("document.activeElement.matches('.cell')"):
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Layer 0 head 0,")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    landed = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert landed.startswith("Layer 1 head 1,")
    tab.keyboard.press("Enter")
    assert tab.inner_text("#focus-title") == "Layer 1 · head 1"
    tab.keyboard.press("ArrowDown")
    assert tab.inner_text("#focus-title") == "Layer 2 · head 1"
    tab.keyboard.press("ArrowLeft")
    assert tab.inner_text("#focus-title") == "Layer 2 · head 0"
    tab.keyboard.press("Escape")
    assert tab.is_hidden("#focus")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Layer 2 head 0,")


def test_escape_lets_go_of_one_thing_at_a_time(opened):
    tab = opened(state="head=1.0&pin=9-3")
    tab.keyboard.press("Escape")
    assert tab.url.endswith("#head=1.0")
    tab.keyboard.press("Escape")
    assert tab.is_hidden("#focus")


def test_only_one_head_is_in_the_tab_order(opened):
    assert opened().locator('.cell[tabindex="0"]').count() == 1


# ---- state, light, lengths ------------------------------------------------------------------------------------------


def test_the_address_brings_everything_back(opened):
    state = "head=1.2&colour=sink&order=previous&kind=previous%20token&pin=7-3&first=hidden&theme=dark"
    tab = opened(state=state)
    tab.keyboard.press("ArrowRight")
    assert set(tab.url.split("#")[1].split("&")[1:]) == set(state.replace("theme=dark", "").split("&")[1:-1]) | {
        "theme=dark"
    }
    assert tab.get_attribute("html", "data-theme") == "dark"
    assert tab.input_value("#order") == "previous"


def test_an_address_that_makes_no_sense_opens_the_map(opened):
    tab = opened(state="head=99.1&colour=%3Cb%3E&order=x&kind=y&pin=9999-1&theme=pink")
    assert tab.is_hidden("#focus")
    assert tab.is_visible("#grid")


def test_light_and_dark_can_be_switched(opened):
    tab = opened()
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.get_attribute("html", "data-theme") == "dark"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_a_long_text_is_pooled_and_says_so(opened):
    made = report(layers=1, tokens=[f" t{n}" for n in range(1003)], pooled=10)
    tab = opened(made, state="head=0.0")
    assert "10 × 10 tokens" in tab.inner_text("#pair")
    tab.focus("#matrix")
    tab.keyboard.press("ArrowUp")
    told = tab.inner_text("#spoken")
    assert "990–999" in told
    assert "0–9" in told
    cell = weights(0, 0, 1003)[990:1000, :10].sum(1).mean()
    assert shown_weight(tab) == pytest.approx(cell, abs=0.03)
    tab.click("#text .word:nth-of-type(996)")
    assert tab.locator("#strongest .given li sub").first.inner_text() == "0–9"
    assert tab.locator("#strongest .given li").count() == 6


def test_attention_in_both_directions_is_shown_whole(opened):
    tab = opened(report(causal=False), state="head=0.1")
    tab.focus("#matrix")
    tab.keyboard.press("Home")
    for _ in range(27):
        tab.keyboard.press("ArrowUp")
    for _ in range(9):
        tab.keyboard.press("ArrowRight")
    query, key = (int(n) for n in tab.locator("#pair sub").all_inner_texts())
    assert query < key
    assert shown_weight(tab) == pytest.approx(weights(0, 1, 29, causal=False)[query, key], abs=0.004)


def test_zooming_keeps_every_label_readable(opened):
    tab = opened(report(layers=1, tokens=[f" t{n}" for n in range(150)]), state="head=0.0")
    assert tab.evaluate("matrix.scrollHeight <= matrix.clientHeight + 1")
    tab.click("#zoom-fit")
    assert tab.evaluate("matrix.scrollHeight") > 150 * 12
    tab.click("#zoom-fit")
    assert tab.evaluate("matrix.scrollHeight <= matrix.clientHeight + 1")
