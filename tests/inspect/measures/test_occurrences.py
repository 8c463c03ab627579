"""The blocks of recurring tokens hold every pair once, however often a token occurs."""

from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.inspect.measures.induction import matches, occurrences


def by_comparing(tokens, shift):
    """Every pair (i, j), j in M_i, in the order of i and j."""
    n = len(tokens)
    return [(i, j) for i in range(n) for j in range(i + 1) if 0 <= j - shift < i and tokens[j - shift] == tokens[i]]


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(-3, 5))
def test_matches_are_those_found_by_comparing(tokens, shift):
    i, j = matches(torch.tensor(tokens, dtype=torch.int64), shift)
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == by_comparing(tokens, shift)


@pytest.mark.parametrize("largest", [2, 4, 64])
def test_frequent_tokens_are_cut_into_blocks(monkeypatch, largest):
    monkeypatch.setattr(import_module("regard.inspect.measures.induction"), "LARGEST", largest)
    torch.manual_seed(0)
    tokens = torch.randint(3, (101,))
    i, j = matches(tokens, 1)
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == by_comparing(tokens.tolist(), 1)
    assert max(blocks.size for blocks in occurrences(tokens)) <= largest


def test_a_token_of_ten_thousand_costs_little_more_than_its_pairs():
    cells = sum(len(blocks.spans) * blocks.size**2 for blocks in occurrences(torch.zeros(10_000, dtype=torch.int64)))
    assert cells < 1.02 * 10_000 * 10_000 / 2


def test_nothing_recurs_in_nothing():
    assert occurrences(torch.arange(5)) == []
    assert occurrences(torch.empty(0, dtype=torch.int64)) == []
