"""The scripts of the folder `experiments`, loaded as their folder's modules are where they run."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"
SHARED = ("record", "page", "tiny_model")
"""What the scripts import; all other files of the folder are scripts."""


@pytest.fixture
def load(monkeypatch):
    """The names that a script of the folder defines."""
    monkeypatch.syspath_prepend(FOLDER)
    yield lambda name: runpy.run_path(str(FOLDER / f"{name}.py"))
    for name in SHARED:
        sys.modules.pop(name, None)
