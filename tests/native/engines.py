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

INTEGERS = tuple(engine for engine in ALL if engine.split()[1] not in ("portable", "neon"))
"""Engines on which few rows of bf16 meet codes of 8 and 4 bits as integers: AVX2 and what includes it."""

PAIRS = tuple(engine for engine in INTEGERS if engine.split()[1] not in ("avx2", "avx512", "avx512vnni"))
"""Engines with products of bf16; their exp2 is as precise as these (native/exp.h)."""
