"""The page as its reader has it, opened from the disk in Chromium: all heads, the table, keys, light and dark."""

import pytest

from regard.inspect.page import framed
from tests.inspect.page.tab import address, colours, values_shown
from tests.inspect.reports import report

# ---- opening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
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


def test_what_ran_is_reported(opened):
    output = opened().inner_text("header")
    for words in (
        "a model",
        "29 tokens",
        "24 of the prompt",
        "5 that the model generated",
        "12.35 million",
        "321 tokens/s",
        "12.3 tokens/s",
        "0.50 GFLOP",
        "sdpa",
        "2.0e-5",
    ):
        assert words in output


@pytest.mark.parametrize("state", [pytest.param("", marks=pytest.mark.exhaustive), "head=1.1"])
def test_a_phone_needs_no_sideways_scrolling(opened, state):
    tab = opened(state=state, size=(390, 844))
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.is_visible("#close" if state else "#grid")


# ---- all heads ------------------------------------------------------------------------------------------------------


def test_pointing_at_a_head_tells_its_scores(opened):
    made = report()
    tab = opened(made)
    tab.hover('.cell[aria-label^="Layer 1 head 0"]')
    output = tab.inner_text("#readout")
    assert output.startswith("1.0")
    assert "previous token 0.850" in output.replace("\n", " ")


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
    value = {head.name: head.value("induction") for head in made.heads}
    assert [value[name] for name in shown] == sorted(value.values(), reverse=True)
    assert values_shown(tab) == {name: pytest.approx(v / max(value.values()), abs=1e-5) for name, v in value.items()}


def test_the_table_sorts_both_ways(opened):
    made = report()
    tab = opened(made)
    first = "#table tbody tr:first-child"
    assert tab.inner_text(f"{first} th") == made.heads[0].name
    tab.click('#table thead button:text-is("sink")')
    highest, lowest = (pick(made.heads, key=lambda head: head.value("sink")) for pick in (max, min))
    assert f"{highest.value('sink'):.3f}" in tab.inner_text(first)
    assert tab.get_attribute('#table th[data-key="sink"]', "aria-sort") == "descending"
    tab.click('#table thead button:text-is("sink")')
    assert first_row(tab, "sink").startswith(f"{lowest.value('sink'):.3f}")


def first_row(tab, key):
    """What the first row of the table says under a measure."""
    column = tab.eval_on_selector(f'#table th[data-key="{key}"]', "header => header.cellIndex")
    return tab.locator("#table tbody tr").first.locator("th, td").nth(column).inner_text()


def test_every_value_of_the_table_stands_beside_its_chance_and_its_interval(opened):
    made = report()
    tab = opened(made)
    score = made.heads[0].scores["previous"]
    output = first_row(tab, "previous").split("\n")
    assert output == [f"{score.value:.3f}", f"chance {score.chance:.3f} · {score.low:.2f} to {score.high:.2f}"]


@pytest.mark.parametrize(
    ("least", "most"),
    [
        *(pytest.param(*of, marks=pytest.mark.exhaustive) for of in (("0.5", ""), ("", "0.5"), ("2", ""))),
        ("0.82", "0.88"),
    ],
)
def test_heads_are_filtered_by_any_measure_between_two_bounds(opened, least, most):
    made = report()
    tab = opened(made)
    tab.select_option("#where", "previous")
    tab.fill("#least", least)
    tab.fill("#most", most)
    inside = [h.name for h in made.heads if float(least or -9) <= (h.value("previous") or 0) <= float(most or 9)]
    assert tab.inner_text("#let-through") == f"{len(inside)} of 12"
    assert sorted(tab.locator("#table tbody tr:visible th").all_inner_texts()) == sorted(inside)
    assert tab.locator(".cell:not(.faded)").count() == len(inside)
    tab.select_option("#where", "")
    assert tab.locator(".cell:not(.faded)").count() == 12


def test_what_a_head_costs_is_a_measure_beside_the_others_with_its_caveat(opened):
    made = report(ablated=True)
    tab = opened(made, state="head=0.0&order=delta_loss")
    output = tab.inner_text("#side")
    assert "No importance." in output
    assert "Attention weights are not importance" in output
    assert f"{made.ablations.loss:.3f} nats" in output
    order = [text.strip() for text in tab.locator(".cell span").all_text_contents()]
    assert order[0] == max(made.heads, key=lambda head: head.value("delta_loss")).name


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
    assert address(tab).endswith("#head=1.0")
    tab.keyboard.press("Escape")
    assert tab.is_hidden("#focus")


def test_only_one_head_is_in_the_tab_order(opened):
    assert opened().locator('.cell[tabindex="0"]').count() == 1


# ---- state, light, lengths ------------------------------------------------------------------------------------------


def test_the_address_brings_everything_back(opened):
    state = "head=1.2&colour=sink&order=previous&kind=previous%20token&pin=7-3&first=hidden&theme=dark"
    tab = opened(state=state)
    tab.keyboard.press("ArrowRight")
    assert set(address(tab).split("#")[1].split("&")[1:]) == set(state.replace("theme=dark", "").split("&")[1:-1]) | {
        "theme=dark"
    }
    assert tab.get_attribute("html", "data-theme") == "dark"
    assert tab.input_value("#order") == "previous"


def test_the_link_to_the_notes_changes_nothing_else(opened):
    tab = opened(state="head=1.2&colour=sink&pin=7-3")
    before = address(tab)
    tab.click('#side a:text-is("what the scores mean")')
    assert address(tab) == before
    assert tab.inner_text("#focus-title") == "Layer 1 · head 2"
    assert tab.eval_on_selector("#notes", "notes => notes.getBoundingClientRect().top < innerHeight / 2")


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


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(browser, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{framed(report())}</body>")
    tab, errors = browser.new_page(), []
    tab.on("console", lambda message: errors.append(message.text))
    tab.goto(path.as_uri())
    inside = tab.frame_locator("iframe")
    inside.locator("html[data-ready]").wait_for()
    inside.locator('.cell[aria-label^="Layer 1 head 1"]').click()
    assert inside.locator("#focus-title").inner_text() == "Layer 1 · head 1"
    inside.locator('#side a:text-is("what the scores mean")').click()
    assert inside.locator("#focus-title").inner_text() == "Layer 1 · head 1"
    tab.close()
    assert errors == []


def test_the_share_of_heads_with_a_sink_is_shown_by_both_thresholds(opened):
    tab = opened()
    output = tab.inner_text("#sinks")
    assert output.startswith("Sinks: 25 % of heads have alpha above 0.3 (the first token's values at 0.50 of the mean")
    assert "17 % above 0.8 (" in output
    assert "mean over all rows of A[i,0]" in tab.get_attribute("#sinks", "title")
    assert "heads with a sink" in tab.inner_text("#definitions")


def test_the_sinks_of_two_models_are_shown_by_name(opened):
    output = opened(report(other=report(heads=1, layers=4, kv_heads=1, model="another"))).inner_text("#sinks")
    assert "a model: Sinks: 25 %" in output
    assert "another: Sinks: 25 % of heads have alpha above 0.3 (most of layer 0," in output
