"""Trained attention as latent attention: exact where it can be, elsewhere as near as it can be."""

import math
from typing import Any, cast

import pytest
import torch
from torch import nn

from regard import Alibi, Causal, Documents
from regard.cache import KVCache
from regard.describe.position import Rope
from regard.describe.rope_scaling import Yarn
from regard.describe.score import Cosine
from regard.errors import ProblemError
from regard.extend import spec
from regard.nn import MultiHeadAttention
from regard.nn.rope_pairs import RopePairs
from regard.nn.to_latent import to_latent
from tests.own_rope import Mirrored

X = torch.randn(29, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotated": {"position": Rope(8)},
    "rotated, interleaved": {"position": Rope(8, interleaved=True)},
    "rotated in part": {"position": Rope(8, fraction=0.5)},
    "with a sink": {"position": Rope(8), "sink": True, "softcap": 4.0},
    "with biases": {"position": Rope(8), "qkv_bias": True, "out_bias": True},
    "with biases of keys alone in effect": {"qkv_bias": True, "scale": 0.2},
    "with an attention factor": {"position": Rope(8, scaling=Yarn(4.0, 16))},
    "multi-query": {"kv_heads": 1, "position": Rope(8)},
}


def made(kind: str = "plain", **more: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    given = {"kv_heads": 2, "head_dim": 8, "mask": Causal(), "dtype": torch.float64} | KINDS[kind] | more
    module = MultiHeadAttention(48, 6, **given)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return module


def turning(module: MultiHeadAttention) -> int:
    return 0 if module.position is None else cast(Rope, module.position.spec).rotated


def stacked(module: MultiHeadAttention) -> torch.Tensor:
    """Keys and values of a module whose keys do not turn."""
    return torch.cat([module.k_proj.weight, module.v_proj.weight]).detach()


# ---- exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [None, X])
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_rank_with_all_dims_turning_is_exact(kind, inputs):
    module = made(kind)
    rank = module.kv_heads * (16 - turning(module))
    converted = to_latent(module, rank, inputs=inputs)
    with torch.no_grad():
        torch.testing.assert_close(converted.module(X[None]), module(X[None]), rtol=1e-11, atol=1e-11)
    assert converted.error < 1e-14
    if inputs is not None:
        assert converted.input_error < 1e-14
        assert converted.output_error < 1e-13


@pytest.mark.parametrize("without", ["q", "k", "v", "qk", "qv", "kv", "ko", "kvo"])
@pytest.mark.parametrize("kind", ["plain", "rotated"])
def test_projections_of_which_some_have_biases_stay_exact(kind: str, without: str):
    """Whisper's keys have no bias, and its queries and values have one."""
    module = made(kind, qkv_bias=True, out_bias=True)
    for letter in without:
        getattr(module, f"{letter}_proj").bias = None
    converted = to_latent(module, module.kv_heads * (16 - turning(module)))
    with torch.no_grad():
        torch.testing.assert_close(converted.module(X[None]), module(X[None]), rtol=1e-11, atol=1e-11)


def test_biases_of_values_alone_are_refused_beside_a_sink():
    module = made(qkv_bias=True, sink=True)
    module.k_proj.register_parameter("bias", None)
    with pytest.raises(ProblemError, match="a sink and biases"):
        to_latent(module, 8)


def test_weights_of_low_rank_are_exact_at_it():
    module = made()
    with torch.no_grad():
        low = torch.randn(32, 5).double() @ torch.randn(5, 48).double()
        module.k_proj.weight.copy_(low[:16])
        module.v_proj.weight.copy_(low[16:])
        assert to_latent(module, 5).error < 1e-14
        assert to_latent(module, 4).error > 1e-3
        torch.testing.assert_close(to_latent(module, 5).module(X[None]), module(X[None]), rtol=1e-10, atol=1e-10)


def test_inputs_of_low_rank_are_exact_at_it_whatever_the_weights():
    module, x = made(), torch.randn(29, 5).double() @ torch.randn(5, 48).double()
    converted = to_latent(module, 5, inputs=x)
    assert converted.error > 0.3
    assert converted.input_error < 1e-13
    assert converted.output_error < 1e-12


def test_rank_that_inputs_leave_over_serves_the_weights():
    module, x = made(), torch.randn(29, 3).double() @ torch.randn(3, 48).double()
    converted = to_latent(module, 20, inputs=x)
    assert converted.output_error < 1e-12
    assert converted.error < 1.2 * to_latent(module, 20).error
    assert to_latent(module, 32, inputs=x).error < 1e-13


@pytest.mark.parametrize("kind", ["rotated", "with an attention factor"])
def test_dims_that_stop_turning_lose_their_rotation_and_nothing_else(kind):
    """With all tokens at one position a rotation changes no score."""
    module = made(kind)
    converted = to_latent(module, 24, rope_dim=4)
    at = torch.zeros(29, dtype=torch.int64)
    with torch.no_grad():
        torch.testing.assert_close(
            converted.module(X[None], positions=at), module(X[None], positions=at), rtol=1e-11, atol=1e-11
        )
        assert (converted.module(X[None]) - module(X[None])).abs().max() > 1e-3


def test_pairs_that_scores_do_not_depend_on_may_stop_turning():
    module = made("rotated")
    with torch.no_grad():
        for head, kept in ((0, (1, 3)), (1, (0, 2))):
            for pair in set(range(4)) - set(kept):
                module.k_proj.weight.view(2, 8, 48)[head, [pair, pair + 4]] = 0
    converted = to_latent(module, 24, rope_dim=4)
    assert converted.module.position.spec == RopePairs(Rope(8), ((1, 3), (0, 2)))
    with torch.no_grad():
        torch.testing.assert_close(converted.module(X[None]), module(X[None]), rtol=1e-11, atol=1e-11)


def test_pairs_are_chosen_by_the_queries_that_look_at_the_head():
    module = made("rotated")
    with torch.no_grad():
        queries = module.q_proj.weight.view(2, 3, 8, 48)
        queries[:, [0, 2]] = 0  # heads 1 and 4 are left
        queries[0][:, [2, 3, 6, 7]] = 0
        queries[1][:, [0, 1, 4, 5]] = 0
    assert to_latent(module, 24, rope_dim=4).module.position.spec == RopePairs(Rope(8), ((0, 1), (2, 3)))


def test_inputs_choose_the_pairs_that_they_reach():
    """Keys of pair 2 are large in the weights, and 0 for these inputs."""
    module, x = made("rotated"), X.clone()
    x[:, 0] = 0
    with torch.no_grad():
        module.k_proj.weight.view(2, 8, 48)[:, [2, 6]] = 0
        module.k_proj.weight.view(2, 8, 48)[:, [2, 6], 0] = 100
    blind, seeing = (cast(Any, to_latent(module, 8, 2, inputs=given)).module.position.spec for given in (None, x))
    assert all(2 in chosen for chosen in blind.pairs)
    assert not any(2 in chosen for chosen in seeing.pairs)


# ---- as near as it can be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 7, 31])
def test_the_error_is_the_discarded_singular_energy(rank):
    module = made()
    energy = torch.linalg.svdvals(stacked(module)).square()
    assert to_latent(module, rank).error == pytest.approx(math.sqrt(energy[rank:].sum() / energy.sum()), rel=1e-9)


@pytest.mark.parametrize("rank", [1, 7, 23])
def test_with_inputs_the_error_of_what_they_give_is_the_least_there_is(rank):
    module = made()
    given = to_latent(module, rank, inputs=X)
    energy = torch.linalg.svdvals(stacked(module) @ X.T).square()
    assert given.input_error == pytest.approx(math.sqrt(energy[rank:].sum() / energy.sum()), rel=1e-9)
    blind = to_latent(module, rank)
    assert given.error >= blind.error
    w = stacked(module)
    u = torch.linalg.svd(w).U[:, :rank]
    assert given.input_error <= ((w - u @ u.T @ w) @ X.T).norm() / (w @ X.T).norm()


def test_the_error_of_the_output_is_the_one_that_is_there():
    module = made("rotated").train()
    converted = to_latent(module, 11, rope_dim=4, inputs=X)
    with torch.no_grad():
        expected = module.eval()(X[None])
        gone = (converted.module.eval()(X[None]) - expected).norm() / expected.norm()
    assert converted.output_error == pytest.approx(gone.item())


def test_more_rank_is_nearer():
    errors = [cast(float, to_latent(made(), rank, inputs=X).output_error) for rank in (4, 12, 20, 28, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1 > errors[-1]


# ---- what is made ---------------------------------------------------------------------------------------------------


def test_the_cache_shrinks_to_the_latent_and_what_turns():
    module = made("rotated")
    latent, plain, small = to_latent(module, 7, rope_dim=2).module, KVCache(), KVCache()
    with torch.no_grad():
        module(X[None], cache=plain)
        latent(X[None], cache=small)
    assert (plain.bytes, small.bytes) == (29 * 2 * 2 * 8 * 8, 29 * (7 + 2 * 2) * 8)


def test_it_keeps_type_mode_mask_and_numbers_and_can_be_trained():
    module = made("with a sink", dtype=torch.float32, dropout=0.1).eval()
    latent = to_latent(module, 9).module
    assert not latent.training
    assert {weight.dtype for weight in latent.parameters()} == {torch.float32}
    assert (latent.softcap, latent.dropout, latent.mask.spec) == (4.0, 0.1, Causal())
    latent(X[None].float()).sum().backward()
    assert all(weight.grad is not None for weight in latent.parameters())


@pytest.mark.parametrize("trained", ["q_proj.weight", "k_proj.weight", "v_proj.bias", "o_proj.weight", "sinks"])
def test_what_is_trained_is_trained_afterwards_and_nothing_else(trained: str):
    more = {"qkv_bias": True, "out_bias": True} if trained == "v_proj.bias" else {"sink": True}
    module = made(position=Rope(8), **more)
    for name, weight in module.named_parameters():
        weight.requires_grad_(name == trained)
    latent = to_latent(module, 9, 4).module
    expected = {"k_proj.weight": ["kv_down.weight", "k_rope.weight", "k_up.weight"]}
    expected["v_proj.bias"] = ["kv_down.bias", "o_proj.bias"]
    found = [name for name, weight in latent.named_parameters() if weight.requires_grad]
    assert sorted(found) == sorted(expected.get(trained, [trained]))


@pytest.mark.parametrize(
    ("more", "asked", "message"),
    [
        ({"qk_norm": True}, {}, "the module has qk_norm="),
        ({"gate": True}, {}, "the module has gate="),
        ({"bias": Alibi(6)}, {}, "the module has bias="),
        ({"score": Cosine()}, {}, "the module has score="),
        ({"position": Mirrored(8)}, {}, r"position=Mirrored\(dim=8\) has a rotate of its own"),
        ({"context_dim": 31}, {}, "latent attention is self-attention"),
        ({"sink": True, "qkv_bias": True}, {}, "a sink and biases"),
        ({}, {"kv_rank": 33}, r"kv_rank=33: expected 1 to 32, the full rank of \[32, 48\]"),
        ({}, {"kv_rank": 0}, "kv_rank=0: expected 1 to 32"),
        ({"position": Rope(8)}, {"rope_dim": 3}, "rope_dim=3: expected an even number from 0 to the 8 rotated dims"),
        ({"position": Rope(8)}, {"rope_dim": 10}, "rope_dim=10: expected an even number"),
        ({}, {"rope_dim": 2}, "from 0 to the 0 rotated dims"),
        ({}, {"kv_rank": 8.0}, "kv_rank is 8.0: expected a whole number of dimensions"),
        ({"position": Rope(8)}, {"rope_dim": 4.0}, "rope_dim is 4.0: expected a whole number of dimensions"),
        ({}, {"inputs": [1.0]}, r"inputs is list: expected a tensor \[tokens, 48\]"),
        ({}, {"inputs": torch.zeros(3, 47)}, r"inputs have shape \[3, 47\]: expected \[tokens, 48\]"),
    ],
)
def test_what_has_no_place_in_latent_attention_is_refused(more, asked, message):
    with pytest.raises(ProblemError, match=message):
        to_latent(made(**more), **{"kv_rank": 8} | asked)


def test_biases_of_keys_under_a_softcap_are_refused():
    with pytest.raises(ProblemError, match="a softcap and biases of keys and values"):
        to_latent(MultiHeadAttention(32, 4, qkv_bias=True, softcap=1.0), 16)


@pytest.mark.parametrize("inputs", [torch.zeros(5, 32), torch.full((5, 32), torch.nan)])
def test_inputs_that_say_nothing_are_refused(inputs: torch.Tensor):
    with pytest.raises(ProblemError, match="all 0, or not finite"):
        to_latent(MultiHeadAttention(32, 4), 16, inputs=inputs)


@pytest.mark.parametrize("tokens", [11, 31, 101])
@pytest.mark.parametrize("rank", [23, 32])
def test_rank_beyond_that_of_the_weights_adds_no_error(tokens, rank):
    module = made()
    with torch.no_grad():
        for projection in (module.k_proj, module.v_proj):
            projection.weight[8:] = projection.weight[:8]  # equal heads: the rank of the weights is 16
    converted = to_latent(module, rank, inputs=torch.randn(tokens, 48, dtype=torch.float64))
    assert max(converted.error, converted.input_error, converted.output_error) < 1e-12
    torch.testing.assert_close(converted.module(X[None]), module(X[None]))


def test_weights_of_zeros_have_no_error():
    module = made()
    for projection in (module.k_proj, module.v_proj):
        nn.init.zeros_(projection.weight)
    assert to_latent(module, 7).error == 0
    converted = to_latent(module, 7, inputs=X)
    assert (converted.error, converted.input_error, converted.output_error) == (0, 0, 0)


def test_the_mask_belongs_to_the_module_that_was_made():
    module = made(mask=Documents(torch.arange(29) // 7))
    to_latent(module, 9).module.to("meta")
    assert module(X[None]).isfinite().all()


def test_the_default_device_changes_nothing():
    module = made("rotated in part")
    expected = to_latent(module, 9, 2, inputs=X).module
    with torch.device("meta"):
        found = to_latent(module, 9, 2, inputs=X).module
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


@spec
class LearnedRope(Rope):
    """RoPE whose frequencies are trained."""

    freqs: torch.Tensor | None = None

    def frequencies(self, tokens: Any = None) -> Any:
        return self.freqs


def test_the_new_module_shares_no_tensor_with_the_old_one():
    rope = LearnedRope(8, freqs=torch.tensor([1.0, 0.3, 0.1, 0.02], requires_grad=True))
    module = MultiHeadAttention(32, 4, position=rope, mask=Causal())
    converted = to_latent(module, 32).module
    assert {id(p) for p in converted.parameters()}.isdisjoint(id(p) for p in module.parameters())
