"""Repeated random tokens, and tokens as readers see them."""

from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from regard.errors import ProblemError
from regard.inspect.measures.stimulus import Jittered, Repeats, Walks, plain_tokens
from regard.inspect.surveying.prompt import readable


def test_a_block_of_different_tokens_is_repeated():
    tokens = Repeats().draw(list(range(10, 500)), 3, sequences=5)
    assert tokens.shape == (5, 101)
    assert tokens[:, 0].tolist() == [3] * 5
    blocks = tokens[:, 1:].unflatten(1, (4, 25))
    assert (blocks == blocks[:, :1]).all()
    assert all(len(set(block[0].tolist())) == 25 for block in blocks)
    assert len({tuple(block[0].tolist()) for block in blocks}) == 5


def test_the_same_seed_draws_the_same_and_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    first, again = (Repeats().draw(list(range(99)), None, 2, seed=7) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, Repeats().draw(list(range(99)), None, 2, seed=8))
    assert torch.equal(torch.get_rng_state(), before)


def test_jittered_repeats_come_back_at_every_distance():
    tokens = Jittered().draw(list(range(10, 500)), 3, sequences=200)
    assert tokens.shape == (200, 101)
    distances = set[int]()
    for row in tokens[:, 1:].tolist():
        firsts = [at for at, token in enumerate(row) if token == row[0]]  # a repetition begins
        lengths = [b - a for a, b in pairwise(firsts)]
        distances |= set(lengths)
        longest = max(lengths)
        assert len(set(row[firsts[lengths.index(longest)] :][:longest])) == longest
        for start, stop in pairwise(firsts):  # which is the beginning of the longest
            assert row[start:stop] == row[firsts[lengths.index(longest)] :][: stop - start]
    assert distances == set(range(15, 36))


@pytest.mark.parametrize(
    ("vocabulary", "context", "fits"),
    [
        (500, None, (15, 35, 4)),
        (500, 101, (15, 35, 4)),
        (500, 100, (15, 35, 3)),
        (500, 21, (4, 10, 2)),
        (6, 64, (2, 6, 4)),
        (1, 64, (1, 1, 4)),
    ],
)
def test_jittered_repeats_are_shortened_alike(vocabulary, context, fits):
    jittered = Jittered().fitting(vocabulary, context)
    assert (jittered.shortest, jittered.longest, jittered.times) == fits
    drawn = jittered.draw(list(range(vocabulary)), 0, 1)
    assert context is None or drawn.shape[1] <= context


def test_walks_go_from_a_token_to_its_successor_or_jump():
    tokens = Walks(length=2000).draw(list(range(10, 500)), 3, sequences=3)
    assert tokens.shape == (3, 2001)
    for row in tokens[:, 1:].tolist():
        assert len(set(row)) == 16
        followed = {token: [b for a, b in pairwise(row) if a == token] for token in set(row)}
        usual = {token: max(set(after), key=after.count) for token, after in followed.items()}
        assert sorted(usual.values()) == sorted(usual)  # a permutation
        kept = sum(usual[a] == b for a, b in pairwise(row)) / 1999
        assert kept == pytest.approx(0.75 + 0.25 / 16, abs=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Jittered(30, 20), r"Jittered\(shortest=30, longest=20, times=4\): expected 1 <= shortest <= longest"),
        (lambda: Jittered(0, 20), "expected 1 <= shortest"),
        (lambda: Jittered(times=0), "times of 1 or more"),
        (lambda: Repeats(0), r"Repeats\(period=0, times=4\): expected a period"),
        (lambda: Repeats(times=0), "expected a period and times of 1"),
        (lambda: Walks(states=0), "expected states"),
        (lambda: Walks(restart=1.5), "a restart from 0 to 1"),
        (lambda: Walks(length=0), "a length of 1 or more"),
    ],
)
def test_a_stimulus_that_cannot_be_drawn_is_refused(make, message):
    with pytest.raises(ProblemError, match=message):
        make()


@pytest.mark.parametrize("stimulus", [Repeats(), Jittered(), Walks()])
def test_all_stimuli_draw_the_same_for_the_same_seed(stimulus):
    first, again, other = (stimulus.draw(list(range(99)), None, 2, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    with pytest.raises(ProblemError, match="5 tokens to draw from: expected"):
        stimulus.draw(list(range(5)), None, 1)
    with pytest.raises(ProblemError, match="sequences is 0: expected a number of 1 or more"):
        stimulus.draw(list(range(99)), None, 0)


@pytest.mark.parametrize(
    ("vocabulary", "context", "fits"),
    [
        (500, None, (25, 4)),
        (500, 101, (25, 4)),
        (500, 100, (25, 3)),
        (500, 21, (10, 2)),
        (6, 64, (6, 4)),
        (1, 64, (1, 4)),
    ],
)
def test_a_short_context_or_small_vocabulary_shortens_the_stimulus(vocabulary, context, fits):
    repeats = Repeats().fitting(vocabulary, context)
    assert (repeats.period, repeats.times) == fits


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat sat on the mat, the cat sat on the hat\n"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_byte_level_tokens_read_as_text():
    tokenizer = byte_level()
    tokens = readable(tokenizer, tokenizer("<s>the cat\n sat")["input_ids"])
    assert "".join(tokens) == "<s>the cat\n sat"
    assert " cat" in tokens


def test_pieces_of_characters_show_their_bytes():
    tokenizer = byte_level()
    assert readable(tokenizer, tokenizer("€")["input_ids"]) == ("⋯", "⋯", "€")
    assert readable(tokenizer, tokenizer("€")["input_ids"][:2]) == ("⋯", "\\xe2\\x82")


def test_tokens_added_to_a_byte_level_vocabulary_are_text():
    tokenizer = byte_level()
    tokenizer.add_tokens(["café"])
    assert readable(tokenizer, tokenizer("the café")["input_ids"])[-1] == "café"


@pytest.mark.parametrize(
    ("piece", "seen"),
    [("▁the", " the"), ("<0x0A>", "\n"), ("<0xE2>", "\\xe2"), ("é", "é"), ("##", "##"), ("###", "###")],
)
def test_other_markers_read_as_text(piece, seen):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, piece: 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    assert readable(tokenizer, [1, 0]) == (seen, "[UNK]")


def test_the_marker_of_word_pieces_is_left_out():
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "walk": 1, "##ing": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    assert readable(tokenizer, [1, 2]) == ("walk", "ing")


def test_an_id_without_a_token_shows_nothing():
    assert readable(byte_level(), [10**6]) == ("",)


def test_random_tokens_are_neither_special_nor_the_most_common():
    tokenizer = byte_level()
    plain = plain_tokens(tokenizer, embeddings=10**6)
    ordinary = [i for i in range(len(tokenizer)) if i != tokenizer.bos_token_id]
    tenth = len(ordinary) // 10
    assert plain == ordinary[tenth:-tenth]
    assert max(plain_tokens(tokenizer, embeddings=40)) < 40
