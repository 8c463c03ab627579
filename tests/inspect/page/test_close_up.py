"""From the pooled picture down to single weights: what the page computes is what Python computes."""

from dataclasses import replace

import numpy as np
import pytest

from regard.inspect.page.packing import quantise
from regard.inspect.surveying.closeup import OTHER_WEIGHTS, close_up_rows
from tests.inspect.page.long import long_report
from tests.inspect.page.tab import address, colours, settled, shown_pair, shown_weight, swatch, under
from tests.inspect.reports import report, weights

LONG = 8192


@pytest.fixture(scope="module")
def long():
    """8,192 random tokens, one head of 8 dimensions: cells of 43 x 43 tokens in the stored picture."""
    return long_report(LONG, 8)


@pytest.fixture(scope="module")
def middling():
    return long_report(1003, 8)


def weight(made, q, k):
    return close_up_rows(made.close_ups[0], q, q + 1)[0, k]


def weights_of(made):
    return close_up_rows(made.close_ups[0], 0, len(made.tokens))


def aim(tab, q, k):
    """Put the mouse on a pair that is in view, from the middle, where the address has put another."""
    box = tab.locator("#matrix canvas").bounding_box()
    x, y = round(box["width"] * q), round(box["height"] * k)
    tab.mouse.move(box["x"] + x, box["y"] + y)
    return x, y


@pytest.mark.exhaustive
def test_at_8192_tokens_a_single_weight_is_what_python_computes(opened, long):
    tab = opened(long, state="head=0.0")
    for q, k in ((7500, 7490), (7500, 3012), (200, 100)):
        tab.evaluate(f"location.hash = 'head=0.0&pin={q}-{k}&at={q}-{k}-40'")
        tab.wait_for_selector(f'#pair sub:text-is("{k}")')
        assert shown_pair(settled(tab)) == [q, k]
        assert shown_weight(tab) == pytest.approx(weight(long, q, k), rel=0.005)
    x, y = aim(tab, 0.6, 0.6)
    pair = shown_pair(tab)
    assert pair != [q, k]
    assert shown_weight(tab) == pytest.approx(weight(long, *pair), rel=0.005)
    assert swatch(tab) == under(tab, x, y)


@pytest.mark.exhaustive
def test_at_8192_tokens_one_zooms_from_all_to_single_weights_and_back(opened, long):
    tab = settled(opened(long, state="head=0.0"))
    assert "43 × 43 tokens" in tab.inner_text("#pair")
    box = tab.locator("#matrix canvas").bounding_box()
    tab.mouse.move(box["x"] + 300, box["y"] + 400)
    widths = [shown_pair_width(tab)]
    while widths[-1] != 1 and len(widths) < 40:
        tab.mouse.wheel(0, -150)
        widths.append(shown_pair_width(tab))
    assert widths == sorted(widths, reverse=True)
    assert set(widths) == {43, 16, 8, 4, 2, 1}
    assert colours(settled(tab), "#matrix canvas") > 20
    query, key = shown_pair(tab)
    assert shown_weight(tab) == pytest.approx(weight(long, query, key), rel=0.005)
    tab.click("#zoom-fit")
    assert "43 × 43 tokens" in tab.inner_text("#pair")
    tab.mouse.move(box["x"] + 300, box["y"] + 400)
    before = tab.evaluate("scrollY")
    tab.mouse.wheel(0, 300)  # at full view the wheel is the page's again
    tab.wait_for_timeout(300)
    assert tab.evaluate("scrollY") > before


def shown_pair_width(tab):
    """Tokens per cell, by the words for the pair under the pointer."""
    first = tab.locator("#pair sub").first.inner_text().split("–")
    return int(first[-1]) - int(first[0]) + 1


@pytest.mark.exhaustive
def test_a_token_pinned_at_8192_tokens_says_which_single_tokens_it_looks_at(opened, long):
    tab = settled(opened(long, state="head=0.0&pin=2000"))
    row = weight(long, 2000, slice(None))
    first = tab.locator("#strongest .outgoing li").first
    assert first.locator("sub").inner_text() == str(row.argmax())
    assert float(first.locator("b").inner_text()) == pytest.approx(row.max(), abs=0.001)
    assert tab.locator(".word").count() == 3000  # a page of the text
    assert tab.inner_text(".word.pinned") == long.tokens[2000].strip()
    tab.click('#text-pages button:has-text("later")')
    assert "tokens 3\u202f000 to 5\u202f999" in tab.inner_text("#text-pages")


@pytest.mark.parametrize("by", [pytest.param("mean", marks=pytest.mark.exhaustive), "max"])
def test_cells_between_are_the_share_or_the_greatest_weight_of_theirs(opened, middling, by):
    tab = settled(opened(middling, state=f"head=0.0&by={by}"))
    tab.focus("#matrix")
    tab.keyboard.press("ArrowUp")
    for _ in range(7):
        tab.keyboard.press("Shift+ArrowRight")
    (top, bottom), (left, right) = (map(int, text.split("–")) for text in tab.locator("#pair sub").all_inner_texts())
    size = bottom - top + 1
    assert 1 < size < 6
    assert right - left + 1 == size
    cell = weights_of(middling)[top : bottom + 1, left : right + 1]
    expected = cell.sum(1).mean() if by == "mean" else cell.max()
    assert shown_weight(tab) == pytest.approx(expected, abs=0.0006)


def test_the_stored_pictures_switch_between_mean_and_greatest(opened):
    made = report(layers=1, tokens=[f" t{n}" for n in range(403)], pooled=10)
    tab = opened(made, state="head=0.1")
    of = made.pictures[1]
    tab.focus("#matrix")
    for key in ("ArrowUp", "Shift+ArrowRight", "Shift+ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)
    row, column = (int(text.split("–")[0]) // 10 for text in tab.locator("#pair sub").all_inner_texts())
    assert shown_weight(tab) == pytest.approx((of.weights[row, column] / 255) ** 2 * 10, abs=0.0006)
    tab.click('#by button:text-is("max")')
    assert tab.get_attribute('#by button:text-is("max")', "aria-pressed") == "true"
    assert "by=max" in address(tab)
    tab.focus("#matrix")
    for key in ("ArrowUp", "Shift+ArrowRight", "Shift+ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)
    assert shown_weight(tab) == pytest.approx((of.largest[row, column] / 255) ** 2, abs=0.0006)


def test_keys_alone_lead_to_single_weights(opened, middling):
    tab = opened(middling, state="head=0.0")
    tab.focus("#matrix")
    for _ in range(3):
        tab.keyboard.press("ArrowUp")
    for _ in range(8):
        tab.keyboard.press("+")
    assert tab.inner_text("#spoken") == "single weights"
    tab.keyboard.press("ArrowRight")
    query, key = shown_pair(tab)
    assert shown_weight(tab) == pytest.approx(weight(middling, query, key), rel=0.005, abs=1e-6)
    labels = settled(tab).evaluate("[matrix.scrollLeft, matrix.scrollTop, matrix.clientWidth, matrix.scrollWidth]")
    assert labels[3] > 10 * labels[2]
    tab.keyboard.press("Enter")
    assert f"pin={query}-{key}" in address(tab)
    tab.keyboard.press("0")
    assert tab.evaluate("matrix.scrollWidth <= matrix.clientWidth + 1")


def test_dragging_pans_and_does_not_pin(opened, middling):
    tab = settled(opened(middling, state="head=0.0&at=500-400-40"))
    x, y = aim(tab, 0.6, 0.6)
    before = shown_pair(tab)
    box = tab.locator("#matrix canvas").bounding_box()
    tab.mouse.down()
    tab.mouse.move(box["x"] + x - 60, box["y"] + y - 60, steps=4)
    tab.mouse.up()
    assert "pin" not in address(tab)
    aim(tab, 0.6, 0.6)
    after = shown_pair(tab)
    assert after[0] > before[0]
    assert after[1] > before[1]


@pytest.mark.exhaustive
def test_the_address_keeps_the_place_and_the_zoom(opened, middling):
    tab = settled(opened(middling, state="head=0.0"))
    tab.click("#zoom-in")
    tab.click("#zoom-in")
    tab.wait_for_function(  # the address follows when nothing has moved for a while
        "() => { const was = self.was; self.was = location.hash; return was?.includes('at=') && was === self.was; }",
        polling=400,
    )
    at = address(tab).split("at=")[1]
    again = settled(opened(middling, state=f"head=0.0&at={at}"))
    places = [t.evaluate("[matrix.scrollLeft, matrix.scrollTop, matrix.scrollWidth]") for t in (tab, again)]
    assert places[0] == pytest.approx(places[1], abs=4)


def test_hiding_the_first_tokens_rescales_single_weights(opened, middling):
    tab = settled(opened(middling, state="head=0.0&pin=900-450&at=900-450-40"))
    before = shown_weight(tab)
    tab.check("#first")
    row = weight(middling, 900, slice(None))
    assert shown_weight(settled(tab)) == pytest.approx(row[450] / row[6:].sum(), rel=0.01)
    assert before == pytest.approx(row[450], rel=0.005)


def test_softcap_bias_windows_and_sinks_are_computed_as_python_does(opened):
    made = long_report(499, 8)
    rng = np.random.default_rng(5)
    close = replace(
        made.close_ups[0],
        softcap=3.0,
        prefix=2,
        first=np.maximum(0, np.arange(499) - 99).astype(np.int32),
        distance_bias=rng.normal(size=997).astype(np.float32),
    )
    made = replace(made, close_ups=(close,))
    tab = opened(made, state="head=0.0")
    for q, k in ((400, 350), (400, 1), (450, 449)):
        tab.evaluate(f"location.hash = 'head=0.0&pin={q}-{k}&at={q}-{k}-30'")
        tab.wait_for_selector(f'#pair sub:text-is("{k}")')
        assert shown_weight(settled(tab)) == pytest.approx(weight(made, q, k), rel=0.005)
    tab.evaluate("location.hash = 'head=0.0&pin=400-200&at=400-200-30'")
    tab.wait_for_selector('#pair sub:text-is("200")')
    assert "may not be seen" in tab.inner_text("#pair")


def test_a_head_without_its_close_up_says_so_and_shows_the_stored_picture(opened):
    made = report(layers=1, tokens=[f" t{n}" for n in range(403)], pooled=10, close_ups=[(0, 1)])
    tab = opened(made, state="head=0.2&at=300-200-30")
    note = tab.inner_text("#close-note")
    assert "Single weights of this head are not in this page" in note
    assert "1 of 4 heads" in note
    assert "--heads 0.2" in note
    assert "10 × 10 tokens" in tab.inner_text("#pair")


def test_a_head_that_was_asked_for_says_why_it_has_no_close_up(opened):
    made = report(layers=1, tokens=[f" t{n}" for n in range(403)], pooled=10, close_ups=[(0, 1)])
    tab = opened(replace(made, missing_close_ups={(0, 2): OTHER_WEIGHTS}), state="head=0.2")
    note = tab.inner_text("#close-note")
    assert note.endswith(f"No close-up: {OTHER_WEIGHTS}.")
    assert "--heads" not in note


def test_shares_of_cells_have_the_error_of_their_size(opened):
    made = report(layers=1, tokens=[f" t{n}" for n in range(403)], pooled=16)
    assert "no share is off by more than 0.016" in opened(made).inner_text("#precision")
    exact = weights(0, 1, 403)
    side = np.add.reduceat(np.add.reduceat(exact, range(0, 403, 16), 0), range(0, 403, 16), 1)
    rows = np.diff([*range(0, 403, 16), 403])
    shares = (made.pictures[1].weights / 255.0) ** 2 * rows  # of the row, in all keys of a cell
    off = np.abs(shares - side / rows[:, None]).max()
    assert 0.004 < off < 0.016


def test_the_page_says_how_exact_it_is(opened, middling):
    q, k = (quantise(numbers) for numbers in (middling.close_ups[0].q, middling.close_ups[0].k))
    exact, stored = (
        weights_of(middling),
        np.tril(np.exp(q.values @ k.values.T - middling.close_ups[0].total[:, None])),
    )
    off = np.abs(stored / np.where(exact > 0, exact, 1) - 1)[exact > 1e-4].max()
    assert off <= 0.005
    note = opened(middling, state="head=0.0").inner_text("#close-note")
    bound = float(note.split("to within about ")[1].split(" %")[0]) / 100
    assert 0 < bound <= 0.005
    assert off <= 3 * bound  # it was measured at some rows
