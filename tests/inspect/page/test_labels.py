"""The tokens beside the rows and above the columns of the large picture."""

import pytest

from tests.inspect.page.long import long_report
from tests.inspect.reports import report

WRITTEN = """
() => {
  const labels = [], words = CanvasRenderingContext2D.prototype, own = words.fillText;
  words.fillText = function (text, x, y) {
    const place = this.getTransform().transformPoint({ x, y });
    if (this.canvas.closest("#matrix")) labels.push([text, place.x / devicePixelRatio, place.y / devicePixelRatio]);
    return own.call(this, text, x, y);
  };
  document.getElementById("matrix").dispatchEvent(new Event("scroll"));
  words.fillText = own;
  return labels;
}
"""


def labels(tab):
    """What is written beside the picture, in the order of drawing."""
    return [text for text, _, _ in tab.evaluate(WRITTEN)]


def test_the_label_of_the_first_column_is_whole(opened):
    tab = opened(report(layers=1, tokens=["█████", *(" t" for _ in range(172))]), state="head=0.0")
    (_, x, y), *_ = tab.evaluate(WRITTEN)  # where it begins, to be read upwards
    drawn = tab.eval_on_selector(
        "#matrix canvas",
        """(canvas, [x, y]) => {
          const row = canvas.getContext("2d").getImageData(0, Math.round(y) - 9, canvas.width, 1).data;
          const at = (x) => [...row.slice(4 * x, 4 * x + 4)].join();
          return Array.from({ length: 21 }, (_, n) => at(Math.round(x) + n - 10) !== at(0));
        }""",
        [x, y],
    )
    assert drawn[6:14] == [True] * 8  # letters are 10 pixels high: what is above their middle is there as well
    assert not drawn[0]


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("size", [(390, 844), (1024, 768), (1440, 900)])
@pytest.mark.parametrize("tokens", [193, 397, 601])
def test_up_to_some_600_tokens_are_named_by_words(opened, tokens, size):
    made = report(layers=1, heads=1, kv_heads=1, tokens=[f" w{n}" for n in range(tokens)], pooled=-(-tokens // 192))
    written = labels(opened(made, state="head=0.0", size=size))
    assert len(written) > 20
    assert set(written) <= {f"·w{n}" for n in range(tokens)}


@pytest.fixture(scope="module")
def long():
    return long_report(4001, 4)


def test_tokens_are_numbered_where_words_are_too_far_apart(opened, long):
    numbers = [int(text.replace("\u202f", "")) for text in labels(opened(long, state="head=0.0"))]
    assert numbers[0] == 0
    assert 50 <= numbers[1] <= 200
    assert all(n % numbers[1] == 0 for n in numbers)


@pytest.mark.parametrize("across", [40, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_tokens_are_named_by_words_when_one_is_near_enough(opened, long, across):
    tab = opened(long, state=f"head=0.0&at=3000-2900-{across}")
    written = labels(tab)
    assert len(written) > 20
    assert set(written) <= {token.replace(" ", "·") for token in long.tokens}


@pytest.mark.exhaustive
def test_words_come_near_where_cells_stay_pooled(opened):
    made = report(layers=1, heads=1, kv_heads=1, tokens=[f" w{n}" for n in range(1999)], pooled=11)
    tab = opened(made, state="head=0.0&at=900-800-40")
    assert "11 × 11 tokens" in tab.inner_text("#pair")
    assert {f"·w{n}" for n in range(795, 805)} <= set(labels(tab))


@pytest.mark.exhaustive
def test_no_label_is_cut_at_the_end(opened):
    tokens = [f" w{n}" for n in range(181)]  # 180 has many divisors: the last token is named at many sizes
    tab = opened(report(layers=1, tokens=tokens), state="head=0.0&vs=0.1")
    for width in range(1100, 1160, 5):
        tab.set_viewport_size({"width": width, "height": 800})
        written = tab.evaluate(WRITTEN)
        wide, high = tab.eval_on_selector("#matrix", "box => [box.clientWidth, box.clientHeight]")
        assert max(y for _, _, y in written) + 5 <= high
        assert max(x for _, x, _ in written) + 5 <= wide
