"""`regard convert`: what it writes, what it says, and how it ends."""

import importlib.util
import json

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from regard.cli.main import main

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 47,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.fixture
def llama(tmp_path, capsys):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    capsys.readouterr()  # the progress bar of save_pretrained
    return tmp_path / "llama"


@pytest.mark.parametrize("order", ["arguments first", "options between"])
def test_it_writes_the_checkpoint_and_tells_what_became_of_it(order, llama, tmp_path, capsys):
    out = str(tmp_path / "out")
    options = ["--kv-heads", "2"]
    arguments = [str(llama), *options, out] if order == "options between" else [str(llama), out, *options]
    assert main(["convert", *arguments]) == 0
    shown, err = capsys.readouterr()
    lines = shown.splitlines()
    assert lines[0].startswith(f"{out}: llama, 3 layers of 4 query heads; 0.1 MB")
    assert lines[1:3] == ["  key heads  4 -> 2", "  cache      768 -> 384 bytes a token"]
    assert [line.split()[0] for line in lines[3:]] == ["keys", "values"]
    assert "% of their norm, most in layer" in lines[3]
    assert err == ""
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == 2


def test_it_says_when_the_architecture_is_another(tmp_path, capsys):
    GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).save_pretrained(tmp_path / "neox")
    assert main(["convert", str(tmp_path / "neox"), str(tmp_path / "out"), "--kv-heads", "1"]) == 0
    assert "gpt_neox written as phi, 3 layers" in capsys.readouterr().out


def test_what_was_not_copied_is_said(llama, tmp_path, capsys):
    (llama / "pytorch_model.bin").write_bytes(b"old")
    assert main(["convert", str(llama), str(tmp_path / "out"), "--kv-heads", "1"]) == 0
    assert capsys.readouterr().err == "regard: weights in other forms were not copied: pytorch_model.bin\n"


@pytest.mark.parametrize("more", [["--how", "random", "--seed", "3"], ["--dtype", "bfloat16"], ["--how", "first"]])
def test_options_reach_the_conversion(more, llama, tmp_path, capsys):
    assert main(["convert", str(llama), str(tmp_path / "plain"), "--kv-heads", "2"]) == 0
    assert main(["convert", str(llama), str(tmp_path / "other"), "--kv-heads", "2", *more]) == 0
    plain, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "other"))
    assert plain != other


def test_a_seed_of_what_is_not_random_is_refused(llama, tmp_path, capsys):
    assert main(["convert", str(llama), str(tmp_path / "out"), "--kv-heads", "2", "--seed", "3"]) == 2
    assert "--seed is for --how random, and --how is mean" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_there_is_replaced_only_by_force(llama, tmp_path, capsys):
    asked = ["convert", str(llama), str(tmp_path / "out"), "--kv-heads", "2"]
    assert main(asked) == 0
    assert main(asked) == 2
    assert "is there already: name another place, or replace it with --force" in capsys.readouterr().err
    assert main([*asked, "--force"]) == 0


def test_what_cannot_be_done_is_said_in_one_line(llama, tmp_path, capsys):
    assert main(["convert", str(llama), str(tmp_path / "out"), "--kv-heads", "3"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("regard: error: 4 key heads do not fall into 3 groups")


@pytest.mark.parametrize("package", ["safetensors", "transformers"])
def test_what_it_needs_and_is_not_installed_is_named(package, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--kv-heads", "1"]) == 2
    assert f"needs {package}, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["in", "out"], "the following arguments are required: --kv-heads"),
        (["in", "--kv-heads", "1"], "the following arguments are required: out"),
        (["in", "out", "--kv-heads", "none"], "'none' is no count"),
        (["in", "out", "--kv-heads", "1", "--how", "median"], "invalid choice: 'median'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(["convert", *arguments])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.model
def test_the_model_that_comes_as_a_package_becomes_multi_query(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert", "SmolLM2-135M-Instruct", out, "--kv-heads", "1", "--dtype", "bfloat16"]) == 0
    shown, err = capsys.readouterr()
    assert "key heads  3 -> 1" in shown
    assert err == ""
    model = LlamaForCausalLM.from_pretrained(out)
    assert model.config.num_key_value_heads == 1
