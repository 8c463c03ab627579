"""Fewer key heads: what their weights are, and when nothing is lost."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.prune import l1_unstructured

from regard import Causal
from regard.describe.position import Rope
from regard.describe.score import Additive
from regard.errors import ProblemError, RefusalError
from regard.nn import MultiHeadAttention
from regard.nn.share_heads import share_heads, shared_rows


def made(kv_heads: int | None = 6, **more: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    module = MultiHeadAttention(31, 12, kv_heads=kv_heads, head_dim=8, dtype=torch.float64, mask=Causal(), **more)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return module


def equal_in_groups(module: MultiHeadAttention, groups: int) -> MultiHeadAttention:
    """The same with the key heads of each group made equal to its first."""
    with torch.no_grad():
        for projection in (module.k_proj, module.v_proj):
            for rows in projection.parameters():
                heads = rows.view(groups, module.kv_heads // groups, 8, -1)
                heads.copy_(heads[:, :1].clone())
    return module


X = torch.randn(2, 11, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotated, with biases": {"position": Rope(8), "qkv_bias": True, "out_bias": True},
    "normed keys, a gate and a sink": {"position": Rope(8), "qk_norm": True, "gate": True, "sink": True},
    "a context": {"context_dim": 31, "scale": 0.2, "softcap": 5.0},
}


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_equal_are_shared_exactly(kind, kv_heads):
    module = equal_in_groups(made(**KINDS[kind]), kv_heads)
    shared = share_heads(module, kv_heads)
    assert shared.kv_heads == shared.sizes.key_heads == kv_heads
    assert shared.k_proj.out_features == shared.k_proj.weight.shape[0] == 8 * kv_heads
    with torch.no_grad():
        torch.testing.assert_close(shared(X), module(X), rtol=1e-12, atol=1e-12)


def test_a_head_is_the_mean_of_those_that_it_replaces():
    rows = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [6.0, 0.0]])  # two heads of two rows
    assert shared_rows(rows, 2, 1).tolist() == [[2.0, 20.0], [4.0, 10.0]]
    assert shared_rows(rows, 4, 2).tolist() == [[1.5, 15.0], [4.5, 15.0]]
    assert shared_rows(rows, 4, 2, "first").tolist() == [[1.0, 10.0], [3.0, 30.0]]
    assert shared_rows(rows[:, 0], 4, 1).tolist() == [3.0]  # a bias


def test_keys_of_shared_heads_are_the_mean_of_keys_rotated_or_not():
    module = made(position=Rope(8), qkv_bias=True)
    shared, rope = share_heads(module, 2), Rope(8)

    def keys(m: MultiHeadAttention) -> torch.Tensor:
        return rope.rotate(m.k_proj(X).unflatten(2, (-1, 8)).transpose(1, 2), 5)

    torch.testing.assert_close(keys(shared), keys(module).unflatten(1, (2, 3)).mean(2), rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31), st.floats(-2.0, 2.0))
def test_no_head_is_nearer_to_its_group_than_the_mean(into, group, dim, seed, step):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(into * group * dim, 5, generator=generator, dtype=torch.float64)
    heads = rows.view(into, group, dim, 5)

    def squares(shared: torch.Tensor) -> float:
        return (heads - shared.view(into, 1, dim, 5)).square().sum().item()

    mean = shared_rows(rows, into * group, into)
    other = mean + step * torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    assert squares(mean) <= squares(other) + 1e-9
    assert squares(mean) <= squares(shared_rows(rows, into * group, into, "first")) + 1e-9


def test_random_heads_have_the_mean_and_deviation_of_the_old():
    rows = 3.0 + 0.5 * torch.randn(16 * 8, 101, generator=torch.Generator().manual_seed(0))
    drawn = [shared_rows(rows, 16, 4, "random", torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert drawn[0].mean().item() == pytest.approx(3.0, abs=0.05)
    assert drawn[0].std().item() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_all_else_is_kept_and_the_module_given_is_left_alone():
    module = made(**KINDS["normed keys, a gate and a sink"]).eval()
    module.v_proj.requires_grad_(requires_grad=False)
    before = copy.deepcopy(module.state_dict())
    shared = share_heads(module, 1)
    with torch.no_grad():
        shared.q_proj.weight.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())
    same = set(before) - {"q_proj.weight", "k_proj.weight", "v_proj.weight"}
    assert all(torch.equal(shared.state_dict()[name], before[name]) for name in same)
    assert not shared.training
    assert not shared.v_proj.weight.requires_grad
    assert shared.k_proj.weight.requires_grad
    assert (shared.position, shared.mask) != (None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_keep_their_type_and_are_rounded_once(dtype):
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    shared = shared_rows(rows, 3, 1)
    assert shared.dtype == dtype
    assert torch.equal(shared, rows.double().view(3, 3, 5).mean(0).to(dtype))


@pytest.mark.parametrize(
    ("kv_heads", "how", "message"),
    [
        (4, "mean", "6 key heads do not divide into 4 groups of one size: expected one of 1, 2, 3, 6"),
        (12, "mean", "kv_heads=12: the module has 6 key heads"),
        (0, "mean", "kv_heads=0: expected 1 or more"),
        ("2", "mean", "kv_heads is '2': expected a whole number of heads"),
        (None, "mean", "kv_heads is None: expected a whole number of heads"),
        (2, "median", "how='median': expected 'mean', 'first' or 'random'"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(kv_heads, how, message):
    with pytest.raises(ProblemError, match=message):
        share_heads(made(), kv_heads, how)


def test_projections_that_are_one_module_stay_one_and_are_pooled_once():
    module = made(kv_heads=None)
    module.v_proj = module.k_proj
    shared = share_heads(module, 6)
    assert shared.v_proj is shared.k_proj
    assert torch.equal(shared.k_proj.weight, shared_rows(module.k_proj.weight, 12, 6))
    assert shared(X).shape == X.shape


@pytest.mark.parametrize("how", ["mean", "random"])
def test_weights_that_are_tied_stay_tied(how):
    module = made()
    module.v_proj.weight = module.k_proj.weight
    shared = share_heads(module, 2, how)
    assert shared.v_proj.weight is shared.k_proj.weight


def test_queries_keep_their_heads_where_keys_are_computed_by_the_same_module():
    module = made(kv_heads=None)
    module.k_proj = module.q_proj
    shared = share_heads(module, 6)
    assert torch.equal(shared.q_proj.weight, module.q_proj.weight)
    assert torch.equal(shared.k_proj.weight, shared_rows(module.q_proj.weight, 12, 6))
    assert shared(X).shape == X.shape


def test_weights_that_are_computed_are_refused():
    module = made()
    torch.nn.utils.parametrizations.weight_norm(module.k_proj)
    with pytest.raises(RefusalError, match=r"k_proj has the parameters parametrizations\.weight\.original0.*remove"):
        share_heads(module, 2)
    torch.nn.utils.parametrize.remove_parametrizations(module.k_proj, "weight")
    assert share_heads(module, 2).kv_heads == 2


def test_a_query_weight_that_a_hook_computes_is_copied_with_the_hook():
    module = made()
    l1_unstructured(module.q_proj, "weight", 0.5)
    shared = share_heads(module, 3)
    with torch.no_grad():
        for each in (module, shared):
            each.q_proj.weight_orig.mul_(2)
        torch.testing.assert_close(share_heads(module, 3)(X), shared(X), rtol=0, atol=0)


def test_a_score_with_a_part_for_each_key_head_is_refused():
    each = Additive(torch.randn(5, 8), torch.randn(6, 5, 8), torch.randn(5))
    with pytest.raises(ProblemError, match=r"score has parts of its own for key heads.*w_k.* for 6 heads"):
        share_heads(made(score=each), 2)
    one = Additive(torch.randn(12, 5, 8), torch.randn(5, 8), torch.randn(12, 5))
    assert share_heads(made(score=one), 2)(X).shape == X.shape


def test_rows_that_are_no_heads_are_refused():
    with pytest.raises(ProblemError, match="7 rows do not divide into 2 heads"):
        shared_rows(torch.zeros(7, 3), 2, 1)


def test_a_count_in_a_tensor_is_an_int():
    assert type(share_heads(made(), torch.tensor(2)).kv_heads) is int


def test_random_heads_are_drawn_where_weights_are_pooled_whatever_the_default_device():
    with torch.device("meta"):
        shared = share_heads(made(device="cpu"), 2, "random")
    assert shared.k_proj.weight.isfinite().all()
