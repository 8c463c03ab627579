"""Models of other packages, with random weights, give the same outputs under `regard.everywhere`."""

import importlib.util

import pytest
import torch

import regard
from benchmarks import programs
from regard import native

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call"),
    pytest.mark.filterwarnings("default"),  # packages use what others deprecate
]

CASES = {case.name: case for case in programs.CASES if case.package is not None}
LIBRARY = programs.define_nms()


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_another_package_gives_its_outputs(name: str):
    case = CASES[name]
    if importlib.util.find_spec(str(case.package)) is None:
        pytest.skip(f"{case.package} is missing: pip install regard[programs]")
    model, run = case.make()
    model.eval()
    with torch.no_grad():
        torch.manual_seed(0)
        theirs = run()
        with regard.everywhere() as caught:
            torch.manual_seed(0)
            ours = run()
    assert any(row.form.why is None for row in caught.rows)
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
