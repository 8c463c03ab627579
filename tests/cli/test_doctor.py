"""`regard doctor`: what it says of a machine on which all is well, and of one on which something is not."""

import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import regard
from regard import native, torch_versions
from regard.cli import diagnosis
from regard.cli.main import main

ROOT = Path(__file__).parents[2]
needs_library = pytest.mark.skipif(not native.available(), reason="there is no compiled library")


def output(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["doctor"]) == 0
    return capsys.readouterr().out


def test_it_names_versions_library_backends_and_integrations(capsys):
    text = output(capsys)
    titles = [line.split("  ")[0] for line in text.splitlines() if line and line[0] not in " -"]
    assert titles[:6] == ["regard", "torch", "python", "numpy", "system", "machine"]
    assert titles[-1] in {"none found", "problems"}
    for part in (
        regard.__version__,
        torch.__version__,
        sys.executable,
        "reference64",
        "gradients are torch's",
        "tested",
    ):
        assert part in text


@needs_library
def test_it_says_which_instruction_set_runs_and_why(capsys, monkeypatch):
    monkeypatch.delenv("REGARD_ISA", raising=False)
    best = native.isas()[-1]
    assert f"compiled library  {best}: the best that" in output(capsys)
    monkeypatch.setenv("REGARD_ISA", "portable")
    assert f"compiled library  portable: REGARD_ISA names it; without it, {best}\n" in output(capsys)
    monkeypatch.setenv("REGARD_ISA", "avx1024")
    text = output(capsys)
    assert "compiled library  none: REGARD_ISA names avx1024, which cannot run" in text
    assert text.split("problems\n- ")[1].startswith("REGARD_ISA is 'avx1024', and regard has kernels ")
    assert text.count("\n- ") == 1  # each call fails for the same reason, which is printed once


@needs_library
def test_a_better_instruction_set_that_was_not_compiled_is_a_problem(capsys, monkeypatch):
    monkeypatch.delenv("REGARD_ISA", raising=False)
    monkeypatch.setattr(native, "best_isa", lambda: "avx1024")
    assert "- This machine runs avx1024, and regard was compiled for portable" in output(capsys)


@pytest.mark.usefixtures("no_library")
def test_it_works_without_the_compiled_library(capsys):
    text = output(capsys)
    assert "compiled library  The compiled library is missing" in text
    assert "- Attention on the CPU is several times slower than it could be: The compiled library is missing" in text
    assert "native      The compiled library is missing" in text


def test_a_torch_that_was_not_tested_is_a_problem_and_no_warning(capsys, monkeypatch):
    monkeypatch.delenv("REGARD_QUIET", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    torch_versions.warn_of_untested.cache_clear()
    assert "- torch 2.99.0 is newer than the versions that this regard was tested with" in output(capsys)
    torch_versions.warn_of_untested.cache_clear()


def test_a_package_that_regard_cannot_do_without_is_a_problem(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    text = output(capsys)
    assert text.endswith("problems\n- regard needs xxhash, not installed here: pip install xxhash\n")


@pytest.mark.parametrize("folder", ["/dev/null/caches", "/proc/caches"])
def test_a_folder_of_compiled_code_that_cannot_be_written_into_is_a_problem(capsys, monkeypatch, folder):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    assert f"- torch.compile cannot write into {folder} (" in output(capsys)


def test_a_user_without_a_home_folder_is_served(capsys, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert "triton: 0 MiB in ~/.triton/cache" in output(capsys)


def test_packages_of_other_versions_are_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "_installed", {"transformers": "4.57.1", "peft": "0.1"}.get)
    text = output(capsys)
    assert "- transformers 4.57.1 is none of the versions that regard was tested with, 5.17 to below 5.25" in text
    assert "peft 0.1 " in text
    assert "not installed: gguf, " in text


def test_more_threads_than_processors_are_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert "- torch uses 4096 threads on " in output(capsys)


def test_where_no_folder_takes_temporary_files_the_other_parts_are_told(capsys, monkeypatch):
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(diagnosis.tempfile, "gettempdir", refuse)
    text = output(capsys)
    assert "- no folder takes temporary files, which torch.compile and others need: set TMPDIR to one." in text
    assert "compiled library  " in text


def test_an_openmp_library_may_lie_in_a_folder_with_blanks(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 fd:00 11  /a folder ü/lib/libgomp.so.1\n7f02-7f03 rw-p 0 00:00 0 [heap]\n")
    monkeypatch.setattr(diagnosis, "Path", lambda *_: maps)
    assert diagnosis._openmp() == ["/a folder ü/lib/libgomp.so.1"]


def test_two_openmp_libraries_are_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "_openmp", lambda: ["/a/libgomp.so.1", "/b/libiomp5.so"])
    assert "- Several OpenMP libraries are loaded, whose threads slow each other: /a/libgomp.so.1, /b/libi" in output(
        capsys
    )


def test_json_has_the_same_for_programs(capsys, tmp_path):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["regard"] == regard.__version__
    assert {"versions", "machine", "library", "backends", "integrations", "caches", "problems"} < found.keys()
    assert set(found["backends"]["cpu"]) == {"native", "sdpa", "triton", "flex", "reference", "reference64"}
    assert main(["doctor", "--json", str(tmp_path / "facts.json")]) == 0
    assert json.loads((tmp_path / "facts.json").read_text())["versions"] == found["versions"]
    assert main(["doctor", "--json", str(tmp_path / "facts.json")]) == 0  # its own file is replaced
    (tmp_path / "other.json").write_text("[]")
    assert main(["doctor", "--json", str(tmp_path / "other.json")]) == 2


def test_the_versions_of_integrations_are_those_of_the_project_file():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ours = {
        f"{name}>={'.'.join(map(str, each.first))},<{'.'.join(map(str, each.end))}"
        for name, each in diagnosis.INTEGRATIONS.items()
        if each.first
    }
    assert ours == {package for extra in ("models", "cli", "plot") for package in extras[extra]}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
def test_it_takes_less_than_3_s_of_a_processor_and_imports_no_integration():
    names = ["transformers", "rich", "matplotlib", "onnx", "jax"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = run(
        f"import sys; from regard.cli.main import main; main(['doctor']); print([n in sys.modules for n in {names}])"
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (ran.stdout.splitlines()[-1], ran.stderr) == (str([False] * 5), "")
    assert after.ru_utime - before.ru_utime < 3


def test_it_works_where_torch_cannot_be_imported():
    ran = run("import sys; sys.modules['torch'] = None; from regard.cli.main import main; sys.exit(main(['doctor']))")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "- torch cannot be imported (" in ran.stdout
    assert "compiled library  unknown" in ran.stdout


def test_the_size_of_a_folder_is_looked_at_for_a_limited_time(tmp_path, monkeypatch):
    for i in range(5):
        (tmp_path / str(i)).write_bytes(b"1234567")
    (tmp_path / "dead").symlink_to("gone")
    assert diagnosis._size(tmp_path) == {"files": 5, "bytes": 35, "complete": True}
    assert diagnosis._size(tmp_path / "nowhere") == {"files": 0, "bytes": 0, "complete": True}
    monkeypatch.setattr(diagnosis, "LOOKING", -1)
    assert diagnosis._size(tmp_path) == {"files": 1, "bytes": 7, "complete": False}
