"""Imports regard before pytest collects its doctests: pytest would load a file of an editable install a second time."""

import regard  # noqa: F401  # pyright: ignore[reportUnusedImport]
from tests.selection import (  # the options --all and --no-skips
    pytest_addoption,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    pytest_collection_modifyitems,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    pytest_configure,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    pytest_sessionfinish,  # noqa: F401  # pyright: ignore[reportUnusedImport]
)
