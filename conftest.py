"""Imports regard before pytest collects its doctests: pytest would load a file of an editable install a second time."""

from importlib.util import find_spec

import regard  # noqa: F401  # pyright: ignore[reportUnusedImport]
from tests.selection import (  # the options --all, --share and --no-skips
    pytest_addoption,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    pytest_collection_modifyitems,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    pytest_collectstart,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    pytest_configure,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    pytest_sessionfinish,  # noqa: F401  # pyright: ignore[reportUnusedImport]
)

pytest_plugins = ["tests.long_tests"]  # what takes long, and the option --write-long

collect_ignore = [] if find_spec("vllm") else ["src/regard/integrate/vllm.py"]  # it is made of vLLM's classes
