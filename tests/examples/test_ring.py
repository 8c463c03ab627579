"""The example of a sharded sequence runs under torchrun, and equals one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "ring.py"

AT_ITS_END = "terminate called without an active exception"
"""How torch's gloo ends one process of some 30 on a busy machine, after all was computed; without regard, too."""


@pytest.mark.exhaustive
def test_training_on_a_sharded_sequence_equals_one_process() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), "--tokens", "301"],
        capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0 or AT_ITS_END in run.stderr, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", run.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert float(run.stdout.split()[-1]) < 1e-4


@pytest.mark.parametrize("script", ["ring.py", "sweep.py"])
def test_without_torchrun_it_says_how_to_start_it(script: str) -> None:
    alone = {name: value for name, value in os.environ.items() if name != "RANK"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT.with_name(script)), *(["README.md"] if script == "sweep.py" else [])],
        capture_output=True, text=True, timeout=300, check=False, env=alone,
    )  # fmt: skip
    assert run.returncode == 2
    assert f"start it with torchrun: torchrun --nproc-per-node 2 examples/{script}" in run.stderr
