"""Ring attention in a program that torchrun starts, on one machine and between two machines that are far apart."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.parallel.far_link import far_link

PROGRAM = Path(__file__).with_name("torchrun_ring.py")
DELAY = 20
"""Milliseconds each way between the two network namespaces."""


def torchrun(*options: str, before: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "torch.distributed.run", *options, str(PROGRAM)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.exhaustive
def test_torchrun_starts_the_ranks():
    run = torchrun("--standalone", "--nproc-per-node=2")
    text, _ = run.communicate(timeout=200)
    assert run.returncode == 0, text
    assert sorted(re.findall(r"rank (\d) of 2 is right", text)) == ["0", "1"]


@pytest.fixture
def namespaces() -> Generator[list[str]]:
    """Two network namespaces, joined by a link that delays packets."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: the program ip is missing (iproute2)")
    names = [f"regard-{os.getpid()}-{end}" for end in "ab"]
    with ExitStack() as stack:
        try:
            stack.enter_context(far_link(names, ["10.213.7.1", "10.213.7.2"], DELAY / 1000))
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names


@pytest.mark.exhaustive
def test_two_machines_with_a_delay_between_them(namespaces: list[str]):
    runs = [
        torchrun(
            "--nnodes=2", "--nproc-per-node=1", f"--node-rank={end}", "--master-addr=10.213.7.1", "--master-port=29577",
            before=("ip", "netns", "exec", name), GLOO_SOCKET_IFNAME="far",
        )
        for end, name in enumerate(namespaces)
    ]  # fmt: skip
    texts = [run.communicate(timeout=250)[0] for run in runs]
    for rank, (run, text) in enumerate(zip(runs, texts, strict=True)):
        assert run.returncode == 0, text
        found = re.search(rf"rank {rank} of 2 is right after ([\d.]+) s", text)
        assert found, text
        assert float(found[1]) > DELAY / 1000
