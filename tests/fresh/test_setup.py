"""scripts/setup.sh does a step once, again when its key changes, and never marks as done what failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"


@pytest.fixture
def bash(tmp_path: Path):
    """Runs a line of bash after sourcing setup.sh, in an empty folder that stands for .venv."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        script = f'set -euo pipefail; . "{SETUP}"; venv="{tmp_path}"; cd "$venv"; {line}'
        known = {name: value for name, value in os.environ.items() if name != "REGARD_QUIET"}
        return subprocess.run(["bash", "-c", script], env=known, capture_output=True, text=True, check=False)

    return run


def test_a_step_is_done_once_for_a_key(bash, tmp_path: Path):
    first = bash("step 'making tea' green bash -c 'echo run >>runs; echo noise'")
    second = bash("step 'making tea' green bash -c 'echo run >>runs'")
    assert first.stderr.startswith("making tea ... ")
    assert first.stdout + second.stdout + second.stderr == ""
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_step_is_done_again_for_another_key(bash, tmp_path: Path):
    for key in ("green", "black"):
        bash(f"step 'making tea' {key} bash -c 'echo {key} >>runs'")
    assert (tmp_path / "runs").read_text() == "green\nblack\n"


def test_a_step_that_fails_shows_its_output_stops_and_is_tried_again(bash, tmp_path: Path):
    failed = bash("step 'making tea' green bash -c 'echo no water; exit 3'; echo drinking")
    assert failed.returncode == 1
    assert failed.stderr == "making tea ... failed:\nno water\n"
    assert failed.stdout == ""
    bash("step 'making tea' green bash -c 'echo run >>runs'")
    assert (tmp_path / "runs").read_text() == "run\n"


def test_two_commands_do_not_make_it_ready_at_once(tmp_path: Path):
    line = f'. "{SETUP}"; root="{tmp_path}"; PYTHON="{sys.executable}"; wait_for_others; echo ready; read -r || true'
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["bash", "-c", line], text=True, stdin=subprocess.PIPE, **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        with subprocess.Popen(["bash", "-c", line], text=True, stdin=subprocess.DEVNULL, **pipes) as second:
            assert second.stderr is not None
            assert second.stderr.readline() == "waiting for another process that makes .venv ready ...\n"
            assert first.communicate("done\n") == ("", "")
            assert second.communicate() == ("ready\n", "")


def test_a_python_that_is_too_old_is_refused_in_words(bash):
    refused = bash("PYTHON=false make_venv")
    assert refused.returncode == 1
    assert "regard needs Python 3.11 or newer" in refused.stdout


def test_a_slow_installation_is_reported_each_time_in_one_line_and_only_there(bash, tmp_path: Path):
    (tmp_path / "ready").mkdir()
    script = "say_slow; echo quiet: ${REGARD_QUIET-no}"
    for reason, line, quiet in (("", "", "no"), ("no compiler was found.", "slow: no compiler was found.\n", "1")):
        (tmp_path / "ready" / "absence").write_text(reason)
        for _ in range(2):
            done = bash(script)
            assert (done.stderr, done.stdout) == (line, f"quiet: {quiet}\n")


def test_whether_it_is_slow_is_asked_once_for_each_installation(bash, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho asked >>asked; cat reason\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    for reason, line in (("", ""), ("no compiler.", "slow: no compiler.\n")):
        (tmp_path / "reason").write_text(reason)
        assert bash("pip_install() { true; }; install_regard; say_slow; say_slow").stderr == 2 * line
        (tmp_path / "reason").write_text("not asked again")
        assert bash("say_slow").stderr == line
    assert (tmp_path / "asked").read_text() == "asked\nasked\n"
    assert bash("pip_install() { return 3; }; install_regard || echo failed: $?").stdout == "failed: 3\n"


def test_regard_is_installed_again_when_a_file_was_moved_and_only_then(bash, tmp_path: Path):
    """The import hook of the install has a list of files. New ones need no entry in it."""
    package, built = tmp_path / "src" / "regard", tmp_path / "build" / "kernels.o"
    for file in (
        package / "old.py",
        built,
        tmp_path / "pyproject.toml",
        tmp_path / "CMakeLists.txt",
        tmp_path / "native" / "x.h",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    without = "say_slow make_venv install_packages install_build_packages"
    commands = f'root=$venv; for name in {without}; do eval "$name() {{ true; }}"; done'
    commands += (
        '; pip_install() { case "$*" in *--editable*) echo installed;; esac >>runs; }; make_ready; cat runs; rm runs'
    )
    assert bash(f"touch runs; {commands}").stdout == "installed\n"
    assert not built.exists()  # of an unknown compiler
    built.parent.mkdir()
    built.touch()
    (package / "new.py").touch()
    assert bash(f"touch runs; {commands}").stdout == ""
    (package / "old.py").rename(package / "older.py")
    assert bash(f"touch runs; {commands}").stdout == "installed\n"
    assert bash(f"touch runs; {commands}").stdout == ""
    assert built.exists()
    (tmp_path / "native" / "x.h").write_text("int x;")
    assert bash(f"touch runs; {commands}").stdout == "installed\n"
    assert not built.exists()
