"""Counts of heads: the published formulas, published models, and what makes no sense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import ProblemError
from regard.describe.heads import Heads, LatentHeads

counts = st.integers(1, 13)


@given(group=counts, kv_heads=counts, head_dim=counts)
def test_a_head_belongs_to_the_kind_that_its_key_heads_make(group: int, kv_heads: int, head_dim: int):
    heads = Heads(group * kv_heads, kv_heads, head_dim)
    assert heads.group == group
    assert heads.kind == ("MHA" if group == 1 else "MQA" if kv_heads == 1 else "GQA")


@given(heads=counts, head_dim=counts)
def test_parameters_are_those_of_the_papers(heads: int, head_dim: int):
    d = heads * head_dim
    assert Heads(heads, qk_dim=head_dim).parameters(d) == 4 * d**2
    assert Heads(heads, qk_dim=head_dim).parameters(d, qkv_bias=True, out_bias=True) == 4 * d**2 + 4 * d
    assert Heads(heads, 1, head_dim).parameters(d) == d**2 + 2 * d * (d // heads) + d**2


@given(st.data())
def test_parameters_are_counted_matrix_by_matrix(data: st.DataObject):
    group, kv_heads, qk_dim, v_dim, d, c = (data.draw(counts) for _ in range(6))
    heads = group * kv_heads
    shapes = [(heads * qk_dim, d), (kv_heads * qk_dim, c), (kv_heads * v_dim, c), (d, heads * v_dim)]
    found = Heads(heads, kv_heads, qk_dim, v_dim)
    assert found.parameters(d, context_dim=c) == sum(a * b for a, b in shapes)
    biased = found.parameters(d, qkv_bias=True, out_bias=True, context_dim=c)
    assert biased - found.parameters(d, context_dim=c) == sum(a for a, _ in shapes)


def test_published_models_have_their_published_numbers():
    """Cached bytes of two-byte numbers per token, in all layers."""
    assert 2 * 32 * Heads(32, qk_dim=128).cache_elements() == 524_288  # Llama 2 7B
    assert 2 * 32 * Heads(32, 8, 128).cache_elements() == 131_072  # Llama 3.1 8B
    assert 2 * 32 * Heads(71, 1, 64).cache_elements() == 8_192  # Falcon 7B
    deepseek_v3 = LatentHeads(128, 1536, 512, 128, 64, 128)
    assert 2 * 61 * deepseek_v3.cache_elements() == 70_272
    assert deepseek_v3.cache_elements(tokens=7) == 7 * 576
    assert (deepseek_v3.kind, deepseek_v3.group, deepseek_v3.qk_dim) == ("MLA", 128, 192)


@pytest.mark.parametrize("q_rank", [None, 7])
def test_latent_parameters_are_counted_matrix_by_matrix(q_rank: int | None):
    """The symbols of DeepSeek-V2, §2.1: W^DQ, W^UQ, W^QR, W^DKV, W^KR, W^UK, W^UV, W^O."""
    d, heads, kv_rank, nope, rope, v = 23, 3, 5, 11, 2, 13
    source = d if q_rank is None else q_rank
    matrices = [] if q_rank is None else [(q_rank, d)]
    matrices += [(heads * nope, source), (heads * rope, source), (kv_rank, d), (rope, d)]
    matrices += [(heads * nope, kv_rank), (heads * v, kv_rank), (d, heads * v)]
    found = LatentHeads(heads, q_rank, kv_rank, nope, rope, v)
    weights = found.parameters(d, norms=False)
    assert weights == sum(a * b for a, b in matrices)
    assert found.parameters(d) == weights + kv_rank + (q_rank or 0)
    biased = found.parameters(d, qkv_bias=True, out_bias=True, norms=False)
    assert biased - weights == kv_rank + rope + (q_rank or 0) + d


def test_heads_that_do_not_divide_into_groups_make_no_sense():
    with pytest.raises(ProblemError, match=r"heads=7, kv_heads=3\).*whole multiple.*7 / 3"):
        Heads(7, 3, 5)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
def test_a_count_is_an_int_of_at_least_one(wrong: object):
    with pytest.raises(ProblemError, match=r"kv_heads=.*(at least 1|whole number)"):
        Heads(4, wrong, 5)
    with pytest.raises(ProblemError, match=r"q_rank=.*(at least 1|whole number)"):
        LatentHeads(4, wrong, 4, 4, 4, 4)


def test_the_width_of_a_head_is_required():
    with pytest.raises(ProblemError, match=r"Heads\(qk_dim=0\).*at least 1"):
        Heads(4)


def test_heads_are_values():
    assert Heads(4, 2, 8) == Heads(4, 2, 8)
    assert {Heads(4, 2, 8), Heads(4, 2, 8)} == {Heads(4, 2, 8)}
    assert repr(Heads(4, qk_dim=8)) == "Heads(heads=4, qk_dim=8)"
