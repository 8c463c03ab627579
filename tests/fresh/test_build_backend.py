"""A wheel without kernels never takes the place of one with them: pip does not find it in its cache."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

backend = pytest.importorskip("scikit_build_core.build", reason="the packages that build regard are not here")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.spec_from_file_location("build_backend", ROOT / "scripts" / "build_backend.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def build(ours: ModuleType, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Build a wheel where scikit-build-core makes one of this name; its new name, under which the file must be."""

    def build_wheel(folder: str, *_: object) -> str:
        Path(folder, name).write_text("wheel")
        return name

    monkeypatch.setattr(backend, "build_wheel", build_wheel)
    built = ours.build_wheel(str(folder))
    assert [path.name for path in folder.iterdir()] == [built]
    return built


def is_taken_from_a_cache(name: str) -> bool:
    return not parse_wheel_filename(name)[3].isdisjoint(sys_tags())


def test_a_wheel_without_kernels_that_pip_builds_is_not_taken_from_its_cache(ours, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_BUILD_TRACKER", str(tmp_path / "tracker"))
    built = build(ours, "regard-0.1.0-py3-none-any.whl", tmp_path, monkeypatch)
    assert is_taken_from_a_cache("regard-0.1.0-py3-none-any.whl")
    assert not is_taken_from_a_cache(built)


def test_a_wheel_with_kernels_keeps_its_name(ours, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_BUILD_TRACKER", str(tmp_path / "tracker"))
    name = "regard-0.1.0-py3-none-linux_x86_64.whl"
    assert build(ours, name, tmp_path, monkeypatch) == name


def test_front_ends_that_look_at_the_name_get_the_usual_one(ours, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_BUILD_TRACKER", raising=False)
    name = "regard-0.1.0-py3-none-any.whl"
    assert build(ours, name, tmp_path, monkeypatch) == name


def test_all_else_is_scikit_build_cores(ours):
    assert ours.build_sdist is backend.build_sdist
    assert ours.get_requires_for_build_wheel is backend.get_requires_for_build_wheel


@pytest.mark.parametrize("isas", ["avx2, avx512", "avx3", "avx-512", "best,avx2"])
def test_a_wrong_name_of_a_set_ends_the_build(ours, tmp_path, monkeypatch, isas):
    monkeypatch.setenv("REGARD_ISAS", isas)
    for build in (ours.build_wheel, ours.build_editable):
        expected = r"^REGARD_ISAS has .*: expected best, all, check, or some of portable,avx2,"
        with pytest.raises(ValueError, match=expected):
            build(str(tmp_path))
    monkeypatch.delenv("REGARD_ISAS")
    with pytest.raises(ValueError, match=r"^REGARD_ISAS has "):
        ours.build_wheel(str(tmp_path), {"cmake.define.REGARD_ISAS": isas})
    assert not list(tmp_path.iterdir())


def test_the_names_of_sets_are_those_of_cmake(ours):
    text = (ROOT / "CMakeLists.txt").read_text()
    named = re.findall(r"(?:set\(known|list\(APPEND known) ([a-z0-9 ]+)\)", text)
    assert {"portable", *" ".join(named).split()} == set(ours.ISAS)
