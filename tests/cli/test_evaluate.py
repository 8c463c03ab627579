"""`regard evaluate`: options, files, and what is printed; with models that are plain functions in a file."""

import json
import os
import sys

import pytest

from regard.cli.main import main
from tests.cli import tiny

MODEL = """
import re, torch

def uniform(tokens):
    return torch.zeros(*tokens.shape, 256)

def copying(tokens):
    text = bytes(tokens[0].tolist()).decode()
    key, logits = re.search(r"The pass key is (\\d+)", text)[1], torch.zeros(*tokens.shape, 256)
    for end in range(len(text) - 9, len(text) + 1):
        asked = re.search(r"What is the pass key\\? The pass key is( ?\\d*)$", text[:end])
        if asked and len(asked[1]) < 6:
            logits[0, end - 1, ord(f" {key}"[len(asked[1])])] = 1.0
    return logits

def never(tokens):
    return uniform(tokens).index_fill(-1, torch.arange(128), -torch.inf)

both = (copying, None)
three = (copying, None, "x")
broken = 1 / 0 if False else 3
"""
ANNOTATED = """
from __future__ import annotations
from dataclasses import dataclass
import torch

@dataclass
class Sizes:
    vocabulary: int = 256

def uniform(tokens):
    return torch.zeros(*tokens.shape, Sizes().vocabulary)
"""
SMALL = ["--lengths", "400", "--depths", "0,1", "--samples", "2"]


@pytest.fixture
def model(here):
    (here / "mine.py").write_text(MODEL)
    return "mine.py"


def evaluate(*arguments):
    return main(["evaluate", *arguments])


def test_the_tasks_are_listed(capsys):
    assert evaluate() == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("needle", "passkey", "niah_multivalue", "vt", "stream", "arXiv:2404.06654"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "-"], "--json needs a task: add one, as regard evaluate needle --json ..."),
        (["needle", "--plot", "x.pdf"], "--plot writes SVG, and x.pdf is the name of another format (.pdf)"),
        (["needle", "--json", "-", "--html", "-"], "--json and --html cannot both go to stdout"),
        (["needle", "--results", "-"], "--results - names no file, and results are continued from one"),
        (["needle", "--results", ""], "--results '' names no file, and results are continued from one"),
    ],
)
def test_files_that_cannot_be_are_refused_in_one_line(arguments, message, here, capsys):
    assert evaluate(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["needle", "--lengths", "1"], "regard: error: "),
        (["documents", "--questions", "nope"], "regard: error: there is no file nope."),
    ],
)
def test_an_error_comes_before_the_name_of_the_results(arguments, message, model, here, capsys):
    assert evaluate(*arguments, "--model", f"{model}:uniform") == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes")
def test_texts_whose_names_are_no_text_are_compared_on_a_page_and_in_a_picture(model, here, capsys):
    names = [os.fsdecode(b"a\xff.txt"), os.fsdecode(b"b\xff.txt")]
    for run, name in enumerate(names):
        (here / name).write_text("It was the best of times. " * 40)
        task = ("passkey", "--haystack", name, "--results", f"{run}.jsonl", *SMALL)
        assert evaluate(*task, "--model", f"{model}:uniform") == 0
    assert evaluate("show", "0.jsonl", "1.jsonl", "--html", "x.html", "--plot", "x.svg", "--json", "x.json") == 0
    assert "haystack b?.txt" in (here / "x.html").read_text()
    assert "haystack b?.txt" in (here / "x.svg").read_text()


@pytest.mark.parametrize("name", ["copying", "both"])
def test_a_function_of_a_file_is_evaluated(model, name, here, capsys):
    outputs = ("--json", "out.json", "--plot", "p.svg", "--html", "p.html")
    assert evaluate("passkey", "--model", f"{model}:{name}", *SMALL, *outputs) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "all             100 % (51 to 100)  100 % (51 to 100)"
    found = json.loads((here / "out.json").read_text())
    assert found["score"][0] == 1
    assert found["settings"]["seed"] == 0
    assert [cell["count"] for cell in found["cells"]] == [2, 2]
    assert (here / "p.svg").read_text().startswith("<svg")
    page = (here / "p.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    (results,) = here.glob("regard-passkey-mine-*.jsonl")
    assert f"results: {results.name}" in printed.err
    assert len(results.read_text().splitlines()) == 5


def test_the_name_of_a_folder_may_have_a_colon(here, capsys):
    tiny.save(here / "run 12:30")
    (here / "book.txt").write_text("It was the best of times. " * 9)
    task = ("stream", "--lengths", "31", "--samples", "1", "--haystack", "book.txt")
    assert evaluate(*task, "--model", "run 12:30", "--dtype", "float32") == 0
    assert "results: regard-stream-run-12-30-" in capsys.readouterr().err


def test_a_second_run_continues_the_file_of_its_settings(model, here, capsys):
    for samples, files in ((2, 1), (2, 1), (3, 2)):
        assert evaluate("passkey", "--model", f"{model}:uniform", *SMALL, "--samples", f"{samples}") == 0
        assert len(list(here.glob("*.jsonl"))) == files


def test_runs_are_shown_side_by_side(model, here, capsys):
    for name in ("copying", "uniform"):
        assert evaluate("passkey", "--model", f"{model}:{name}", *SMALL, "--results", f"{name}.jsonl") == 0
    assert evaluate("show", "copying.jsonl", "uniform.jsonl", "--html", "both.html", "--json", "both.json") == 0
    printed = capsys.readouterr().out
    assert "model mine:copying  100 % (51 to 100)         4" in printed
    assert "model mine:uniform      0 % (0 to 49)         4" in printed
    assert (here / "both.html").read_text().count("<h2>") == 2
    assert json.loads((here / "both.json").read_text())["runs"][0]["score"][0] == 1


def test_the_examples_of_one_process_alone_are_shown_with_a_note(model, here, capsys):
    assert evaluate("passkey", "--model", f"{model}:copying", *SMALL, "--results", "part.jsonl") == 0
    whole, *records = (here / "part.jsonl").read_text().splitlines(keepends=True)
    (here / "part.jsonl").write_text(whole + "".join(records[:2]))
    (here / "part.jsonl.1").write_text(whole + "".join(records[2:]))
    capsys.readouterr()
    note = "note: part.jsonl.1 has the examples of one process alone; those of all: part.jsonl.\n"
    assert evaluate("show", "part.jsonl.1") == 0
    assert capsys.readouterr().err == note
    assert evaluate("show", "part.jsonl", "part.jsonl.1") == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine.py", "torch.py"])
def test_a_file_may_define_dataclasses_with_annotations_as_texts(name, here, capsys):
    (here / name).write_text(ANNOTATED)
    assert evaluate("passkey", "--model", f"{name}:uniform", *SMALL) == 0


def test_a_file_that_cannot_be_run_is_reported_with_its_own_error(here, capsys):
    (here / "mine.py").write_text("import torch\nx = torch.nope\ndef uniform(tokens): pass\n")
    assert evaluate("passkey", "--model", "mine.py:uniform", *SMALL) == 2
    assert "mine.py cannot be run: AttributeError: module 'torch' has no attribute 'nope'" in capsys.readouterr().err


def test_a_file_that_was_changed_is_another_model(model, here, capsys):
    command = ("passkey", "--model", f"{model}:uniform", *SMALL)
    assert evaluate(*command, "--results", "r.jsonl") == 0
    (here / model).write_text(MODEL.replace("zeros", "ones"))
    capsys.readouterr()
    assert evaluate(*command, "--results", "r.jsonl") == 2
    assert "r.jsonl has results of another run: weights is" in capsys.readouterr().err
    assert evaluate(*command) == 0
    (here / model).write_text(MODEL)
    assert evaluate(*command) == 0
    assert len(list(here.glob("regard-passkey-mine-uniform-*.jsonl"))) == 2


def test_losses_that_are_all_infinite_are_drawn_as_a_note(model, here, capsys):
    (here / "book.txt").write_text("It was the best of times, it was the worst of times. " * 9)
    task = ("stream", "--lengths", "50", "--samples", "2", "--haystack", "book.txt")
    assert evaluate(*task, "--model", f"{model}:never", "--plot", "p.svg", "--html", "p.html") == 0
    for name in ("p.svg", "p.html"):
        assert "loss by position, nats: infinite at every position" in (here / name).read_text()


# ---- files that are read --------------------------------------------------------------------------------------------

RUN = ["passkey", "--model", "mine.py:uniform", *SMALL]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*RUN, "--results", "r.jsonl", "--json", "r.jsonl"], "--results and --json name the same file"),
        ([*RUN, "--results", "./new.jsonl", "--json", "new.jsonl"], "--results and --json name the same file"),
        ([*RUN, "--results", "new.jsonl", "--json", "r.jsonl"], "r.jsonl exists, and is no JSON that regard wrote"),
        ([*RUN, "--html", "mine.py", "--force"], "mine.py is a file that is read: name another file after --html"),
        ([*RUN, "--haystack", "book", "--plot", "book", "--force"], "book is a file that is read"),
        (["documents", "--questions", "book", "--json", "book", "--force"], "book is a file that is read"),
        (["show", "r.jsonl", "--json", "r.jsonl"], "r.jsonl is a file that is read: name another file after --json"),
        (["show", "r.jsonl", "--json", "r.jsonl", "--force"], "r.jsonl is a file that is read"),
        (["stream", "--model", "tiny", "--json", "tiny/config.json", "--force"], "is a file of the model that is read"),
    ],
)
def test_no_output_replaces_results_or_a_file_that_is_read(arguments, message, model, here, capsys):
    (here / "tiny").mkdir()
    for name, text in {"r.jsonl": "", "book": "Call me Ishmael.", "tiny/config.json": "{}"}.items():
        (here / name).write_text(text)
    assert evaluate(*RUN, "--results", "r.jsonl") == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert evaluate(*arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (RUN, "regard-passkey-*.jsonl"),
        ([*RUN, "--results", "r.jsonl"], "r.jsonl.1"),
        (["show", "r.jsonl"], "r.jsonl.1"),
    ],
)  # fmt: skip
def test_force_replaces_no_results_of_the_same_run(arguments, output, model, here, capsys):
    assert evaluate(*RUN) == evaluate(*RUN, "--results", "r.jsonl") == 0
    (here / "r.jsonl.1").write_bytes((here / "r.jsonl").read_bytes())
    before = {path: path.read_bytes() for path in here.glob("*.jsonl*")}
    (file,) = here.glob(output)
    capsys.readouterr()
    assert evaluate(*arguments, "--json", file.name, "--force") == 2
    message = f"regard: error: {file.name} is a file of this run's results: name another one after --json."
    assert capsys.readouterr().err.splitlines()[-1] == message
    assert {path: path.read_bytes() for path in before} == before


def test_json_that_regard_wrote_is_replaced(model, here, capsys):
    for _ in range(2):
        assert evaluate(*RUN, "--results", "r.jsonl", "--json", "r.json") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["needel"], "unknown task 'needel'. Near: needle"),
        (
            ["show", "a.jsonl", "--samples", "5"],
            "regard evaluate show has no --samples: it shows runs with the settings",
        ),
        (["show", "a.jsonl", "--model", "b"], "show has no --model"),
        (["show", "a.jsonl", "--seed", "0"], "show has no --seed"),
        (["stream", "--seed", "1"], "the task stream has no --seed: expected --lengths, --samples, --haystack"),
        (["vt", "--depths", "0.5"], "the task vt has no --depths: expected --lengths, --samples, --seed"),
        (["vt", "--haystack", "noise"], "the task vt has no --haystack: expected --lengths, --samples, --seed"),
        (["niah_single_1", "--haystack", "noise"], "the task niah_single_1 has no --haystack"),
        (["passkey", "--model", "nowhere.py:f"], "there is no file nowhere.py"),
        (["passkey", "--model", "mine.py:g"], "mine.py has no 'g'"),
        (["passkey", "--model", "mine.py:broken"], "the model is int: expected a callable"),
        (["passkey", "--model", "mine.py:three"], "mine.py:three is a tuple of 3: expected a model, or (model, token"),
        (["passkey", "--model", "mine.py:uniform", "--dtype", "float32"], "--dtype has no effect on mine.py:uniform"),
        (["passkey", "--model", "mine.py:uniform", "--device", "cuda"], "--device has no effect on mine.py:uniform"),
        (["passkey", "--model", "nowhere"], "nowhere"),
        (["passkey", "--model", "mine.py:uniform", "--cache", "int8"], "a plain callable has no KV cache"),
        (["passkey", "--evict", "tova"], "--evict tova keeps a budget of tokens: add --budget"),
        (["passkey", "--with-question"], "--with-question says when a policy evicts: add --evict"),
        (["passkey", "x.jsonl"], "'x.jsonl' follows the task passkey"),
        (["show"], "show shows the results of files: name one or more"),
        (["show", "none.jsonl"], "there are no results in none.jsonl"),
        (["show", "mine.py"], "mine.py exists, and has no results"),
        (["passkey", "--model", "mine.py:uniform", "--results", "mine.py"], "mine.py exists, and has no results"),
        (["passkey", "--model", "mine.py:uniform", "--results", "no/where.jsonl"], "no/where.jsonl cannot be written"),
        (["passkey", "--plot", "mine.py"], "mine.py exists, and is no chart that regard wrote"),
    ],
)
def test_what_cannot_be_done_is_reported_in_a_line(model, arguments, message, capsys):
    assert evaluate(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [["--depths", "2"], ["--lengths", "x"], ["--samples", "0"], ["--threads", "9999999"]]
)
def test_values_that_are_wrong_are_refused(arguments):
    with pytest.raises(SystemExit) as ended:
        evaluate("needle", *arguments)
    assert ended.value.code == 2
