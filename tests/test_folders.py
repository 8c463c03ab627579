"""Folders of the user, where there is a home and where there is none."""

import os
import tempfile
from pathlib import Path

import pytest

from regard.folders import cache_folder, expanded


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process of a user that the system does not know, without HOME."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", os.fspath)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert expanded("~/model") == tmp_path / "model"
    assert cache_folder() == tmp_path / ".cache" / "regard"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other" / "regard"


@pytest.mark.usefixtures("homeless")
def test_without_a_home_a_tilde_names_nothing_and_the_cache_is_among_the_temporary_files():
    assert expanded("~/model") == Path("~/model")
    assert cache_folder().is_relative_to(tempfile.gettempdir())
