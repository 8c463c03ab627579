"""What tests read from an open page."""

import re


def address(tab):
    """The address as the page has it; `tab.url` is what the browser has sent so far, and may be one step behind."""
    return tab.evaluate("location.href")


def colours(tab, selector):
    """How many colours a canvas has."""
    return tab.eval_on_selector(
        selector,
        """canvas => new Set(new Uint32Array(canvas.getContext("2d")
            .getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size""",
    )


def shown_weight(tab):
    """The weight in the line above the picture, and 0 for what is too small to be written."""
    return float(tab.inner_text("#pair b").lstrip("<"))


def shown_pair(tab):
    """The numbers of the query and the key in that line."""
    return [int(n) for n in tab.locator("#pair sub").all_inner_texts()]


def under(tab, x, y):
    """The colour of the large picture at a place of its box, [red, green, blue]."""
    return tab.evaluate(
        f"[...document.querySelector('#matrix canvas').getContext('2d').getImageData({x}, {y}, 1, 1).data]"
    )[:3]


def swatch(tab):
    """The colour beside the weight, [red, green, blue]."""
    words = tab.eval_on_selector("#pair .swatch", "swatch => getComputedStyle(swatch).backgroundColor")
    return [int(n) for n in re.findall(r"\d+", words)]


def settled(tab):
    """Wait until the close-up is drawn."""
    tab.wait_for_selector('#matrix[aria-busy="false"]')
    return tab


def values_shown(tab):
    """The bars under the small pictures, by head: their share of the longest."""
    bars = tab.locator(".cell").evaluate_all(
        "cells => cells.map(cell => [cell.querySelector('span').textContent,"
        " Number(cell.querySelector('i').style.getPropertyValue('--share'))])"
    )
    return dict(map(tuple, bars))
