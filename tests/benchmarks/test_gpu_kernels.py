"""The GPU kernels compile for every chip, within its registers and shared memory, onto its tensor cores."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_kernels import CHIPS

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

ROOT = Path(__file__).parents[2]

PREFILL = ("forward", "gradient_of_queries", "gradient_of_keys", "gradient_of_values")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_fits_the_chip(chip: str):
    for found in compiled(chip):
        name = f"{found['variant']} on {chip}"
        kernel, kind, dim, *beside = found["variant"].split()
        assert found["shared"] <= CHIPS[chip][3], name
        assert found["products"] > 0 or kernel in ("merge", "prepare_rows"), name
        assert found["copies"] > 0 or has_one_block(kernel, kind, dim, beside), name
        most = most_spilled(kernel, kind, dim, beside)
        # Blackwell has the blocks that are the fastest on an H200, and reads sums from the memory of its tensor cores
        most = 3 * most if chip == "sm_100" and kernel in PREFILL and most > 64 else most
        assert found["stack"] <= most or chip == "gfx942", name
        if kind == "fp32":  # Triton gives warps beyond the rows products that read beyond shared memory
            assert found["warped"] <= found["rows"], name
        if kernel in PREFILL and kind == "bf16" and dim in ("64", "128") and not beside:
            assert not found["serialized"], name


def has_one_block(kernel: str, kind: str, dim: str, beside: list[str]) -> bool:
    """Whether a kernel may have one block of tokens, so that nothing is copied while it computes.

    Beside biases, with the largest heads of float32, and where wide heads are decoded, some chips have shared
    memory for one block only; second starts and kernels with more arithmetic have one anywhere.
    """
    return bool(beside) or kernel not in (*PREFILL, "span") or (kind == "fp32" and int(dim) >= 256) or dim == "1024"


def most_spilled(kernel: str, kind: str, dim: str, beside: list[str]) -> float:
    """The most bytes of registers that a thread may spill."""
    if kernel in ("merge", "prepare_rows"):
        return 0
    if kernel == "span":
        return most_spilled_by_decoding(kind, dim, beside)
    if {"CAREFUL", "REPAIR"} & set(beside):
        return 1280  # they run where something is not finite, which is rare, and add values one by one
    if kernel == "sweep" and kind == "fp32":
        return 1088  # of the inspection of weights, which is not called in training: sums and a picture beside products
    if kind == "fp32":
        return 768  # three products of TF32 for one of float32 are more than registers have room for
    if dim == "256":
        return 384  # so are the sums of 256 channels
    if "BIAS" in beside:
        return 800  # the address of each element of a bias
    if kernel in ("gradient_of_keys", "gradient_of_values"):
        # the sums of both gradients are in registers, where a block is the faster for it (on an H200)
        return 160 if beside else 96
    return 256 if beside else 64


def most_spilled_by_decoding(kind: str, dim: str, beside: list[str]) -> float:
    """That of the kernel of decoding."""
    if dim == "1024" or "many_rows" in beside or (kind, dim) == ("fp32", "512"):
        return math.inf  # rare shapes
    if beside in (["int8"], ["fp8"], ["int4"]):
        return 768  # a warp alone decodes codes in all of its registers, and leaves few to a mask
    return 160 if "whole" in beside else 64  # of sm_100 without a mask; the others have less


def compiled(chip: str) -> list[dict[str, Any]]:
    """What `./bench gpu-kernels` says, run without the interpreter, which the tests of this process use."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-P", "-m", "benchmarks.gpu_kernels", "--json", "--chips", chip]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
