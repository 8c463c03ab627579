"""The names of the engines that tests/native/conftest.py makes."""

import pytest

from regard import native

PLAIN = "native plain"
"""The loops that every kernel must equal."""

ALL = tuple(f"native {isa}" for isa in native.isas())
"""An engine for each instruction set."""

LEAST_AND_BEST = [
    pytest.param(name, marks=pytest.mark.exhaustive) if 0 < number < len(ALL) - 1 else name
    for number, name in enumerate(ALL)
]
"""As a parameter: the default run has the least and the best instruction set, `./test --all` those between as well.

Each set computes the table of calls and random calls, and decodes what is stored, in the default run too (ALL).
"""

BEST = f"native {native.isas()[-1]}" if native.available() else PLAIN
