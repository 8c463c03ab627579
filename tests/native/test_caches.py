"""How blocks are cut follows the caches of the machine; what they give does not."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from regard import native

ISAS = native.isas()
SMALL, LARGE = "16384,600000", "1048576,16777216"
"""A machine whose products wait for its second level, and one that all operands fit."""


@cache
def digests(caches: str | None, isas: tuple[str, ...]) -> list[str]:
    """What tests/native/digests.py prints on a machine with these caches; None: with its own."""
    top = Path(__file__).parents[2]
    own = {name: value for name, value in os.environ.items() if name != "REGARD_CACHES"}
    environment = own | {"PYTHONPATH": str(top), "REGARD_QUIET": "1"} | ({"REGARD_CACHES": caches} if caches else {})
    command = [sys.executable, str(Path(__file__).with_name("digests.py")), *isas]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    found = printed.stdout.splitlines()
    assert len(found) == len(isas)
    return found


@pytest.mark.parametrize("isas", [ISAS[-1:], pytest.param(ISAS, marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("caches", [LARGE, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_the_sizes_of_the_caches_change_no_bit(caches: str | None, isas: tuple[str, ...]):
    assert digests(caches, isas) == digests(SMALL, isas)
