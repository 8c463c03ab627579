"""Looking up what torch keeps private, and a note of each name that is not there."""

from importlib import import_module
from typing import Any

import torch

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

MISSING: dict[str, str] = {}
"""What happens without each private name that this torch lacks, by the name; empty for the versions that were tried."""


class Absent:
    """A class without instances, in place of a class that torch no longer has."""


def find(name: str, substitute: Any, consequence: str) -> Any:
    """The private name, `torch.a.b`; where torch lacks it, the substitute, with the consequence noted in `MISSING`."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(_module(module), attribute)
    except (ImportError, AttributeError):
        MISSING[name] = consequence
        return substitute


def _module(name: str) -> Any:
    """The module, or the attribute of a module: some parts of `torch._C` are no modules to Python."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        parent, _, attribute = name.rpartition(".")
        if not parent:
            raise
        return getattr(_module(parent), attribute)
