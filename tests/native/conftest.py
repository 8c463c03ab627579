"""Every instruction set of the machine, and the plain loops, as engines that can be asked for by name.

Hooks and no fixture: pytest 9.1 binds the fixtures of a folder to the first node that it makes for it, and makes
another one where files of the folder are named before and after a file of the parent folder.
"""

from functools import cache

import pytest

from regard import native
from regard.backend.native import Native
from regard.dispatch.choose import BACKENDS
from tests.native.engines import ALL, PLAIN


@cache
def engines() -> dict[str, Native]:
    """The engines by the names in `tests.native.engines`."""
    return {name: Native(name=name, isa=name.removeprefix("native ")) for name in (*ALL, PLAIN)}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Make the names known to a test of this folder, and to its fixtures."""
    if not native.available():
        pytest.skip(str(native.absence()))
    BACKENDS.update(engines())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Other tests go through the table of backends and expect those of the library alone."""
    for name in engines():
        BACKENDS.pop(name, None)
