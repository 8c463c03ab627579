"""`python -m regard script.py`: the program sees what it sees without regard, and its attention is regard's."""

import subprocess
import sys
from pathlib import Path

import pytest

from regard import native

LONG = pytest.mark.exhaustive
"""Each run of a program takes seconds, to import torch."""

SEES = """
import os, pickle, sys
from beside import VALUE
class Own:
    pass
print(__name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, os.path.realpath(sys.path[0]), VALUE)
print(sys.modules["__main__"].Own is Own, type(pickle.loads(pickle.dumps(Own()))) is Own, "regard" in dir())
if "exit" in sys.argv:
    sys.exit(7)
if "raise" in sys.argv:
    def fail():
        raise KeyError("what")
    fail()
"""

BUILTINS = """
print(type(__builtins__), __builtins__.len("abc"))
"""

INTERRUPTED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(9)
"""

ATTENDS = """
import torch
q = torch.randn(2, 8, 256, 64)
torch.nn.functional.scaled_dot_product_attention(q, q, q)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "package"
    inside.mkdir()
    for name in ("__init__.py", "beside.py"):
        (inside / name).write_text("VALUE = 3")
    (inside / "sees.py").write_text(SEES)
    (inside / "__main__.py").write_text(SEES.replace("beside", "package.beside"))
    (inside / "module.py").write_text(SEES.replace("beside", "package.beside"))
    (inside / "attends.py").write_text(ATTENDS)
    (inside / "builtins_of.py").write_text(BUILTINS)
    (inside / "interrupted.py").write_text(INTERRUPTED)
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("package/sees.py", "a", "--b", "-m", "c.py"),
        pytest.param(("./package/../package/sees.py", "exit"), marks=LONG),
        pytest.param(("package/sees.py", "raise"), marks=LONG),
        pytest.param(("-m", "package", "a", "--html", "x"), marks=LONG),
        pytest.param(("-m", "package.module", "raise"), marks=LONG),
        pytest.param(("package/beside.py",), marks=LONG),
        ("package/builtins_of.py",),
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_sees_without_regard(folder: Path, arguments: tuple[str, ...]):
    ours, theirs = python(folder, "-m", "regard", *arguments), python(folder, *arguments)
    assert ours.stdout == theirs.stdout
    assert ours.returncode == theirs.returncode
    shown = [text.stderr.replace("<frozen runpy>", "") for text in (ours, theirs)]
    assert shown[0].splitlines()[-1:] == shown[1].splitlines()[-1:]
    assert "regard" not in ours.stderr


@pytest.mark.exhaustive
def test_an_error_is_shown_as_python_shows_it(folder: Path):
    arguments = ("package/sees.py", "raise")
    ours, theirs = python(folder, "-m", "regard", *arguments), python(folder, *arguments)
    assert ours.stderr == theirs.stderr


def test_ctrl_c_is_shown_as_python_shows_it(folder: Path):
    ours, theirs = python(folder, "-m", "regard", "package/interrupted.py"), python(folder, "package/interrupted.py")
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr)


@pytest.mark.representative
@pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call")
@pytest.mark.parametrize(
    "how",
    [("package/attends.py",), pytest.param(("-m", "package.attends"), marks=LONG)],
    ids=["script", "module"],
)
def test_its_attention_is_regards_and_the_report_says_so(folder: Path, how: tuple[str, ...]):
    done = python(folder, "-m", "regard", "--report", *how)
    assert done.returncode == 0, done.stderr
    assert "1 call of attention, 1 run by regard" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py",), "can't open file 'missing.py': No such file or directory."),
        (("-m", "missing_module"), "can't run -m missing_module: no module named missing_module."),
        (("-m",), "-m needs the name of a module: python -m regard -m package.module."),
    ],
)
def test_what_cannot_be_run_is_one_line(folder: Path, arguments: tuple[str, ...], message: str):
    done = python(folder, "-m", "regard", *arguments)
    assert (done.returncode, done.stderr) == (2, f"regard: error: {message}\n")


def test_the_commands_are_what_they_were(folder: Path):
    done = python(folder, "-m", "regard", "inspect", "--help")
    assert done.returncode == 0
    assert "regard inspect" in done.stdout
