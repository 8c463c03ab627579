"""The shapes in the types are checked by running tests once more with jaxtyping's hook, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOK = "--jaxtyping-packages=regard.attend,regard.state,beartype.beartype"
WRONG = """
import torch
from regard import State

def test_wrong():
    State(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5))
"""


@pytest.mark.exhaustive
def test_the_shapes_in_the_types_are_true_and_one_that_is_not_is_found(tmp_path: Path):
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(WRONG)
    files = ["tests/test_attend.py", "tests/test_state.py", str(wrong)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HOOK, *files]
    command += ["-m", "not outside_types"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert len(failed) == 1, done.stdout
    assert "test_wrong" in failed[0]
    assert "queries" in done.stdout
    assert " passed" in done.stdout
