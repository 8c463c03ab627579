"""The shapes in the types are checked by running tests once more with jaxtyping's hook, in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def checked(*files: str) -> subprocess.CompletedProcess[str]:
    hook = "--jaxtyping-packages=regard.attention,regard.state,beartype.beartype"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", hook, *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_shapes_in_the_types_are_true():
    result = checked("tests/test_attend.py", "tests/test_state.py", "-k", "not do_not_merge and not autocast")
    assert result.returncode == 0, result.stdout


def test_a_shape_that_is_not_true_is_found(tmp_path: Path):
    test = tmp_path / "test_wrong.py"
    make = "State(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5))"
    test.write_text(f"import torch\nfrom regard import State\ndef test(): {make}\n")
    result = checked(str(test))
    assert result.returncode == 1
    assert "queries" in result.stdout
