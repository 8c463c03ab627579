"""Counts of heads: their kinds, and what makes no sense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import ProblemError
from regard.describe.heads import Heads

counts = st.integers(1, 13)


@given(group=counts, kv_heads=counts, head_dim=counts)
def test_a_head_belongs_to_the_kind_that_its_key_heads_make(group: int, kv_heads: int, head_dim: int):
    heads = Heads(group * kv_heads, kv_heads, head_dim)
    assert heads.key_heads == kv_heads
    assert heads.kind == ("MHA" if group == 1 else "MQA" if kv_heads == 1 else "GQA")


def test_without_key_heads_there_is_one_for_each_query_head():
    assert (Heads(6, None, 4).key_heads, Heads(6, None, 4).kind) == (6, "MHA")


def test_heads_that_do_not_divide_into_groups_make_no_sense():
    with pytest.raises(ProblemError, match=r"heads=7, kv_heads=3\).*whole multiple.*7 / 3"):
        Heads(7, 3, 5)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
@pytest.mark.parametrize("name", ["heads", "kv_heads", "qk_dim"])
def test_a_count_is_an_int_of_at_least_one(name: str, wrong: object):
    with pytest.raises(ProblemError, match=rf"{name}=.*(at least 1|whole number)"):
        Heads(**{"heads": 4, "kv_heads": 2, "qk_dim": 8} | {name: wrong})


def test_heads_are_values():
    assert Heads(4, 2, 8) == Heads(4, 2, 8)
    assert {Heads(4, 2, 8), Heads(4, 2, 8)} == {Heads(4, 2, 8)}
    assert repr(Heads(4, 2, 8)) == "Heads(heads=4, kv_heads=2, qk_dim=8)"
