"""scripts/gpu_first_run.sh, tried on a CPU: every step leaves what it found, whatever the others do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_checks import KERNELS, checks, run, wanted
from tests.pretended_gpu import CUDA, pretended_gpu

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

ROOT = Path(__file__).parents[1]


def first_run(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = tmp_path / "found.json"
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu_first_run.sh"), "--device", "cpu", "--out", str(file), *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done, json.loads(file.read_text())


def test_names_are_unique_and_every_part_is_of_the_whole():
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)
    assert set(KERNELS) <= set(names)
    whole = wanted(["triton bfloat16"], (0, 1), None)
    parts = [check.name for i in range(3) for check in wanted(["triton bfloat16"], (i, 3), None)]
    assert sorted(parts) == sorted(check.name for check in whole)
    assert wanted(["triton bfloat16"], (0, 1), whole[-2].name)[0].name == whole[-1].name


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_at_once(tmp_path: Path):
    file = tmp_path / "found.json"
    command = [str(ROOT / "scripts" / "gpu_first_run.sh"), "--out", str(file)]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "torch sees no GPU here: --device cpu tries the way" in done.stdout
    assert json.loads(file.read_text())["machine"]["gpu"] is None


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("triton float32 alibi, slopes of the call", marks=LONG),
        "sdpa float32 multi-head",
        pytest.param("decode masks on the device: prefix-LM float32", marks=LONG),
        "decode latent int8 float32",
        pytest.param("decode rows that a finite bias hides 130", marks=LONG),
        pytest.param("triton float32 everything", marks=LONG),
        pytest.param("decode fp8 pages of 16 float32 1", marks=LONG),
        pytest.param("decode rotated contiguous float32 7", marks=LONG),
    ],
)
def test_a_check_has_each_tensor_where_a_gpu_needs_it(name: str):
    (check,) = (check for check in checks() if check.name == name)
    with pretended_gpu():  # where Triton's interpreter has no bfloat16
        found = run(check, CUDA)
    assert found["ok"], found


@pytest.mark.exhaustive
def test_checks_are_compared_and_listed(tmp_path: Path):
    done, found = first_run(tmp_path, "--of", "sdpa float32 dense", "sdpa float32 alibi", "--skip", "bench")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{found}"
    results = {each["check"]: each for each in found["checks"]}
    assert results["sdpa float32 dense"]["errors"].keys() == {"out", "dq", "dk", "dv"}
    assert results["sdpa float32 alibi"]["note"].startswith("refused: sdpa: a bias would be built in full")
    assert found["machine"]["triton"]
    assert found["not_run"] == []


@pytest.mark.exhaustive
def test_checks_go_on_after_one_that_ends_the_process(tmp_path: Path):
    """A module that comes before the checks ends the process in the middle of one."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('tests.gpu_checks' in each for each in sys.orig_argv) and '--after' not in sys.orig_argv:\n"
        "    import regard\n"
        "    calls, attend = [], regard.attend\n"
        "    def ending(*args, **words):\n"
        "        calls.append(1)\n"
        "        os._exit(7) if len(calls) > 2 else None\n"
        "        return attend(*args, **words)\n"
        "    regard.attend = ending\n"
    )
    script = ROOT / "scripts" / "gpu_first_run.py"
    file = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-P", str(script), "--device", "cpu", "--out", str(file), "--skip", "bench", "--of",
         "sdpa float32 multi", "sdpa float32 dense"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT)))},
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    found = json.loads(file.read_text())
    assert done.returncode == 1
    results = {each["check"]: each["ok"] for each in found["checks"]}
    assert len(results) == 3
    assert sum(results.values()) == 2
    assert [each["note"] for each in found["checks"] if not each["ok"]] == ["the process ended: status 7"]
    assert "NOT FINISHED" in done.stdout


@pytest.mark.exhaustive
def test_the_whole_run_on_a_cpu(tmp_path: Path):
    done, found = first_run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step["ended"] for step in found["steps"]] == ["0"] * 3
    assert {each["check"] for each in found["checks"]} >= {"decode plain contiguous float32 1"}
    assert any(record["library"] == "regard by triton" for record in found["bench"]["records"])
