"""Limits of the compiled library that Python has as well: raised on one side alone, calls would fail in the library."""

import re
from pathlib import Path

import pytest

from regard.describe.interval import FAR
from regard.plan.problem import MAX_OFFSET

NATIVE = Path(__file__).parents[2] / "native"


@pytest.mark.parametrize(
    ("file", "name", "limit"),
    [("check.cpp", "LONGEST", MAX_OFFSET), ("listing.cpp", "FAR", FAR)],
    ids=["offsets and sizes", "edges of intervals"],
)
def test_python_and_the_library_have_the_same_limit(file: str, name: str, limit: int):
    found = re.findall(rf"\b{name}\s*=\s*int64_t\(1\)\s*<<\s*(\d+);", (NATIVE / file).read_text())
    assert [1 << int(bits) for bits in found] == [limit]
