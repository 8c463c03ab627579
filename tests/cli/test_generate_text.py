"""Tokens as text, piece by piece: what is given out is the text that all tokens make, as soon as it is certain."""

import random

import pytest

from regard.cli.text_stream import FAR, TextStream
from tests.cli import tiny


def streamed(tokenizer, tokens, before=(), stops=()):
    """(the pieces, one for each token and what came at the end; the stream)."""
    stream = TextStream(tokenizer, before, stops)
    pieces = [stream.put(token) for token in tokens]
    return [*pieces, stream.end()], stream


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


BYTES = tiny.byte_level(("Ġ", "a"), ("Ã", "©"))
TEXTS = ["a café, au lait", "日本語 🙂👍🏽 a", "line\nline\t\n\n a", "été \u200d e\u0301 é", "é", " a", "€uro"]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_given_out_is_the_text(text):
    pieces, stream = streamed(BYTES, ids(BYTES, text))
    assert "".join(pieces) == stream.text == text


def test_a_character_comes_when_its_last_byte_does():
    pieces, _ = streamed(BYTES, ids(BYTES, "x€🙂!"))
    assert pieces == ["x", "", "", "€", "", "", "", "🙂", "!", ""]


def test_text_before_an_unfinished_character_does_not_wait():
    tokenizer = tiny.byte_level(("x", "æ"))  # the first byte of 日 merged with the letter before it
    pieces, _ = streamed(tokenizer, ids(tokenizer, "x日"))
    assert pieces == ["x", "", "日", ""]


@pytest.mark.parametrize("seed", range(7))
def test_bytes_that_are_no_text_read_as_they_do_in_one_piece(seed):
    tokens = random.Random(seed).choices(range(256), k=211)
    pieces, stream = streamed(BYTES, tokens)
    whole = BYTES.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) == stream.text == whole
    assert sum(map(bool, pieces[:-1])) > 100  # and not all at the end


def test_bytes_without_an_end_do_not_wait_for_ever():
    pieces, _ = streamed(BYTES, ids(BYTES, "ü")[:1] * (3 * FAR))
    assert "".join(pieces) == "\ufffd" * (3 * FAR)
    assert pieces[FAR - 1]


@pytest.mark.parametrize("text", ["caf au lait", "cafés", "caf 日本 au", "é au", "s au laits"])
def test_words_that_carry_their_space(text):
    tokenizer = tiny.sentence_piece()
    tokens = ids(tokenizer, text)
    assert "".join(streamed(tokenizer, tokens)[0]) == tokenizer.decode(tokens) == text


def test_the_first_word_after_a_prompt_keeps_its_space():
    tokenizer = tiny.sentence_piece()
    before, after = ids(tokenizer, "caf"), ids(tokenizer, "au lait")
    assert "".join(streamed(tokenizer, after, before)[0]) == " au lait"
    assert "".join(streamed(tokenizer, after)[0]) == "au lait"


@pytest.mark.parametrize("prompt", ["日本日本日本", "日本日本ü", "日本日本üü", "🙂🙂"])
def test_a_prompt_that_ends_in_bytes_does_not_spoil_what_follows(prompt):
    tokenizer = tiny.sentence_piece()
    assert "".join(streamed(tokenizer, ids(tokenizer, "日 au")[1:], ids(tokenizer, prompt))[0]) == "日 au"


def test_a_token_without_text_takes_no_space_from_the_word_after_it():
    tokenizer = tiny.sentence_piece()
    tokens = [*ids(tokenizer, "caf"), tokenizer.eos_token_id, *ids(tokenizer, "au")]
    assert "".join(streamed(tokenizer, tokens)[0]) == "caf au"


def test_pieces_that_belong_to_the_word_before():
    tokenizer = tiny.word_piece()
    tokens = tokenizer.convert_tokens_to_ids(["play", "##ing", "##s", "a", "game"])
    assert "".join(streamed(tokenizer, tokens)[0]) == tokenizer.decode(tokens) == "playings a game"


def test_tokens_that_stand_for_no_text_are_not_shown():
    end = BYTES.eos_token_id
    tokens = [end, *ids(BYTES, "a"), end, end, *ids(BYTES, " a"), end]
    assert "".join(streamed(BYTES, tokens)[0]) == "a a"


# ---- stops ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops", "given"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["four"], "one two three"),
        ("one twtwo", ["two"], "one tw"),
        ("aab", ["aaab"], "aab"),
        ("two", ["two"], ""),
        ("ä€ x", ["€"], "ä"),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("User: x", [": "], "User"),
        ("one tw", ["two"], "one tw"),
        ("éa", ["a", "é"], ""),
    ],
)
def test_text_ends_before_a_stop(text, stops, given):
    pieces, stream = streamed(BYTES, ids(BYTES, text), stops=stops)
    assert "".join(pieces) == stream.text == given
    assert stream.stopped == (given != text)


def test_of_two_stops_in_one_token_the_first_counts():
    tokenizer = tiny.byte_level(("a", "b"))
    assert "".join(streamed(tokenizer, ids(tokenizer, "xab"), stops=["b", "a"])[0]) == "x"


def test_what_may_become_a_stop_waits_and_nothing_else_does():
    pieces, _ = streamed(BYTES, ids(BYTES, "xyzxx"), stops=["xyw"])
    assert pieces == ["", "", "xyz", "", "x", "x"]
