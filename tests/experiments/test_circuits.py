"""The parts of the experiment on rank collapse."""

import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def load(monkeypatch):
    """The names that a script of the folder defines."""
    monkeypatch.syspath_prepend(FOLDER)
    yield lambda name: runpy.run_path(str(FOLDER / f"{name}.py"))
    for name in ("record", "tiny_model"):
        sys.modules.pop(name, None)


def test_the_log_residual_of_attention_alone_triples_per_layer(load):
    digits, error = load("rank_collapse")["with_digits"](0, 5)
    falls = [after - before for before, after in pairwise(digits)]
    assert error < 1e-12
    assert all(2.8 < after / before < 3.2 for before, after in pairwise(falls[2:]))


def test_a_causal_mask_slows_the_collapse_to_a_constant_factor_per_layer(load):
    through = load("rank_collapse")["through"]
    assert through(0, 5)[-1] < 1e-12
    rates = [after / before for before, after in pairwise(through(0, 8, causal=True)[3:])]
    assert all(0.3 < rate < 0.8 for rate in rates)


def test_larger_mlps_slow_the_collapse(load):
    through = load("rank_collapse")["through"]
    assert through(0, 4, gain=16.0)[-1] > 0.1
    assert through(0, 4, gain=1.0)[-1] < 1e-3
