"""Two heads, two models: side by side, one less the other, and measure by measure."""

from dataclasses import replace

import pytest

from tests.inspect.page.tab import address, settled, shown_weight, swatch, under, values_shown
from tests.inspect.reports import report, weights


def higher(made, by):
    """The same heads with `by` more of a sink."""

    def raised(head):
        sink = head.scores["sink"]
        return replace(head, scores=dict(head.scores) | {"sink": sink._replace(value=sink.value - by * head.layer)})

    return replace(made, heads=tuple(map(raised, made.heads)))


def second_weight(tab):
    return float(tab.locator("#pair .dim b").inner_text().lstrip("<"))


def test_two_heads_stand_side_by_side_with_both_weights_of_a_pair(opened):
    tab = opened(state="head=0.1&pin=20-19")
    tab.select_option("#vs", "1.0")
    assert "vs=1.0" in address(tab)
    assert shown_weight(tab) == pytest.approx(weights(0, 1, 29)[20, 19], abs=0.004)
    assert second_weight(tab) == pytest.approx(weights(1, 0, 29)[20, 19], abs=0.004)
    assert "0.1" in tab.inner_text("#scores")
    assert "1.0" in tab.inner_text("#scores")


def test_the_mouse_finds_the_cell_of_either_picture(opened):
    tab = opened(state="head=0.1&vs=1.2")
    box = tab.locator("#matrix canvas").bounding_box()
    for across in (0.2, 0.66):
        tab.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * 0.8)
        query, key = (int(n) for n in tab.locator("#pair sub").all_inner_texts())
        assert shown_weight(tab) == pytest.approx(weights(0, 1, 29)[query, key], abs=0.004)
        assert second_weight(tab) == pytest.approx(weights(1, 2, 29)[query, key], abs=0.004)


def test_a_difference_is_coloured_by_its_sign(opened):
    tab = opened(state="head=0.0&vs=0.1&how=difference")
    colours = {}
    for query, key in ((20, 0), (20, 19)):
        tab.evaluate(f"location.hash = 'head=0.0&vs=0.1&how=difference&pin={query}-{key}'")
        tab.wait_for_selector(f'#pair sub:text-is("{key}")')
        colours[key] = swatch(tab)
        less = weights(0, 0, 29)[query, key] - weights(0, 1, 29)[query, key]
        output = tab.locator("#pair .dim").last.inner_text()
        assert float(output.split("Δ ")[1].rstrip(")").replace("−", "-")) == pytest.approx(less, abs=0.008)
    assert colours[0][2] > colours[0][0]  # more: blue
    assert colours[19][0] > colours[19][2]  # less: brown
    box = tab.locator("#matrix canvas").bounding_box()
    x, y = round(box["width"] * 0.4), round(box["height"] * 0.8)
    tab.mouse.move(box["x"] + x, box["y"] + y)
    assert swatch(tab) == under(tab, x, y)


def test_shift_and_a_click_lays_a_head_beside_the_open_one(opened):
    tab = opened(state="head=0.0")
    tab.click('.cell[aria-label^="Layer 2 head 1"]', modifiers=["Shift"])
    assert tab.inner_text("#focus-title") == "Layer 0 · head 0"
    assert tab.input_value("#vs") == "2.1"
    tab.keyboard.press("Escape")
    assert "vs" not in address(tab)


def test_two_models_of_equal_shape_are_compared_head_by_head(opened):
    made = report()
    tab = opened(replace(made, other=higher(report(model="the other"), 0.02)), state="colour=Δsink&order=Δsink")
    assert "the other" in tab.inner_text("#compared")
    shown = values_shown(tab)
    assert [name.split(".")[0] for name in shown] == ["2"] * 4 + ["1"] * 4 + ["0"] * 4
    assert shown["2.0"] == pytest.approx(1)
    assert shown["1.0"] == pytest.approx(0.5, abs=1e-3)
    tab.click('#table thead button:text-is("Δ sink")')
    assert tab.locator("#table tbody tr:first-child th").inner_text().startswith("2.")


def test_the_same_head_of_two_models_stands_side_by_side(opened):
    made = report(layers=2)
    turned = [replace(p, weights=other.weights) for p, other in zip(made.pictures, made.pictures[::-1], strict=True)]
    other = replace(report(layers=2, model="the other"), pictures=tuple(turned))
    tab = opened(replace(made, other=other), state="head=0.0&vs=other&pin=20-19")
    assert "the other" in tab.inner_text("#pair")
    assert shown_weight(tab) == pytest.approx(weights(0, 0, 29)[20, 19], abs=0.004)
    assert second_weight(tab) == pytest.approx(weights(1, 3, 29)[20, 19], abs=0.004)


def test_models_of_other_shapes_are_compared_by_their_distributions(opened):
    tab = opened(replace(report(), other=report(layers=5, model="a deeper one")))
    assert "20 heads in 5 layers" in tab.inner_text("#compared")
    assert tab.locator('#colour option:has-text("Δ")').count() == 0
    assert "a deeper one" in tab.inner_text("#spread-of")


def test_models_that_cut_the_text_otherwise_are_not_laid_over_one_another(opened):
    other = report(model="the other", tokens=[f" u{n}" for n in range(29)])
    tab = opened(replace(report(), other=other), state="head=0.0&vs=other&pin=20-19")
    assert "cut the text into other tokens" in tab.inner_text("#vs-note")
    assert tab.locator("#pair .dim b").count() == 0
    assert "this" in tab.inner_text("#scores")  # the numbers are compared all the same


def test_rows_of_other_generated_tokens_are_named_by_the_tokens_of_each_model(opened):
    made = report()
    tokens = [*made.tokens[:26], " x", " y", " z"]
    tab = opened(replace(made, other=report(model="the other", tokens=tokens)), state="head=0.0&vs=other&pin=27-26")
    assert "the other generated other tokens from 26 on" in tab.inner_text("#vs-note")
    assert "at its own tokens ·y → ·x" in tab.inner_text("#pair")
    tab.evaluate("location.hash = 'head=0.0&vs=other&pin=25-24'")
    tab.wait_for_selector('#pair sub:text-is("24")')
    assert "the other" in tab.inner_text("#pair")
    assert "its own tokens" not in tab.inner_text("#pair")


def test_the_last_cell_of_a_pooled_text_that_both_models_share_is_not_of_their_own_tokens(opened):
    tokens = [f" t{n}" for n in range(403)]
    made, other = (report(layers=1, model=name, tokens=tokens, pooled=10) for name in ("a model", "the other"))
    tab = opened(replace(made, other=other), state="head=0.0&vs=other&pin=400-390")
    assert "the other" in tab.inner_text("#pair")
    assert "its own tokens" not in tab.inner_text("#pair")


def test_a_model_that_generated_fewer_tokens_is_not_reported_to_cut_the_text_otherwise(opened):
    made = report()
    other = report(model="the other", tokens=made.tokens[:26], prompt=24)
    tab = opened(replace(made, other=other), state="head=0.0&vs=other&pin=20-19")
    note = tab.inner_text("#vs-note")
    assert note.startswith("the other generated 2 tokens, and a model 5 tokens: pictures of other lengths")
    assert tab.locator("#pair .dim b").count() == 0


def test_a_prompt_with_one_more_token_at_its_end_was_cut_otherwise(opened):
    made = report()
    other = report(model="the other", tokens=[*made.tokens[:24], "<s>"], prompt=25)
    tab = opened(replace(made, tokens=made.tokens[:24], other=other), state="head=0.0&vs=other")
    assert "the other cut the text into other tokens" in tab.inner_text("#vs-note")


def test_the_page_names_what_is_compared_with_eager(opened):
    made = report()
    tab = opened(replace(made, run=replace(made.run, eager_output="hidden states")))
    assert "largest difference of hidden states" in tab.inner_text("#run")


def test_two_heads_zoom_as_one(opened):
    made = report(layers=1, tokens=[f" t{n}" for n in range(150)])
    tab = opened(made, state="head=0.0&vs=0.1")
    tab.click("#zoom-in")
    tab.click("#zoom-in")
    box = tab.locator("#matrix canvas").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.6)
    left = tab.locator("#pair sub").all_inner_texts()
    tab.mouse.move(box["x"] + box["width"] * 0.3 + (box["width"] - 66) / 2, box["y"] + box["height"] * 0.6)
    right = tab.locator("#pair sub").all_inner_texts()
    assert left[0] == right[0]
    assert abs(int(left[1]) - int(right[1])) <= 6
    settled(tab)
