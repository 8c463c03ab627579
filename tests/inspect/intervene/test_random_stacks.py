"""Attention alone makes tokens alike, doubly exponentially; skip connections hold against it."""

import pytest
import torch

from regard.errors import ProblemError
from regard.inspect.intervene.rank_collapse import Stack, random_rank_collapse


def test_attention_alone_collapses_doubly_exponentially():
    found = random_rank_collapse(Stack(), layers=3).mean(1)
    assert found[1] > 0.7
    assert 1e-3 < found[2] < 0.1
    assert found[3] < 1e-6


def test_mlps_do_not_save_it_and_skips_do():
    stacks = Stack(), Stack(mlp=True), Stack(skip=True), Stack(skip=True, mlp=True)
    by = {str(stack): random_rank_collapse(stack, layers=12, draws=2).mean(1) for stack in stacks}
    assert by["attention + MLPs"][4] < 1e-9
    assert by["attention"][4] < 1e-9
    assert by["attention + skips"][1] > 0.95 > by["attention + skips"][12] > 0.1
    assert by["attention + skips + MLPs"][12] > 0.05


def test_random_mlps_do_not_even_slow_it_down():
    bare, mlps = (random_rank_collapse(stack, layers=3).mean(1) for stack in (Stack(), Stack(mlp=True)))
    assert (mlps[1:] < bare[1:]).all()


def test_the_same_seed_draws_the_same_stack():
    sizes = {"layers": 2, "tokens": 7, "d_model": 8, "heads": 2, "draws": 2}
    assert torch.equal(random_rank_collapse(Stack(norm=True), **sizes), random_rank_collapse(Stack(norm=True), **sizes))
    assert random_rank_collapse(Stack(norm=True), **sizes).shape == (3, 2)


@pytest.mark.parametrize("asked", [{"draws": 0}, {"layers": 0}, {"tokens": 0}])
def test_a_stack_has_tokens_layers_and_draws(asked):
    with pytest.raises(ProblemError, match="expected each to be 1 or more"):
        random_rank_collapse(Stack(), **asked)
