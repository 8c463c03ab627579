"""The benchmark of new lengths: its calls compute the same as torch's, and each length is new."""

import time

import pytest
import torch

from benchmarks import lengths
from regard.dispatch import plan_cache


@pytest.mark.parametrize("row", lengths.ROWS, ids=lambda row: row.name)
def test_a_row_is_measured(row: lengths.Row, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lengths, "LENGTHS", 3)
    with torch.no_grad():
        ours, theirs = lengths.measure(row, (2, 1, 8), time.perf_counter, 2)
    assert len(ours) == len(theirs) == 2
    assert min(*ours, *theirs) > 0
    assert sum(len(alike) for alike in plan_cache._calls.values()) <= 3 + 2 + 1
