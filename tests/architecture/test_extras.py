"""`.ci/extras.txt`: exact versions of the packages that regard works with, which `.ci/run` installs and tests."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PINS = {
    canonicalize_name(name): version
    for name, version in (line.split("==") for line in (ROOT / ".ci" / "extras.txt").read_text().splitlines())
}


@pytest.mark.parametrize("extra", ["onnx", "jax", "tools", "programs"])
def test_the_version_that_is_tested_is_one_that_the_extra_allows(extra: str):
    for requirement in map(Requirement, EXTRAS[extra]):
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), requirement


def test_no_package_brings_another_torch():
    assert "torch" not in PINS
    assert not [name for name in PINS if name.startswith(("nvidia-", "triton"))]
