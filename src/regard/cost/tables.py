"""The TOML tables of this folder."""

from functools import cache
from pathlib import Path
from typing import Any


@cache
def table(name: str) -> dict[str, Any]:
    """A table by the name of its file, read once."""
    import tomllib  # noqa: PLC0415 - `import regard` needs no table

    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
