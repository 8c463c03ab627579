"""An exported program that is loaded in a new Python process."""

import subprocess
import sys
from pathlib import Path

import torch

from regard import Alibi, Causal, Window, attend

LOAD = """
import sys, torch
{imports}
q, expected = torch.load(sys.argv[2])
out = torch.export.load(sys.argv[1]).module()(q)
torch.testing.assert_close(out, expected)
"""


class Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return attend(q, q, q, mask=Causal() & Window(5), bias=Alibi(2))


def load_anew(folder: Path, imports: str) -> "subprocess.CompletedProcess[str]":
    code = LOAD.format(imports=imports)
    command = [sys.executable, "-W", "ignore", "-c", code, str(folder / "program.pt2"), str(folder / "tensors.pt")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_saved_program_runs_in_a_process_that_imports_attend(tmp_path: Path):
    q = torch.randn(1, 2, 11, 8)
    torch.export.save(torch.export.export(Layer(), (q,)), tmp_path / "program.pt2")
    torch.save((q, Layer()(q)), tmp_path / "tensors.pt")
    done = load_anew(tmp_path, "from regard import attend")
    assert (done.returncode, done.stderr) == (0, "")
