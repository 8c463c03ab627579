"""`regard cost`: the table, its files, its errors; at once, and without torch."""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from regard.cli import bench, cost_view, evaluate, generate
from regard.cli import cost as cost_command
from regard.cli.generate_options import add_cache_options, cache_spec
from regard.cli.main import main
from regard.cost import Storage, cost, find_machine, find_model, model_names, storage_names
from regard.storage.codec import Fp8, Int4, Int8


def shown(capsys, *arguments: str) -> str:
    assert main(["cost", *arguments]) == 0
    return capsys.readouterr().out


def test_the_cache_of_llama_2_70b_is_10_gib_and_80_with_all_heads(capsys):
    out = shown(capsys, "llama-2-70b", "--context", "32k", "--machine", "8xh100")
    assert re.search(r"KV cache +10.00 GiB +320 KiB a token", out)
    rows = dict(re.findall(r"^(\w.*?)  +(\S+ GiB) .* B  ", out, re.MULTILINE))
    assert rows == {
        "as it is": "10.00 GiB",
        "MHA": "80.00 GiB",
        "MQA": "1.25 GiB",
        "MLA": "2.81 GiB",
        "int8 cache": "5.20 GiB",
        "int4 cache": "3.14 GiB",
        "window 4,096 + 4 sinks": "1.25 GiB",
    }
    assert "It fits in 90 % of 640 GiB: at most 1,466,436 tokens" in out


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if i % 5 else []) for i, name in enumerate(model_names())],
)
def test_every_model_is_shown_with_units_of_one_kind(name, capsys):
    out = shown(capsys, name, *(["--context", "512"] if find_model(name).context is None else []), "--machine", "b200")
    assert not re.search(r"\d ?[KMGT]B\b", out)
    assert all(len(line) <= 140 for line in out.splitlines() if not line.startswith(("  source", "  note")))


def test_what_does_not_fit_says_how_many_would(capsys):
    out = shown(capsys, "llama-2-70b", "--machine", "h100")
    assert "It does not fit: 128 GiB of weights, 90 % of 80.00 GiB. Try --machine 2xh100." in out
    assert re.search(r"Try --machine \d+xrtx-4090\.", shown(capsys, "llama-2-70b", "--machine", "2xrtx-4090"))
    out = shown(capsys, "llama-3-8b", "--batch", "100", "--machine", "a100", "--context", "8k")
    assert "It does not fit (115 GiB) in 90 % of 80.00 GiB: at most" in out


@pytest.mark.parametrize(("name", "batch"), [("llama-3-1-8b", 1_000_000), ("whisper-large-v3", 100_000)])
def test_a_batch_that_does_not_fit_is_no_reason_for_more_machines(name, batch, capsys):
    out = shown(capsys, name, "--batch", str(batch), "--context", "8")
    fits = cost(name, context=8, machine="h100").largest_batch
    assert f"at most 0 tokens of context in this batch, or a batch of {fits:,} at this context." in out
    assert "Try --machine" not in out


def test_this_machine_is_the_only_one_of_its_kind():
    here = replace(find_machine("a100"), name="this-cpu")
    out = cost_view.view(cost("llama-2-70b", machine=here), [])
    assert "It does not fit: 128 GiB of weights, 90 % of 80.00 GiB. Try another --machine." in out


def test_a_window_narrows_the_wider_windows_of_a_model(capsys):
    out = shown(capsys, "mistral-7b", "--window", "100", "--context", "32k")
    assert "32 of GQA-8 (32 query heads of 128), window 96 + 4 sinks" in out
    assert re.search(r"KV cache +12.50 MiB", out)  # 100 of 4,096 tokens, which take 512 MiB


@pytest.mark.parametrize("name", ["bert-base", "mistral-7b"])
def test_a_window_that_changes_nothing_has_a_note(name, capsys):
    note = "note     --window 8,192 changes nothing: no layer stores more."
    assert note in shown(capsys, name, "--window", "8k", "--context", "512")


def test_options_of_the_cache_count(capsys):
    out = shown(capsys, "llama-2-7b", "--context", "1000", "--cache", "int8", "--group-size", "64", "--page-size", "64")
    assert "KV cache int8 in pages of 64 tokens" in out
    out = shown(capsys, "llama-2-7b", "--context", "100k", "--window", "2048", "--sinks", "8")
    assert re.search(r"KV cache +1.00 GiB", out)
    assert "window 2,040 + 8 sinks" in out


@pytest.mark.parametrize("name", storage_names.NAMES)
def test_the_function_and_the_commands_take_the_same_names_of_caches(name, capsys):
    of_command = json.loads(shown(capsys, "gemma-2-9b", "--context", "8k", "--cache", name, "--json", "-"))
    found = cost("gemma-2-9b", context=8192, storage=name)
    full = "bfloat16" if name == "dense" else storage_names.FLOATS.get(name, name)
    assert found.storage == Storage(full)
    assert (of_command["cache"]["kind"], of_command["cache_bytes"]) == (full, found.cache_bytes)
    args = generate_parser().parse_args(["--cache", name])
    assert cache_spec(args).codec == (None if name == "dense" else codec_named(full))


@pytest.mark.parametrize("command", [bench, cost_command, evaluate, generate])
def test_the_commands_take_short_names_of_types(command):
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers())
    name = command.__name__.rpartition(".")[2]
    for short, long in (("bf16", "bfloat16"), ("fp32", "float32"), ("torch.float16", "float16")):
        assert parser.parse_args([name, "--dtype", short]).dtype == long


def generate_parser():
    parser = argparse.ArgumentParser()
    add_cache_options(parser)
    return parser


def codec_named(kind):
    return {"int8": Int8(), "int4": Int4(), "fp8": Fp8()}.get(kind) or getattr(torch, kind)


def test_an_encoder_has_no_cache_and_one_line_says_so(capsys):
    out = shown(capsys, "bert-base", "--cache", "int8")
    assert [line.split() for line in out.splitlines() if "KV cache" in line] == [
        ["KV", "cache", "none", "an", "encoder", "stores", "none"]
    ]


def test_without_a_model_the_known_ones_are_listed(capsys):
    out = shown(capsys)
    assert all(name in out for name in (*model_names(), "mi300x", "m4-max"))


def test_json_has_everything_and_what_if(capsys):
    out = shown(capsys, "qwen3-0.6b", "--context", "4k", "--json", "-")
    content = json.loads(out)
    c = cost("qwen3-0.6b", context=4096, machine="h100")
    assert content["regard"]
    assert content["cache_bytes"] == c.cache_bytes == 4096 * 114_688
    assert content["step"]["roofline_seconds"] == c.seconds(c.step)
    assert content["what_if"]["MQA"]["cache_bytes"] == c.cache_bytes // 8


def test_the_plot_is_a_picture_of_two_panels(tmp_path, capsys):
    file = tmp_path / "cost.svg"
    for _ in range(2):  # a picture of ours is replaced
        shown(capsys, "gemma-3-12b", "--plot", str(file))
    root = ET.fromstring(file.read_text())
    texts = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("text")]
    assert {"memory: weights and KV cache", "least time of one more token", "memory of the machine"} <= {*texts}
    assert len([each for each in root.iter() if each.tag.endswith("polyline")]) == 2 * 7
    shown(capsys, "bert-base", "--plot", str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-2-80b"], "unknown model 'llama-2-80b'. Near: llama-2-70b"),
        (["llama-2-7b", "--machine", "h1000"], "unknown machine 'h1000'. Near: h100"),
        (["llama-2-7b", "--machine", "8xthis-cpu"], "'8xthis-cpu': 'this-cpu' is the machine at hand, one alone"),
        ([""], "the name of the model is empty"),
        (["llama-2-7b", "--cache", "int8", "--page-size", "7"], "pages of 7 tokens with int8: the codes of 16 tokens"),
        (["llama-2-7b", "--machine", "0xh100"], "'0xh100' is zero machines: expected 1xh100 or more"),
        (["llama-2-7b", "--sinks", "4"], "add --window"),
        (["llama-2-7b", "--window", "4", "--sinks", "4"], "--window 4 counts its 4 sinks"),
        (["llama-2-7b", "--window", "64", "--page-size", "4"], "leave one of them out"),
        (["llama-2-7b", "--group-size", "64"], "--group-size is for codes, and --cache is dense"),
        (["llama-2-7b", "--cache", "int8", "--group-size", "20"], "group 20: expected a multiple of 16"),
        (["gpt2", "--context", "2k"], "gpt2 has 1,024 learned positions, and a context of 2,048"),
        (["transformer-big"], "has no longest context: give context"),
        (["v100", "--machine", "v100"], "unknown model 'v100'"),
        (["llama-2-7b", "--ranks", "4"], "--ranks and --link go together"),
        (["llama-2-7b", "--link", "1GB/s"], "--ranks and --link go together"),
        (["transformer-big", "--context", "512", "--ranks", "4", "--link", "1GB/s"], "cross-attention and states"),
        (["llama-2-7b", "--plot", "/nowhere/at/all.svg"], "/nowhere/at/all.svg"),
        (["llama-2-7b", "--plot", "cost.PNG"], "--plot writes SVG, and cost.PNG is the name of another format (.PNG)"),
        (["llama-2-7b", "--plot", "-", "--json", "-"], "--json and --plot cannot both go to stdout"),
        (["--json", "-"], "--json needs a model: add one, as regard cost llama-2-70b --json ..."),
        (["--batch", "3"], "--batch needs a model"),
    ],
)
def test_what_cannot_be_is_reported_in_one_line(arguments, message, capsys):
    assert main(["cost", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_folder_with_a_config_json_is_a_model(tmp_path, capsys):
    entries = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(entries | {"vocab_size": 100, "intermediate_size": 128}))
    assert "2 of MHA (4 query heads of 16)" in shown(capsys, str(tmp_path), "--context", "100")


def test_a_model_of_states_alone_has_no_lines_of_attention(tmp_path, capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 8, "time_step_rank": 4}
    more = {"intermediate_size": 128, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", **sizes, **more}))
    out = shown(capsys, str(tmp_path), "--context", "100", "--plot", str(tmp_path / "m.svg"))
    assert "layers   2 of mamba (a state of 1,024 elements)" in out
    assert re.search(r"states +10.00 KiB   of layers without attention, at any length", out)
    assert "any number of tokens of context" in out
    assert not re.search("outweighs|Attention of the prompt|int8 cache", out)


def test_an_encoder_of_a_fixed_number_of_tokens_is_shown(tmp_path, capsys):
    auto = pytest.importorskip("transformers.models.auto")
    auto.configuration_auto.CONFIG_MAPPING["whisper"]().save_pretrained(tmp_path)
    out = shown(capsys, str(tmp_path))
    assert "448 tokens and 1,500 of the encoder x 1 row" in out
    assert re.search(r"KV cache +11.41 MiB +6.00 KiB a token", out)  # 4 layers x 2 x 384 x 2 bytes x (448 + 1,500)


PROBE = """
import sys
from regard.cli.main import main
main(sys.argv[1:])
print(*(name in sys.modules for name in ("torch", "numpy", "rich", "transformers")), file=sys.stderr)
import time; print(time.process_time(), file=sys.stderr)
"""


@pytest.mark.parametrize("more", [[], ["--json", "-"]])
def test_it_is_there_in_less_than_a_third_of_a_second_and_without_torch(more):
    """Seconds of the processor: the time on a clock depends on what else runs here."""
    call = [sys.executable, "-c", PROBE, "cost", "llama-2-70b", "--context", "32k", *more]

    def seconds() -> float:
        run = subprocess.run(call, capture_output=True, text=True, check=True).stderr.split()
        assert run[:4] == ["False", "False", "False", "False"]
        return float(run[4])

    assert any(seconds() < 0.3 for _ in range(3))


SHARDED = ("llama-3-1-8b", "--context", "128k", "--ranks", "4", "--link", "400Gbit/s")


def test_sharded_sequences_have_a_row_for_each_layout_and_ulysses(capsys):
    out = shown(capsys, *SHARDED)
    assert "The prompt on 4 ranks, each NVIDIA H100 SXM5, that send 46.57 GiB/s in each direction:" in out
    names = re.findall(r"^(ring, \w+|Ulysses) ", out, re.MULTILINE)
    assert names == ["ring, contiguous", "ring, zigzag", "ring, striped", "ring, balanced", "Ulysses"]
    rows = json.loads(shown(capsys, *SHARDED, "--json", "-"))["sharded"]
    assert [row["name"] for row in rows] == names
    assert rows[1]["sent_bytes"] == 32 * 3 * 32768 * 2 * 8 * 128 * 2


def test_sharded_sequences_are_counted_without_torch():
    call = [sys.executable, "-c", PROBE, "cost", *SHARDED]
    assert subprocess.run(call, capture_output=True, text=True, check=True).stderr.split()[0] == "False"


@pytest.mark.parametrize("text", ["100", "100GB", "0GB/s", "-1GB/s", "1 XB/s", "many"])
def test_a_link_needs_its_unit(text, capsys):
    with pytest.raises(SystemExit):
        main(["cost", "llama-2-7b", "--ranks", "4", f"--link={text}"])
    assert "expected a number with its unit, such as 100GB/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"), [("32k", "32,768"), ("32K", "32,768"), ("32Ki", "32,768"), ("1M", "1,048,576")]
)
def test_contexts_are_typed_in_thousands_and_millions(text, tokens, capsys):
    assert f"problem  {tokens} tokens" in shown(capsys, "llama-2-7b", "--context", text)


@pytest.mark.parametrize("text", ["0", "-5", "1e5", "32kB", ""])
def test_what_is_no_number_of_tokens_says_what_is(text, capsys):
    with pytest.raises(SystemExit):
        main(["cost", "llama-2-7b", f"--context={text}"])
    assert "expected 1, 2, 3 ... or thousands such as 32k" in capsys.readouterr().err


def test_several_machines_are_named_as_such():
    assert find_machine("8xh100").title == "8 x NVIDIA H100 SXM5"


def test_the_example_of_the_page_is_what_is_printed(capsys):
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    example = re.search(r"<!-- example -->\n```\n(.*?)```\n", page, re.DOTALL)
    assert example
    assert example[1] == shown(capsys, "llama-2-70b", "--context", "32k", "--machine", "8xh100")


def test_the_sharded_example_of_the_page_is_what_is_printed(capsys):
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    example = re.search(r"<!-- sharded -->\n```\n(.*?)```\n", page, re.DOTALL)
    out = shown(capsys, "llama-3-1-8b", "--context", "1m", "--ranks", "16", "--link", "100GB/s")
    assert example
    assert example[1] == out[out.index("The prompt on 16 ranks") :]
