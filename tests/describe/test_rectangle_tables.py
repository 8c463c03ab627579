"""The tables behind the bounds of masks that hold data, against plain loops, over several blocks of 64."""

import tracemalloc

import numpy as np
import pytest

from regard.describe.mask import Rectangles
from regard.describe.rectangle_tables import BLOCK, BlockCounts, RangeExtremes

RANDOM = np.random.default_rng(0)


def ranges(limit: int, count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    ends = np.sort(RANDOM.integers(0, limit, (count, 2)), axis=1)
    return ends[:, 0], ends[:, 1] + 1


def outward(start: int, stop: int) -> slice:
    return slice(start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_extremes_are_those_of_the_blocks_that_cover_a_range(tokens: int):
    values = RANDOM.integers(-50, 50, (3, tokens))
    extremes = RangeExtremes(values)
    start, stop = ranges(tokens)
    row = RANDOM.integers(0, 3, len(start))
    low, high = extremes(row, start, stop)
    for i in range(len(start)):
        covered = values[row[i], outward(start[i], stop[i])]
        assert (low[i], high[i]) == (covered.min(), covered.max())


@pytest.mark.parametrize(
    "shape", [(2, 3, 200, 333), (1, 1, 1, 200), (2, 1, 200, 1), (1, 3, 64, 64), (1, 1, 200, 5), (1, 1, 2100, 77)]
)
def test_counts_of_a_table_are_those_of_the_blocks_that_cover_a_rectangle(shape: tuple[int, int, int, int]):
    table = RANDOM.random(shape) > 0.5
    table[..., : shape[2] // 2, : shape[3] // 2] = True
    table[..., shape[2] // 2 :, shape[3] // 2 :] = False
    (q0, q1), (k0, k1) = ranges(max(200, shape[2])), ranges(shape[3] if shape[3] > 1 else 200)
    q0, q1 = (q0 % shape[2], q0 % shape[2] + 1) if shape[2] == 64 else (q0, q1)
    b, h = RANDOM.integers(0, 2, len(q0)), RANDOM.integers(0, 3, len(q0))
    some, every = BlockCounts.of_table(table).bounds(Rectangles(b, h, q0, q1, k0, k1))
    for i in range(len(q0)):
        rows = slice(None) if shape[2] == 1 else outward(q0[i], q1[i])
        columns = slice(None) if shape[3] == 1 else outward(k0[i], k1[i])
        covered = table[b[i] % shape[0] if shape[0] > 1 else 0, h[i] if shape[1] > 1 else 0, rows, columns]
        assert (some[i], every[i]) == (covered.any(), covered.all())


@pytest.mark.parametrize("shape", [(1, 1, 8192, 1024), (1, 1, 8192, 1021), (2, 2, 4096, 512)])
def test_a_table_is_not_copied(shape: tuple[int, int, int, int]):
    table = RANDOM.random(shape) > 0.5
    tracemalloc.start()
    BlockCounts.of_table(table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < table.nbytes // 4


@pytest.mark.parametrize("shape", [(1, 1, 0, 70), (1, 1, 70, 0), (0, 1, 70, 70), (1, 1, 0, 0)])
def test_a_table_without_entries_counts_nothing(shape: tuple[int, int, int, int]):
    counts = BlockCounts.of_table(np.zeros(shape, dtype=bool))
    assert not counts.some.any()
    assert not counts.every.any()


def test_counts_of_a_layout_are_exact_for_whole_blocks():
    layout = RANDOM.random((1, 2, 20, 30)) > 0.5
    (q0, q1), (k0, k1) = ranges(20), ranges(30)
    h = RANDOM.integers(0, 2, len(q0))
    some, every = BlockCounts.of_layout(layout, 16).bounds(Rectangles(0 * h, h, 16 * q0, 16 * q1, 16 * k0, 16 * k1))
    for i in range(len(q0)):
        covered = layout[0, h[i], q0[i] : q1[i], k0[i] : k1[i]]
        assert (some[i], every[i]) == (covered.any(), covered.all())
