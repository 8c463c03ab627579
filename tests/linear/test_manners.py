"""How linear attention behaves: gradients, tracing, types, the edges, and what it costs."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from regard import RefusalError
from regard.extend import spec
from regard.linear import (
    Decay,
    Delta,
    Elu1,
    Favor,
    Gated,
    LinearState,
    Relu,
    Taylor,
    attend,
    linear_attend,
    retnet_decay,
)
from tests.linear.calls import FAST, FORMS, KINDS, Numbers, expected, numbers, whole, words

COMPILED = ("gated delta",)
"""What is compiled in the default run as well; sums over the keys are where a map is redrawn."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [*FAST, "favor", "dot, one gate"])
def test_gradients_are_right_in_everything_also_through_the_state(kind: str, form: str):
    n = numbers(kind, tokens=7, batch=1, group=2, dim=5, width=2)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = type(n)(*tensors)
        first, second = given.cut(0, 3), given.cut(3, None)
        state = linear_attend(first.q, first.k, first.v, **words(kind, first), form=form, chunk=2).state
        out, state = linear_attend(second.q, second.k, second.v, **words(kind, second), form=form, chunk=2, state=state)
        return out, whole(state)[0]

    inputs = [t.requires_grad_() for t in n.tensors()]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    used = torch.autograd.grad(run(*inputs)[0].square().sum(), inputs, allow_unused=True)
    names = ["q", "k", "v", "gamma", "gate", "one_gate", "beta", "log_decay"]
    rules = {"decay": ["gamma"], "gated": ["gate"], "one gate": ["one_gate"], "gated delta": ["beta", "log_decay"]}
    flows = {
        name
        for name, g in zip(names, cast("list[Tensor | None]", list(used)), strict=True)
        if g is not None and g.any()
    }
    assert flows == {"q", "k", "v", *rules.get(KINDS[kind][1] or "", [])}


@pytest.mark.parametrize("name", ["S", "z", "log_scale"])
def test_each_part_of_a_first_state_can_be_learned(name: str):
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    parts = {"S": torch.rand(1, 2, 8, 4), "z": torch.rand(1, 2, 8), "log_scale": torch.zeros(1, 2)}
    learned = parts[name].requires_grad_()

    def run(kind: torch.dtype) -> Tensor:
        state = LinearState(**{name: t.to(kind) for name, t in parts.items()})
        out = linear_attend(q.to(kind), k.to(kind), v.to(kind), Favor(4, features=8), state=state).out
        return torch.autograd.grad(out.square().sum(), learned)[0]

    assert torch.allclose(run(torch.float32), run(torch.float64), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", FAST)
def test_gradients_of_gradients_and_forward_derivatives_are_right(kind: str):
    n = numbers(kind, tokens=5, batch=1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attend(q, k, v, **words(kind, n), chunk=2, form="chunked").out

    inputs = [t.requires_grad_() for t in (n.q, n.k, n.v)]
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, check_forward_ad=True, check_backward_ad=False)


def test_vmap_maps_over_calls():
    q, k, v = torch.randn(3, 5, 1, 2, 7, 4)
    both = torch.func.vmap(lambda q, k, v: linear_attend(q, k, v).out)(q, k, v)
    assert torch.allclose(both, torch.stack([linear_attend(*one).out for one in zip(q, k, v, strict=True)]), atol=1e-6)


@pytest.mark.parametrize("kind", ["elu", "favor, decay"])
def test_a_call_is_exported_with_its_states(kind: str):
    n = numbers(kind, tokens=7).to(torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None) -> tuple[Tensor, LinearState]:
            return linear_attend(q, k, v, **words(kind, n), state=state)

    _, state = Layer()(n.q, n.k, n.v, None)
    exported = torch.export.export(Layer(), (n.q, n.k, n.v, state)).module()
    for given in (state, Layer()(n.q, n.k, n.v, state)[1]):
        (out, after), truth = exported(n.q, n.k, n.v, given), Layer()(n.q, n.k, n.v, given)
        assert torch.allclose(out, truth[0], atol=1e-5)
        assert isinstance(after, LinearState)
        assert torch.allclose(after.S, truth[1].S, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_it_is_not_traced_by_the_jit():
    q = torch.randn(1, 2, 7, 4)
    with pytest.raises(RefusalError, match=r"torch\.jit\.trace records .*Use torch\.compile or torch\.export"):
        torch.jit.trace(lambda q: linear_attend(q, q, q).out, (q,), check_trace=False)


def test_a_call_that_is_refused_while_torch_compiles_says_why():
    q = torch.randn(1, 2, 7, 4)
    run = torch.compile(lambda: linear_attend(q, q, q, features=Elu1(), scale=0.5).out, fullgraph=True, backend="eager")
    with pytest.raises(Unsupported, match=r"scale=0\.5 with Elu1\(\.\.\.\): its weights"):
        run()


@pytest.mark.representative
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in COMPILED else pytest.mark.exhaustive) for kind in FAST]
)
def test_torch_compiles_it_whole(kind: str):
    n = numbers(kind, tokens=13, batch=1, group=2).to(torch.float32)
    state = linear_attend(n.q, n.k, n.v, **words(kind, n)).state

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, LinearState]:
        return linear_attend(q, k, v, **words(kind, n), chunk=4, state=state)

    torch.compiler.reset()
    inputs = [t.requires_grad_() for t in (n.q, n.k, n.v)]
    found, right = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs), run(*inputs)
    torch.testing.assert_close(found[0], right[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].S, right[1].S, rtol=1e-5, atol=1e-5)
    flows = [torch.autograd.grad(out.square().sum(), inputs) for out in (found[0], right[0])]
    torch.testing.assert_close(*flows, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_other_types_are_as_near_as_their_rounding(kind: str, dtype: torch.dtype):
    n = numbers(kind, tokens=67, group=2).to(dtype)
    right = expected(kind, n.to(torch.float64))[0]
    found = linear_attend(n.q, n.k, n.v, **words(kind, n), chunk=16)
    assert (found.out.dtype, found.state.S.dtype) == (dtype, torch.float32)
    worst = right.abs().amax()
    assert (found.out.double() - right).abs().amax() <= max(torch.finfo(dtype).eps, 1e-6) * worst * 4


def test_autocast_leaves_the_sums_in_single_precision():
    q, k, v = torch.randn(3, 1, 2, 37, 8)
    right = linear_attend(q, k, v).out
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_attend(q, k, v).out, right)


def test_any_strides_will_do():
    n = numbers("elu", tokens=19, group=3)
    right = linear_attend(n.q, n.k, n.v, chunk=4).out
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (n.q, n.k, n.v))
    assert torch.equal(linear_attend(q, k, v, chunk=4).out, right)


@pytest.mark.parametrize("kind", [kind for kind, (_, rule) in KINDS.items() if rule])
def test_tensors_of_a_rule_may_be_negated_lazily(kind: str):
    n = numbers(kind, tokens=37).to(torch.float32)
    negated = Numbers(*n.tensors()[:3], *(cast(Any, torch)._neg_view(-t) for t in n.tensors()[3:]))
    found, expected = (linear_attend(m.q, m.k, m.v, **words(kind, m)).out for m in (negated, n))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_zeros_without_memory_are_zeros(name: str):
    given = dict(zip("qkv", torch.randn(3, 1, 2, 7, 8), strict=True))
    lazy = cast(Any, torch)._efficientzerotensor((1, 2, 7, 8))
    found, right = (linear_attend(**(given | {name: t})).out for t in (lazy, torch.zeros(1, 2, 7, 8)))
    assert torch.allclose(found, right, atol=1e-6)


# ---- the edges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAST)
def test_rows_that_see_nothing_are_zero(kind: str):
    n = numbers(kind, tokens=5, group=2)
    more = torch.cat([torch.randn(2, 4, 3, 5, dtype=torch.float64), n.q], 2)
    out = linear_attend(more, n.k, n.v, **words(kind, n)).out
    assert not out[:, :, :3].any()
    torch.testing.assert_close(out[:, :, 3:], linear_attend(n.q, n.k, n.v, **words(kind, n)).out)
    none = n.cut(0, 0)
    for causal in (True, False):
        nothing = linear_attend(n.q, none.k, none.v, **words(kind, none), causal=causal)
        assert nothing.out.shape == (2, 4, 5, 3)
        assert not nothing.out.any()
        assert not nothing.state.S.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (1, 2, 5, 0)])
def test_sizes_may_be_zero(shape: tuple[int, ...], form: str):
    q, v = torch.randn(shape), torch.randn(*shape[:3], 3)
    beta = torch.rand(shape[:3])
    for given in ({}, {"features": None, "rule": Gated(-beta[..., None])}, {"features": None, "rule": Delta(beta)}):
        for causal in (True, False):
            out, state = linear_attend(q, q, v, form=form, causal=causal, **given)
            assert out.shape == (*shape[:3], 3)
            assert state.S.shape == (*shape[:2], shape[3], 3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("kind", FAST)
def test_without_tokens_gradients_are_zero_rather_than_none(kind: str, queries: int, keys: int, causal: bool):
    n = numbers(kind, tokens=5)
    q, given = n.q[:, :, :queries], n.cut(0, keys)
    rule = words(kind, given).get("rule")
    leaves = [t.requires_grad_() for t in (q, given.k, given.v, *(rule.tensors() if rule else []))]
    out, state = linear_attend(*leaves[:3], **words(kind, given), causal=causal)
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), leaves, retain_graph=True))
    if not keys:
        assert not any(grad.any() for grad in torch.autograd.grad(state.S.sum(), leaves[1:]))


@pytest.mark.parametrize("kind", FAST)
def test_tensors_without_data_give_shapes(kind: str):
    n = numbers(kind, tokens=19, group=2)
    empty = Numbers(*(t.to("meta") for t in n.tensors()))
    found, right = (linear_attend(m.q, m.k, m.v, **words(kind, m)) for m in (empty, n))
    assert found.out.is_meta
    assert (found.out.shape, found.state.S.shape) == (right.out.shape, right.state.S.shape)


def test_weights_that_are_all_zero_give_zero():
    q = -torch.ones(1, 1, 3, 4)
    out = linear_attend(q, q, torch.randn(1, 1, 3, 2), features=Relu(epsilon=0.0)).out
    assert not out.any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_query_stands_at_the_last_key(kind: str):
    n = numbers(kind, tokens=19, group=2)
    right = linear_attend(n.q, n.k, n.v, **words(kind, n), chunk=4)
    found = linear_attend(n.q[:, :, 12:], n.k, n.v, **words(kind, n), chunk=4)
    torch.testing.assert_close(found.out, right.out[:, :, 12:])
    for ours, theirs in zip(whole(found.state), whole(right.state), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_without_causality_every_query_reads_the_last_state(kind: str, form: str):
    n = numbers(kind, tokens=19, group=2)
    _, right_state, _ = expected(kind, n) if kind != "taylor" else (None, None, None)
    found = linear_attend(n.q[:, :, :7], n.k, n.v, **words(kind, n), causal=False, form=form, chunk=4)
    causal = linear_attend(n.q[:, :, :1], n.k, n.v, **words(kind, n))
    torch.testing.assert_close(found.out[:, :, :1], causal.out)  # the only query stands at the last key
    for ours, theirs in zip(whole(found.state), whole(causal.state), strict=True):
        torch.testing.assert_close(ours, theirs)
    if right_state is not None:
        torch.testing.assert_close(whole(found.state)[0], right_state)


def test_without_causality_it_is_a_weighted_mean():
    q, k, v = torch.randn(3, 1, 1, 11, 4, dtype=torch.float64)
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    right = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(linear_attend(q, k, v, causal=False).out, right)


@pytest.mark.parametrize("kind", ["elu", "dot", "favor", "taylor"])
def test_states_of_sums_merge_in_any_order(kind: str):
    n = numbers(kind, tokens=19)
    if kind == "favor":
        n.k[:, :, :5] *= 30  # tops far apart
    parts = [n.cut(0, 5), n.cut(5, 6), n.cut(6, None), n.cut(0, 0)]
    a, b, c, nothing = (linear_attend(p.q, p.k, p.v, **words(kind, p)).state for p in parts)
    right = linear_attend(n.q, n.k, n.v, **words(kind, n)).state
    for merged in ((a | b) | c, c | (b | a), nothing | a | (c | nothing) | b):
        for ours, theirs in zip(whole(merged), whole(right), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert not (nothing | nothing).S.isnan().any()
    read = linear_attend(n.q, parts[3].k, parts[3].v, **words(kind, parts[3]), state=c | b | a, causal=False).out
    torch.testing.assert_close(read, linear_attend(n.q, n.k, n.v, **words(kind, n), causal=False).out)


def test_long_calls_in_segments_give_the_same(monkeypatch: pytest.MonkeyPatch):
    for kind in FAST:
        n = numbers(kind, tokens=101, group=2)
        right = linear_attend(n.q, n.k, n.v, **words(kind, n), chunk=4)
        monkeypatch.setattr(attend, "SEGMENT", 512)
        with torch.no_grad():
            found = linear_attend(n.q, n.k, n.v, **words(kind, n), chunk=4)
            read = linear_attend(n.q, n.k, n.v, **words(kind, n), chunk=4, causal=False)
        flowing = linear_attend(n.q.requires_grad_(), n.k, n.v, **words(kind, n), chunk=4)
        monkeypatch.undo()
        all_see = linear_attend(n.q, n.k, n.v, **words(kind, n), chunk=4, causal=False)
        torch.testing.assert_close(read.out, all_see.out, rtol=1e-12, atol=1e-12)
        for one in (found, flowing):
            torch.testing.assert_close(one.out, right.out, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(one.state.S, right.state.S, rtol=1e-12, atol=1e-12)


def test_the_scale_multiplies_the_scores():
    q, k, v = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64)
    beta = torch.rand(1, 2, 7, dtype=torch.float64)
    for given in ({"features": Taylor()}, {"features": Favor(4, features=8)}):
        half: dict[str, Any] = {"scale": 0.5 * 4**-0.5} | given
        torch.testing.assert_close(
            linear_attend(q, k, v, **half).out, linear_attend(q * 0.5**0.5, k * 0.5**0.5, v, **given).out
        )
    for rule in (None, Delta(beta)):  # the keys of the delta rule stay as they are
        one = linear_attend(q, k, v, features=None, rule=rule, scale=0.25)
        torch.testing.assert_close(one.out, 0.25 * linear_attend(q, k, v, features=None, rule=rule).out)


def test_retnets_decays_are_the_papers():
    assert retnet_decay(8).tolist() == [1 - 2.0**-n for n in range(5, 13)]


def test_decays_in_half_precision_keep_what_they_say():
    n = numbers("dot", tokens=67)
    gamma = torch.tensor([0.99609375, 0.5])  # numbers that bfloat16 has, while their logarithms are none
    one, two = (linear_attend(n.q, n.k, n.v, features=None, rule=Decay(g)).out for g in (gamma, gamma.bfloat16()))
    assert torch.equal(one, two)


def test_a_decay_of_one_and_gates_of_one_change_nothing():
    n = numbers("dot", tokens=19)
    right = linear_attend(n.q, n.k, n.v, features=None).out
    for rule in (Decay(1.0), Gated(torch.zeros(2, 2, 19, 1))):
        torch.testing.assert_close(linear_attend(n.q, n.k, n.v, features=None, rule=rule, chunk=4).out, right)


# ---- what it costs --------------------------------------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Watches what tensors are made: the elements of the largest, and of all."""

    elements = 0
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        there = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in made if isinstance(made, tuple | list) else [made]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in there:
                self.elements = max(self.elements, t.numel())
                self.total += t.numel()
        return made


def _long(kind: str, tokens: int) -> tuple[Numbers, dict[str, Any]]:
    n = numbers(kind, tokens, batch=1, kv_heads=1, dim=5, width=3).to(torch.float32)
    return n, words(kind, n)


@pytest.mark.parametrize("kind", FAST)
def test_nothing_but_the_output_grows_with_the_tokens(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attend, "SEGMENT", 1 << 14)
    found: list[int] = []
    for tokens in (1 << 13, 1 << 16):
        n, given = _long(kind, tokens)
        monitor = Made()
        with torch.no_grad(), monitor:
            linear_attend(n.q, n.k, n.v, **given)
        found.append(monitor.elements)
        assert monitor.elements == max(3 * tokens, found[0])  # the output, v_dim 3
    assert found[0] < 3 << 16


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize("kind", FAST)
def test_going_backward_grows_with_the_tokens_and_not_with_their_square(
    kind: str, form: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attend, "SEGMENT", 256)
    totals: list[int] = []
    for tokens in (64, 512):
        n, given = _long(kind, tokens)
        inputs = [t.requires_grad_() for t in (n.q, n.k, n.v)]
        with Made() as monitor:
            linear_attend(*inputs, **given, form=form, chunk=8).out.sum().backward()
        totals.append(monitor.total)
    assert totals[1] < 1.1 * 8 * totals[0]


@pytest.mark.parametrize("kind", [*FAST, "dot"])
def test_the_work_is_what_the_chunks_say_and_grows_with_the_tokens(kind: str):
    flops: list[int] = []
    for tokens in (1 << 10, 1 << 11):
        n, given = _long(kind, tokens)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            linear_attend(n.q, n.k, n.v, **given, chunk=32)
        flops.append(counter.get_total_flops())
    assert flops[1] == 2 * flops[0]
    if kind in ("elu", "dot"):
        size, width = 5, 3 + (kind == "elu")  # a column of ones, which normalises
        assert flops[0] == (2 * 32 * (size + width) + 4 * size * width) * 1024


# ---- maps of features, and what a call leaves as it is --------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_redrawn_map_compiles_whole():
    torch._dynamo.reset()
    q = torch.randn(1, 2, 7, 8)

    def run(q: torch.Tensor, seed: int) -> torch.Tensor:
        return linear_attend(q, q, q, features=Favor(8, features=16, seed=seed)).out

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for seed in (0, 1, 2):
        torch.testing.assert_close(compiled(q, seed), run(q, seed))


def test_random_vectors_drawn_in_any_mode_serve_in_every_other():
    q = torch.randn(2, 1, 2, 7, 8, dtype=torch.float64)
    for i, mode in enumerate((torch.inference_mode, FakeTensorMode)):
        with mode():
            Favor(8, features=16, seed=100 + i).vectors()
        leaf = q[0].clone().requires_grad_()
        linear_attend(leaf, leaf, leaf, features=Favor(8, features=16, seed=100 + i)).out.sum().backward()
    favor = Favor(8, features=16, seed=200)
    mapped = torch.vmap(lambda t: linear_attend(t, t, t, features=favor).out)(q)
    torch.testing.assert_close(mapped[1], linear_attend(q[1], q[1], q[1], features=favor).out)


def test_values_may_have_no_numbers():
    q = torch.randn(1, 2, 7, 5)
    out, state = linear_attend(q, q, q[..., :0])
    assert out.shape == (1, 2, 7, 0)
    assert bool(torch.isfinite(state.z).all())
    state = linear_attend(q, q, torch.full_like(q[..., :1], torch.nan)).state
    assert bool(torch.isfinite(state.z).all())  # the keys are fine


def test_a_default_device_changes_nothing():
    q = torch.randn(1, 2, 73, 8)
    expected = linear_attend(q, q, q)
    with torch.device("meta"):
        found = linear_attend(q, q, q)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.state.S, expected.state.S)


@spec
class Straight(Favor):
    """A map of its own in the place of Favor's."""

    def map(self, x: Tensor, scale: float | None = None) -> Tensor:
        return x.abs().float() @ self.vectors().float().abs().T


@spec
class Turned(Favor):
    """Favor with its vectors turned around."""

    def vectors(self) -> Tensor:
        return -super().vectors().flip(0)


@pytest.mark.parametrize("kind", [Straight, Turned])
def test_a_subclass_of_favor_is_its_own_map(kind: type[Favor]):
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    favor = kind(4, features=6).redraw(3)
    assert type(favor) is kind
    weights = (favor.map(q) @ favor.map(k).mT).tril()
    torch.testing.assert_close(linear_attend(q, k, v, favor).out, weights / weights.sum(-1, keepdim=True) @ v)
