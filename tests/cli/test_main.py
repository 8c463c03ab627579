"""The command `regard` itself: help, versions, and how it ends."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.cli.main import HINTS, main, run_command


def test_without_a_command_it_tells_what_it_can_do(capsys):
    assert main([]) == 0
    assert "inspect" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"]])
def test_help_is_there(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert "usage: regard" in capsys.readouterr().out


def test_version_tells_what_is_installed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == f"regard {regard.__version__}"
    assert output[1].startswith("torch 2.")
    assert [line.split()[0] for line in output[2:]] == ["transformers", "compiled"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["look"], "invalid choice: 'look'"),
        (["--json", "doctor"], ". Write --json after the command. See regard doctor --help."),
        (["inspect", "--max-new-tokens", "-1"], "'-1' is no count"),
        (["inspect", "--prompt-tokens", "many"], "'many' is no number of tokens"),
        (["inspect", "--top", "1.5"], "'1.5' is no count"),
        (["inspect", "one", "two"], "unrecognized arguments: two"),
        (["inspect", "--model"], "expected one argument"),
        (["generate", "--prompt", "why?"], "--prompt (the prompt takes no option, a file of it --prompt-file). See"),
        (["inspect", "why?", "--tokens=3"], "(tokens to generate are --max-new-tokens; those of the prompt are --pro"),
        (["--report"], "--report (it is for a program: regard --report script.py). See regard"),
        (["inspect", "--report"], "(it is for a program: regard --report script.py; the page is --html). See regard"),
        (["bench", "--repeat", "3"], "--repeat (the number of rounds is --rounds"),
        (["bench", "--heads", "8"], "--heads (a number of heads is --query-heads)"),
        (
            ["inspect", "--modle", "x"],
            "unrecognized arguments: --modle. Did you mean --model? See regard inspect --help.",
        ),
        (
            ["generate", "--tokns", "3", "x"],
            "unrecognized arguments: --tokns (tokens to generate are --max-new-tokens).",
        ),
        (["inspct"], ". Did you mean inspect? See regard --help."),
        (["generate", "x", "--cache", "int9"], "Did you mean int8? See regard generate --help."),
        (["bench", "--quick"], "--rounds 3). See"),
        (["cost", "gpt2", "--context", "9" * 20], "99999999999999999999 is too large: expected at most 99999999999."),
        (["bench", "--queries", "0"], "expected 1, 2, 3 ... See regard bench --help."),
        (
            ["inspect", "--top", "3", "--compare", "b"],
            "--compare (another model is --compare-model). See regard inspect",
        ),
        (["generate", "x", "--compare"], "--compare (a plain cache is --compare-cache). See regard generate"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert err.startswith("regard")


@pytest.mark.parametrize("command", ["inspect", "generate", "evaluate", "bench", "cost", "doctor"])
@pytest.mark.parametrize("option", [*HINTS, "--bogus", "--html", "--plot"])
def test_no_option_is_advised_that_the_command_does_not_have(command, option, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = {*re.findall(r"--[\w-]+", capsys.readouterr().out)}
    if option in known:
        return
    with pytest.raises(SystemExit):
        main([command, option])
    advice = capsys.readouterr().err.split("unrecognized arguments: ")[1].removeprefix(option)
    program = "regard --report script.py"
    assert {*re.findall(r"--[\w-]+", advice.replace(program, ""))} <= known | {"--help"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device of a full disk is Linux's")
@pytest.mark.parametrize("arguments", [["cost", "llama-2-70b"], ["cost", "gpt2", "--json", "-"], ["--help"]])
def test_a_full_disk_is_reported_in_one_line(arguments):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "regard", *arguments]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.stderr == "regard: error: the output cannot be written: No space left on device.\n"
    assert ran.returncode == 2


@pytest.mark.skipif(os.name != "posix", reason="other systems have other limits")
@pytest.mark.parametrize("command", ["cost", "inspect text --model", "evaluate show", "evaluate recall --results"])
def test_a_name_that_no_file_can_have_is_reported_in_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def model(tokens): ...")
    given = ["--model", "mine.py:model"] if "results" in command else []
    assert main([*command.split(), "x" * 300, *given]) == 2
    line = capsys.readouterr().err
    assert line.startswith("regard: error: ")
    assert line.count("\n") == 1


def test_a_file_that_may_not_be_read_is_reported_in_one_line(capsys):
    def run() -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/home/ada/model/config.json")

    assert run_command(run) == 2
    line = "regard: error: '/home/ada/model/config.json' cannot be read: Permission denied.\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [MemoryError("Unable to allocate 5.82 TiB"), MemoryError()], ids=str)
def test_memory_that_is_not_there_is_reported_in_one_line(error, capsys):
    def run() -> int:
        raise error

    assert run_command(run) == 2
    line = f"regard: error: there is not enough memory: {str(error) or 'ask for less'}.\n"
    assert capsys.readouterr().err == line


@pytest.mark.skipif(os.name != "posix", reason="a shell of POSIX closes the streams")
@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        ("cost llama-2-70b", ">&-", 0),
        ("--version", ">&-", 0),
        ("--help", ">&- 2>&-", 0),
        ("cost llama-2-7", "2>&-", 2),
        ("inspect -", "<&-", 2),
    ],
)
def test_closed_streams_take_nothing_and_give_nothing(arguments, closed, code):
    line = f"{sys.executable} -m regard {arguments} {closed}"
    ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("arguments", [["cost", "gpt-oss-20b"], ["cost", "gpt2", "--machine", "h100"]])
def test_files_are_read_as_utf_8_in_any_locale(arguments):
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "regard", *arguments]
    ran = subprocess.run(command, capture_output=True, env=os.environ | locale, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


PROBE = """
import sys, time
start = time.perf_counter()
from regard.cli.main import HINTS, main, run_command
try:
    main(sys.argv[1:])
finally:
    print(time.perf_counter() - start, *(name in sys.modules for name in ("torch", "rich", "numpy")), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["inspect", "--help"],
        ["inspect", "--measures", "sinks"],
        ["generate", "--help"],
        ["generate", "why?", "--temperature", "0", "--seed", "1"],
        ["bench", "--heads", "1"],
        ["bench", "--query-heads", "7", "--kv-heads", "2"],
        ["bench", "--mask", "causal"],
        ["inspect", "--model", "./nowhere"],
        ["inspect", "--heads", "99.99"],
        ["generate", "why?", "--model", "./nowhere"],
    ],
)
def test_help_and_wrong_arguments_are_answered_without_torch(arguments):
    ran = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False)
    seconds, *imported = ran.stderr.splitlines()[-1].split()
    assert imported == ["False", "False", "False"]
    assert float(seconds) < 3  # 0.1 on a quiet machine


def test_python_m_regard_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "regard", "look"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("regard: error: ")
