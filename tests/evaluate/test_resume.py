"""Results in a file: nothing is lost or counted twice after a kill, a torn line, a full disk, or several processes."""

import dataclasses
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from datetime import datetime
from typing import Any, cast

import pytest
import torch
from transformers.utils import chat_template_utils

from regard.errors import ProblemError
from regard.evaluate import Documents, KeyValues, Passkey, Recall, Tokenizer, as_model, evaluate, task_of
from regard.evaluate import records as files
from regard.evaluate.losses import Extrapolation, Perplexity, Stream
from regard.evaluate.run import runs_of, settings_of, share_of
from tests.cli import tiny

TASK = Passkey((400,), (0.0, 0.5, 1.0), samples=7)
SLOW = """
import sys, time, torch
from regard.evaluate import Passkey, evaluate

def model(tokens):
    time.sleep(0.03)
    return torch.zeros(*tokens.shape, 256)

evaluate(Passkey((400,), (0.0, 0.5, 1.0), samples=7), model, label="model", file=sys.argv[1])
"""


def model(tokens):
    return torch.zeros(*tokens.shape, 256)


def run(file, **options):
    return evaluate(TASK, model, label="model", file=file, **options)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def names(file):
    return [record["example"] for record in lines(file)[1:]]


ALL = [f"400/{depth:g}/{i}" for depth in (0, 0.5, 1) for i in range(7)]


def start(file, **environment):
    command = [sys.executable, "-c", SLOW, str(file)]
    return subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE)


def wait_for(file, count, process):
    end = time.monotonic() + 120
    while not file.is_file() or file.read_bytes().count(b"\n") < count:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_run_that_is_killed_continues_and_nothing_is_lost_or_counted_twice(tmp_path):
    file = tmp_path / "results.jsonl"
    for count in (3, 9):  # killed twice, while it computes and writes
        process = start(file)
        wait_for(file, count, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert len(names(file)) >= count - 1
    before = names(file)
    seen = []
    results = run(file, progress=lambda done, total: seen.append((done, total)))
    assert names(file) == ALL
    assert [record["example"] for record in results.records] == ALL
    assert seen == [(i, 21) for i in range(len(before), 22)]


def test_a_second_run_computes_nothing_again(tmp_path):
    first = run(tmp_path / "results.jsonl")

    def never(tokens):
        raise AssertionError

    second = evaluate(TASK, never, label="model", file=tmp_path / "results.jsonl")
    assert second.records == first.records


@pytest.mark.parametrize("torn", [1, 10, -2])
def test_a_torn_line_is_dropped_and_computed_again(tmp_path, torn):
    file = tmp_path / "results.jsonl"
    run(file)
    whole = file.read_bytes()
    keep = whole.rstrip(b"\n").rfind(b"\n") + 1
    file.write_bytes(whole[: keep + torn] if torn > 0 else whole[:torn])
    run(file)
    assert file.read_bytes() == whole


def test_a_header_that_is_torn_begins_anew(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_bytes(b'{"regard": "0.')
    run(file)
    assert names(file) == ALL


@pytest.mark.parametrize(
    ("task", "label", "message"),
    [
        (Passkey((400,), (0.0, 0.5, 1.0), samples=7, seed=1), "model", "seed is 0 there and 1 here"),
        (Passkey((401,), (0.0, 0.5, 1.0), samples=7), "model", r"lengths is \[400\] there and \[401\] here"),
        (TASK, "other", '.*model is "model" there and "other" here'),
    ],
)
def test_a_run_with_other_settings_is_refused_by_name(tmp_path, task, label, message):
    run(tmp_path / "results.jsonl")
    before = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(ProblemError, match=rf"results.jsonl has results of another run: {message}. Name another file"):
        evaluate(task, model, label=label, file=tmp_path / "results.jsonl")
    assert (tmp_path / "results.jsonl").read_bytes() == before


class Shifted:
    """Bytes plus a number."""

    def __init__(self, by):
        self.by = by

    def encode(self, text):
        return [(byte + self.by) % 256 for byte in text.encode()]

    def decode(self, tokens):
        return bytes((token - self.by) % 256 for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("task", [Perplexity(lengths=(100,)), Extrapolation(samples=2, multiples=(1, 2))])
def test_a_run_of_other_positions_is_refused_by_name(tmp_path, task):
    book, file = tmp_path / "book.txt", tmp_path / "results.jsonl"
    book.write_text(" ".join(map(str, range(400))))
    task = dataclasses.replace(task, haystack=str(book))
    evaluate(task, model, label="model", positions=64, file=file)
    with pytest.raises(ProblemError, match=r"positions is 64 there and 32 here"):
        evaluate(task, model, label="model", positions=32, file=file)


def test_a_run_with_another_tokenizer_is_refused_by_name(tmp_path):
    file = tmp_path / "results.jsonl"
    evaluate(TASK, model, Shifted(0), label="model", file=file)
    evaluate(TASK, model, Shifted(0), label="model", file=file)
    with pytest.raises(ProblemError, match=r'tokenizer is "\w+" there and "\w+" here'):
        evaluate(TASK, model, Shifted(7), label="model", file=file)


DATED = (
    " {% macro day() %}{{ strftime_now('%A %d %b %Y, %B, %Y-%m-%d %y %j %a %H:%M:%S') }}{% endmacro %}\n"
    "{% if strftime_now is defined %}\n  {% set today = day() %}\n{% endif %}\n"
    "{{ today }}: {{ messages[0]['content'] }}<says>"
)
"""As Llama's template, which writes the day into each prompt."""


def on_the_day(monkeypatch, *day):
    """Let this be the day of transformers."""
    fixed = type("Day", (datetime,), {"now": classmethod(lambda cls: cls(*day))})
    monkeypatch.setattr(chat_template_utils, "datetime", fixed)


def test_a_run_continues_on_another_day_with_the_same_prompts(tmp_path, monkeypatch):
    def uniform(tokens):
        return torch.zeros(*tokens.shape, len(tokenizer))

    tokenizer, file = tiny.byte_level(), tmp_path / "results.jsonl"
    tokenizer.chat_template = DATED
    tasks = [Passkey((400,), (0.5,), samples=samples, chat=True) for samples in (1, 2)]
    before = list(tasks[1].examples(as_model(uniform, tokenizer)))
    evaluate(tasks[0], uniform, tokenizer, label="model", file=file)
    on_the_day(monkeypatch, 2041, 5, 6)
    assert "2041" in tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    evaluate(tasks[0], uniform, tokenizer, label="model", file=file)
    assert list(tasks[1].examples(as_model(uniform, tokenizer))) == before


def test_the_prompts_are_those_of_transformers_on_the_day_of_all_prompts(monkeypatch):
    tokenizer = tiny.byte_level()
    tokenizer.chat_template = DATED
    on_the_day(monkeypatch, 2024, 7, 26)
    theirs = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    assert "?".join(Tokenizer.of(tokenizer).chat) == theirs
    assert "Friday 26 Jul 2024, July, 2024-07-26" in theirs


@pytest.mark.parametrize(
    ("form", "day"),
    [
        ("%-d %B", "26 July"), ("%e.%-m.%-y", "26.7.24"), ("%F", "2024-07-26"), ("%D, %x", "07/26/24, 07/26/24"),
        ("%-I:%M %p", "12:00 AM"), ("%T, %X, %R", "00:00:00, 00:00:00, 00:00"), ("%c", "Fri Jul 26 00:00:00 2024"),
    ],
)  # fmt: skip
def test_a_template_may_ask_for_the_day_in_any_form(form, day, monkeypatch):
    tokenizer = tiny.byte_level()
    tokenizer.chat_template = f"{{{{ strftime_now('{form}') }}}}: {{{{ messages[0]['content'] }}}}"
    assert Tokenizer.of(tokenizer).chat == (f"{day}: ", "")
    on_the_day(monkeypatch, 2024, 7, 26)
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == f"{day}: "


def test_a_template_that_asks_for_the_day_in_an_unknown_form_is_refused():
    tokenizer, task = tiny.byte_level(), Passkey((400,), (0.5,), samples=1)
    tokenizer.chat_template = "{{ strftime_now('%d of %Ob') }}: {{ messages[0]['content'] }} 5 %"
    assert len(list(task.examples(as_model(model, tokenizer)))) == 1
    with pytest.raises(ProblemError, match="the chat template asks for the day by %O: expected parts such as %d"):
        list(dataclasses.replace(task, chat=True).examples(as_model(model, tokenizer)))


def test_a_run_with_another_chat_template_is_refused_by_name(tmp_path):
    def uniform(tokens):
        return torch.zeros(*tokens.shape, len(tokenizer))

    task, tokenizer, file = Passkey((400,), (0.5,), samples=1), tiny.byte_level(), tmp_path / "results.jsonl"
    tokenizer.chat_template = DATED
    evaluate(task, uniform, tokenizer, label="model", file=file)
    tokenizer.chat_template = DATED.replace("says", "answers")
    with pytest.raises(ProblemError, match=r'tokenizer is "\w+" there and "\w+" here'):
        evaluate(task, uniform, tokenizer, label="model", file=file)


@pytest.mark.parametrize("name", ["needle", "passkey", "niah_single_2"])
@pytest.mark.parametrize(("bird", "count"), [("He saw {} birds.", None), ("он увидел {} птиц.", 400)])
def test_the_sentences_of_a_text_are_a_setting_where_few_begin_with_a_capital(name, bird, count, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(" ".join(bird.format(i) for i in range(400)), encoding="utf-8")
    task = task_of(name, haystack=str(book))
    assert settings_of(task, as_model(model)).get("sentences") == count
    assert "sentences" not in settings_of(task_of("stream", haystack=str(book)), as_model(model))


def test_results_of_a_task_that_had_a_book_are_not_continued(tmp_path):
    task, file = task_of("vt", lengths=(2500,), samples=1), tmp_path / "results.jsonl"
    with files.Writer(file, settings_of(task, as_model(model, label="model")) | {"haystack": "moby-dick"}, {}):
        pass
    with pytest.raises(ProblemError, match=r'haystack is "moby-dick" there and not set here. Name another file.$'):
        evaluate(task, model, label="model", file=file)


def test_a_run_with_other_questions_in_the_same_file_is_refused_by_name(tmp_path):
    questions, file = tmp_path / "questions.jsonl", tmp_path / "results.jsonl"
    one = {"question": "Who?", "answers": ["Ada"], "ctxs": [{"title": "A", "text": "Ada.", "isgold": True}]}
    task = Documents((1,), (0.0,), samples=1, questions=str(questions))
    questions.write_text(json.dumps(one))
    evaluate(task, model, label="model", file=file)
    evaluate(task, model, label="model", file=file)
    questions.write_text(json.dumps(one | {"question": "Which?"}))
    with pytest.raises(ProblemError, match=r'questions_digest is "\w+" there and "\w+" here'):
        evaluate(task, model, label="model", file=file)


@pytest.mark.parametrize("content", ["Call me Ishmael.", '{"other": 1}\n', "[1]\n", "\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    (tmp_path / "notes.txt").write_text(content)
    with pytest.raises(ProblemError, match=r"notes.txt exists, and has no results of regard evaluate"):
        run(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == content


def test_a_line_that_is_damaged_is_named(tmp_path):
    file = tmp_path / "results.jsonl"
    run(file)
    whole = file.read_text().splitlines()
    file.write_text("\n".join([*whole[:3], whole[3][:20], *whole[4:]]) + "\n")
    with pytest.raises(ProblemError, match=r"line 4: .* is not JSON"):
        run(file)


def test_two_processes_do_not_write_one_file(tmp_path):
    file = tmp_path / "results.jsonl"
    with (
        files.Writer(file, {"task": "passkey"}, {}),
        pytest.raises(ProblemError, match="is written by another process"),
    ):
        files.Writer(file, {"task": "passkey"}, {})


def test_a_file_system_without_locks_is_named_as_such(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.raises(ProblemError, match=r"cannot be locked against other processes \(No locks available\): name a"):
        files.Writer(tmp_path / "results.jsonl", {"task": "passkey"}, {})


def test_a_full_disk_is_reported_and_leaves_whole_lines(tmp_path):
    file = tmp_path / "results.jsonl"
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1100, limits[1]))
        with pytest.raises(ProblemError, match=r"cannot be written: File too large. The results before are whole"):
            run(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert 1 < len(names(file)) < 21
    assert file.read_bytes().endswith(b"}\n")
    run(file)
    assert names(file) == ALL


@pytest.mark.exhaustive
def test_several_processes_share_the_examples_and_merge_their_results(tmp_path):
    file = tmp_path / "results.jsonl"
    processes = [start(file, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    for process in processes:
        _, error = process.communicate(timeout=200)
        assert process.returncode == 0, error.decode()
    ours, theirs = names(file), names(tmp_path / "results.jsonl.1")
    assert sorted(ours + theirs) == sorted(ALL)
    assert (len(ours), len(theirs)) == (14, 7)  # whole cells, so that prefixes stay shared
    assert [record["example"] for record in run(file).records] == ALL
    assert len(names(file)) == 14  # nothing was computed again


def shares(task):
    """The names of the examples of three processes."""
    examples = list(task.examples(as_model(model, positions=64)))
    found = [share_of(examples, task.axes, rank, 3) for rank in range(3)]
    assert sorted(each.name for share in found for each in share) == sorted(each.name for each in examples)
    return found


@pytest.mark.parametrize(
    "task", [Perplexity(lengths=(300,)), Stream((50,), samples=9), Extrapolation(samples=9, multiples=(1, 2))]
)
def test_processes_share_the_passages_of_a_text(task, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(" ".join(map(str, range(400))))
    assert [len(share) for share in shares(dataclasses.replace(task, haystack=str(book)))] == [3, 3, 3]


@pytest.mark.parametrize("task", [KeyValues((5,), samples=6), Recall(pairs=(4,), samples=6)])
def test_a_context_of_several_questions_is_read_by_one_process(task):
    read = [{cast(Any, each).context for each in share} for share in shares(task)]
    assert [len(contexts) for contexts in read] == [2, 2, 2]
    assert len(set.union(*read)) == 6


def test_results_are_shown_in_the_order_of_their_cells_whatever_the_order_of_the_file(tmp_path):
    run(tmp_path / "results.jsonl")
    head, *rest = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join([head, *rest[::-1]]))
    (one, other) = (runs_of([tmp_path / name])[0][1] for name in ("results.jsonl", "other.jsonl"))
    assert other.rows() == one.rows()
    assert other.cells() == one.cells()
    for axis in one.axes:
        assert other.along(axis) == one.along(axis)
        assert one.values(axis) == sorted(one.values(axis))


def test_a_run_without_a_finished_example_has_nothing_to_show(tmp_path):
    run(tmp_path / "results.jsonl")
    head = tmp_path / "results.jsonl.1"
    head.write_text((tmp_path / "results.jsonl").read_text().splitlines(keepends=True)[0])
    ((_, found),) = runs_of([head, tmp_path / "results.jsonl"])
    assert len(found.records) == 21
    with pytest.raises(ProblemError, match=r"there are no results in .*results.jsonl.1: no example is finished yet"):
        runs_of([head])


def test_a_run_of_several_processes_needs_a_file(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ProblemError, match="several processes need a file"):
        evaluate(TASK, model)


def test_every_record_has_its_seed_in_the_settings(tmp_path):
    run(tmp_path / "results.jsonl")
    head, *rest = lines(tmp_path / "results.jsonl")
    assert head["settings"]["seed"] == 0
    assert all(re.fullmatch(r"400/(0|0\.5|1)/\d", record["example"]) for record in rest)


HEAD = '{"regard": "0.1.0", "format": 1, "settings": {"task": "passkey"}, "about": {}}'


@pytest.mark.parametrize(
    ("head", "record", "message"),
    [
        (HEAD, '{"example": "a", "score": 1.0, "nll": 1}', "line 2: no record of an example"),
        (HEAD, '{"example": ["a"], "cell": {"length": 5, "depth": 0.5}, "score": 1.0}', "line 2: no record of an exam"),
        (HEAD, '{"example": "a", "cell": {"length": 5, "depth": 0.5}, "score": NaN}', "line 2: .* is not JSON"),
        (HEAD, '{"example": "a", "cell": {"length": 5, "depth": 0.5}}', "line 2: no record"),
        (HEAD, '{"example": "a", "cell": {"length": 5, "depth": 0.5}, "score": 7.0}', "line 2: no record"),
        (HEAD, '{"example": "a", "cell": {"length": 5, "depth": 0.5}, "score": "1"}', "line 2: no record"),
        (HEAD, '{"example": "a", "cell": {"length": 5, "depth": 0.5}, "score": 1.0, "nll": "1"}', "line 2: no record"),
        (HEAD, '{"example": "a", "cell": {"length": 5, "depth": 0.5}, "losses": [1.0]}', "line 2: no record"),
        (HEAD, '{"example": "a", "cell": {}, "first": 1, "losses": [1.0], "counts": []}', "line 2: no record"),
        pytest.param(HEAD, "[" * 100_000, "line 2: .* is not JSON", id="deep"),
        (HEAD, '{"example": "a", "cell": {"length": 5}, "score": 1.0}', "the cell of a has no depth"),
        (HEAD.replace('{"task": "passkey"}', "{}"), "{}", "has no results"),
        (HEAD.replace('{"task": "passkey"}', "[]"), "{}", "has no results"),
        (HEAD.replace('"passkey"', '["passkey"]'), "{}", "has no results"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, head, record, message):
    (tmp_path / "results.jsonl").write_text(f"{head}\n{record}\n")
    with pytest.raises(ProblemError, match=message):
        runs_of([tmp_path / "results.jsonl"])
