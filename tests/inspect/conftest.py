"""Tiles so small that tests meet their edges."""

import pytest

from regard.inspect.weights import lazy as module


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of a few rows and chunks of a few keys, so that small calls have many, and cells are met by several."""
    monkeypatch.setattr(module, "TILE", 2 * 6 * 29 * 3)
    monkeypatch.setattr(module, "CHUNK", 4)
