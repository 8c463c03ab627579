"""What Linux says of the machine, and the compiler that torch takes."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import RefusalError, explain, machine
from regard.backend import flex
from regard.cli.diagnosis import diagnose


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


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder on the path, without compilers."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable names a compiler, torch has not read its settings, and regard has not looked."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    flex._lacking.cache_clear()
    yield
    flex._lacking.cache_clear()


def program(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.usefixtures("unread")
@pytest.mark.skipif(sys.platform != "linux", reason="the name of the compiler is that of Linux")
def test_the_compiler_is_the_one_that_cxx_names_or_else_g_plus_plus(tools: Path, monkeypatch: pytest.MonkeyPatch):
    program(tools / "clang++")
    program(tools / "c++")
    assert machine.torch_compiler() is None
    usual = program(tools / "g++")
    assert machine.torch_compiler() == usual
    monkeypatch.setenv("CXX", "missing")
    assert machine.torch_compiler() is None
    monkeypatch.setenv("CXX", usual)
    assert machine.torch_compiler() == usual


@pytest.mark.usefixtures("unread", "tools")
def test_an_empty_name_of_a_compiler_is_refused_in_words(monkeypatch: pytest.MonkeyPatch):
    q = torch.zeros(1, 1, 3, 4)
    monkeypatch.setenv("CXX", "")
    with pytest.raises(RefusalError, match=r"needs a C\+\+ compiler on cpu, and the variable CXX is empty: unset it"):
        explain(q, q, q, backend="flex")


@pytest.mark.parametrize("names", ["c++", (None, "missing", "clang++"), (None, "missing")])
def test_torch_takes_the_compiler_that_is_found(names: Any, tools: Path, monkeypatch: pytest.MonkeyPatch):
    program(tools / "clang++")
    program(tools / "c++")
    builder = importlib.import_module("torch._inductor.cpp_builder")
    builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr(builder.config.cpp, "cxx", names)
    try:
        expected = shutil.which(builder.get_cpp_compiler())
    except RuntimeError:
        expected = None
    builder.cpp_compiler_search.cache_clear()
    assert machine.torch_compiler() == expected


@pytest.mark.usefixtures("unread")
def test_flex_and_the_doctor_look_for_the_same_compiler(tools: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flex, "python_header", lambda: "Python.h")
    monkeypatch.setenv("CXX", str(tools / "mine"))
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(RefusalError, match=r"a C\+\+ compiler on cpu, and finds no .*mine"):
        explain(q, q, q, backend="flex")
    assert diagnose()["compiler"]["c++"] is None
    program(tools / "mine")
    flex._lacking.cache_clear()
    assert explain(q, q, q, backend="flex").backend == "flex"
    assert diagnose()["compiler"]["c++"] == str(tools / "mine")
