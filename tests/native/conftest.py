"""Every instruction set of the machine, and the plain loops, as engines that can be asked for by name."""

from collections.abc import Iterator

import pytest

from regard import native
from regard.backend.native import Native
from regard.dispatch.choose import BACKENDS
from tests.native.engines import ALL, PLAIN


@pytest.fixture(autouse=True, scope="module")
def engines() -> Iterator[None]:
    """The names in `tests.native.engines`, for as long as the tests of a file run."""
    if not native.available():
        pytest.skip(str(native.absence()))
    made = {name: Native(name=name, isa=name.removeprefix("native ")) for name in (*ALL, PLAIN)}
    BACKENDS.update(made)
    yield
    for name in made:
        del BACKENDS[name]
