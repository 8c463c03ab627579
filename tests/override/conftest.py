"""After each test regard is out of other programs' calls again."""

from collections.abc import Iterator

import pytest

import regard


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    regard.everywhere(False)
