"""The parts of experiments that are checked by their records alone otherwise: tasks, scores, and what is averaged."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from regard.evaluate import as_model
from regard.integrate import load as load_model
from regard.integrate import use_regard
from tests.cli import tiny


def generator():
    return torch.Generator().manual_seed(0)


def test_the_answers_of_look_ups_are_the_values_of_their_keys_in_order(load):
    names = load("heads")
    tokens, answers = names["batch"](3, 50, generator())
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        values, keys = row[:16], row[16:]
        assert sorted(values) == list(range(16))
        assert len(set(keys)) == 3
        assert answer == [values[key] for key in keys]


def test_one_head_with_weights_set_by_hand_makes_two_look_ups(load):
    names = load("heads")
    assert names["accuracy"](names["by_hand"](), names["batch"](2, 500, generator())) > 0.999
    embeddings, attention, read = (16 + 16 + 2 * 16) * 64, 4 * 64 * 64, 64 * 32 + 32
    sizes = {names["parameters"](names["LookUp"](heads, 2)) for heads in names["HEADS"]}
    assert sizes == {embeddings + attention + read}


def test_sequences_are_copied_forwards_or_backwards(load):
    tokens, targets = load("score_functions")["batch"](200, generator())
    for (direction, *source), target in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert target == (source[::-1] if direction else source)
    assert 70 < tokens[:, 0].sum() < 130


@pytest.mark.parametrize("kind", ["dot", "scaled dot", "bilinear", "additive"])
@torch.no_grad()
def test_each_score_is_its_formula(load, kind):
    names = load("score_functions")
    torch.manual_seed(0)
    model = names["Aligner"](kind, 8)
    q, k, v = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5, 4)
    w = list(model.w)
    scores = {
        "dot": lambda: (q @ w[0].T) @ (k @ w[1].T).T,
        "scaled dot": lambda: (q @ w[0].T) @ (k @ w[1].T).T / math.sqrt(8),
        "bilinear": lambda: q @ w[0] @ k.T,
        "additive": lambda: torch.tanh((q @ w[0].T)[:, None] + k @ w[1].T) @ model.v,
    }[kind]()
    found = names["compare"](model, *(t[None, None] for t in (q, k, v)))[0, 0]
    torch.testing.assert_close(found, scores.softmax(1) @ v, atol=1e-5, rtol=1e-5)


def uniform(tokens):
    return torch.zeros(*tokens.shape, 256)


def test_a_life_is_asked_for_by_its_position_in_one_text(load):
    lives = load("lost_in_the_middle")["Lives"]((5,), (0.0, 0.5, 1.0), 3, 0)
    questions = list(lives.examples(as_model(uniform)))
    assert [each.cell["depth"] for each in questions] == [0.0, 0.5, 1.0] * 3
    for number, one in enumerate(questions):
        text, asked = bytes(one.context).decode(), bytes(one.question).decode()
        (who,) = re.findall(r"was (\S+ \S+) born\?\nAnswer: \1 was born in$", asked)
        document = text.split("Document [")[1 + (0, 2, 4)[number % 3]]
        assert f"{who} was born in {one.answers[0]} " in document
        assert one.context == questions[number - number % 3].context
    assert len({each.context for each in questions}) == 3


def test_wrong_answers_of_the_first_document_are_counted(load):
    names = load("lost_in_the_middle")
    model, task = as_model(uniform), names["Lives"]((5,), (0.0, 1.0), 2, 0)
    one, _, other, last = task.examples(model)
    records = [
        {"example": one.name, "score": 1.0, "text": one.answers[0]},
        {"example": last.name, "score": 0.0, "text": f" {other.answers[0]}"},
        {"example": "5/1/0", "score": 0.0, "text": "Nowhere"},
    ]
    assert names["first_instead"](task, SimpleNamespace(records=records), model) == 0.5


def test_an_end_is_compared_with_the_middle_in_pairs(load):
    scores = np.array([[1.0, 0, 0, 0, 0, 0, 1], [1.0, 0, 1, 1, 1, 0, 0]])
    less = load("lost_in_the_middle")["less"]
    assert less(scores, 0)[0] == 0.5
    assert less(scores, -1) == (0.0, -1.0, 1.0)


def test_losses_are_averaged_over_equal_parts_of_a_text(load):
    names = load("sinks")
    records = [{"losses": [1.0, 3.0], "counts": [32, 16]}, {"losses": [5.0, 2.0], "counts": [16, 32]}]
    assert names["buckets"](records) == [1.0, 4.0, 2.0]
    assert names["by"]({"a": [9.0, 1.0, 2.0], "b": [0.0, 0.5, 1.5]}, "a", "b", 1)[0] == pytest.approx(math.exp(0.5))


@torch.no_grad()
def test_sinks_beside_the_window_are_the_plain_model_and_far_ones_are_not(load, tmp_path):
    tiny.save(tmp_path, max_position_embeddings=1024)
    model, _, _ = load_model(str(tmp_path))
    ids = torch.randint(0, 200, (2, 97), generator=generator())
    plain = F.cross_entropy(model(ids[:, :-1]).logits.mT, ids[:, 1:], reduction="none")[:, -48:]
    far_sinks = load("sinks")["far_sinks"]
    use_regard(model)
    near = far_sinks(model, ids, 4)
    assert near == pytest.approx(plain.reshape(-1, 16).mean(1).tolist(), abs=1e-4)
    assert max(abs(a - b) for a, b in zip(near, far_sinks(model, ids, 500), strict=True)) > 1e-4


def test_the_last_characters_are_counted_whatever_is_before_them(load):
    names, seen = load("length_generalisation"), []

    def model(tokens):
        seen.append(tokens.shape[1])
        logits = torch.zeros(*tokens.shape, 8)
        logits[:, :-32, 0] = 50  # what is not counted
        return logits

    passages = torch.randint(1, 8, (3, 129), generator=generator())
    assert [names["read"](model, passages, n) for n in (64, 128)] == [pytest.approx(math.log(8))] * 2
    assert seen == [64, 128]


@torch.no_grad()
def test_a_repair_changes_the_rotation_and_no_weights(load):
    names = load("length_generalisation")
    text = SimpleNamespace(alphabet="abcdefgh")
    torch.manual_seed(0)
    model, tokens = names["decoder"]("RoPE", text), torch.arange(40)[None] % 8
    same, other = (names["changed"](model, text, names["repair"]("linear", factor)) for factor in (1.0, 4.0))
    assert torch.equal(same(tokens), model(tokens))
    assert not torch.allclose(other(tokens), model(tokens))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert names["repair"]("window", 4.0) is None
