"""Groups of processes: two and four that are started once for all tests here, and this one alone."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.parallel.workers import Workers, workers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests here in one worker of pytest-xdist: each would import what the processes are forked with."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("parallel"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with workers(2, tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with workers(4, tmp_path_factory.mktemp("four")) as made:
        yield made


@pytest.fixture
def alone() -> Generator[None]:
    """A group of this process alone."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
