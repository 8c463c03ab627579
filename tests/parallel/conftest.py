"""Two and four processes, started once for all tests here."""

from collections.abc import Generator
from pathlib import Path

import pytest

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
