"""What is known in closed form: a copy model finds every needle, a uniform model none but by chance."""

# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

import contextlib
import dataclasses
import json
import math
import re

import pytest
import torch

from regard.errors import ProblemError
from regard.evaluate import TASKS, KeyValues, Needle, Passkey, Recall, Tokenizer, as_model, corpus, evaluate, task_of
from regard.evaluate.intervals import wilson
from regard.evaluate.picture import picture
from regard.evaluate.results import percent

BYTES = 256
GRID = {"depths": (0.0, 0.4, 1.0), "samples": 3}
ASKED = [
    (re.compile(r"for (\S+) mentioned in the provided text is( \S*)?$"), r"for {} is: (\S+)\."),
    (re.compile(r"(pass key) is( \S*)?$"), r"The {} is (\d+)\."),
    (re.compile(r'Key: "(\S+)"\nCorresponding value:( \S*)?$'), r'"{}": ("\S+")'),
    (re.compile(r"In which city was (\S+ \S+) born\?\nAnswer:( \S*)?$"), r"{} was born in (\w+)"),
]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A text of sentences that are all different, in a file."""
    file = tmp_path_factory.mktemp("text") / "book.txt"
    words = ["".join("aeioumnlrs"[int(digit)] for digit in f"{7919 * i % 10**6:06}") for i in range(900)]
    file.write_text(" ".join(f"The {word} of {i} went ashore. He saw {3 * i} birds." for i, word in enumerate(words)))
    return str(file)


def in_book(name, book, **options):
    """The task of that name; where it reads a book, this one."""
    known = task_of(name).__dataclass_fields__
    return task_of(name, **options, **({"haystack": book} if "haystack" in known else {}))


def uniform(tokens):
    """A model without any preference."""
    return torch.zeros(*tokens.shape, BYTES)


def copying(window: int | None = None):
    """A model that looks the answer up in the last `window` tokens that it reads, and copies it."""

    def call(tokens):
        (ids,) = tokens.tolist()
        logits = torch.zeros(1, len(ids), BYTES)
        for end in range(max(1, len(ids) - 60), len(ids) + 1):
            token = following(bytes(ids[max(0, end - window) if window else 0 : end]).decode())
            if token is not None:
                logits[0, end - 1, token] = 1.0
        return logits

    return call


def following(text: str) -> int | None:
    """The byte that continues an answer at the end of the text; None where none is begun, or none is known."""
    for asked, output in ASKED:
        if found := asked.search(text):
            reason = re.search(output.format(re.escape(found[1])), text[: found.start()])
            whole, begun = f" {reason[1]}" if reason else "", found[2] or ""
            return whole.encode()[len(begun)] if whole.startswith(begun) and len(begun) < len(whole) else None
    return None


@pytest.mark.parametrize(
    "task",
    [
        Needle((400, 700), haystack="noise", **GRID),
        Passkey((400, 700), **GRID),
        KeyValues((3, 7), **GRID),
        task_of("documents", documents=(3, 5), **GRID),
    ],
    ids=lambda task: task.name,
)
def test_a_copy_model_finds_everything(task):
    results = evaluate(task, copying())
    assert results.score.value == 1
    assert len(results.records) == 18
    assert [each.count for each in results.cells()] == [3] * 6


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"])
def test_a_copy_model_answers_questions_of_ruler(name, book):
    assert evaluate(in_book(name, book, lengths=(1500,), samples=3), copying()).score.value == 1


@pytest.mark.parametrize("task", [Needle((400,), haystack="noise", **GRID), Recall(pairs=(5,))])
def test_a_uniform_model_scores_chance(task):
    results = evaluate(task, uniform)
    for record, example in zip(results.records, task.examples(as_model(uniform)), strict=True):
        assert record["score"] == pytest.approx(BYTES ** -len(example.target))
        assert record["nll"] == pytest.approx(len(example.target) * math.log(BYTES))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("perplexity", {"context": 97, "stride": 41, "lengths": (1009,)}),
        ("extrapolation", {"trained": 61, "samples": 3}),
        ("stream", {"lengths": (499,), "samples": 3}),
    ],
)
def test_the_perplexity_of_a_uniform_model_is_its_vocabulary(name, options, book):
    results = evaluate(task_of(name, haystack=book, **options), uniform)
    assert results.perplexity == pytest.approx((BYTES, BYTES, BYTES))
    assert "256.00 (256.00 to 256.00)" in results.table()


def certain(tokens):
    """A model that predicts the text `aaa...` for 100 tokens of context, and nothing after these."""
    logits = torch.zeros(*tokens.shape, BYTES)
    logits[:, :100, ord("a")] = 99.0
    return logits


def rows_of(results):
    """The perplexity of each row of the table by its first and last token."""
    rows = re.findall(r"^([\d,]+) to ([\d,]+) .*?([\d.]+) \([^)]*\)$", results.table(), re.MULTILINE)
    return {(int(first.replace(",", "")), int(last.replace(",", ""))): float(value) for first, last, value in rows}


@pytest.mark.parametrize(
    "options", [{"trained": 100}, {"trained": 100, "multiples": (1, 2, 3)}, {"trained": 33, "multiples": (3, 7)}]
)
def test_each_row_of_lengths_has_its_own_tokens_and_no_others(options, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 9999)
    results = evaluate(task_of("extrapolation", haystack=str(tmp_path / "a.txt"), samples=2, **options), certain)
    found = rows_of(results)
    assert len(found) == 2 * len(options.get("multiples", (1, 2, 4, 8)))
    for (first, last), perplexity in found.items():
        unknown = max(0, last - max(first - 1, 100))
        assert perplexity == pytest.approx(BYTES ** (unknown / (last - first + 1)), abs=0.006)


def test_each_part_of_a_stream_has_its_own_tokens_and_no_others(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 9999)
    found = rows_of(evaluate(task_of("stream", haystack=str(tmp_path / "a.txt"), lengths=(202,), samples=2), certain))
    assert len(found) == 9
    for (first, last), perplexity in found.items():
        unknown = max(0, last - max(first - 1, 100))
        assert perplexity == pytest.approx(BYTES ** (unknown / (last - first + 1)), abs=0.006)


def test_sliding_windows_score_each_token_once(book):
    results = evaluate(task_of("perplexity", context=97, stride=41, lengths=(1009,), haystack=book), uniform)
    spans = [(record["cell"]["start"], sum(record["counts"])) for record in results.records]
    assert [start for start, _ in spans] == [1 + sum(count for _, count in spans[:i]) for i in range(len(spans))]
    assert sum(count for _, count in spans) == 1009


def uneven(tokens):
    """A model whose losses differ between tokens and do not depend on those before."""
    return torch.arange(BYTES).sin().expand(*tokens.shape, BYTES)


@pytest.mark.parametrize(
    ("name", "options"), [("perplexity", {"context": 64, "stride": 20}), ("stream", {"samples": 3})]
)
def test_several_lengths_are_separate_and_no_token_counts_twice(name, options, book):
    def run(*lengths):
        return evaluate(task_of(name, haystack=book, lengths=lengths, **options), uneven)

    both, short, long = run(256, 128), run(128), run(256)
    assert both.loss == long.loss != short.loss
    assert both.losses == {128: short.loss, 256: long.loss}
    content, alone = both.as_dict(), long.as_dict()
    assert content["spans"] == alone["spans"]
    assert content["lengths"] == [{"length": 128, "loss": [*short.loss]}, {"length": 256, "loss": [*long.loss]}]
    assert both.rows() == [long.rows()[0], short.rows()[-1], *long.rows()[1:]]
    assert picture([("", both)]) == picture([("", long)])


def test_an_interval_is_within_0_and_1():
    for count in range(1, 60):
        for small in (1e-300, 1e-20, 1e-16, 1e-12):
            low, high = wilson(small, count), wilson(count - small, count)
            assert 0 <= low.low <= low.value <= low.high <= 1
            assert 0 <= high.low <= high.value <= high.high <= 1
            assert percent(low).startswith("0 % (0 to ")


def test_results_are_json_without_infinities(book):
    """One passage gives no interval."""
    content = evaluate(task_of("stream", haystack=book, lengths=(256,), samples=1), uneven).as_dict()
    assert content["loss"][1:] == [None, None]
    assert json.loads(json.dumps(content, allow_nan=False)) == content


@pytest.mark.parametrize("window", [400, 600])
def test_a_model_that_sees_a_window_finds_needles_within_it_only(window):
    task = Needle((1000,), tuple(i / 10 for i in range(11)), samples=1, haystack="noise")
    results = evaluate(task, copying(window))
    for record, example in zip(results.records, task.examples(as_model(uniform)), strict=True):
        text = bytes(example.tokens).decode()
        distance = len(text) - re.search(r"for \S+ is: \d+\.", text).start() + len(example.target) - 1
        assert (record["score"] == 1) == (distance <= window), (record, distance)
    assert 0 < results.score.value < 1


def test_the_depth_is_where_the_needle_is(book):
    for example in Needle((3000,), (0.0, 0.25, 0.5, 0.75, 1.0), samples=1, haystack=book).examples(as_model(uniform)):
        text = bytes(example.tokens + example.target).decode()
        start, end = text.index("afterwards.\n") + 12, text.index("\nWhat is the special")
        share = (text.index("One of the special") - start) / (end - start - 66)
        assert share == pytest.approx(example.cell["depth"], abs=0.025)  # a sentence earlier at most
        assert len(text) == 3000


@pytest.mark.parametrize("name", [name for name, kind in TASKS.items() if hasattr(kind, "new_tokens")])
def test_prompts_of_ruler_fill_their_length(name, book):
    examples = list(in_book(name, book, lengths=(2500, 9000), samples=2).examples(as_model(uniform)))
    assert len(examples) == 4
    for example in examples:
        used = len(example.tokens) + example.new_tokens
        assert example.cell["length"] - 700 < used <= example.cell["length"]
        text = bytes(example.tokens).decode()
        assert all(answer in text for answer in example.answers)


def test_a_prompt_of_ruler_that_is_longer_than_its_length_is_refused():
    """Keys of two words have different lengths, so that a length may have room for one sample and not for another."""
    found = dict[int, int]()
    for length in range(530, 580):
        task = task_of("niah_single_1", lengths=(length,), samples=5)
        with contextlib.suppress(ProblemError):  # the least length that fits is between these
            found[length] = max(len(each.tokens) + each.new_tokens for each in task.examples(as_model(uniform)))
    assert 0 < len(found) < 50
    assert all(used <= length for length, used in found.items())


def saying(example, text):
    """A model that says this text after the prompt of an example, in bytes."""

    def call(tokens):
        reason = tokens.shape[1] - len(example.tokens)
        return torch.zeros(*tokens.shape, BYTES).index_fill(-1, torch.tensor([text.encode()[max(0, reason)]]), 1.0)

    return call


def numbered(answers):
    return " ".join(f"{i}. {answer}" for i, answer in enumerate(answers, 1))


@pytest.mark.parametrize(
    ("name", "listed"), [("vt", ", ".join), ("cwe", numbered), ("fwe", ", ".join), ("niah_multivalue", ", ".join)]
)
def test_all_answers_of_ruler_have_room_in_what_is_generated(name, listed, tmp_path):
    (tmp_path / "book.txt").write_text(" ".join(f"walking{a}{b}{c}." for a in "abcde" for b in "abcde" for c in "abc"))
    task = in_book(name, str(tmp_path / "book.txt"), lengths=(2500,), samples=1)
    (example,) = task.examples(as_model(uniform))
    text = f" {listed(example.answers)}"
    assert example.new_tokens == max(task.new_tokens, len(text))
    assert len(example.tokens) + example.new_tokens <= 2500
    assert evaluate(task, saying(example, text.ljust(example.new_tokens))).score.value == 1


def test_ruler_generates_its_own_number_of_tokens_where_a_letter_is_a_token_with_its_space():
    tokenizer = Tokenizer(lambda text: [ord(letter) for letter in text if letter != " "], str)
    examples = task_of("vt", lengths=(2500,), samples=5).examples(as_model(uniform, tokenizer))
    assert [each.new_tokens for each in examples] == [30] * 5


@pytest.mark.parametrize("name", ["vt", "fwe", "niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_a_task_of_ruler_without_a_book_reads_none(name, monkeypatch):
    monkeypatch.setattr(corpus, "_moby_dick", lambda: pytest.fail("a book was read"))
    results = evaluate(task_of(name, lengths=(2500,), samples=1), uniform)
    assert not {"haystack", "text"} & results.settings.keys()


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("perplexity", "extrapolation", "stream")])
def test_the_same_settings_give_the_same_examples_and_another_seed_others(name, book):
    def examples(seed):
        options = {"seed": seed, "samples": 2}
        options |= {"lengths": (2500,)} if "lengths" in task_of(name).__dataclass_fields__ else {}
        return list(in_book(name, book, **options).examples(as_model(uniform)))

    assert examples(0) == examples(0)
    assert all(one != other for one, other in zip(examples(0), examples(1), strict=True))


def test_examples_do_not_depend_on_their_number():
    few, many = (list(Passkey((400,), samples=n, depths=(0.5,)).examples(as_model(uniform))) for n in (2, 5))
    assert few == many[:2]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (as_model(uniform, positions=300), "has 400 tokens, and uniform has 300 positions: give shorter texts"),
        (lambda tokens: torch.zeros(3), r"called with tokens \[1, \d+\] and returned \[3\]: expected logits"),
        ("nothing", "the model is str: expected a callable"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(model, message):
    with pytest.raises(ProblemError, match=message):
        evaluate(Passkey((400,), samples=1), model)


def test_lengths_without_room_are_refused():
    message = r"300 tokens has no room: without a haystack it has 3\d\d already\. Expected lengths of more than that"
    with pytest.raises(ProblemError, match=message):
        evaluate(Needle((300,), haystack="noise"), uniform)


def test_an_answer_with_the_probability_0_has_an_infinite_loss(tmp_path, book):
    def never(tokens):
        logits = torch.full((*tokens.shape, BYTES), -torch.inf)
        logits[..., 0] = 0
        return logits

    results = evaluate(Passkey((400,), (0.5,), samples=2), never, label="never", file=tmp_path / "results.jsonl")
    assert (results.score.value, results.cells()[0].nll) == (0, math.inf)
    assert "Infinity" not in (tmp_path / "results.jsonl").read_text()
    losses = evaluate(task_of("stream", lengths=(100,), samples=2, haystack=book), never)
    assert losses.perplexity.value == math.inf


@pytest.mark.parametrize("name", ["passkey", "documents"])
def test_logits_that_are_no_numbers_are_refused(name):
    with pytest.raises(ProblemError, match=r"the model's logits for the example .* are NaN"):
        evaluate(task_of(name, samples=1, depths=(0.5,)), lambda tokens: torch.full((*tokens.shape, BYTES), torch.nan))


def test_a_question_in_a_chat_ends_before_the_answer_begins():
    tokenizer = dataclasses.replace(Tokenizer.of(None), chat=("<user>", "<end><says>"))
    task = Passkey((500,), (0.5,), samples=1, chat=True)
    (example,) = task.examples(as_model(uniform, tokenizer))
    text = bytes(example.tokens).decode()
    assert text.startswith("<user>There is an important info")
    assert text.endswith("What is the pass key?<end><says>The pass key is")
    with pytest.raises(ProblemError, match="has no chat template"):
        evaluate(task, uniform)
