"""Pictures come back as they were packed."""

from dataclasses import replace

import numpy as np
import pytest

from regard.inspect.page import page
from regard.inspect.page.packing import blocks, is_causal, pack, unpack
from tests.inspect.page.parsed import Parsed, content, scripts
from tests.inspect.reports import report, weights


def test_a_weight_read_back_is_within_half_a_step_of_its_root():
    made = report(layers=2, tokens=[f" {n}" for n in range(101)])
    parsed = Parsed(page(made))
    output, packed = content(parsed), {attrs["id"]: text for attrs, text in scripts(parsed, "text/plain")}
    seen = 0
    for block in output["pictures"]:
        pictures = unpack(packed[block["id"]], [p["size"] for p in block["pictures"]], output["causal"])
        for caption, codes in zip(block["pictures"], pictures, strict=True):
            layer, number = map(int, caption["head"].split("."))
            assert np.abs(codes / 255 - np.sqrt(weights(layer, number, 101))).max() <= 0.5 / 255 + 1e-12
            seen += 1
    assert seen == 8


@pytest.mark.parametrize("causal", [True, False])
def test_pictures_come_back_as_they_were(causal):
    pictures = report(causal=causal).pictures
    assert is_causal(pictures) == causal
    back = unpack(pack((p.weights for p in pictures), causal), [p.size for p in pictures], causal)
    assert all(np.array_equal(a, b.weights) for a, b in zip(back, pictures, strict=True))


def test_a_causal_picture_stores_its_lower_half():
    rows = unpack(pack([report(causal=False).pictures[0].weights], causal=True), [29], causal=True)[0]
    assert not np.triu(rows, 1).any()
    assert np.array_equal(np.tril(rows), np.tril(report(causal=False).pictures[0].weights))


@pytest.mark.parametrize("field", ["weights", "largest"])
def test_one_look_ahead_makes_all_pictures_whole(field):
    ahead = np.eye(29, k=1, dtype=np.uint8)
    assert not is_causal([*report().pictures, replace(report().pictures[0], **{field: ahead})])


def test_means_and_greatest_weights_are_blocks_of_their_own():
    made = report(layers=2, tokens=[f" {n}" for n in range(30)], pooled=10).pictures
    means, largest = (list(blocks(made, causal=True, by=by)) for by in ("mean", "max"))
    assert [block.id for block in means + largest] == ["mean-0", "mean-1", "max-0", "max-1"]
    for each, of in ((means, "weights"), (largest, "largest")):
        back = unpack(each[1].data, [3] * 4, causal=True)
        assert all(np.array_equal(cells, getattr(picture, of)) for cells, picture in zip(back, made[4:], strict=True))
    assert list(blocks(report().pictures, causal=True, by="max")) == []
