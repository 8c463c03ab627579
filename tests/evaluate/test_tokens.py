"""Texts to tokens and back: pieces of one text, bytes, the ends of an answer, the chat template."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from regard.errors import ProblemError
from regard.evaluate import Documents, KeyValues, Needle, Passkey, Question, Recall, Tokenizer, as_model, evaluate
from regard.evaluate.answer import answers, check_written
from regard.evaluate.harness import harness_config
from tests.cli import tiny

SIGNS = [*map(chr, range(33, 127)), "\n", "\N{LOWER ONE EIGHTH BLOCK}", "\N{LOWER ONE EIGHTH BLOCK}" * 2]


def characters(prefix=None, *, doubles=()):
    """A tokenizer of characters and of two spaces, as Llama 2's with a space before each text that it encodes.

    Args:
        prefix: what puts the space there: a normalizer, or a `Metaspace` of a scheme; None for no space.
    """
    signs = [*SIGNS, *doubles]
    space = SIGNS[-2]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {sign: 3 + i for i, sign in enumerate(signs)}
    merges = [(space, space), *((pair[0], pair[1]) for pair in doubles)]
    made = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True))
    if prefix in ("first", "always"):
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    else:
        before = [normalizers.Prepend(space)] if prefix else []
        made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", space)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.Fuse(), *strip])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def nothing(tokens):
    return torch.zeros(*tokens.shape, 200)


PREFIXES = ("normalizer", "first", "always")


@pytest.mark.parametrize("prefix", [None, *PREFIXES])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "task",
    [
        Needle((700,), (0.0, 0.5, 1.0), samples=1, haystack="noise"),
        Passkey((700,), (0.5,), samples=1),
        KeyValues((3,), (0.5,), samples=1),
        Documents((2,), (0.5,), samples=1),
    ],
    ids=lambda task: task.name,
)
def test_the_pieces_of_a_prompt_have_the_tokens_of_the_whole_text(task, chat, prefix):
    tokenizer = characters(prefix)
    tokenizer.chat_template = "{% for each in messages %}[{{ each.content }}]{% endfor %}says:"
    for example in dataclasses.replace(task, chat=chat).examples(as_model(nothing, tokenizer)):
        found = [*example.tokens, *example.target]
        text = tokenizer.decode(found, skip_special_tokens=True)
        assert found == tokenizer(text, add_special_tokens=not chat)["input_ids"]
        assert not re.search("  | \n\n|says: ", text)  # no space was put before a piece


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_piece_that_begins_with_a_line_end_is_not_merged_with_what_is_before_it(prefix):
    plain, prefixed = (Tokenizer.of(characters(each, doubles=("\n\n",))) for each in (None, prefix))
    assert prefixed.encode_after("\nKey") == plain.encode("\nKey") == [plain.encode("\n")[0], *plain.encode("Key")]


@pytest.mark.parametrize(("prefix", "text"), [("normalizer", " 48"), ("first", "48"), ("always", "48")])
def test_a_text_that_follows_another_one_has_no_space_before_it(prefix, text):
    plain, prefixed = (Tokenizer.of(characters(each)) for each in (None, prefix))
    assert prefixed.encode_after(text) == plain.encode_after(text) == plain.encode(text) != prefixed.encode(text)


def test_the_digest_of_a_tokenizer_that_puts_no_space_before_a_text_is_what_it_was():
    found = [Tokenizer.of(each).digest() for each in (None, characters(), tiny.byte_level())]
    assert found == ["c91bde9f4fc1dd35", "892a770ea545c422", "59c79c2035b2693e"]


@pytest.mark.parametrize("change", ["truncation", "padding"])
def test_truncation_and_padding_of_a_tokenizer_leave_texts_as_they_are(change):
    plain, changed = (FastTokenizer.from_str(characters().backend_tokenizer.to_str()) for _ in range(2))
    if change == "truncation":
        changed.enable_truncation(5)
    else:
        changed.enable_padding(length=64)
    found, expected = Tokenizer.of(changed), Tokenizer.of(plain)
    assert found.encode("Call me Ishmael") == expected.encode("Call me Ishmael")
    assert found.digest() == expected.digest()
    assert getattr(changed, change) is not None  # the tokenizer of the user is as it was


def test_the_special_tokens_before_a_text_are_those_of_transformers():
    whole = characters()
    assert Tokenizer.of(whole.backend_tokenizer).start == Tokenizer.of(whole).start == (1,)
    whole.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert Tokenizer.of(whole.backend_tokenizer).start == (1,)


def test_a_tokenizer_that_refuses_a_letter_has_no_special_tokens_before_a_text():
    assert Tokenizer.of(FastTokenizer(models.WordLevel({"a": 0}))).start == ()


OF_PARTS = (
    "{% for each in messages %}[{% for part in each.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}]{% endfor %}says:"
)
"""As SmolVLM's template, whose messages are lists of texts and images."""


FIRST_PART = "[{{ (messages[0].content | selectattr('type', 'equalto', 'text') | list)[0].text }}]says:"
REFUSES_A_TEXT = "{% if messages[0].content is string %}{{ raise_exception('no parts') }}{% endif %}" + OF_PARTS


@pytest.mark.parametrize("template", [OF_PARTS, FIRST_PART, REFUSES_A_TEXT])
def test_a_template_for_texts_and_images_gets_the_question_as_a_part(template):
    tokenizer = characters()
    tokenizer.chat_template = template
    assert Tokenizer.of(tokenizer).chat == ("[", "]says:")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('system\n  first') }}", "chat template fails: system first. Leave --chat out"),
        ("{{ raise_exception('no ' ~ messages[0].content | length) }}", "chat template fails: no 1. Leave --chat out"),
        ("{{ raise_exception('no ' ~ (messages[0].content is string)) }}", "fails: no True. Leave --chat"),
        ({"tool_use": OF_PARTS}, "chat template fails: This model has multiple chat templates .*. Leave --chat out"),
    ],
)
def test_a_template_that_fails_ends_tasks_with_chat_alone(template, message):
    tokenizer, task = characters(), Passkey((700,), (0.5,), samples=1)
    tokenizer.chat_template = template
    assert len(list(task.examples(as_model(nothing, tokenizer)))) == 1
    with pytest.raises(ProblemError, match=message):
        list(dataclasses.replace(task, chat=True).examples(as_model(nothing, tokenizer)))


@pytest.mark.parametrize("template", ["says:", "{% for each in messages %}{{ each.content * 2 }}{% endfor %}says:"])
def test_a_template_without_one_question_is_no_template_for_a_chat(template):
    tokenizer, task = characters(), Passkey((700,), (0.5,), samples=1)
    tokenizer.chat_template = template
    assert len(list(task.examples(as_model(nothing, tokenizer)))) == 1
    with pytest.raises(ProblemError, match="no chat template that contains the question exactly once: leave --chat"):
        list(dataclasses.replace(task, chat=True).examples(as_model(nothing, tokenizer)))


def test_a_small_tokenizer_may_refuse_the_signs_by_which_pieces_are_measured():
    digits = SimpleNamespace(encode=lambda text: [int(sign) for sign in text], decode=str, vocab_size=10)
    assert Tokenizer.of(digits).encode_after("48") == [4, 8]


def test_tokens_beyond_the_bytes_are_shown_by_their_numbers():
    def last(tokens):
        return torch.zeros(*tokens.shape, 512).index_fill(-1, torch.tensor([511]), 1.0)

    results = evaluate(Recall(vocabulary=512, pairs=(4,), samples=1), last)
    assert {record["text"] for record in results.records} == {"<511>"}
    assert Tokenizer.of(None).decode([104, 195, 169, 256, 300, 33]) == "h\N{LATIN SMALL LETTER E WITH ACUTE}<256><300>!"


class Saying(LlamaForCausalLM):
    """A model that says these tokens, one by one."""

    def __init__(self, tokens):
        super().__init__(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=1, bos_token_id=None, eos_token_id=2))  # fmt: skip
        self.tokens = iter(tokens)

    def forward(self, tokens, **_):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits = torch.zeros(1, tokens.shape[1], 8)
        logits[0, -1, next(self.tokens)] = 1
        return SimpleNamespace(logits=logits)


WORDS = {"<unk>": 0, "Where?": 1, "<eos>": 2, "No.": 3, "<turn>": 4, "Paris": 5}


@pytest.mark.parametrize(
    ("ends", "text"), [(2, "No. <turn> Paris"), ([2, 4], "No."), (4, "No."), (None, "No. <turn> Paris")]
)
def test_an_answer_ends_where_the_generation_of_the_model_does(ends, text):
    made = FastTokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>")
    whole = Saying([0, 3, 4, 5])  # the first one after the context
    whole.generation_config.eos_token_id = ends
    question = Question("one", {}, (1,), (1,), (), ("Paris",), new_tokens=3)
    ((_, answer),) = answers(as_model(whole, tokenizer), [question])
    assert answer["text"] == text


def test_an_answer_may_be_as_the_tokenizer_writes_it():
    """WordPiece decodes "a-b" as "a - b"."""
    made = FastTokenizer(models.WordPiece({"[UNK]": 0, "Who?": 1, "Jean": 3, "-": 4, "Luc": 5, "No": 6}))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("-", "isolated")]
    )
    made.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    for tokens, score in (((3, 4, 5), 1), ((3, 5, 4), 0), ((6, 3, 4), 0)):
        question = Question("one", {}, (1,), (1,), (), ("Jean-Luc",), new_tokens=3)
        ((_, answer),) = answers(as_model(Saying([0, *tokens]), tokenizer), [question])
        assert answer["score"] == score
    assert Tokenizer.of(tokenizer).spelled("Jean-Luc") == "Jean - Luc"
    for unknown in ("Jean Picard", "Picard", "[UNK]s"):  # whose tokens decode to another text
        assert Tokenizer.of(tokenizer).spelled(unknown) == unknown


def test_unknown_tokens_are_not_written_as_an_answer():
    made = FastTokenizer(models.WordLevel({"[UNK]": 0, "Who?": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    question = Question("one", {}, (1,), (1,), (), ("Picard",), new_tokens=1)
    ((_, answer),) = answers(as_model(Saying([0, 0]), made), [question])
    assert (answer["text"], answer["score"]) == ("[UNK]", 0)


def words_of_noise():
    """A tokenizer of some words of Mohtashami's noise, which makes an unknown token of a number."""
    words = {"[UNK]": 0, "grass": 1, "is": 2, "green": 3, ".": 4, "pass": 5, "key": 6}
    made = FastTokenizer(models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def letters_alone():
    """A tokenizer of letters, which leaves digits out."""
    signs = {chr(code): code for code in range(128) if not chr(code).isdigit()}
    return FastTokenizer(models.BPE(vocab=signs, merges=[]))


@pytest.mark.parametrize("made", [words_of_noise, letters_alone])
def test_a_tokenizer_that_cannot_write_an_answer_is_refused(made, tmp_path):
    """A model that predicts nothing but unknown tokens would find every pass key."""
    model = as_model(lambda tokens: torch.eye(200)[torch.zeros_like(tokens)], made(), label="unknown")
    task = Passkey((300,), (0.5,), samples=1)
    for refused in (lambda: evaluate(task, model), lambda: harness_config(task, model, tmp_path)):
        with pytest.raises(ProblemError, match=r"makes .* of '\d{5}', an answer of the example 300/0.5/0"):
            refused()


def test_of_several_answers_the_tokenizer_writes_one():
    question = Question("one", {}, (1,), (1,), (), ("Paris", "7"), new_tokens=1, any_answer=True)
    model = as_model(nothing, letters_alone())
    check_written(model, question)
    with pytest.raises(ProblemError, match="makes ' ' of '7'"):
        check_written(model, dataclasses.replace(question, any_answer=False))


def test_bytes_have_no_end_tokens():
    assert as_model(Saying([])).tokenizer.end == ()


def test_a_prompt_for_the_harness_has_the_special_tokens_of_the_chat_template(tmp_path):
    tokenizer = characters()
    tokenizer.chat_template = "<s>{% for each in messages %}[{{ each.content }}]</s>{% endfor %}says"
    model = as_model(nothing, tokenizer)
    for chat, begin, end in ((True, "<s>[A special", "text?]</s>saysThe "), (False, "A special", "text? The ")):
        task = Needle((600,), (0.5,), samples=1, haystack="noise", chat=chat)
        harness_config(task, model, tmp_path)
        prompt = json.loads((tmp_path / "needle.jsonl").read_text())["prompt"]
        assert prompt.startswith(begin)
        assert end in prompt
        (example,) = task.examples(model)
        assert tokenizer(prompt, add_special_tokens=not chat)["input_ids"] == list(example.tokens)
