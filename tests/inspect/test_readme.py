"""What the room's README shows is so."""

import doctest
import re
from pathlib import Path

import pytest

import regard.inspect


@pytest.mark.exhaustive
@pytest.mark.model
def test_the_examples_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    readme = Path(regard.inspect.__file__).with_name("README.md")
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, tried = doctest.testfile(str(readme), module_relative=False, optionflags=options)
    assert failed == 0
    assert tried > 20
    assert (tmp_path / "page.html").stat().st_size > 100_000


def test_the_readme_names_every_file_and_room_and_no_other():
    room = Path(regard.inspect.__file__).parent
    text = room.joinpath("README.md").read_text()
    files = {file.name for file in room.glob("*.py")} - {"__init__.py"}
    rooms = {f"{file.parent.name}/" for file in room.glob("*/__init__.py")}
    assert len(files) >= 3
    assert len(rooms) >= 7
    assert {name for name in files | rooms if f"`{name}`" not in text} == set()
    named = set(re.findall(r"`(?:\w+/)*(\w+\.py)`", text)) | set(re.findall(r"\]\((?:\w+/)*(\w+\.py)\)", text))
    assert {name for name in named if not any(room.rglob(name))} == set()
