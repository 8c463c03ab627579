"""What holds for every test: a fixed seed, the same examples in every run, one process for the tests of a model."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from regard import native
from regard.dispatch import plan_cache
from tests.selection import tries_all
from tests.triton_interpreter import make_faster

# A law that fails fails for everybody. To look for new failures: ./test --hypothesis-profile=search tests/laws
hypothesis.settings.register_profile("same examples", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", max_examples=2000, deadline=None)
hypothesis.settings.load_profile("same examples")
hypothesis.settings.register_profile(
    "some of the examples", parent=hypothesis.settings.get_profile("same examples"), max_examples=25
)

# Triton's kernels run on CPUs by its interpreter, which must be known before they are imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Warnings are errors, and where no compiler is the first call of a process would warn of that.
if not native.available():
    os.environ.setdefault("REGARD_QUIET", "1")


def pytest_report_header() -> str:
    """What is under test: the torch, and the instruction sets of the compiled library."""
    return f"torch: {torch.__version__}, native: {', '.join(native.isas()) or native.absence()}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector the modules and test cases, which all live until the end.

    Its full passes over them take 4 of the 15 s of a collection of tests, and later 0.2 s each, also where a test asks
    for one. What a test makes is collected as ever.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_finish() -> None:
    """Files with kernels for GPUs have imported Triton by now."""
    make_faster()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The tensors that a file makes when it is imported do not depend on the files imported before it.

    By default, laws that name no number of examples try 25 of hypothesis's 100.
    """
    torch.default_generator.manual_seed(0)
    if isinstance(collector, pytest.Module) and not collector.config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("same examples" if tries_all(collector) else "some of the examples")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same random numbers, whichever ran before it.

    `torch.manual_seed` would write down a traceback for each kind of GPU, 0.5 ms, to seed it when it is first used.
    """
    torch.default_generator.manual_seed(0)


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Regard as in a process that has made no call; what the test plans is forgotten after it."""
    plan_cache.forget()
    yield
    plan_cache.forget()


@pytest.fixture
def no_library(no_plans: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regard as it is where no compiler was: without its library, and without the plans that were made with it."""
    monkeypatch.setattr(native, "_find", lambda: str(tmp_path / native.LIBRARY))
    monkeypatch.setenv("REGARD_QUIET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file in one worker of pytest-xdist, and the tests marked `model` of all files in one.

    What a file prepares for several tests, and the checkpoint, are then made once.
    """
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue  # a folder has one worker
        group = "model" if item.get_closest_marker("model") else item.nodeid.split("::", maxsplit=1)[0]
        item.add_marker(pytest.mark.xdist_group(group))
