"""The GPU kernels compile for every chip, within its registers and shared memory, onto its tensor cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_kernels import CHIPS

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_fits_the_chip(chip: str):
    for found in compiled(chip):
        name = f"{found['variant']} on {chip}"
        assert found["shared"] <= CHIPS[chip][3], name
        kernel, kind, dim, *beside = found["variant"].removesuffix(" CAREFUL").split()
        if kernel in ("merge", "prepare_rows"):
            assert found["stack"] == 0, name
            continue
        assert found["products"] > 0, name
        if kernel == "span" and (dim == "1024" or "many_rows" in beside or (kind, dim) == ("fp32", "512")):
            continue  # rare shapes, which spill, and have one block of tokens where shared memory has no room for two
        # beside biases and with the largest heads of float32, some chips have room for one block only; two kernels have
        # one block of keys and more arithmetic
        is_one = beside or (kind, dim) == ("fp32", "256") or kernel in ("sweep", "far_rows")
        assert found["copies"] > 0 or is_one, name
        # three products of TF32 for one of float32, and 256 channels, are more than the registers have room for
        is_large = kind == "fp32" or dim == "256"
        # a warp alone decodes codes in all of its registers, and leaves few to a mask
        is_alone = kernel == "span" and beside in (["int8"], ["fp8"], ["int4"])
        most = (768 if kernel != "span" else 64) if is_large else 64 if kernel == "span" or not beside else 256
        most = 768 if is_alone else 160 if "whole" in beside else most
        assert found["stack"] <= most or chip == "gfx942", name


def compiled(chip: str) -> list[dict[str, Any]]:
    """What `./bench gpu-kernels` says, run without the interpreter, which the tests of this process use."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-P", "-m", "benchmarks.gpu_kernels", "--json", "--chips", chip]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
