"""The example with tools around models of transformers: the same results with regard as with torch."""

import importlib.util
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import programs

pytest.importorskip("transformers", reason="the package transformers is missing: pip install regard[models]")
if importlib.util.find_spec("accelerate") is None:
    pytest.skip("the package accelerate is missing: pip install regard[tools]", allow_module_level=True)

LIBRARY = programs.define_nms()  # transformers imports torchvision where it is there
tools = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tools.py")))

TRAINED: dict[str, tuple[str, Any, float]] = {
    "peft": ("peft", tools.with_peft, 1e-4),
    "Trainer": ("accelerate", tools.with_trainer, 1e-3),  # it rounds what it writes down
    "accelerate": ("accelerate", tools.with_accelerate, 3e-2),  # bfloat16
}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools about themselves


@pytest.fixture(autouse=True)
def own_state():
    """accelerate has one state per process, which a test leaves as it found it."""
    yield
    if importlib.util.find_spec("accelerate") is not None:
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", TRAINED)
def test_losses_are_those_with_torch(name: str):
    package, tool, tolerance = TRAINED[name]
    pytest.importorskip(package, reason=f"the package {package} is missing: pip install regard[tools]")
    ours, theirs = tool(steps=8), tool(steps=8, regard=False)
    assert len(ours) == 8
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, abs=tolerance)


def test_an_evaluation_gives_what_it_does_with_torch(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("lm_eval", reason="the package lm_eval is missing: pip install regard[tools]")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setitem(os.environ, name, "1")
    assert tools.with_lm_eval() == pytest.approx(tools.with_lm_eval(regard=False), abs=1e-4)
