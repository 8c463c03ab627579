"""Latent attention: its two forms, its cache, what it costs, against the paper's equations written out."""

import cmath
import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import spectral_norm
from torch.nn.utils.prune import l1_unstructured
from torch.utils.flop_counter import FlopCounterMode

from regard import Causal, Window
from regard.cache import H2O, Int8, KVCache, Latent, Paged
from regard.calls import observe_calls
from regard.cost.model import Attention
from regard.cost.model import Latent as LatentSizes
from regard.cost.parameter_count import attention_parameters
from regard.describe.position import Rope
from regard.describe.rope_scaling import DynamicNTK, LongRope
from regard.errors import ProblemError
from regard.nn.latent import LatentAttention
from regard.nn.rope_pairs import RopePairs
from regard.nn.token_positions import tokens_at
from tests.integrate.quantised import quantise

SIZES: dict[str, Any] = {"kv_rank": 13, "nope_dim": 5, "rope_dim": 4, "v_dim": 7, "mask": Causal()}
KINDS: dict[str, dict[str, Any]] = {
    "as in the paper": {"q_rank": 11, "position": Rope(4, interleaved=True)},
    "queries made of x": {"position": Rope(4)},
    "without norms": {"q_rank": 11, "norm": False, "position": Rope(4, interleaved=True)},
    "with biases": {"q_rank": 11, "qkv_bias": True, "q_bias": True, "out_bias": True, "position": Rope(4)},
    "without a part with position": {"rope_dim": 0},
    "without a part without": {"nope_dim": 0, "position": Rope(4)},
    "fewer key heads": {"kv_heads": 3, "position": Rope(4)},
    "rotated keys per head": {"kv_heads": 3, "rope_heads": 3, "position": RopePairs(Rope(8), ((0, 1), (3, 0), (1, 2)))},
    "a sink and a softcap": {"sink": True, "softcap": 3.0, "scale": 0.5, "position": Rope(4)},
    "a window": {"mask": Causal() & Window(5), "position": Rope(4)},
}


def made(kind: str, dtype: torch.dtype = torch.float64, heads: int = 6, **more: Any) -> LatentAttention:
    torch.manual_seed(0)
    module = LatentAttention(31, heads, dtype=dtype, **(SIZES | KINDS[kind] | more))
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return module


def tokens(dtype: torch.dtype = torch.float64, count: int = 11) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, count, 31, dtype=dtype)


def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return x if norm is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def turned(x: torch.Tensor, t: int, rope: Rope | RopePairs | None, head: int) -> torch.Tensor:
    """One vector at position t; each of its pairs is a complex number that is multiplied with e^(i t f)."""
    if rope is None:
        return x
    d = len(x)
    if isinstance(rope, RopePairs):
        f = [10000.0 ** (-2 * pair / 8) for pair in rope.pairs[head]]
        places = [(2 * i, 2 * i + 1) for i in range(d // 2)]
    else:
        f = [10000.0 ** (-2 * i / d) for i in range(d // 2)]
        places = [(2 * i, 2 * i + 1) if rope.interleaved else (i, i + d // 2) for i in range(d // 2)]
    out = x.clone()
    for (a, b), angle in zip(places, f, strict=True):
        number = torch.complex(x[a], x[b]) * cmath.rect(1.0, t * angle)
        out[a], out[b] = number.real, number.imag
    return out


def written_out(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Equations 9 to 19 of arXiv:2405.04434, token by token and head by head."""
    batch, n, _ = x.shape
    rope: Any = None if m.position is None else m.position.spec
    window = 5 if "Window" in repr(m.mask) else n
    scale = (m.nope_dim + m.rope_dim) ** -0.5 if m.scale is None else m.scale
    out = torch.zeros(batch, n, m.heads, m.v_dim, dtype=x.dtype)
    for b in range(batch):
        latent = [rms(m.kv_down(x[b, t]), m.kv_norm) for t in range(n)]
        queries = [m.q_proj(x[b, t]) if m.q_proj else m.q_up(rms(m.q_down(x[b, t]), m.q_norm)) for t in range(n)]
        for h in range(m.heads):
            g = h * m.kv_heads // m.heads
            r = g * m.rope_heads // m.kv_heads
            keys = []
            for t in range(n):
                nope = m.k_up(latent[t]).view(m.kv_heads, -1)[g] if m.nope_dim else x.new_zeros(0)
                shared = (
                    turned(m.k_rope(x[b, t]).view(m.rope_heads, -1)[r], t, rope, r) if m.rope_dim else x.new_zeros(0)
                )
                keys.append(torch.cat([nope, shared]))
            for t in range(n):
                q = queries[t].view(m.heads, -1)[h]
                q = torch.cat([q[: m.nope_dim], turned(q[m.nope_dim :], t, rope, r)]) if m.rope_dim else q
                seen = range(max(0, t - window + 1), t + 1)
                scores = torch.stack([q @ keys[s] * scale for s in seen])
                scores = scores if m.softcap is None else m.softcap * (scores / m.softcap).tanh()
                top = scores.exp()
                weights = top / (top.sum() + (0 if m.sinks is None else m.sinks[h].exp()))
                values = torch.stack([m.v_up(latent[s]).view(m.kv_heads, -1)[g] for s in seen])
                out[b, t, h] = weights @ values
    return m.o_proj(out.flatten(2))


# ---- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k_up", "v_up"])
def test_hooks_that_change_what_is_expanded_act_on_decoded_tokens_too(name: str):
    m = made("queries made of x")
    up = getattr(m, name)
    up.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    up.register_forward_hook(lambda _, inputs, out: out - 1)
    x, cache = tokens(), KVCache()
    with torch.no_grad():
        steps = torch.cat([m(some, cache=cache) for some in x.split([8, 1, 1, 1], 1)], 1)
        torch.testing.assert_close(steps, m(x))


@pytest.mark.parametrize("absorbed", [False, True, None])
@pytest.mark.parametrize("kind", KINDS)
def test_either_form_is_the_papers_equations(kind, absorbed):
    module, x = made(kind), tokens(count=7)
    with torch.no_grad():
        torch.testing.assert_close(module(x, absorbed=absorbed), written_out(module, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_two_forms_give_the_same(kind, dtype, error):
    module, x = made(kind, dtype), tokens(dtype)
    with torch.no_grad():
        torch.testing.assert_close(module(x, absorbed=True), module(x, absorbed=False), rtol=error, atol=error)


@pytest.mark.parametrize("absorbed", [False, True, None])
@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_with_a_cache_is_the_whole_at_once(kind, absorbed):
    module, x, cache = made(kind), tokens(), KVCache()
    with torch.no_grad():
        steps = [module(part, cache=cache, absorbed=absorbed) for part in x.split([4, 1, 1, 3, 2], 1)]
        torch.testing.assert_close(torch.cat(steps, 1), module(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_holds_latents_and_rotated_keys_and_nothing_expanded(kind):
    module, cache = made(kind), KVCache()
    with torch.no_grad():
        module(tokens(), cache=cache)
    assert cache.tokens == 11
    assert cache.bytes == 2 * 11 * (13 + module.rope_heads * module.rope_dim) * 8


def test_what_is_cached_is_not_copied_when_a_step_reads_it():
    """Keys and values of the absorbed form are the cache's own memory."""
    module, cache, seen = made("as in the paper"), KVCache(), []
    with torch.no_grad(), observe_calls(seen.append):
        module(tokens(), cache=cache)
        module(tokens(count=1), cache=cache, absorbed=True)
    stored, _ = cache.append(torch.empty(2, 1, 0, 17).double(), torch.empty(2, 1, 0, 0).double())
    assert isinstance(stored, torch.Tensor)
    assert seen[1].k.data_ptr() == seen[1].v.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("absorbed", [False, True])
def test_positions_may_be_given(absorbed):
    module, x = made("as in the paper"), tokens()
    with torch.no_grad():
        plain = module(x, absorbed=absorbed)
        shifted = module(x, absorbed=absorbed, positions=7)
        per_row = module(x, absorbed=absorbed, positions=torch.stack([torch.arange(11), torch.arange(11) + 100]))
        spread = module(x, absorbed=absorbed, positions=3 * torch.arange(11))
    torch.testing.assert_close(shifted, plain, rtol=1e-10, atol=1e-10)  # RoPE knows distances alone
    torch.testing.assert_close(per_row, plain, rtol=1e-10, atol=1e-10)
    assert (spread - plain).abs().max() > 1e-3


def test_the_mask_of_a_call_joins_the_modules_own():
    x = tokens()
    with torch.no_grad():
        both = made("queries made of x")(x, mask=Window(5))
        torch.testing.assert_close(both, made("queries made of x", mask=Causal() & Window(5))(x))


def test_weights_are_dropped_in_training_only():
    module, x = made("queries made of x", dropout=0.5), tokens()
    torch.manual_seed(3)
    assert not torch.equal(module(x), module.eval()(x))
    torch.testing.assert_close(module(x), made("queries made of x")(x))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_sizes_give_the_same_in_both_forms(data):
    draw = data.draw
    rope_heads = draw(st.integers(1, 3))
    kv_heads = rope_heads * draw(st.integers(1, 2))
    module = LatentAttention(
        draw(st.integers(1, 9)), kv_heads * draw(st.integers(1, 3)), kv_rank=draw(st.integers(1, 9)),
        nope_dim=draw(st.integers(0, 5)), rope_dim=2 * draw(st.integers(1, 3)), v_dim=draw(st.integers(1, 5)),
        q_rank=draw(st.sampled_from([None, 3])), kv_heads=kv_heads, rope_heads=rope_heads, mask=Causal(),
        norm=draw(st.booleans()), dtype=torch.float64,
    )  # fmt: skip
    x = torch.randn(draw(st.integers(1, 2)), draw(st.integers(1, 7)), module.d_model, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(module(x, absorbed=True), module(x, absorbed=False), rtol=1e-10, atol=1e-10)


# ---- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_rank", [None, 11])
@pytest.mark.parametrize("flags", [{}, {"norm": False}, {"qkv_bias": True, "out_bias": True}])
def test_it_has_the_parameters_that_regard_cost_counts(q_rank, flags):
    module = LatentAttention(31, 6, **SIZES | {"q_rank": q_rank} | flags)
    biases = {name: is_used for name, is_used in flags.items() if name != "norm"}
    shape = Attention(6, 6, 5 + 4, 7, latent=LatentSizes(13, rope_dim=4, nope_dim=5, q_rank=q_rank), **biases)
    absent = 13 + (q_rank or 0) if "norm" in flags else 0
    assert sum(weight.numel() for weight in module.parameters()) == attention_parameters(shape, 31) - absent


def measured(module: LatentAttention, queries: int, stored: int, absorbed: bool) -> int:
    cache = KVCache()
    with torch.no_grad():
        module(torch.randn(1, stored, 31), cache=cache)
        with FlopCounterMode(display=False) as counter:
            module(torch.randn(1, queries, 31), cache=cache, absorbed=absorbed)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "kind", ["as in the paper", "fewer key heads", "rotated keys per head", "without a part without"]
)
@pytest.mark.parametrize(("queries", "stored"), [(1, 36), (5, 32)])
def test_the_operations_it_tells_are_those_that_torch_counts(kind, queries, stored):
    module = made(kind, torch.float32, mask=None)
    shared = 2 * queries * sum(
        part.weight.numel()
        for part in (module.q_proj, module.q_down, module.q_up, module.kv_down, module.k_rope, module.o_proj)
        if part is not None
    )  # fmt: skip
    flops = module.flops(queries, queries + stored)
    assert measured(module, queries, stored, absorbed=False) == shared + flops.expanded
    assert measured(module, queries, stored, absorbed=True) == shared + flops.absorbed


def test_the_form_with_fewer_operations_is_taken():
    module, cache, seen = made("as in the paper", heads=12, nope_dim=7, v_dim=11), KVCache(), []
    with torch.no_grad(), observe_calls(seen.append):
        module(torch.randn(1, 300, 31).double(), cache=cache)
        module(torch.randn(1, 1, 31).double(), cache=cache)
    assert [call.k.shape[1] for call in seen] == [12, 1]  # a prompt expands, a step absorbs


def test_a_step_of_deepseek_v3_takes_a_hundredth_when_absorbed():
    with torch.device("meta"):
        module = LatentAttention(7168, 128, kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128)
    up, pairs = 2 * 512 * 128 * 256, 2 * 128
    flops = module.flops(1, 4096)
    assert flops == (4096 * (up + pairs * 320), up + 4096 * pairs * 1088)
    assert flops.expanded / flops.absorbed == pytest.approx(117, abs=0.5)


# ---- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["as in the paper", "rotated keys per head", "a sink and a softcap"])
def test_both_forms_have_the_same_gradients(kind):
    found = []
    for absorbed in (False, True):
        module, x = made(kind), tokens().requires_grad_()
        module(x, absorbed=absorbed).square().sum().backward()
        found.append([x.grad, *(weight.grad for weight in module.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_equations():
    module, x = made("as in the paper"), tokens(count=5)
    module(x, absorbed=True).square().sum().backward()
    got = {name: weight.grad.clone() for name, weight in module.named_parameters()}
    module.zero_grad()
    written_out(module, x).square().sum().backward()
    for name, weight in module.named_parameters():
        torch.testing.assert_close(got[name], weight.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "absorbed"),
    [("as in the paper", None), pytest.param("rotated keys per head", True, marks=pytest.mark.exhaustive)],
)
def test_it_compiles_as_one_graph(kind, absorbed):
    module, x = made(kind, torch.float32), tokens(torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, absorbed=absorbed), module(x, absorbed=absorbed), rtol=1e-5, atol=1e-5)


def test_copies_and_saved_weights_compute_the_same():
    module, x = made("as in the paper"), tokens()
    other = LatentAttention(31, 6, **SIZES | KINDS["as in the paper"]).double()
    other.load_state_dict(module.state_dict())
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert torch.equal(other(x), module(x))


def test_it_runs_in_half_precision():
    module, x = made("as in the paper", torch.bfloat16), tokens(torch.bfloat16)
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
        for absorbed in (False, True):
            out = module(x, absorbed=absorbed)
            assert out.dtype == torch.bfloat16
            assert (out.double() - exact).abs().max() < 0.05 * exact.abs().max()


def test_it_runs_under_autocast():
    module, x = made("as in the paper", torch.float32), tokens(torch.float32)
    exact, cache = module(x), KVCache()
    with torch.autocast("cpu", torch.bfloat16):
        for absorbed in (False, True):
            out = module(x, absorbed=absorbed)
            assert out.dtype == torch.bfloat16
            assert (out - exact).abs().max() < 0.05 * exact.abs().max()
        with torch.no_grad():
            steps = torch.cat([module(part, cache=cache) for part in x.split([7, 1, 3], 1)], 1)
        assert (steps - exact).abs().max() < 0.05 * exact.abs().max()


# ---- projections that are more than their weights -------------------------------------------------------------------


def replaced(linear: torch.nn.Linear) -> torch.nn.Linear:
    before = linear.forward
    linear.forward = lambda input: 2 * before(input)  # noqa: A006  # the name of nn.Linear
    return linear


class Adapted(torch.nn.Linear):
    """A projection with an adapter, which its weight does not contain."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name of nn.Linear
        return super().forward(input) + input.sum(-1, keepdim=True)


class Opaque(torch.nn.Module):
    """A projection like torch's quantised ones, whose `weight` is a method."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def weight(self) -> torch.Tensor:
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def biased(linear: torch.nn.Linear) -> torch.nn.Linear:
    made = torch.nn.Linear(linear.in_features, linear.out_features)
    made.weight = linear.weight
    return made


def quantised(linear: torch.nn.Linear) -> torch.nn.Linear:
    quantise(linear)
    return linear


@pytest.mark.parametrize("change", [replaced, Adapted, Opaque, biased, quantised])
@pytest.mark.parametrize("name", ["k_up", "v_up"])
def test_where_weights_do_not_say_the_output_the_expanded_form_is_taken(name, change):
    module, x = LatentAttention(31, 6, **SIZES).eval(), torch.randn(1, 9, 31)
    setattr(module, name, change(getattr(module, name)))
    cache = KVCache()
    with torch.no_grad():
        whole = module(x, absorbed=False)
        steps = [module(x[:, i : i + 1], cache=cache) for i in range(9)]
        assert torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-5)
        with pytest.raises(ProblemError, match=rf"absorbed=True reads .* and {name} .*; or leave absorbed= out"):
            module(x, absorbed=True)
        with pytest.raises(ProblemError, match=rf"a cache with evict= reads .* and {name} .*; or leave evict= out"):
            module(x, cache=KVCache(evict=H2O(5)))


# ---- what makes no sense --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_rank": 0}, "kv_rank is 0: expected at least 1 dimensions"),
        ({"q_rank": 0}, "q_rank is 0: expected at least 1 dimensions"),
        ({"nope_dim": -1}, "nope_dim is -1: expected at least 0 dimensions"),
        ({"kv_heads": 3.0}, r"kv_heads is 3\.0: expected a whole number of heads"),
        ({"nope_dim": 0, "rope_dim": 0}, "are both 0"),
        ({"kv_heads": 4}, "each must be a whole multiple"),
        ({"kv_heads": 3, "rope_heads": 2}, "each must be a whole multiple"),
        ({"position": Rope(8)}, r"expected Rope\(4\)"),
        ({"rope_heads": 2, "position": RopePairs(Rope(8), ((0, 1),) * 3)}, "chooses pairs for 3 heads"),
        ({"scale": float("nan")}, "scale"),
        ({"mask": "causal"}, "mask"),
    ],
)
def test_sizes_and_arguments_that_do_not_fit_are_refused(more, message):
    with pytest.raises(ProblemError, match=message):
        LatentAttention(31, 6, **SIZES | more)


def test_calls_that_do_not_fit_are_refused():
    with pytest.raises(ProblemError, match=r"x has shape \[2, 11, 7\]: expected \[batch, tokens, 31\]"):
        made("as in the paper")(torch.zeros(2, 11, 7).double())
    with pytest.raises(ProblemError, match=r"x is int: expected a tensor \[batch, tokens, 31\]"):
        made("as in the paper")(3)
    with pytest.raises(ProblemError, match=r"cache is 3: expected a regard.cache.KVCache, or None"):
        made("as in the paper")(tokens(), cache=3)
    with pytest.raises(ProblemError, match="absorbed is 'no': expected True or False"):
        made("as in the paper")(tokens(), absorbed="no")
    with pytest.raises(ProblemError, match="positions= needs a module with a position"):
        made("without a part with position")(tokens(), positions=3)


@pytest.mark.parametrize("scaling", [DynamicNTK(4.0, 8), LongRope((1.0, 2.0), (3.0, 4.0), 8)])
def test_positions_given_one_by_one_or_by_the_first_are_the_same(scaling: object):
    module = LatentAttention(
        32, 4, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8, position=Rope(4, scaling=scaling, interleaved=True)
    )
    x = torch.randn(1, 5, 32)
    assert torch.allclose(module(x, positions=100), module(x, positions=torch.arange(100, 105)), atol=1e-6)


def test_a_first_position_of_numpy_is_an_int_and_other_positions_are_named():
    position = Rope(4, scaling=DynamicNTK(4.0, 8))
    module, x = (
        LatentAttention(32, 4, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8, position=position),
        torch.randn(1, 5, 32),
    )
    assert torch.equal(module(x, positions=np.int64(7)), module(x, positions=7))
    assert module(x[:, :0]).shape == (1, 0, 32)
    with pytest.raises(ProblemError, match=r"expected a whole number of tokens \(the first position\), a tensor"):
        module(x, positions=[0, 1, 2, 3, 4])


def test_every_shard_of_a_sequence_takes_the_form_of_the_whole():
    module = LatentAttention(16, 4, kv_heads=1, kv_rank=3, nope_dim=4, rope_dim=8, v_dim=6)
    sequence = torch.randn(1, 11, 16)
    of_whole, of_six, of_five = (module.flops(n, n) for n in (11, 6, 5))
    assert of_whole.absorbed < of_whole.expanded
    assert of_six.absorbed < of_six.expanded
    assert of_five.absorbed > of_five.expanded  # so a shard by itself would take the other form
    seen: list[int] = []
    with observe_calls(lambda call: seen.append(call.q.shape[3])):
        module(sequence)
        for part in (slice(0, 6), slice(6, 11)):
            with tokens_at(torch.arange(11)[part], 11):
                module(sequence[:, part])
    assert len(set(seen)) == 1


def test_pages_of_codes_are_refused_with_the_layout_that_takes_them():
    module, x = LatentAttention(31, 6, **SIZES | {"kv_rank": 16}), torch.randn(1, 50, 31)
    with torch.no_grad():
        with pytest.raises(ProblemError, match=r"codec=None, or KVCache\(Latent\(rank\), codec\) if the values are ch"):
            module(x, cache=KVCache(Paged(16), Int8()))
        module(x, cache=KVCache(Latent(16), Int8()))


def test_specs_can_be_assigned():
    made, x = LatentAttention(16, 2, **SIZES, position=Rope(4)), torch.randn(1, 7, 16)
    later = LatentAttention(16, 2, **(SIZES | {"mask": None}))
    for name, spec in (("mask", Causal()), ("position", Rope(4))):
        setattr(later, name, spec)
    later.load_state_dict(made.state_dict())
    assert torch.equal(later(x), made(x))
    for name, wrong, says in (("mask", "causal", "the text 'causal'"), ("position", Rope(6), r"Rope\(4\)")):
        with pytest.raises(ProblemError, match=says):
            setattr(later, name, wrong)


@pytest.mark.parametrize("name", ["position", "mask"])
def test_a_module_in_place_of_a_spec_is_named_where_a_spec_is_read(name: str):
    class Own(LatentAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x)

    module = Own(16, 2, **SIZES)
    setattr(module, name, torch.nn.Identity())
    with pytest.raises(ProblemError, match=f"^{name} is the module Identity, .* assign a spec or None to {name}"):
        module(torch.randn(1, 7, 16))


def of_rank(module: LatentAttention, rank: int, ranks: int, names: tuple[str, ...]) -> LatentAttention:
    """The module of a rank: these projections have its share of the heads, as `ColwiseParallel` leaves them."""
    module = copy.deepcopy(module)
    for name in names:
        linear: Any = getattr(module, name)
        if linear is not None:
            part = linear.weight.chunk(ranks, dim=1 if name == "o_proj" else 0)[rank]
            linear.weight = torch.nn.Parameter(part.clone())
    return module


COLUMNS = ("q_proj", "q_up", "k_up", "v_up")
PLACED = ["as in the paper", "queries made of x", "without a part with position", "fewer key heads"]


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("kind", PLACED)
def test_heads_may_be_those_of_a_rank(kind: str, absorbed: bool):
    module, x, ranks = made(kind), tokens(), 3
    shares = [of_rank(module, rank, ranks, (*COLUMNS, "o_proj")) for rank in range(ranks)]
    found = sum(share(x, absorbed=absorbed) for share in shares)
    torch.testing.assert_close(found, module(x, absorbed=absorbed), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("absorbed", [False, True])
def test_shares_of_heads_that_do_not_fit_are_refused(absorbed: bool):
    for names, message in (
        (("k_up", "v_up"), "gives 6 of 6 query heads, and ._up 2 of 6 key heads: expected the same share of both"),
        (("q_proj",), "gives 2 of 6 query heads, and ._up 6 of 6 key heads"),
    ):
        share = of_rank(made("queries made of x"), 0, 3, names)
        with pytest.raises(ProblemError, match=message):
            share(tokens(), absorbed=absorbed)
    share = of_rank(made("fewer key heads", rope_heads=3), 0, 3, COLUMNS)
    with pytest.raises(ProblemError, match="2 of 6 query heads, and 3 heads of the key part with position"):
        share(tokens(), absorbed=absorbed)


@pytest.mark.parametrize("change", [partial(l1_unstructured, name="weight", amount=0.5), spectral_norm])
def test_weights_that_hooks_compute_are_those_of_now_in_either_form(change):
    module = made("queries made of x")
    change(module.k_up)
    change(module.v_up)
    module.eval()
    x, steps = tokens(), torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        steps.zero_grad()
        module(x, absorbed=True).square().sum().backward()
        steps.step()
    with torch.no_grad():
        torch.testing.assert_close(module(x, absorbed=True), module(x, absorbed=False), rtol=1e-11, atol=1e-11)
