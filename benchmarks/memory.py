"""How much memory one call holds beyond q, k, v and its output, measured in a process of its own.

`python -m benchmarks.memory NAME THREADS` prints the bytes.
"""

import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cases import MEMORY
from regard import attend
from regard.bench.case import Case
from regard.bench.rounds import on_threads

ROOT = Path(__file__).parents[1]


def extra_bytes(case: Case, threads: int) -> int:
    """The most that a call of this case, one of `MEMORY`, holds beyond its tensors, in bytes, with its plan."""
    command = [sys.executable, "-m", "benchmarks.memory", case.name, str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"ended with {done.returncode}")
    return int(done.stdout)


def _measured(case: Case) -> int:
    tensors, options = case.tensors(torch.float32), case.options(torch.float32)
    small = replace(case, queries=128, keys=128, mask=None, bias=None)
    attend(*small.tensors(torch.float32))  # what a first call brings along, threads and code, is not this one's
    before = peak_from_here()
    out = attend(*tensors, **options)
    return max(0, peak() - before - out.nbytes)


def peak_from_here() -> int:
    """Forget earlier peaks, where the system can, and give the bytes held now, or the highest peak so far."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most bytes of memory that this process held since the peak was last forgotten."""
    try:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    with on_threads(int(sys.argv[2])), torch.no_grad():
        print(_measured({row.name: row.case for row in MEMORY.rows}[sys.argv[1]]))
