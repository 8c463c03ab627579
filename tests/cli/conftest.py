"""What tests of the command share: an empty folder to stand in, and something on stdin."""

import io
import sys

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder that is the current one, and a terminal 80 characters wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def stdin(monkeypatch):
    """Puts bytes where a command reads its stdin."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
