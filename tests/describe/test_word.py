"""Words as values: outlines and spellings."""

import torch
from hypothesis import given

from regard import Alibi, Bias, Causal, Documents, T5Bias, TensorBias, Tree, Where, Window
from regard.describe.tensors import derived
from regard.describe.word import Word, unspell
from tests.expressions import biases, masks


def holds_a_predicate(word: Word) -> bool:
    return isinstance(word, Where) or any(holds_a_predicate(p) for p in word.parts() if isinstance(p, Word))


@given(mask=masks(13, 13), bias=biases(13, 13))
def test_a_word_that_is_spelled_and_read_is_the_same_word(mask: Word, bias: Bias | None):
    for said in (mask, bias):
        if said is None or holds_a_predicate(said):
            continue
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        text = said.spell(tensors, numbers)
        assert unspell(text, tensors, numbers) == said
        assert [id(t) for t in tensors] == [id(t) for t in said.tensors()]


def test_a_spelling_by_hand():
    ids = torch.arange(3)
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    assert (Causal() & Documents(ids)).spell(tensors, numbers) == '["And", ["Causal"], ["Documents", {"tensor": 0}]]'
    assert tensors[0] is ids
    assert Tree([-1, 0]).spell(tensors, numbers) == '["Tree", {"tuple": [{"number": 0}, {"number": 1}]}, null]'
    assert numbers == [-1, 0]


def test_an_outline_keeps_no_tensor():
    outline = (Causal() & Documents(torch.arange(3))).outline()
    assert outline.text == "Causal() & Documents(ids=int64[3])"

    def holds(parts: tuple[object, ...]) -> bool:
        return any(isinstance(p, torch.Tensor) or holds(getattr(p, "parts", ())) for p in parts)

    assert not holds(outline.parts)


def test_functions_are_known_by_identity():
    def even(b, h, q, k):
        return (q + k) % 2 == 0

    assert Where(even) == Where(even)
    assert Where(even) != Where(lambda b, h, q, k: (q + k) % 2 == 0)
    assert repr(Where(even)) == "Where(even)"


def test_biases_are_written_as_they_are_said():
    assert repr(Alibi(4) + T5Bias(torch.zeros(32, 4), bidirectional=False)) == (
        "Alibi(heads=4) + T5Bias(table=float32[32, 4], bidirectional=False)"
    )
    assert repr(TensorBias(torch.zeros(2, 3))) == "TensorBias(tensor=float32[2, 3])"


def test_what_is_derived_of_a_tensor_is_made_once_and_again_when_it_changed():
    made: list[int] = []
    tensor = torch.zeros(3)

    def total(t: torch.Tensor) -> float:
        made.append(1)
        return float(t.sum())

    assert derived(tensor, "total", total) == derived(tensor, "total", total) == 0
    tensor += 1
    assert derived(tensor, "total", total) == 3
    assert len(made) == 2


def test_words_of_different_kinds_are_not_equal():
    assert Window(4) != Alibi(4)
