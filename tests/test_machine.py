"""What Linux says of the machine."""

from pathlib import Path

import pytest

from regard import machine


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two processors, and four caches of the first."""
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 167\nmodel name\t: A CPU @ 2.6 GHz: new\nstepping\t: 1\n\n"
        "processor\t: 1\ncpu family\t: 7\nmodel\t\t: 168\nmodel name\t: Another\nstepping\t: 2\n"
    )
    caches = (("Data", 1, "48K"), ("Instruction", 1, "64K"), ("Unified", 2, "2048K"), ("Unified", 3, "491520K"))
    for index, values in enumerate(caches):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in zip(("type", "level", "size"), values, strict=True):
            (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("described")
def test_the_first_processor_is_named_with_its_model():
    assert machine.processor() == "A CPU @ 2.6 GHz: new"
    assert machine.model() == "6/167/1"


def test_caches_for_data_are_listed_by_level(described: Path):
    assert machine.cache_sizes() == {1: 48 << 10, 2: 2 << 20, 3: 480 << 20}
    (described / "index3" / "size").write_text("unknown\n")
    (described / "index2" / "level").unlink()
    assert machine.cache_sizes() == {1: 48 << 10}


def test_where_the_system_does_not_tell_there_are_no_sizes_and_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert (machine.cache_sizes(), machine.model()) == ({}, "")
