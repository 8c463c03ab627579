"""`./bench linear`: the page and the picture that it makes of what was measured."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

from benchmarks import linear, linear_picture
from regard.linear import linear_attend

SECONDS = {name: {tokens: (i + 1) * 1e-6 * tokens for tokens in (1024, 4096)} for i, name in enumerate(linear.KINDS)}
SECONDS[linear.EXACT] = {1024: 1e-4, 4096: 1.0}
FOUND = linear.Found(SECONDS, {name: {1024: 5.0} for name in SECONDS}, {"Elu1": 4e10}, 8e10, (1.4, 97.0))


def test_the_page_says_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "ERRED", 7)
    text = linear.page(FOUND, quick=True)
    assert "| 4,096 | 4.10 ms | 8.19 ms |" in text
    assert "| Elu1 | 40 | 50 % |" in text
    assert "**97 times**" in text
    assert "up to 4,096 tokens" in text
    assert "./bench linear --quick`" in text


@pytest.mark.parametrize(
    ("ours", "message"), [((1.0, 1.0), "2,000"), ((0.1, 0.1), "below 1,024"), ((9.0, 9.0), "above 4,096")]
)
def test_the_crossing_lies_where_both_take_as_long(ours: tuple[float, float], message: str):
    exact = {1024: 0.25, 4096: 4.0}  # 1 second at 2,048
    assert linear.crossing(dict(zip(exact, ours, strict=True)), exact) == message


def test_the_picture_has_a_line_and_a_name_for_each_kind():
    root = ET.fromstring(linear_picture.picture(SECONDS))
    assert len(root.findall("{*}polyline")) == len(linear.KINDS)
    assert set(linear.KINDS) <= {text.text for text in root.findall("{*}text")}
    assert [linear_picture._power(power) for power in (-6, -4, -3, -1, 0, 2)] == [
        "1 us",
        "100 us",
        "1 ms",
        "100 ms",
        "1 s",
        "100 s",
    ]


def test_the_usual_way_gives_the_same():
    inputs = linear.drawn_inputs(67)
    torch.testing.assert_close(linear.plain(*inputs), linear_attend(*inputs).out, rtol=1e-4, atol=1e-5)


def test_every_kind_can_be_run():
    inputs = linear.drawn_inputs(67)
    for name, make in linear.KINDS.items():
        made: Any = make(inputs)()
        assert (made if name == linear.EXACT else made[0]).shape == (1, 1, 67, linear.DIM)
