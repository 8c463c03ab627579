"""What a long call does to the rest of the process: it can be interrupted, and lets other threads of Python run."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from regard import Causal, attend
from regard.backend import native as engine
from tests.native.engines import BEST, PLAIN
from tests.native.interrupted import seconds_to_end

BEFORE = """
import torch
from regard import attend, Causal
torch.set_num_threads({threads})
q, k = torch.randn(1, {heads}, {tokens}, 64, requires_grad=True), torch.randn(1, 1, {tokens}, 64)
"""
OUT = 'out = attend(q, k, k, mask=Causal(), backend="native")'
WORK = {
    "forward": "attend(q, k, k, mask=Causal(), backend='native')",
    "backward": "torch.autograd.grad(out, q, out, retain_graph=True)",  # all heads on one: a single unit of work
}
"""Each of more than a second on two cores of 2026."""


@pytest.mark.parametrize("work", ["forward", pytest.param("backward", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_ctrl_c_ends_a_long_call_within_a_second(threads: int, work: str):
    heads, tokens = {"forward": (12, 16384), "backward": (24, 8192)}[work]
    before = BEFORE.format(threads=threads, heads=heads, tokens=tokens) + (OUT if work == "backward" else "")
    assert seconds_to_end(before, WORK[work]) < 1


def test_other_threads_of_python_run_during_a_call():
    q = torch.randn(1, 8, 4096, 128)
    running, ticks = threading.Event(), 0

    def work() -> None:
        running.set()
        attend(q, q, q, mask=Causal(), backend=BEST)

    worker = threading.Thread(target=work)
    worker.start()
    running.wait()
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    worker.join()
    assert ticks > 3


@pytest.mark.parametrize("name", [BEST, PLAIN])
def test_several_threads_of_python_may_call_at_once(name: str):
    inputs = [torch.randn(1, 4, n, 16) for n in (1, 7, 64, 131, 200)]
    expected = [attend(q, q, q, mask=Causal(), backend=name) for q in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            found = list(pool.map(lambda q: attend(q, q, q, mask=Causal(), backend=name), inputs))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_call_inside_a_call_gets_memory_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """A signal handler may call while the library has returned for a moment in the middle of a call."""
    q, small = torch.randn(1, 4, 300, 16), torch.randn(1, 2, 100, 16)
    monkeypatch.setattr(engine, "SECONDS", 0.0005)
    expected = attend(q, q, q, backend=BEST), attend(small, small, small, backend=BEST)
    inner: list[torch.Tensor] = []
    outer: list[torch.Tensor] = []

    def call(*_: object) -> None:
        inner.append(attend(small, small, small, backend=BEST))
        if len(outer) < 50:  # not at regular intervals, or a slow machine would call inside of calls without end
            signal.setitimer(signal.ITIMER_REAL, 0.001)

    before = signal.signal(signal.SIGALRM, call)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    try:
        while len(outer) < 50:
            outer.append(attend(q, q, q, backend=BEST))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(torch.equal(out, expected[0]) for out in outer)
    assert inner
    assert all(torch.equal(out, expected[1]) for out in inner)


ALONE = """
import os, resource, torch
from regard import attend, Causal, Window
q = torch.randn(1, 2, 16384, 64)
attend(q[:, :, :256], q[:, :, :256], q[:, :, :256], mask=Causal(), backend="native")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = attend(q, q, q, mask=Causal() & Window(4096), backend="native")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, flush=True)

torch.set_num_threads(2)
q = torch.randn(1, 8, 509, 64)
expected = attend(q, q, q, mask=Causal(), backend="native")
child = os.fork() if hasattr(os, "fork") else 0
if child == 0:
    torch.set_num_threads(1)
    os._exit(not torch.equal(attend(q, q, q, mask=Causal(), backend="native"), expected))
print(os.waitpid(child, 0)[1])
"""


@cache
def alone() -> list[str]:
    """What one new process reports: KiB that a large call takes, and how a forked process ended."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


@pytest.mark.exhaustive
def test_a_large_call_needs_little_memory_beside_its_tensors():
    """16,384 tokens: the scores of a head would take 1 GiB. Measured in a process of its own."""
    assert int(alone()[0]) * 1024 < 64 << 20


@pytest.mark.representative
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_computes_on_one_thread():
    """On two it would wait for ever for threads that fork has not copied, as in any call of torch."""
    assert alone()[1] == "0"
