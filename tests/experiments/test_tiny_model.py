"""The training of the experiments: losses, batches, and steps that learn."""

import math
import sys
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import nn

from regard.errors import ProblemError
from regard.nn import Decoder
from tests.experiments.conftest import FOLDER


@pytest.fixture
def tiny(monkeypatch):
    """The module."""
    monkeypatch.syspath_prepend(FOLDER)
    yield import_module("tiny_model")
    sys.modules.pop("tiny_model", None)


def always(token):
    """A model that gives the token the probability 0.7, and two others 0.2 and 0.1."""
    row = torch.tensor([0.1, 0.2, 0.7]).roll(token - 2).log()
    return lambda tokens: row.expand(*tokens.shape, 3)


def test_losses_are_those_of_each_next_token(tiny):
    found = tiny.losses(always(2), torch.tensor([[0, 2, 1], [2, 0, 2]]))
    assert torch.allclose(found, -torch.tensor([[0.7, 0.2], [0.1, 0.7]]).log())


def test_accuracy_does_not_count_ignored_targets(tiny):
    targets = torch.tensor([[2, 0, tiny.IGNORE], [2, tiny.IGNORE, 2]])
    assert tiny.accuracy(always(2), (torch.zeros_like(targets), targets)) == 0.75


def test_a_batch_has_the_next_characters_as_targets(tiny):
    text = tiny.Text("", torch.arange(50), torch.arange(50, 100))
    tokens, targets = text.batch(7, 11, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (7, 11)
    assert torch.equal(targets, tokens + 1)
    assert targets.max() < 50
    passages = text.passages(3, 4)
    assert passages.shape == (3, 5)
    assert passages.min() >= 50


def test_training_learns_and_ignored_targets_teach_nothing(tiny):
    def batch(step):
        tokens = torch.randint(2, (16, 8), generator=torch.Generator().manual_seed(step))
        targets = 1 - tokens
        targets[:, ::2] = tiny.IGNORE
        return tokens, targets

    torch.manual_seed(0)
    model = Decoder(2, 16, layers=1, heads=2)
    found = tiny.train(model, batch, 60, rate=1e-2)
    assert len(found) == 60
    assert found[0] > 0.5
    assert found[-1] < 0.05
    assert not model.training
    assert tiny.accuracy(model, batch(1000)) == 1


def test_the_rate_rises_and_falls_to_zero(tiny, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self))[1]
    )
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    tiny.train(model, lambda step: (tokens, tokens), 20, rate=1.0)
    assert rates[:2] == [0.5, 1.0]
    assert all(a >= b for a, b in pairwise(rates[1:]))
    assert math.isclose(rates[-1], 0.5 * (1 + math.cos(math.pi * 17 / 18)))


def test_moby_dick_is_a_long_text_of_few_characters(tiny):
    try:
        text = tiny.moby_dick()
    except ProblemError as error:
        pytest.skip(str(error))
    assert len(text.training) > 1_000_000
    assert len(text.alphabet) < 100
    read = "".join(text.alphabet[i] for i in text.validation[-2000:])
    assert "rolled five thousand years ago" in read
