"""Runs the checks, compute-sanitizer and the benchmark of a machine with a GPU; see gpu_first_run.sh.

Every step is a process of its own with a time limit, and what a step prints is read line by line: so a step that fails,
hangs or loses the GPU leaves what it found until then, and the other steps go on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

CHECKS = [
    sys.executable, "-P", "-c",
    f"""
import runpy, sys, types
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [{str(ROOT / "tests")!r}]
runpy.run_module("tests.gpu_checks", run_name="__main__", alter_sys=True)
""",
]  # fmt: skip
"""Runs tests/gpu_checks.py. Our folder `tests` is no package, so that of any other project would come before it."""
SHARDS = {
    "triton bfloat16": 3,
    "triton float32": 3,
    "decode": 3,
    "sdpa": 1,
    "flex bfloat16": 2,
    "flex float32": 1,
}
"""The checks by the beginnings of their names, and processes for each: compiling takes most of the time."""

TRIED = ("triton float32 causal, keys", "sdpa float32 dense", "decode plain contiguous float32 1")
"""The checks with `--device cpu`."""

SECONDS = {"checks": 210, "sanitizer": 210, "bench": 150}
"""The limit of each step. The first two run at the same time."""

RESTARTS = 5
"""How often checks go on after a fault of the GPU or a crash, for each process."""

MACHINE = """\
import importlib.util, json, platform, sys
found = {"python": platform.python_version(), "executable": sys.executable}
needed = ("torch", "triton", "numpy", "xxhash", "jaxtyping", "flash_attn", "flashinfer", "pytest")
found["missing"] = [name for name in needed if importlib.util.find_spec(name) is None]
import torch, shutil
found["compiler"] = next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None)  # Triton's launcher
found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
try:
    found["cudnn"] = torch.backends.cudnn.version()
except Exception as error:
    found["cudnn"] = repr(error)
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    found |= {"gpu": p.name, "multiprocessors": p.multi_processor_count, "capability": [p.major, p.minor]}
try:
    import triton
    found["triton"] = triton.__version__
except Exception as error:
    found["triton"] = repr(error)
import regard
found["regard"] = regard.__file__
print(json.dumps(found))
"""


@dataclass
class Step:
    """The result of a process: how it ended ("0", "status 1", "time limit"), its seconds, and the end of its output."""

    name: str
    ended: str = ""
    seconds: float = 0.0
    tail: list[str] = field(default_factory=list)


@dataclass
class Results:
    """All that was found so far, written after each step; shared between threads."""

    path: Path
    content: dict[str, Any] = field(default_factory=lambda: {"steps": [], "checks": [], "not_run": []})
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: float = field(default_factory=time.monotonic)

    def add(self, key: str, value: Any) -> None:
        """Add to a list of the file."""
        with self.lock:
            self.content[key].append(value)

    def write(self, **more: Any) -> None:
        """Write the file, with more in it."""
        with self.lock:
            self.content |= {**more, "seconds": round(time.monotonic() - self.begun, 1)}
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps(self.content, indent=1) + "\n")
            part.replace(self.path)

    def say(self, text: str) -> None:
        """Progress, on stdout."""
        with self.lock:
            print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)


def run(
    name: str, command: Sequence[str], seconds: float, results: Results, line: Callable[[str], bool] | None = None
) -> Step:
    """Run a process until it ends or its time is over.

    Args:
        line: gets each line of its output; False keeps the line out of `tail`.
    """
    step, start = Step(name), time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        step.ended = f"not started: {error}"
        results.add("steps", vars(step))
        return step
    ended_by_us = threading.Event()

    def end() -> None:
        ended_by_us.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(0.1, seconds), end)
    timer.start()
    assert process.stdout is not None
    for text in process.stdout:
        if line is None or line(text.rstrip()):
            step.tail = [*step.tail[-39:], text.rstrip()[:500]]
    status = process.wait()
    timer.cancel()
    step.ended = "time limit" if ended_by_us.is_set() else str(status) if status == 0 else f"status {status}"
    step.seconds = round(time.monotonic() - start, 1)
    results.add("steps", vars(step))
    return step


# ---- the steps ------------------------------------------------------------------------------------------------------


def machine(results: Results, device: str) -> dict[str, Any]:
    """What is there: versions, the GPU, and what is missing."""
    found: dict[str, Any] = {}

    def line(text: str) -> bool:
        if not text.startswith("{"):
            return True
        found.update(json.loads(text))
        return False

    step = run("machine", [sys.executable, "-P", "-c", MACHINE], 60, results, line)
    if device == "cuda" and which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
        found["nvidia-smi"] = run("nvidia-smi", ["nvidia-smi", query, "--format=csv,noheader"], 20, results).tail
    results.say(f"machine: {json.dumps(found) if found else step.tail}")
    results.write(machine=found)
    return found


def checks(results: Results, device: str, of: Sequence[str], shard: tuple[int, int], seconds: float) -> None:
    """One process of checks, which goes on in a new one after a check that ended it."""
    until, label = time.monotonic() + seconds, f"checks {', '.join(of)} {shard[0] + 1}/{shard[1]}"
    left: list[str] = []
    command = [*CHECKS, "--device", device, "--of", *of, "--shard", *map(str, shard)]
    for _ in range(RESTARTS + 1):
        progress = Progress(results)
        step = run(label, command, until - time.monotonic(), results, progress.line)
        left = progress.left
        if step.ended == "0" or progress.last is None:
            break
        if progress.running:
            results.add("checks", {"check": progress.last, "ok": False, "note": f"the process ended: {step.ended}"})
            results.say(f"NOT FINISHED: {progress.last}: {step.ended}")
        if step.ended == "time limit" or not left:
            break
        command = [*command[: command.index("--shard") + 3], "--after", progress.last]
    for name in left:
        results.add("not_run", name)
    results.write()


class Progress:
    """What a process of checks says about itself, line by line.

    Attributes:
        last: the check that started last; None before the first.
        running: whether it has not ended.
        left: the checks that did not start.
    """

    def __init__(self, results: Results) -> None:
        self.results, self.running = results, False
        self.last: str | None = None
        self.left: list[str] = []

    def line(self, text: str) -> bool:
        """Read a line; whether it is none of the checks' own."""
        try:
            found = json.loads(text) if text.startswith('{"') else None
        except ValueError:
            found = None
        if found is None:
            return True
        if "planned" in found:
            self.left = found["planned"]
        elif "start" in found:
            self.last, self.running, self.left = found["start"], True, self.left[1:]
        else:
            self.running = False
            self.results.add("checks", found)
            if not found["ok"]:
                self.results.say(f"NOT OK: {found['check']}: {found['note'] or found.get('errors')}")
        return False


def sanitizer(results: Results, seconds: float) -> None:
    """compute-sanitizer on one small call of each kernel: memory first, then races."""
    until = time.monotonic() + seconds
    tool = which("compute-sanitizer") or which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        results.say("compute-sanitizer is not there")
        results.write(sanitizer="not there")
        return
    said: dict[str, Any] = {}
    for kind in ("memcheck", "racecheck"):
        lines: list[str] = []

        def line(text: str, lines: list[str] = lines) -> bool:
            if text.startswith("=========") and len(lines) < 200:
                lines.append(text)
            return not text.startswith("=========")

        of = [*CHECKS, "--of", "kernels"]
        options = ["--tool", kind, "--target-processes", "application-only", "--error-exitcode", "9"]
        step = run(f"sanitizer {kind}", [tool, *options, *of], until - time.monotonic(), results, line)
        said[kind] = {"ended": step.ended, "said": lines, "checks": step.tail}
        results.say(f"compute-sanitizer {kind}: {step.ended}; {lines[-1] if lines else 'nothing said'}")
        results.write(sanitizer=said)


def bench(results: Results, device: str, seconds: float) -> None:
    """`./bench gpu --quick`."""
    file = results.path.with_name(results.path.stem + ".bench.json")
    file.unlink(missing_ok=True)
    only = ["--cases", "tensors, 64"] if device == "cpu" else []
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", "--quick", "--device", device, *only, "--json", str(file)]

    def line(text: str) -> bool:
        results.say(text)
        return True

    step = run("bench", command, seconds, results, line)
    found = json.loads(file.read_text()) if file.is_file() else None
    file.unlink(missing_ok=True)
    results.say(f"bench: {step.ended}")
    results.write(bench=found)


def summarise(results: Results) -> bool:
    """Print the results; returns whether every check passed."""
    found = results.content["checks"]
    wrong = [each["check"] for each in found if not each["ok"]]
    ended = [f"{step['name']}: {step['ended']}" for step in results.content["steps"] if step["ended"] != "0"]
    late = results.content["not_run"]
    results.say(
        f"{len(found)} checks, {len(wrong)} not ok, {len(late)} not run for lack of time"
        + "".join(f"\n    {name}" for name in wrong[:40])
    )
    results.say("every step ended by itself" if not ended else "steps that did not end well: " + "; ".join(ended))
    results.write(summary={"checks": len(found), "wrong": wrong, "ended": ended, "not run": len(late)})
    results.say(f"results: {results.path}")
    return bool(found) and not wrong and not ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps; 0 where every check is right, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_first_run.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="the file of results (default: $OUT/gpu_first_run.json)")
    parser.add_argument("--of", nargs="+", help="only checks whose names begin so")
    parser.add_argument("--skip", nargs="*", default=[], choices=list(SECONDS), help="steps to leave out")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    path = options.out or Path(os.environ.get("OUT", ".")) / "gpu_first_run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = Results(path.resolve())
    found = machine(results, options.device)
    if options.device == "cuda" and found and found["gpu"] is None:
        results.say("torch sees no GPU here: --device cpu tries the way with a few cases.")
        return 1
    tried = tuple(options.of or TRIED)
    groups = [((of,), (i, n)) for of, n in SHARDS.items() for i in range(n)]
    if options.of or options.device == "cpu":
        groups = [(tried, (0, 1))]
    with ThreadPoolExecutor(len(groups) + 1) as pool:
        if "checks" not in options.skip:
            for of, shard in groups:
                pool.submit(checks, results, options.device, of, shard, SECONDS["checks"])
        if "sanitizer" not in options.skip and options.device == "cuda":
            pool.submit(sanitizer, results, SECONDS["sanitizer"])
    if "bench" not in options.skip:
        bench(results, options.device, SECONDS["bench"])
    return 0 if summarise(results) else 1


if __name__ == "__main__":
    sys.exit(main())
