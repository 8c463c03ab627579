"""The names of the engines that tests/native/conftest.py makes."""

from regard import native

PLAIN = "native plain"
"""The loops that every kernel must equal."""

ALL = tuple(f"native {isa}" for isa in native.isas())
"""An engine for each instruction set."""

BEST = f"native {native.isas()[-1]}" if native.available() else PLAIN
