"""Settings that no text has, logits that mean nothing, files that are none, tokenizers of other packages."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, NemotronHConfig, NemotronHForCausalLM

from regard.cache import TOVA
from regard.errors import ProblemError
from regard.evaluate import (
    CacheOptions,
    Documents,
    Extrapolation,
    KeyValues,
    Needle,
    Passkey,
    Perplexity,
    Question,
    Recall,
    Stream,
    Tokenizer,
    as_model,
    evaluate,
    task_of,
)
from regard.evaluate.documents import read_questions
from regard.evaluate.harness import harness_config
from regard.nn import Decoder
from regard.storage.codec import Int8
from regard.storage.stored import Paged

BYTES = 256


def uniform(tokens):
    return torch.zeros(*tokens.shape, BYTES)


def filled(value):
    return lambda tokens: torch.full((*tokens.shape, BYTES), value)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "book.txt"
    file.write_text(" ".join(f"He saw {i} birds." for i in range(200)))
    return str(file)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Needle((400,), (0.5, 2.0)), r"depths has 2.0: expected numbers from 0 to 1"),
        (KeyValues((5,), (-0.5,)), r"depths has -0.5: expected numbers from 0 to 1"),
        (Documents((5,), (float("nan"),)), "depths has nan: expected numbers from 0 to 1"),
        (Recall(pairs=(4,), depths=(1.01,)), r"depths has 1.01: expected numbers from 0 to 1"),
        (Needle((), (0.5,)), r"lengths is \(\): expected one or more whole numbers from 1 on, such as \(512, 1024\)"),
        (Needle(400), "lengths is 400: expected one or more whole numbers"),  # type: ignore[arg-type]
        (Stream((-5,)), "lengths has -5: expected whole numbers from 1 on"),
        (Extrapolation(16, (0.5,)), "multiples has 0.5: expected whole numbers from 1 on"),  # type: ignore[arg-type]
        (KeyValues((0,)), "pairs has 0: expected whole numbers from 1 on"),
        (Extrapolation(16, (2, 1, 2)), "multiples has 2 more than once: expected each value once"),
        (Stream((50, 50)), "lengths has 50 more than once: expected each value once"),
        (Passkey(depths=(0.0, 0.5, 0)), "depths has 0 more than once: expected each value once"),
        (Needle((400,), ()), r"depths is \(\): expected one or more numbers from 0 to 1, such as \(0.0, 0.5, 1.0\)"),
        (Needle((400,), 0.5), "depths is 0.5: expected one or more numbers from 0 to 1"),  # type: ignore[arg-type]
        (Needle((400,), ("0.5",)), "depths has '0.5': expected numbers from 0 to 1"),  # type: ignore[arg-type]
        (Perplexity(context=64, stride=-1), "stride is -1: expected a whole number from 1 on, or 0 for that of the"),
        (Perplexity(context=2.5), "context is 2.5: expected a whole number from 1 on, or 0"),  # type: ignore[arg-type]
        (Extrapolation(-4), "trained is -4: expected a whole number from 1 on, or 0 for that of the model"),
        (Extrapolation(1.5), "trained is 1.5: expected a whole number from 1 on, or 0"),  # type: ignore[arg-type]
        (Recall(7.0), "vocabulary is 7.0: expected a whole number from 1 on"),  # type: ignore[arg-type]
        (Passkey(samples=0), "samples is 0: expected a whole number from 1 on"),
        (Needle(haystack=None), "haystack is None: expected a name or the path of a file"),  # type: ignore[arg-type]
        (Documents(questions=3), "questions is 3: expected a name or the path"),  # type: ignore[arg-type]
        (Documents((700,)), "there are 624 invented people and 700 documents: give fewer, or a file of questions"),
        ("needle", r"the task is str: expected a task with its settings, such as Needle\(\) or task_of\('needle'\)"),
        (Needle, r"the task is the class Needle: expected a task with its settings, such as Needle\(\)"),
    ],
)
def test_settings_that_no_text_has_are_refused(task, message):
    with pytest.raises(ProblemError, match=message):
        evaluate(task, uniform)


@pytest.mark.parametrize("name", [None, 3, ["needle"]])
def test_what_is_no_name_of_a_task_is_refused(name):
    with pytest.raises(ProblemError, match=r"^unknown task .*needle"):
        task_of(name)


@pytest.mark.parametrize("positions", [0, -1, "512", 2.5])
def test_positions_that_are_no_count_are_refused(positions):
    with pytest.raises(ProblemError, match=rf"positions is {positions!r}: expected a whole number from 1 on, or None"):
        evaluate(Passkey((400,), (0.5,), samples=1), uniform, positions=positions)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("int8", r"^cache is 'int8': expected None, or the options of one, such as CacheOptions\(codec=Int8\(\)\)\.$"),
        (CacheOptions, r"^cache is the class CacheOptions: expected None, or"),
        (CacheOptions(step=0), r"^CacheOptions\(step=0\): expected a whole number from 1 on, or None\.$"),
        (CacheOptions(step=1.5), r"^CacheOptions\(step=1\.5\): expected"),  # type: ignore[arg-type]
    ],
)
def test_options_of_a_cache_that_are_none_are_refused(cache, message):
    with pytest.raises(ProblemError, match=message):
        evaluate(Passkey((400,), (0.5,), samples=1), Decoder(256, 16, layers=1, heads=2), cache=cache)


def test_a_setting_that_the_task_does_not_have_is_refused_with_those_that_it_has():
    message = "the task stream has no depths, seed: expected lengths, samples, haystack."
    with pytest.raises(ProblemError, match=f"^{message}$"):
        task_of("stream", depths=(0.5,), samples=1, seed=3)


def test_files_of_a_task_may_be_paths(book, tmp_path):
    (tmp_path / "questions.jsonl").write_text(json.dumps(ASKED))
    for number, task in enumerate(
        (
            Needle((400,), (0.5,), samples=1, haystack=Path(book)),  # type: ignore[arg-type]
            Documents((1,), (0.5,), samples=1, questions=tmp_path / "questions.jsonl"),  # type: ignore[arg-type]
        )
    ):
        evaluate(task, uniform, file=tmp_path / f"{number}.jsonl")
        settings = evaluate(task, uniform, file=tmp_path / f"{number}.jsonl").settings  # continues
        assert book == settings.get("haystack", book)
        assert str(tmp_path / "questions.jsonl") == settings.get("questions", str(tmp_path / "questions.jsonl"))


@dataclass(frozen=True)
class Own:
    """A task of a user, whose settings have names of other tasks."""

    context: str = "A book about whales."
    questions: str = "Who?"
    haystack: tuple[str, ...] = ("A field of hay.",)
    depths: str = "all"
    lengths: float = 0.5
    seed: int = 0
    name: ClassVar[str] = "own"
    axes: ClassVar[tuple[str, ...]] = ()

    def examples(self, model):
        encode = model.tokenizer.encode
        yield Question("one", {}, tuple(encode(self.context)), tuple(encode(" Who?")), tuple(encode(" I")), ("I",))


def test_a_task_of_a_user_may_have_any_settings(tmp_path):
    task: Any = Own()
    assert len(evaluate(task, uniform).records) == 1
    assert harness_config(task, as_model(uniform), tmp_path)["task"] == "regard_own"


def test_answers_that_are_tokens_are_no_task_of_the_harness(tmp_path):
    with pytest.raises(ProblemError, match="the answers of recall are tokens: lm-evaluation-harness gets tasks with"):
        harness_config(Recall(pairs=(4,), samples=1), as_model(uniform), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_task_that_is_derived_from_one_of_regard_has_its_settings_checked():
    derived = dataclass(frozen=True)(type("Derived", (Passkey,), {"name": "derived"}))
    with pytest.raises(ProblemError, match="lengths has 0: expected whole numbers from 1 on"):
        evaluate(derived((0,)), uniform)


def test_a_file_without_questions_is_refused(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n\n")
    with pytest.raises(ProblemError, match=r"questions.jsonl has no questions: expected a JSON object with a question"):
        evaluate(Documents((5,), questions=str(file)), uniform)


ASKED = {
    "question": "Where was Ada born?",
    "answers": ["Paris"],
    "ctxs": [{"title": "Ada", "text": "Ada was born in Paris.", "isgold": True}],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": "Paris"}, "answers is 'Paris', no list of one or more texts that are not empty"),
        ({"answers": []}, r"answers is \[\], no list of one or more texts"),
        ({"answers": ["Paris", " "]}, r"answers is \['Paris', ' '\], no list of one or more texts"),
        ({"answers": ["Paris", 3]}, "3 is no text"),
        ({"question": ["Where?"]}, r"\['Where\?'\] is no text"),
        ({"ctxs": [{"title": None, "text": "", "isgold": True}]}, "None is no text"),
    ],
)
def test_a_question_without_texts_is_refused_by_its_line(change, message, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (ASKED, ASKED | change)))
    with pytest.raises(ProblemError, match=rf"questions.jsonl, line 2: expected a JSON object .*{message}"):
        evaluate(Documents((1,), (0.0,), samples=1, questions=str(file)), uniform)


def test_the_document_with_the_answer_is_the_gold_one_though_others_have_the_answer(tmp_path):
    documents = [
        {"title": title, "text": f"{title} of Paris.", "isgold": title == "Gold", "hasanswer": True}
        for title in ("First", "Gold", "Last")
    ]
    file, without = tmp_path / "questions.jsonl", [each | {"isgold": False} for each in documents]
    file.write_text("".join(json.dumps(ASKED | {"ctxs": each}) + "\n" for each in (documents, without)))
    assert [each.gold.title for each in read_questions(str(file))] == ["Gold", "First"]


def test_questions_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "questions.jsonl").write_text(json.dumps(ASKED), encoding="utf-8-sig")
    assert len(read_questions(str(tmp_path / "questions.jsonl"))) == 1


@pytest.mark.parametrize("count", [3, 40])
def test_a_long_answer_has_room_in_what_is_generated(count, tmp_path):
    answer = "a" * count
    (tmp_path / "questions.jsonl").write_text(json.dumps(ASKED | {"answers": ["b", answer]}))
    task = Documents((1,), (0.5,), samples=1, questions=str(tmp_path / "questions.jsonl"))
    (example,) = task.examples(as_model(uniform))

    def saying(tokens):
        """A space, and the answer."""
        token = ord("a") if tokens.shape[1] > len(example.tokens) else ord(" ")
        return torch.zeros(*tokens.shape, BYTES).index_fill(-1, torch.tensor([token]), 1.0)

    assert example.new_tokens == max(24, 1 + count + 8)
    assert evaluate(task, saying).score.value == 1


def test_a_line_of_questions_may_have_line_separators_of_unicode(tmp_path):
    file, separators = tmp_path / "questions.jsonl", "\u2028\u0085"
    with file.open("w", encoding="utf-8", newline="\r\n") as out:
        text = json.dumps(ASKED | {"question": f"Where?{separators}"}, ensure_ascii=False)
        out.write(f"{text}\n\n{text}\n")
    assert [each.question for each in read_questions(str(file))] == [f"Where?{separators}"] * 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (filled(torch.inf), "are infinite"),
        (filled(-torch.inf), "are infinite"),
        (lambda tokens: torch.zeros(*tokens.shape, 40), r"has the token \d+, and the model gave logits of 40 tokens"),
        (lambda tokens: torch.zeros(*tokens.shape, 0), r"returned \[1, \d+, 0\]: expected logits"),
        (lambda tokens: torch.zeros(*tokens.shape, BYTES, dtype=torch.complex64), "complex64: expected logits"),
    ],
    ids=["inf", "-inf", "few tokens", "no tokens", "complex"],
)
@pytest.mark.parametrize("is_question", [True, False])
def test_logits_that_mean_nothing_are_refused(model, message, is_question, book):
    task = Passkey((400,), (0.5,), samples=1) if is_question else Stream((50,), samples=1, haystack=book)
    with pytest.raises(ProblemError, match=message):
        evaluate(task, model)


def test_logits_of_half_precision_are_compared_in_full(book):
    half = evaluate(Stream((50,), samples=1, haystack=book), lambda tokens: uniform(tokens).bfloat16())
    assert half.perplexity.value == pytest.approx(BYTES)


def test_a_module_gets_tokens_on_its_own_device(book):
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, device="meta"))

        def forward(self, tokens):
            assert tokens.device == self.weight.device
            return torch.zeros(*tokens.shape, BYTES)

        def state_dict(self, *_, **__):
            return {}

    assert evaluate(Stream((50,), samples=1, haystack=book), Elsewhere()).perplexity.value == pytest.approx(BYTES)


def test_a_window_may_fill_all_learned_positions(book):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=BYTES, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config).eval()
    assert evaluate(Perplexity(lengths=(200,), haystack=book), model).loss.value < 7
    with pytest.raises(ProblemError, match=r"reads 65 tokens, and .* has 64 positions: give shorter texts, .*64"):
        evaluate(Stream((65,), samples=1, haystack=book), model)


def test_more_positions_than_the_table_has_are_refused():
    config = GPT2Config(vocab_size=BYTES, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config)
    assert [as_model(model, positions=given).positions for given in (None, 32, 64)] == [64, 32, 64]
    with pytest.raises(
        ProblemError, match=r"positions is 4,000, and GPT2LMHeadModel has a table of 64 .*: expected 64"
    ):
        as_model(model, positions=4000)


def test_a_model_that_learns_no_positions_reads_on_beyond_those_of_its_config(book):
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=BYTES, max_position_embeddings=64, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, layers_block_type=["attention"],
    )  # fmt: skip
    config.bos_token_id = config.eos_token_id = None
    for positions in (None, 4000):
        model = as_model(NemotronHForCausalLM(config).eval(), positions=positions)
        assert evaluate(Stream((80,), samples=1, haystack=book), model).loss.value < 7


def test_positions_may_be_an_integer_of_numpy_and_no_bool(book, tmp_path):
    model = as_model(uniform, positions=np.int64(64))
    found = evaluate(Stream((50,), samples=1, haystack=book), model, file=tmp_path / "results.jsonl")
    assert found.settings["positions"] == 64
    with pytest.raises(ProblemError, match="positions is True: expected a whole number"):
        as_model(uniform, positions=True)


@pytest.mark.parametrize(
    ("task", "advice"),
    [
        (Needle((400,), samples=1, haystack="noise"), "give shorter texts, such as --lengths 200"),
        (KeyValues((50,), samples=1), "give fewer --pairs"),
        (Documents((10,), samples=1), "give fewer --documents"),
    ],
)
def test_the_advice_for_a_long_example_names_an_option_of_its_task(task, advice):
    with pytest.raises(ProblemError, match=f"has 200 positions: {advice}"):
        evaluate(task, as_model(uniform, positions=200))


def test_the_advice_for_tokens_that_the_model_does_not_know_names_the_vocabulary():
    task = Recall(512, (4,), samples=1)
    for model in (as_model(uniform), dataclasses.replace(as_model(uniform), vocabulary=BYTES)):
        with pytest.raises(ProblemError, match=r"has the token \d+, and .*: give a smaller --vocabulary\."):
            evaluate(task, model)


def test_the_advice_for_a_short_text_names_samples_where_there_are_several(book):
    with pytest.raises(ProblemError, match=r"and 90,001 are needed: give a longer one, or ask for fewer tokens"):
        evaluate(Perplexity(context=64, lengths=(90000,), haystack=book), uniform)
    with pytest.raises(ProblemError, match=r"and 4 samples of 9,001 are 36,004: .* or ask for fewer --samples"):
        evaluate(Stream((9000,), haystack=book), uniform)


def test_a_passage_has_no_question_after_which_a_policy_evicts(book):
    model = dataclasses.replace(as_model(uniform), cache=CacheOptions(evict=TOVA(64), with_question=True))
    with pytest.raises(ProblemError, match="has no question after which a policy could evict: leave --with-q"):
        evaluate(Stream((100,), samples=1, haystack=book), model)


def test_a_cache_that_cannot_be_made_leaves_no_results(book, tmp_path):
    model = Decoder(BYTES, 16, 1, 2)
    cache = CacheOptions(Paged(1), Int8())
    with pytest.raises(ProblemError, match="a page must be a multiple of 16 tokens"):
        evaluate(Stream((50,), samples=1, haystack=book), model, cache=cache, file=tmp_path / "results.jsonl")
    assert not (tmp_path / "results.jsonl").exists()


def test_a_row_of_losses_has_its_own_tokens_alone(book):
    """The second half of a single window is hard."""

    def model(tokens):
        next_token = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        certain = torch.zeros(*tokens.shape, BYTES).scatter(-1, next_token[..., None], 50.0)
        certain[:, 200:] = 0
        return certain

    results = evaluate(Perplexity(context=401, lengths=(399,), haystack=book), model)
    rows = {row[0]: float(row[2]) for row in results.rows()[1:]}
    assert len(rows) == 9
    assert [loss < 0.1 for loss in rows.values()][:8] == [True] * 4 + [False] * 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such device here")
@pytest.mark.parametrize("name", ["/dev/full", "/dev/null"])
def test_a_device_is_no_file_for_results(name):
    with pytest.raises(ProblemError, match=f"{name} is no regular file"):
        evaluate(Passkey((400,), (0.5,), samples=1), uniform, file=name)


def test_scores_and_losses_are_named_where_there_are_others(book):
    losses = evaluate(Stream((50,), samples=1, haystack=book), uniform)
    scores = evaluate(Passkey((400,), (0.5,), samples=1), uniform)
    with pytest.raises(ProblemError, match="stream measures losses, no scores: see loss, losses and perplexity"):
        _ = losses.score
    with pytest.raises(ProblemError, match="passkey measures scores, no losses: see score, cells and along"):
        _ = scores.perplexity


def test_a_tokenizer_of_tokenizers_adds_no_special_tokens():
    made = FastTokenizer(BPE({"<s>": 0, "a": 1, "b": 2}, []))
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer.of(made)
    assert tokenizer.encode("ab") == [1, 2]
    assert tokenizer.decode([1, 2]).replace(" ", "") == "ab"
    assert tokenizer.vocabulary == 3


def test_a_vocabulary_size_may_be_a_method():
    class Pieces:
        """As the processor of sentencepiece has it."""

        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode())

        def vocab_size(self):
            return 256

    assert Tokenizer.of(Pieces()).vocabulary == 256
    assert Tokenizer.of(Pieces()).digest() == Tokenizer.of(Pieces()).digest()
