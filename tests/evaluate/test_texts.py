"""Texts of any script and length as haystacks: depths are met, and prompts of RULER are as long as their length."""

# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

import re
from pathlib import Path

import pytest
import torch

from regard.errors import ProblemError
from regard.evaluate import Needle, Tokenizer, as_model, evaluate, task_of
from regard.evaluate.corpus import text_of
from regard.evaluate.haystack import LONGEST, sentences
from regard.evaluate.prompts import MANY_ADJECTIVES, MANY_NOUNS

TEXTS = {
    "russian": " ".join(f"Он увидел {i} птиц над морем." for i in range(400)),
    "lower-case": " ".join(f"he saw {i} birds over the sea." for i in range(700)),
    "chinese": "".join(f"他看见了{i}只鸟。" for i in range(900)),
    "hindi": " ".join(f"उसने {i} पक्षी देखे।" for i in range(400)),
    "no sentences": " ".join(f"bird {i}" for i in range(2000)),
    "no words": "0123456789" * 2000,
}


@pytest.fixture(params=TEXTS)
def text(request, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXTS[request.param], encoding="utf-8")
    return str(file)


def model(tokens):
    return torch.zeros(*tokens.shape, 256)


def fours(text):
    """Four bytes are a token."""
    content = text.encode()
    return [int.from_bytes(content[i : i + 4], "big") for i in range(0, len(content), 4)]


def total(task, tokenizer=None):
    """The tokens of the only example, with those to generate."""
    (example,) = task.examples(as_model(model, tokenizer))
    return len(example.tokens) + example.new_tokens


def test_the_depth_is_where_the_needle_is_in_any_script(text):
    for example in Needle((6000,), (0.0, 0.25, 0.5, 0.75, 1.0), samples=1, haystack=text).examples(as_model(model)):
        prompt = bytes(example.tokens).decode(errors="replace").encode("utf-16-le")
        start, at, end = (prompt.index(part.encode("utf-16-le")) for part in (".\n", "One of the", "\nWhat is the"))
        assert (at - start) / (end - start - 140) == pytest.approx(example.cell["depth"], abs=0.05)


def test_a_needle_of_ruler_is_hidden_in_any_script(text):
    task = task_of("niah_multikey_1", lengths=(6000,), samples=1, haystack=text)
    assert 5800 < total(task) <= 6000


def test_the_sentences_of_a_text_of_capitals_and_full_stops_are_what_they_were(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text('He saw St. Ives, e.g. "three" birds… and one. Élan! "Who?" he said. 3 birds. Two.\n\n“So.” Yes.')
    found = ("He saw St.", 'Ives, e.g. "three" birds… and one. Élan!', '"Who?" he said. 3 birds.', "Two.", "“So.” Yes.")
    assert sentences(str(file)) == (found[0], "Ives, e.g.", '"three" birds… and one. Élan!', *found[2:])


def test_no_sentence_is_longer_than_the_longest_one_of_moby_dick(text):
    assert max(map(len, sentences(text))) <= LONGEST
    assert "".join(sentences(text)).replace(" ", "") == re.sub(r"\s", "", Path(text).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["niah_single_2", "niah_multikey_1", "niah_multivalue"])
@pytest.mark.parametrize("haystack", ["noise", None])
def test_a_short_book_is_repeated(name, haystack, tmp_path):
    if haystack is None:
        haystack = str(tmp_path / "text.txt")
        (tmp_path / "text.txt").write_text(" ".join(f"He saw {i} birds over the sea." for i in range(40)))
    assert 7800 < total(task_of(name, lengths=(8000,), samples=1, haystack=haystack)) <= 8000


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_needles_fill_lengths_for_which_the_keys_of_few_words_are_not_enough(name):
    task = task_of(name, lengths=(40000,), samples=1)
    assert 39000 < total(task, Tokenizer(fours, str)) <= 40000


def test_many_words_are_all_different():
    assert len({*MANY_ADJECTIVES, *MANY_NOUNS}) == 400
    assert len(MANY_ADJECTIVES) == len(MANY_NOUNS) == 200
    assert all(re.fullmatch("[a-z]{2,12}", word) for word in (*MANY_ADJECTIVES, *MANY_NOUNS))


def test_a_text_of_too_few_words_for_the_length_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(f"bird{a}{b}" for a in "abcde" for b in "abcdefghij"))
    task = task_of("cwe", lengths=(9000,), samples=1, haystack=str(tmp_path / "text.txt"))
    with pytest.raises(
        ProblemError, match=r"cwe has \d,\d{3} tokens at most, .* and is to have 9,000: give shorter --l"
    ):
        evaluate(task, model)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "book.txt").write_text("A text.", encoding="utf-8-sig")
    assert text_of(str(tmp_path / "book.txt")) == "A text."
