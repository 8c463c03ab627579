"""Two and four processes, started once for all tests here."""

from collections.abc import Generator

import pytest

from tests.parallel.workers import Workers, workers


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with workers(2, tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with workers(4, tmp_path_factory.mktemp("four")) as made:
        yield made
