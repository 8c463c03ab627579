"""Linear attention by the library: all instruction sets equal the plain loops, and a row's bits depend on its past."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import native, native_calls
from regard.linear import Decay, Delta, Elu1, Favor, Feature, Gated, LinearResult, Relu, Rule, compiled, linear_attend
from regard.linear.call import check_call, first_carry
from tests.native.test_interface import DONE, ISA, POINTER, SIZE, WORKSPACE
from tests.native.test_kernels import ROUNDING, repeated, spread, token_by_token

PLAIN = -1
ISAS = range(len(native.isas()))
Inputs = tuple[Tensor, Tensor, Tensor]


def run(inputs: Inputs, words: dict[str, Any], isa: int | None, state: Tensor | None = None) -> compiled.Found:
    q, k, v = inputs
    words = {"features": Elu1(), "rule": None, "scale": None, "normalise": None, "chunk": 64} | words
    call = check_call(
        *(q, k, v, words["features"], words["rule"], True),
        *(words["scale"], words["normalise"], None, "chunked", words["chunk"]),
    )
    assert compiled.fits(call, q, k, v)
    carry = first_carry(call, k, v, None)
    return compiled.run(call, q, k, v, carry if state is None else carry._replace(matrix=state), isa)


def inputs(tokens: int, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 24), batch: int = 2) -> Inputs:
    g = torch.Generator().manual_seed(0)
    (n, kv_heads), (dim, width) = heads, dims
    sizes = ((n, dim), (kv_heads, dim), (kv_heads, width))
    q, k, v = (torch.randn(batch, h, tokens, d, generator=g) for h, d in sizes)
    return q, k, v


@given(data=st.data())
@settings(max_examples=60)
def test_linear_attention_equals_the_plain_loops(data: st.DataObject):
    g, draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30))), data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    batch, (heads, kv_heads) = draw(st.integers(1, 2)), draw(st.sampled_from([(1, 1), (4, 2), (3, 3)]))
    tokens = draw(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 131, 193]))
    dim, width = draw(st.sampled_from([(16, 16), (64, 64), (5, 7), (1, 1), (17, 33), (31, 67), (80, 130)]))

    def tensor(h: int, d: int) -> Tensor:
        made = torch.randn(batch, h, tokens, d, generator=g).to(dtype)
        return draw(st.sampled_from([made, token_by_token(made), spread(made), repeated(made)]))

    tensors = tensor(heads, dim), tensor(kv_heads, dim), tensor(kv_heads, width)
    favors = [Favor(dim, features=size) for size in (1, 7, 64, 130)]
    features = draw(st.sampled_from([None, Elu1(), Relu(), Relu(0.0), *favors]))
    size = dim if features is None else features.size(dim)
    gates = [-torch.rand(batch, kv_heads, tokens, n, generator=g).mul(8).exp().sub(1) for n in (size, 1)]
    gated = [] if features in favors else [Gated(token_by_token(one)) for one in gates]
    rule = draw(st.sampled_from([None, Decay(0.9), Decay(1 - torch.rand(kv_heads, generator=g)), *gated]))
    if features in (None, Relu()) and draw(st.booleans()):
        tensors = (tensors[0], torch.nn.functional.normalize(tensors[1].float(), dim=-1).to(dtype), tensors[2])
        beta, fade = torch.rand(batch, kv_heads, tokens, generator=g), gates[1][..., 0]
        rule = Delta(token_by_token(beta[..., None])[..., 0], draw(st.sampled_from([None, fade])))
        if features is not None:  # of norms above 1
            rule = Delta(beta / (0.1 + tensors[1].float().square().sum(-1) + dim), rule.log_decay)
    words = {"features": features, "rule": rule, "chunk": draw(st.sampled_from([1, 7, 16, 40, 64, 100]))}
    words["scale"] = draw(st.sampled_from([None, 0.3])) if features is None or features in favors else None
    summed = features is not None and not isinstance(rule, Delta)
    words["normalise"] = None if not summed or features in favors else draw(st.booleans())
    state = torch.rand(batch, kv_heads, size, width + (summed and words["normalise"] is not False))
    plain = run(tensors, words, PLAIN, state)
    for isa in ISAS:
        found = run(tensors, words, isa, state)
        exponents = 2e-5 if isinstance(features, Favor) else 0.0  # of some tens, which are rounded to 2e-6 each
        pairs = [
            (found.out, plain.out, max(exponents, ROUNDING[dtype])),
            (_with_its_scale(found, plain), plain.carry.matrix, max(exponents, 4e-6)),
        ]
        for one, right, rounding in pairs:
            size = max(1.0, float(right.abs().max()))
            torch.testing.assert_close(one.double(), right.double(), rtol=0, atol=rounding * size)


def _with_its_scale(found: compiled.Found, right: compiled.Found) -> Tensor:
    """The state, with the scale that the other has."""
    if found.carry.top is None or right.carry.top is None:
        return found.carry.matrix
    torch.testing.assert_close(found.carry.top, right.carry.top, rtol=1e-5, atol=1e-4)
    return found.carry.matrix * (found.carry.top.double() - right.carry.top).exp()[..., None, None]


@pytest.mark.exhaustive(per="isa")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", [None, "decay", "gated", "delta", "gated delta"])
@pytest.mark.parametrize("features", [Elu1(), Favor(16, features=67)])
def test_threads_and_other_heads_change_no_bit(
    isa: int, rule: str | None, features: Feature, monkeypatch: pytest.MonkeyPatch
):
    if rule not in (None, "decay") and isinstance(features, Favor):
        pytest.skip("Favor has no gates")
    tensors, gates = inputs(2500, heads=(3, 3), dims=(16, 67)), -torch.rand(2, 3, 2500, 16)
    if rule in ("delta", "gated delta"):
        tensors[1].copy_(torch.nn.functional.normalize(tensors[1], dim=-1))

    def words_of(gates: Tensor) -> dict[str, Any]:
        rules: dict[str | None, Rule | None] = {None: None, "decay": Decay(0.97), "gated": Gated(gates)}
        rules |= {"delta": Delta(-gates[..., 0]), "gated delta": Delta(-gates[..., 0], gates[..., 1])}
        return {"rule": rules[rule], "features": None if isinstance(rules[rule], Delta) else features}

    words = words_of(gates)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    whole = run(tensors, words, isa)
    for threads in (2, 4, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = run(tensors, words, isa)
        assert torch.equal(found.out, whole.out)
        assert torch.equal(found.carry.matrix, whole.carry.matrix)
        assert found.carry.top is None or torch.equal(found.carry.top, whole.carry.top)
    q, k, v = (t[1:, 2:] for t in tensors)
    alone = run((q, k, v), words_of(gates[1:, 2:]), isa)
    assert torch.equal(alone.out, whole.out[1:, 2:])
    assert torch.equal(alone.carry.matrix, whole.carry.matrix[1:, 2:])


@pytest.mark.parametrize("isa", ISAS)
def test_calls_of_whole_chunks_give_the_bits_of_one(isa: int, monkeypatch: pytest.MonkeyPatch):
    tensors = inputs(700)
    whole = run(tensors, {}, isa)
    monkeypatch.setattr(compiled, "FLOPS", 1)
    found = run(tensors, {}, isa)
    assert torch.equal(found.out, whole.out)
    assert torch.equal(found.carry.matrix, whole.carry.matrix)


def test_a_value_that_is_not_finite_is_found_wherever_it_is():
    for name, last in (("q", 15), ("k", 15), ("v", 23)):
        for at in ((0, 0, 0, 0), (1, 1, 129, last)):
            tensors = dict(zip("qkv", inputs(130), strict=True))
            tensors[name][at] = torch.inf if at[0] else -torch.nan
            for isa in (PLAIN, *ISAS):
                assert not run((tensors["q"], tensors["k"], tensors["v"]), {}, isa).finite


@pytest.mark.parametrize("value", [1e4, torch.nan])
@pytest.mark.parametrize("features", [Elu1(), Favor(16, features=67)])
def test_a_later_token_changes_no_bit_of_rows_of_the_library(features: Feature, value: float):
    q, k, v = inputs(200)
    before = linear_attend(q, k, v, features).out
    for at in (63, 64, 150, 199):
        for t in (q, k, v):
            t[:, :, at:] = value
        assert torch.equal(linear_attend(q, k, v, features).out[:, :, :at], before[:, :, :at])
        q, k, v = inputs(200)


def test_the_library_and_the_form_in_pytorch_agree(monkeypatch: pytest.MonkeyPatch):
    q, k, v = inputs(300)
    a: LinearResult = linear_attend(q, k, v, rule=Decay(0.9), features=Elu1())
    monkeypatch.setattr(compiled, "fits", lambda *call: False)
    b: LinearResult = linear_attend(q, k, v, rule=Decay(0.9), features=Elu1())
    torch.testing.assert_close(a.out, b.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.state.S, b.state.S, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive(per="isa")
@pytest.mark.parametrize("isa", [PLAIN, *ISAS])
@pytest.mark.parametrize("rule", [None, Decay(0.9)])
@pytest.mark.parametrize("size", [0.5, 3.0])
def test_favors_rows_and_states_are_as_near_as_those_of_the_form_in_pytorch(
    isa: int, rule: Decay | None, size: float, monkeypatch: pytest.MonkeyPatch
):
    q, k, v = (size * t for t in inputs(300))
    monkeypatch.setattr(compiled, "_chosen", lambda: isa)
    words: dict[str, Any] = {"features": Favor(16, features=131), "rule": rule}
    right = linear_attend(q.double(), k.double(), v.double(), **words)
    first = linear_attend(*(t[:, :, :131] for t in (q, k, v)), **words)
    second = linear_attend(*(t[:, :, 131:] for t in (q, k, v)), **words, state=first.state)
    found = LinearResult(torch.cat([first.out, second.out], 2), second.state)
    monkeypatch.setattr(compiled, "fits", lambda *call: False)
    beside = linear_attend(q, k, v, **words)
    assert _far(found.out, right.out) <= 2 * _far(beside.out, right.out) + 1e-7
    scale = right.state.log_scale
    assert scale is not None
    states = [one.state.under(scale.float()).S for one in (found, beside)]
    assert _far(states[0], right.state.S) <= 2 * _far(states[1], right.state.S) + 1e-6


@pytest.mark.parametrize("isa", [PLAIN, *ISAS])
@pytest.mark.parametrize("log", [0.0, -1e-6, math.log(1e-6), -1e4, -math.inf, None])
def test_gates_neither_overflow_nor_lose_recent_tokens(isa: int, log: float | None, monkeypatch: pytest.MonkeyPatch):
    q, k, v = inputs(300)
    gates = torch.full((2, 2, 300, 16), 0.0 if log is None else log)
    if log is None:  # strong and weak ones side by side
        gates[:, :, ::3, ::2], gates[:, :, 50], gates[:, :, 100:] = -1e3, -math.inf, -1e-4
    monkeypatch.setattr(compiled, "_chosen", lambda: isa)
    assert run((q, k, v), {"rule": Gated(gates)}, isa).finite
    found = linear_attend(q, k, v, rule=Gated(gates))
    right = linear_attend(q.double(), k.double(), v.double(), rule=Gated(gates.double()), form="recurrent")
    size = float(right.out.abs().max())
    torch.testing.assert_close(found.out.double(), right.out, rtol=1e-4, atol=2e-6 * size)
    torch.testing.assert_close(found.state.S.double(), right.state.S, rtol=1e-4, atol=2e-6 * size)


@pytest.mark.parametrize("isa", [PLAIN, *ISAS])
@pytest.mark.parametrize("log", [-1e-6, -1e-4])
def test_weak_gates_are_as_strong_after_many_tokens_as_each_says(isa: int, log: float):
    tokens = 3000
    q, k, v = inputs(tokens, heads=(1, 1), batch=1)
    k[:, :, 1:] = 0
    found = run((q, k, v), {"rule": Gated(torch.full((1, 1, tokens, 16), log)), "features": None}, isa)
    right = k[0, 0, 0, :, None].double() * v[0, 0, 0].double() * math.exp(log * (tokens - 1))
    torch.testing.assert_close(found.carry.matrix[0, 0].double(), right, rtol=1e-4, atol=0)


@pytest.mark.exhaustive(per="isa")
@pytest.mark.parametrize("isa", [PLAIN, *ISAS])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("log", [None, 0.0, math.log(1e-6), -math.inf])
def test_delta_is_exact_at_the_ends_of_its_range(
    isa: int, beta: float, log: float | None, monkeypatch: pytest.MonkeyPatch
):
    q, k, v = inputs(300)
    k = torch.nn.functional.normalize(k, dim=-1)
    fade = None if log is None else torch.full((2, 2, 300), log).index_fill(2, torch.arange(0, 300, 5), -1e-6)
    betas = torch.full((2, 2, 300), beta)
    monkeypatch.setattr(compiled, "_chosen", lambda: isa)
    assert run((q, k, v), {"rule": Delta(betas, fade), "features": None}, isa).finite
    found = linear_attend(q, k, v, rule=Delta(betas, fade))
    exact = Delta(betas.double(), None if fade is None else fade.double())
    right = linear_attend(q.double(), k.double(), v.double(), rule=exact, form="recurrent")
    size = max(1.0, float(right.out.abs().max()))
    torch.testing.assert_close(found.out.double(), right.out, rtol=1e-4, atol=4e-6 * size)
    torch.testing.assert_close(found.state.S.double(), right.state.S, rtol=1e-4, atol=4e-6 * size)


@pytest.mark.parametrize("isa", [PLAIN, *ISAS])
@pytest.mark.parametrize("size", [3.0, 1e4, 1e10])
def test_keys_of_delta_that_make_the_state_overflow_change_no_bit_of_earlier_rows(
    isa: int, size: float, monkeypatch: pytest.MonkeyPatch
):
    q, k, v = inputs(200)
    k, rule = torch.nn.functional.normalize(k, dim=-1), Delta(torch.rand(2, 2, 200))
    monkeypatch.setattr(compiled, "_chosen", lambda: isa)
    before = linear_attend(q, k, v, rule=rule).out
    for at in (5, 63, 64, 139):
        later = k.clone()
        later[:, :, at:] *= size
        after = linear_attend(q, later, v, rule=rule).out
        assert torch.equal(after[:, :, :at], before[:, :, :at])
        assert not torch.equal(after[:, :, at:], before[:, :, at:])


def _far(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("rule", [None, Decay(0.9)])
def test_a_single_token_is_computed_by_the_library_unless_a_form_is_chosen(rule: Decay | None):
    q, k, v = inputs(9)
    calls = [check_call(q, k, v, Elu1(), rule, True, None, None, None, form, 64) for form in (None, "recurrent")]
    assert [compiled.fits(call, q, k, v) for call in calls] == [True, False]
    state = linear_attend(*(t[:, :, :8] for t in (q, k, v)), rule=rule, features=Elu1()).state
    last = [t[:, :, 8:] for t in (q, k, v)]
    found, right = (linear_attend(*last, Elu1(), state=state, rule=rule, form=form) for form in (None, "recurrent"))
    torch.testing.assert_close(found.out, right.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.state.S, right.state.S, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", [PLAIN, *ISAS])
@pytest.mark.parametrize("threads", [1, 7])
def test_rows_of_the_state_alone_and_keys_alone(isa: int, threads: int, monkeypatch: pytest.MonkeyPatch):
    q, k, v = (t.double() for t in inputs(1100, heads=(3, 1)))
    right = linear_attend(q, k, v, Elu1(), causal=False)
    q, k, v = inputs(1100, heads=(3, 1))
    call = check_call(q, k, v, Elu1(), None, False, None, None, None, "chunked", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    carry = compiled.run(call, None, k, v, first_carry(call, k, v, None), isa).carry
    torch.testing.assert_close(carry.matrix[..., :-1].double(), right.state.S, rtol=1e-5, atol=1e-3)
    found = compiled.run(call, q, None, None, carry, isa)
    torch.testing.assert_close(found.out.double(), right.out, rtol=1e-4, atol=1e-6)
    assert torch.equal(found.carry.matrix, carry.matrix)


@pytest.mark.parametrize("isa", [PLAIN, *ISAS])
@pytest.mark.parametrize("size", [-45.0, -43.7, -22.5, -21.5])
def test_a_sum_of_weights_may_be_so_small_that_its_reciprocal_is_infinite(isa: int, size: float):
    x, v = torch.full((1, 1, 70, 1), size), 1 + torch.rand(1, 1, 70, 33)
    call = check_call(x, x, v, Elu1(), None, True, None, None, None, "chunked", 64)
    found = compiled.run(call, x, x, v, first_carry(call, x, v, None), isa).out
    torch.testing.assert_close(found, v.cumsum(2) / torch.arange(1, 71)[:, None], rtol=1e-5, atol=0)


@pytest.mark.parametrize("sizes", [(70, 200), (200, 70), (0, 70), (70, 0)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rule", ["decay", "gated", "delta"])
def test_queries_and_keys_may_differ_in_number(
    sizes: tuple[int, int], causal: bool, rule: str, monkeypatch: pytest.MonkeyPatch
):
    tensors = inputs(200)
    gated = Gated(-torch.rand(2, 2, sizes[1], 16)) if rule == "gated" else None
    q, k, v = tensors[0][:, :, : sizes[0]], tensors[1][:, :, : sizes[1]], tensors[2][:, :, : sizes[1]]
    words: dict[str, Any] = {"causal": causal, "rule": gated or Decay(0.9), "features": Relu()}
    if rule == "delta":
        words |= {"rule": Delta(torch.rand(2, 2, sizes[1]), -torch.rand(2, 2, sizes[1])), "features": None}
        k.copy_(torch.nn.functional.normalize(k, dim=-1))
    found = linear_attend(q, k, v, **words)
    monkeypatch.setattr(compiled, "fits", lambda *call: False)
    right = linear_attend(q, k, v, **words)
    torch.testing.assert_close(found.out, right.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.state.S, right.state.S, rtol=1e-4, atol=1e-4)


def status(**changed: float) -> int:
    """Of a call of 1 x 2 heads on 1, 70 tokens, 16 dims, with these fields changed."""
    q, k, out = torch.zeros(1, 2, 70, 16), torch.zeros(1, 1, 70, 16), torch.zeros(1, 2, 70, 16)
    state, memory = torch.zeros(16 * 17), torch.zeros(1 << 20, dtype=torch.uint8)
    values: dict[str, float] = {"batch": 1, "heads": 2, "kv_heads": 1, "tokens": 70, "qk_dim": 16, "v_dim": 16}
    values |= {"dtype": 1, "threads": 1, "chunk": 64, "feature": 1, "normalise": 1, "scale": 1.0}
    values["features"] = 16
    for name, t in {"q": q, "k": k, "v": k, "out": out}.items():
        values |= {f"{name}.data": t.data_ptr(), f"{name}.batch": 70 * 16, f"{name}.head": 70 * 16}
        values[f"{name}.token"] = 16
    aligned = -(-memory.data_ptr() // 64) * 64
    values |= {"state": state.data_ptr(), "workspace": aligned, "workspace_bytes": (1 << 20) - 64}
    entry: Any = native_calls.Entry("regard_attend_linear", native_calls.LINEAR)
    return entry._run(entry.opened(entry.packed(values | changed)))


WRONG: dict[str, tuple[dict[str, float], int]] = {
    "nothing": ({}, DONE),
    "no queries": ({"q.data": 0}, DONE),
    "no tokens": ({"tokens": 0}, DONE),
    "no chunk": ({"chunk": 0}, SIZE),
    "a chunk of more than a panel": ({"chunk": 65}, SIZE),
    "float64": ({"dtype": 0}, SIZE),
    "a feature": ({"feature": 4}, SIZE),
    "features that are not the elements": ({"features": 17}, SIZE),
    "random features without vectors": ({"feature": 3}, POINTER),
    "random features without an exponent": ({"feature": 3, "vectors": 64}, POINTER),
    "random features that are not normalised": ({"feature": 3, "normalise": 0}, SIZE),
    "random features of no scale": ({"feature": 3, "scale": 0.0}, SIZE),
    "no random features": ({"feature": 3, "features": 0}, SIZE),
    "heads that do not divide": ({"heads": 3, "kv_heads": 2}, SIZE),
    "a negative size": ({"tokens": -1}, SIZE),
    "no features": ({"qk_dim": 0}, SIZE),
    "sizes that overflow": ({"batch": 1 << 39, "qk_dim": 1 << 20, "v_dim": 1 << 20}, SIZE),
    "a negative stride": ({"k.token": -1}, SIZE),
    "no keys": ({"k.data": 0, "v.data": 0}, DONE),
    "a decay without keys": ({"k.data": 0, "log_decay": 64}, SIZE),
    "no values": ({"v.data": 0}, POINTER),
    "no out": ({"out.data": 0}, POINTER),
    "no state": ({"state": 0}, POINTER),
    "little workspace": ({"workspace_bytes": 64}, WORKSPACE),
    "gates without keys": ({"k.data": 0, "log_gate.data": 64}, SIZE),
    "gates and a decay": ({"log_gate.data": 64, "log_decay": 64}, SIZE),
    "gates of random features": ({"feature": 3, "vectors": 64, "top": 64, "log_gate.data": 64}, SIZE),
    "gates of every other feature": ({"log_gate.data": 64, "log_gate_feature": 2}, SIZE),
    "gates backwards": ({"log_gate.data": 64, "log_gate.token": -1}, SIZE),
    "a beta without keys": ({"k.data": 0, "beta.data": 64, "normalise": 0}, SIZE),
    "a beta that normalises": ({"beta.data": 64}, SIZE),
    "a beta and gates": ({"beta.data": 64, "log_gate.data": 64, "normalise": 0}, SIZE),
    "a beta backwards": ({"beta.data": 64, "beta.head": -1, "normalise": 0}, SIZE),
    "fades without a beta": ({"log_fade.data": 64}, SIZE),
    "an instruction set": ({"isa": 99}, ISA),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_struct_of_linear_attention_that_makes_no_sense_gives_its_status(name: str):
    changed, expected = WRONG[name]
    assert status(**changed) == expected
