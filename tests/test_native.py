"""The compiled library: found, checked, asked, and done without when it is not there."""

import os
import platform
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from regard import (
    Alibi,
    Causal,
    ProblemError,
    RefusalError,
    SlowWarning,
    Window,
    attend,
    attend_state,
    explain,
    native,
)
from regard.backend.native import _chosen
from regard.nn import MultiHeadAttention
from regard.scores import Additive

needs_library = pytest.mark.skipif(not native.available(), reason=str(native.absence()))
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
CPUINFO = Path("/proc/cpuinfo")

# What a machine must have for each instruction set, as Linux spells it in /proc/cpuinfo; each row includes those above.
X86_FEATURES = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512vnni": {"avx512_vnni"},
    "avx512bf16": {"avx512_bf16", "avx512vbmi"},
    "amx": {"amx_tile", "amx_bf16"},
}


def library_that_speaks(version: int, folder: Path) -> Path:
    """A library with nothing in it but a version of the interface."""
    source, library = folder / "old.cpp", folder / native.LIBRARY
    source.write_text(f'extern "C" int regard_abi_version() {{ return {version}; }}\n')
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture
def look_at(monkeypatch: pytest.MonkeyPatch):
    """Makes regard look for its library at another path."""

    def look(path: Path) -> None:
        monkeypatch.setattr(native, "_find", lambda: str(path))

    return look


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_where_there_is_a_compiler_there_is_the_library():
    assert native.absence() is None


@needs_library
def test_the_plainest_instruction_set_is_first_and_the_best_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REGARD_ISA", raising=False)
    assert native.isas()[0] == "portable"
    assert native.isa() == native.isas()[-1]


@needs_library
@pytest.mark.skipif(platform.machine() != "x86_64" or not CPUINFO.exists(), reason="reads x86 flags in /proc/cpuinfo")
def test_the_instruction_sets_are_those_that_the_system_lists():
    flags = set(next(line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")).split())
    expected, needed = ["portable"], set[str]()
    for name, features in X86_FEATURES.items():
        needed |= features
        if needed <= flags:
            expected.append(name)
    assert native.best_isa() == expected[-1]
    compiled = native.isas()
    assert {"portable", expected[-1]} <= set(compiled)  # an installation from source may have no others
    assert compiled == tuple(isa for isa in expected if isa in compiled)


@needs_library
def test_a_better_instruction_set_that_was_not_compiled_is_warned_of_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REGARD_ISA", raising=False)
    monkeypatch.setenv("REGARD_QUIET", "0")
    monkeypatch.setattr(native, "best_isa", lambda: "avx1024")
    native._warn.cache_clear()
    with pytest.warns(
        SlowWarning, match=r"this machine runs avx1024, and regard was compiled for portable.*REGARD_ISAS=all"
    ):
        assert native.isa() == native.isas()[-1]
    assert native.isa() == native.isas()[-1]  # and no second warning, which would be an error
    native._warn.cache_clear()
    _chosen.cache_clear()
    q = torch.randn(1, 2, 5, 11)
    with pytest.warns(SlowWarning) as warned:
        attend(q, q, q)
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]


@needs_library
def test_a_library_without_amx_may_come_from_an_older_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REGARD_ISA", raising=False)
    monkeypatch.setenv("REGARD_QUIET", "0")
    monkeypatch.setattr(native, "best_isa", lambda: "amx")
    monkeypatch.setattr(native, "isas", lambda: ("portable", "avx512bf16"))
    native._warn.cache_clear()
    with pytest.warns(SlowWarning, match=r"REGARD_ISAS=all, by GCC 11, Clang 12 or newer\."):
        native.isa()


@needs_library
def test_every_instruction_set_of_the_machine_can_be_pinned(monkeypatch: pytest.MonkeyPatch):
    for name in native.isas():
        monkeypatch.setenv("REGARD_ISA", name)
        assert native.isa() == name


@needs_library
def test_an_instruction_set_that_the_machine_lacks_is_refused_with_those_it_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REGARD_ISA", "avx1024")
    with pytest.raises(ProblemError, match="REGARD_ISA is 'avx1024', and regard has kernels for portable"):
        native.isa()


def test_a_missing_library_is_explained_and_harmless(look_at, tmp_path: Path):
    look_at(tmp_path / native.LIBRARY)
    assert not native.available()
    assert native.isas() == ()
    assert "The compiled library is missing" in str(native.absence())
    with pytest.raises(RefusalError, match=r"Install g\+\+ or clang\+\+"):
        native.isa()


def test_a_file_that_is_no_library_is_explained_and_harmless(look_at, tmp_path: Path):
    broken = tmp_path / native.LIBRARY
    broken.write_bytes(b"not a library")
    look_at(broken)
    assert not native.available()
    assert "cannot be used" in str(native.absence())


@needs_library
@pytest.mark.parametrize("left", [5, 63, 64, 500, 4096, 0.3, 0.99, -1])
def test_a_library_that_was_cut_short_is_explained_and_does_not_end_python(look_at, tmp_path: Path, left: float):
    whole, cut = Path(native.path()).read_bytes(), tmp_path / native.LIBRARY
    if not whole.startswith(b"\x7fELF"):
        pytest.skip("not an ELF file")
    cut.write_bytes(whole[: left if isinstance(left, int) else int(left * len(whole))])
    look_at(cut)
    assert not native.available()
    assert "cannot be used" in str(native.absence()) or "was cut short" in str(native.absence())


def test_a_library_of_which_only_the_first_bytes_were_written_is_explained(look_at, tmp_path: Path):
    cut = tmp_path / native.LIBRARY
    for count in (0, 1):
        header = b"\x7fELF\x02\x01" + bytes(50) + count.to_bytes(2, "little")
        cut.write_bytes(header + bytes(4096 - len(header)))
        look_at(cut)
        assert "was cut short" in str(native.absence())


def test_a_library_that_may_not_be_read_is_explained(look_at, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    closed = tmp_path / native.LIBRARY
    closed.write_bytes(b"")
    monkeypatch.setattr(native, "_is_cut_short", refuse)
    look_at(closed)
    assert "cannot be used" in str(native.absence())


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_a_library_of_another_version_is_refused(look_at, tmp_path: Path):
    look_at(library_that_speaks(native.ABI + 1, tmp_path))
    assert not native.available()
    assert f"has interface version {native.ABI + 1}, these sources need {native.ABI}" in str(native.absence())


def test_both_sides_state_the_same_version_of_the_interface():
    header = Path(__file__).parents[1] / "native" / "abi.h"
    assert f"#define REGARD_ABI_VERSION {native.ABI}\n" in header.read_text()


@pytest.mark.usefixtures("no_library")
def test_without_the_library_all_is_computed_and_explained():
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    for words in ({}, {"mask": Causal() & Window(3), "bias": Alibi(2), "sink": torch.zeros(2), "softcap": 2.0}):
        plan, reference = explain(q, q, q, **words), attend(q, q, q, **words, backend="reference")
        assert plan.backend in ("sdpa", "reference")
        assert "not chosen: native (The compiled library is missing" in str(plan)
        found = attend(q, q, q, **words)
        assert torch.allclose(found, reference, atol=1e-6)
        for ours, theirs in zip(*(torch.autograd.grad(out.sin().sum(), q) for out in (found, reference)), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
    with pytest.raises(RefusalError, match="native: The compiled library is missing"):
        attend(q, q, q, backend="native")


@pytest.fixture
def loud(no_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, in a process that has not warned of it and may."""
    monkeypatch.delenv("REGARD_QUIET")
    native._warn.cache_clear()


def additive() -> Additive:
    return Additive(torch.randn(3, 8), torch.randn(3, 8), torch.randn(3))


@pytest.mark.usefixtures("loud")
def test_the_first_call_without_the_library_warns_and_names_the_line_that_called():
    q = torch.randn(1, 2, 5, 8)
    explain(q, q, q)
    attend(q, q, q, backend="reference")
    attend(q, q, q, score=additive())  # which the library does not know
    with pytest.warns(SlowWarning) as warned:
        attend(q, q, q, mask=Causal())
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
    shown = str(warned[0].message)
    for words in ("several times slower", "Install g++ or clang++", "category=regard.SlowWarning", "REGARD_QUIET=1"):
        assert words in shown
    attend(q, q, q, mask=Window(3))  # a warning would be an error


@pytest.mark.usefixtures("loud")
def test_a_module_and_a_state_warn_as_well():
    q = torch.randn(1, 2, 5, 8)
    layer = MultiHeadAttention(16, heads=2)
    for call in (lambda: attend_state(q, q, q), lambda: layer(torch.randn(1, 5, 16))):
        native._warn.cache_clear()
        with pytest.warns(SlowWarning) as warned:
            call()
        assert Path(warned[0].filename) == Path(__file__)


@pytest.mark.usefixtures("loud")
def test_the_warning_can_be_silenced(monkeypatch: pytest.MonkeyPatch):
    q = torch.randn(1, 2, 5, 8)
    monkeypatch.setenv("REGARD_QUIET", "1")
    attend(q, q, q)
    monkeypatch.setenv("REGARD_QUIET", "0")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=SlowWarning)
        attend(q, q, q, mask=Causal())


@needs_library
@pytest.mark.filterwarnings("error")
def test_with_the_library_nothing_warns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REGARD_QUIET", raising=False)
    native._warn.cache_clear()
    q = torch.randn(1, 2, 5, 8)
    attend(q, q, q)
    attend(q, q, q, score=additive())


@needs_library
@pytest.mark.exhaustive
def test_an_instruction_set_that_is_pinned_is_used_by_calls():
    text = "import torch, regard; q = torch.randn(1, 1, 5, 8); print(regard.attend(q, q, q, backend='native').sum())"

    def run(isa: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "import torch; torch.manual_seed(0); " + text]
        return subprocess.run(
            command, env=os.environ | {"REGARD_ISA": isa}, capture_output=True, text=True, check=False
        )

    assert run("portable").stdout.startswith("tensor(")
    assert "REGARD_ISA is 'avx1024'" in run("avx1024").stderr
