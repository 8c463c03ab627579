"""The example runs; what it finds after a few steps of training is not looked at."""

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "induction.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """What the example prints."""

    def printed(*words):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_it_prints_a_table(run):
    printed = run("--steps", "2", "--sequences", "8")
    assert "step     2" in printed
    assert all(f"\n{layer}.{head} " in printed for layer in (0, 1) for head in range(8))


def test_it_prints_json_alone(run):
    found = json.loads(run("--steps", "1", "--layers", "1", "--sequences", "8", "--json"))
    assert [head["head"] for head in found["heads"]] == list(range(8))
    assert all(one["low"] <= one["change"] <= one["high"] for one in found["removed"])
